"""Launches qmv: up to 16 rows times quantized matrices, transposed.

There are two kernels. One takes any dtype and any processor: a SIMD group, or one thread, computes
some columns of the result. The other takes rows in half precision to the matrix units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from operator import itemgetter
from struct import pack, unpack
from typing import Any, ClassVar, Literal, NamedTuple

import mlx.core as mx

from ...formats import MODES, Format
from ...options import MatmulCall, PackedMatrix
from ...runtime.backend import backend
from ...runtime.kernel import MAX_THREADGROUP_MEMORY, Kernel
from ...runtime.launch import Bound, TemplateValue
from ...runtime.limits import most_threads
from ...runtime.program import CONSTANT_BELOW

MAX_QMV_ROWS = 16
MAX_MATRICES = 3

Gate = Literal["silu", "gelu", "gelu_approx"]


def packed_template(fmt: Format, dtype: mx.Dtype, scales: mx.Dtype) -> dict[str, TemplateValue]:
    """What every kernel on packed matrices is told: dtypes of rows and scales, and the format."""
    mode = list(MODES).index(fmt.mode)
    return {"T": dtype, "S": scales, "mode": mode, "group": fmt.group_size, "bits": fmt.bits}


@dataclass(frozen=True)
class QmvConfig:
    """How qmv is spread over threads.

    Attributes:
        rows: rows that the kernel is compiled for; a product may have fewer.
        outputs: columns of the result that one SIMD group, or one thread, computes.
        run: neighbouring elements of a row of the matrix that a thread takes at once; a multiple
            of 16, or of 32 where ``bits`` is odd, that divides the group size.
        lanes: threads that share the columns: 32, or 1 where threads do not run side by side.
        ways: float32 sums that a thread keeps for each output; divides ``run``.
        threads: threads of a threadgroup; a multiple of ``lanes``.
    """

    rows: int
    outputs: int
    run: int
    lanes: int
    ways: int
    threads: int

    template: ClassVar = ("rows", "outputs", "run", "lanes", "ways")

    def threadgroups(self, sizes: tuple[int, ...], gated: bool) -> int:
        """As many as matrices of so many rows take."""
        height = self.outputs // 2 if gated else self.outputs
        tiles = sum(-(-n // height) for n in (sizes[:1] if gated else sizes))
        return -(-tiles * self.lanes // self.threads)


@dataclass(frozen=True)
class QmvMatrixConfig:
    """How qmv is spread over SIMD groups that use the matrix units.

    Attributes:
        fragments: operands of 8 columns, which hold the rows times the groups that the four lanes
            of a row of the matrix take side by side (4 * run / group_size, in NVFP4 one).
        run: neighbouring elements of a row of the matrix that a lane takes at once; it divides K.
        tiles: tiles of 16 rows of the matrix that a threadgroup computes.
        simds: SIMD groups of a threadgroup, which share K.
        ahead: runs that a lane has under way for each row, 1, 2 or 4.
        stacks: SIMD groups that share a part of K, with tiles of their own.
        occupancy: SIMD groups that a core should have registers for at once, on CUDA; 0 leaves that
            to the compiler.
    """

    fragments: int
    run: int
    tiles: int
    simds: int
    ahead: int = 1
    stacks: int = 1
    occupancy: int = 0

    template: ClassVar = ("fragments", "run", "tiles", "stacks", "simds", "ahead", "RESIDENT")

    def takes(self, k: int) -> bool:
        """Whether rows of so many elements are whole runs."""
        return k % self.run == 0

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simds * self.stacks

    @property
    def resident(self) -> int:
        """Threadgroups that a core should hold at once."""
        return self.occupancy // (self.simds * self.stacks)

    def threadgroups(self, sizes: tuple[int, ...], gated: bool) -> int:
        """As many as matrices of so many rows take."""
        return -(-sum(-(-n // 16) for n in sizes) // (self.tiles * self.stacks))


def qmv_config(
    device: str, rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format, kind: str = ""
) -> QmvConfig | QmvMatrixConfig:
    """The configuration for ``"metal"``, ``"cuda"`` or ``"host"``, of 1 to 16 rows.

    ``n`` counts the outputs of all matrices, and ``kind`` says what the launch does besides, for
    what was tuned: ``norm-3``, ``norm-gate``, ...
    """
    if device == "host":
        # A thread is a loop of vector instructions: 16 floats fill the widest registers there are.
        # Its loops over rows are not unrolled, so that one kernel does for all but the single row.
        rows = 1 if rows == 1 else MAX_QMV_ROWS
        return QmvConfig(rows, outputs=4, run=fmt.group_size, lanes=1, ways=16, threads=8)
    # Apple's matrix units multiply no faster than its other units: an estimate.
    if dtype != mx.float32 and (device == "cuda" or rows > 3):
        config = _matrix_units(rows, n, k, fmt, "norm" in kind)
        smaller = config if device == "cuda" else _within_registers(config, dtype, fmt)
        if smaller is not None:
            return smaller
    return _any_units(device, rows, fmt)


def _any_units(device: str, rows: int, fmt: Format) -> QmvConfig:
    """For every GPU and dtype: sums and unpacked weights stay in registers."""
    longer = device == "metal" and rows == 1 and fmt.group_size > 16
    run = 32 if fmt.bits % 2 or longer else 16
    rows = next(n for n in (1, 2, 4, 8, MAX_QMV_ROWS) if n >= rows)
    outputs = 4 if rows * run <= (64 if device == "cuda" or run == 16 else 32) else 2
    return QmvConfig(rows, outputs, run, lanes=32, ways=1, threads=64)


def _within_registers(
    config: QmvMatrixConfig, dtype: mx.Dtype, fmt: Format
) -> QmvMatrixConfig | None:
    """The configuration, or a smaller one, for which M1 and M2 have registers."""
    told: dict[str, Any] = {**packed_template(fmt, dtype, dtype), "normed": True}
    sizes = product((config.tiles, 2), (config.simds, 8), (config.ahead, 1))
    for tiles, simds, ahead in sizes:
        smaller = replace(config, tiles=tiles, simds=min(simds, config.simds), ahead=ahead)
        # With a gate tiles come in pairs.
        spread = asdict(smaller) | {"tiles": tiles + tiles % 2}
        if smaller.threads <= most_threads(_matrix_registers(**told, **spread)):
            return smaller
    return None


def _matrix_units(rows: int, n: int, k: int, fmt: Format, normed: bool) -> QmvMatrixConfig:
    """Measured on an H200; for other GPUs an estimate."""
    group, bits, mode = fmt
    # Not many more tiles than an H200 runs threadgroups of 16 SIMD groups.
    small = n <= 8192
    if mode == "nvfp4":
        run, slots = 16 if k % 32 else 32, 1
    else:
        # As many neighbours as are 32 bytes at most (in 6 bits 48, two or three of 16), but no more
        # columns than one operand has, down to one group at a time and to the words that begin and
        # end with a code. Those of a normed x take twice the registers.
        least = max(group // 4, {2: 16, 4: 8, 6: 16, 8: 4}.get(bits, 32))
        run = max(least, min(group, 64 if not normed else 16 if small else 32))
        most = 384 if bits == 6 else 256
        while run > least and (run * bits > most or 4 * run // group * rows > 8):
            run //= 2
        slots = 4 * run // group
    fragments = -(-rows * slots // 8)
    if normed:
        config = QmvMatrixConfig(fragments, run, *((1, 8) if small else (2, 4)))
    else:
        # Other formats than these, and more of x, take more registers.
        light = mode == "affine" and bits in (2, 4) and fragments * run <= (64 if rows < 3 else 32)
        tiles, simds, ahead, occupancy = _spread(rows, n, k, fmt, light)
        occupancy = 8 if fragments * run > 64 else occupancy
        config = QmvMatrixConfig(fragments, run, tiles, simds, ahead, occupancy=occupancy)
    return _within_memory(config)


def _within_memory(config: QmvMatrixConfig) -> QmvMatrixConfig:
    while _threadgroup_memory(**asdict(config)) > MAX_THREADGROUP_MEMORY:
        config = replace(config, simds=config.simds // 2)
    return config


def _spread(rows: int, n: int, k: int, fmt: Format, light: bool) -> tuple[int, int, int, int]:
    """Tiles, SIMD groups, runs ahead and occupancy."""
    if n <= 4096 and (2 < rows <= 8 or (rows > 8 and k > 8192)):
        # Each multiprocessor has one threadgroup at most.
        return 2, 16 if rows <= 8 else 15, 1, 16
    if n <= 8192:
        ahead = 2 if rows > 4 and fmt.mode != "nvfp4" else 1
        return 1, 8, ahead, 24 if light and 2 < rows <= 8 else 16
    if rows <= 2:
        return (4, 4, 1, 12) if fmt.bits == 2 else (2, 4, 1, 16 if light else 12)
    if rows > 8:
        return 4, 2, 1, 12
    if rows > 4 and n > 65536:
        return 4, 4, 1, 16 if light else 12
    return 2, 4, 1, 20 if light else 12


class QmvArrays(NamedTuple):
    """What a launch is given, in the order of the kernels' inputs; None for what there is not.

    Attributes:
        x: (..., K) in float32, float16 or bfloat16; M rows, 1 to 16.
        norm_weight: (K,) in the dtype of ``x``: the weight of an RMS norm that ``x`` goes through.
        tile_squares: (M, ceil(K / 16)) float32, if ``x`` was multiplied by the norm's weight
            already: sums of squares of 16 columns of what it was before (a deferred norm).
        residual: added to the product of a single matrix; in its shape and dtype.
        next_weight: (N,) of the norm that the product of a single matrix goes through next.
        w, scales, biases, bias, ...: of up to three matrices, see :class:`PackedMatrix`.
    """

    x: Any
    norm_weight: Any = None
    tile_squares: Any = None
    residual: Any = None
    next_weight: Any = None
    w: Any = None
    scales: Any = None
    biases: Any = None
    bias: Any = None
    w1: Any = None
    scales1: Any = None
    biases1: Any = None
    bias1: Any = None
    w2: Any = None
    scales2: Any = None
    biases2: Any = None
    bias2: Any = None

    @property
    def matrices(self) -> list[PackedMatrix]:
        """The matrices that there are."""
        found = (PackedMatrix(*self[i : i + 4]) for i in (5, 9, 13))
        return [matrix for matrix in found if matrix.w is not None]


# Of arrays in the order of :class:`QmvArrays`.
Launch = Callable[..., list[mx.array]]


def qmv(
    specs: QmvArrays,
    fmt: Format,
    config: QmvConfig | QmvMatrixConfig,
    *,
    epsilon: float | None = None,
    gate: Gate | None = None,
    norm_first: bool = False,
) -> Launch:
    """The launch of ``x @ w.T + bias`` for up to three matrices, each read once for all rows.

    Args:
        specs: the specs of its arrays.
        fmt: group_size, bits and mode of the matrices, which have K columns each, biases all or
            none, bias each as it likes.
        config: how to spread the work. With ``tile_squares`` or ``next_weight`` it and the matrices
            are what :func:`takes_deferred_norm` takes.
        epsilon: of the RMS norm that ``x`` goes through first; None for no norm.
        gate: with two matrices of one shape, give ``activation(first) * second`` only.
        norm_first: whether that norm has a launch of its own.

    Returns:
        A function of arrays that gives (..., N) in the dtype of ``x`` for each matrix, or the gated
        one; float32 inside, rounded once. With ``next_weight`` also that product times it, and its
        ``tile_squares``.
    """
    x, config = specs.x, _fitting(config, specs, fmt, gate)
    by_threads = isinstance(config, QmvConfig) and config.lanes == 1
    norm_first |= x.dtype == mx.float16 or by_threads
    if epsilon is not None and specs.tile_squares is None and norm_first:
        # Times the weight but not yet divided by its norm, x may exceed float16; and a processor
        # whose threads share nothing would norm it in each of them.
        product = qmv(specs._replace(norm_weight=None), fmt, config, gate=gate)
        return lambda x, weight, *others: product(
            mx.fast.rms_norm(x, weight, epsilon), None, *others
        )
    launch, shape = _bind(specs, fmt, config, epsilon, gate)
    given = itemgetter(*(i for i, spec in enumerate(specs) if spec is not None))
    return lambda *arrays: launch([*given(arrays), *shape])


def single_qmv(call: MatmulCall, config: QmvConfig | QmvMatrixConfig) -> Callable[..., mx.array]:
    """The launch of :func:`qmv` for one matrix.

    Returns:
        A function of x, w, scales, biases and bias, of which the last two may be None, that gives
        (..., N); further arguments are not looked at.
    """
    specs = QmvArrays(call.x, None, None, None, None, *call.matrix)
    launch, shape = _bind(specs, call.fmt, _fitting(config, specs, call.fmt, None), None, None)
    given = itemgetter(*(i for i, spec in enumerate((call.x, *call.matrix)) if spec is not None))
    return lambda *arrays: launch([*given(arrays), *shape])[0]


def _fitting(
    config: QmvConfig | QmvMatrixConfig, specs: QmvArrays, fmt: Format, gate: Gate | None
) -> QmvConfig | QmvMatrixConfig:
    """The configuration as these arrays admit it."""
    k = specs.x.shape[-1]
    if isinstance(config, QmvConfig):
        return config
    if not config.takes(k):
        raise ValueError(f"{config} does not take rows of {k} elements")
    if not takes_deferred_norm(config, specs.matrices):
        # That kernel reads the shape of w, which so arrives as it is: in constant memory.
        return _any_units(backend(), specs.x.size // k, fmt)
    if not gate or config.tiles % 2 == 0:
        return config
    # With a gate tiles in pairs, one of each matrix that it joins.
    return _within_memory(replace(config, tiles=config.tiles + 1))


def takes_deferred_norm(
    config: QmvConfig | QmvMatrixConfig, matrices: Sequence[PackedMatrix]
) -> bool:
    """Whether a launch can take part of a norm from the launch before, and leave it to the next."""
    return isinstance(config, QmvMatrixConfig) and all(m.w.size >= CONSTANT_BELOW for m in matrices)


_INPUTS = (*QmvArrays._fields, "shape")
_OUTPUTS = ("y", "y1", "y2", "scaled", "scaled_squares")
# What only the kernel on the matrix units has.
_DEFERRED = ("tile_squares", "next_weight", "scaled", "scaled_squares")
_GATES = (None, "silu", "gelu", "gelu_approx")
_TEMPLATE = ("T", "S", "mode", "group", "bits", "gate", "normed", "epsilon")


def _threadgroup_memory(*, simds: int, tiles: int, stacks: int, fragments: int, **_: object) -> int:
    return 4 * simds * fragments * 8 * stacks * (tiles * 16 + 1)


def registers(
    *, rows: int, outputs: int, run: int, ways: int, normed: bool = False, **_: object
) -> int:
    """Words of the arrays of a thread of qmv: weights, sums, and squares of x or x itself.

    The weights of a single row are used as they are unpacked.
    """
    weights = 2 * run if rows == 1 else outputs * run
    return weights + rows * outputs * ways + rows * normed


def _matrix_registers(
    *,
    T: mx.Dtype,
    mode: int,
    group: int,
    bits: int,
    normed: bool,
    fragments: int,
    run: int,
    tiles: int,
    ahead: int,
    **_: object,
) -> int:
    """The same on the matrix units: packed words and numbers of the tiles, x, and sums."""
    affine = mode == list(MODES).index("affine")
    numbers = (6 if affine else 4) * (run // 16 if group == 16 else 1)
    of_tile = 2 * ahead * run * bits // 32 + numbers + 4 + 4 * fragments
    # Short runs of x are loaded a step ahead.
    operands = fragments * run * T.size // 4 * (2 if run <= 16 else 1)
    sums = 4 * fragments * (2 if affine else 1) + 2 * fragments * normed
    return tiles * of_tile + operands + sums + 2 * T.size


@lru_cache(maxsize=256)
def _kernel(units: bool, omitted: tuple[str, ...]) -> Kernel:
    """One of the two kernels, without some of its inputs and outputs."""
    letters = "".join("01"[name in omitted] for name in _INPUTS + _OUTPUTS)
    function = "qmv_matrix" if units else "qmv"
    # That with the matrix units reads the shapes of its arrays.
    lacking = omitted + (("shape",) if units else _DEFERRED)
    return Kernel(
        f"{function}_{int(letters, 2):x}",
        f"quantized_matmul/{function}.metal",
        function=function,
        inputs=tuple(name for name in _INPUTS if name not in lacking),
        outputs=tuple(name for name in _OUTPUTS if name not in lacking),
        omitted=omitted,
        template=_TEMPLATE + (QmvMatrixConfig if units else QmvConfig).template,
        threadgroup_memory=_threadgroup_memory if units else 0,
        registers=_matrix_registers if units else registers,
        large=True,
    )


def _bind(
    specs: QmvArrays,
    fmt: Format,
    config: QmvConfig | QmvMatrixConfig,
    epsilon: float | None,
    gate: Gate | None,
) -> tuple[Bound, list[mx.array]]:
    """The launch, and what it takes after the arrays."""
    (*leading, k), matrices = specs.x.shape, specs.matrices
    rows, sizes = specs.x.size // k, [matrix.w.shape[0] for matrix in matrices]
    shapes = [(*leading, n) for n in (sizes[:1] if gate else sizes)]
    # What of the kernel's inputs and outputs the launch does without.
    omitted = [*_OUTPUTS[len(shapes) : 3], *_OUTPUTS[3:] * (specs.next_weight is None)]
    omitted += [name for name, spec in specs._asdict().items() if spec is None]
    omitted += [f"w{i}_shape" for i in range(len(matrices), MAX_MATRICES)]
    if specs.next_weight is not None:
        shapes += [*shapes, (rows, -(-sizes[0] // 16))]
    units, threads = isinstance(config, QmvMatrixConfig), config.threads
    shape = [] if units else [mx.array([rows, k, *sizes], mx.int32)]
    template = packed_template(fmt, specs.x.dtype, matrices[0].scales.dtype)
    template["gate"] = _GATES.index(gate)
    template["normed"] = epsilon is not None and specs.tile_squares is None
    template["epsilon"] = unpack("i", pack("f", epsilon or 0.0))[0]
    launch = _kernel(units, tuple(omitted)).bind(
        [*(spec for spec in specs if spec is not None), *shape],
        template=template | {name: getattr(config, name.lower()) for name in config.template},
        grid=(config.threadgroups(tuple(sizes), gate is not None) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=shapes,
    )
    return launch, shape
