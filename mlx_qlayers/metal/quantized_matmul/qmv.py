"""Launches qmv: up to 16 rows times quantized matrices, transposed; up to 128 by qmm_skinny.

There are two kernels of qmv. One takes any dtype and any processor: a SIMD group, or one thread,
computes some columns of the result. The other takes rows in half precision to the matrix units, as
qmm_skinny does with more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from ...formats import Format
from ...options import MatmulCall, PackedMatrix
from ...runtime.backend import backend
from ...runtime.kernel import Kernel
from ...runtime.launch import Bound, Launching
from ...runtime.program import CONSTANT_BELOW
from ...runtime.spec import Spec
from ..common.kernels import large_kernel, numbered, without, words
from . import tile
from .qmv_config import any_units, within_memory
from .tile import INTEGERS, SERIAL, Tile, packed_template

MAX_MATRICES = 3

Gate = Literal["silu", "gelu", "gelu_approx"]
# By their numbers in epilogue.metal.
GATES = (None, "silu", "gelu", "gelu_approx")


class QmvArrays(NamedTuple):
    """The arrays of a launch; None for those that are absent."""

    x: Any  # (..., K) in float32, float16 or bfloat16; M rows, 1 to 16, or 128 with qmm_skinny
    # (K,) in the dtype of `x`: the weight of an RMS norm that `x` goes through.
    norm_weight: Any = None
    # (M, ceil(K / 16)) float32, if `x` was multiplied by the norm's weight already: sums of squares
    # of 16 columns of what it was before (a deferred norm).
    partial_squares: Any = None
    residual: Any = None  # added to the product of a single matrix; in its shape and dtype
    # (N,), of the norm that the product of a single matrix goes through next.
    deferred_weight: Any = None
    matrices: Sequence[PackedMatrix] = ()  # up to three

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> QmvArrays:
        """From the arrays one by one, four for each matrix."""
        count = len(cls._fields) - 1
        packed = (PackedMatrix(*arrays[i : i + 4]) for i in range(count, len(arrays), 4))
        matrices = [matrix for matrix in packed if matrix.w is not None]
        return cls._make([*arrays[:count], matrices])

    @property
    def flat(self) -> list[Any]:
        """The arrays one by one, in the order of the kernels' inputs."""
        return [*self[:-1], *(array for matrix in self.matrices for array in matrix)]

    def there(self) -> dict[str, Any]:
        """Those that there are, by the names of the kernels' inputs."""
        pairs = zip(_ARRAYS, self.flat, strict=False)
        return {name: array for name, array in pairs if array is not None}


_ARRAYS = (
    *QmvArrays._fields[:-1],
    *(f"{name}{i or ''}" for i in range(MAX_MATRICES) for name in PackedMatrix._fields),
)
# Of arrays in the order of :attr:`QmvArrays.flat`.
Launch = Callable[..., list[mx.array]]


def qmv(
    specs: QmvArrays,
    fmt: Format,
    config: Tile,
    *,
    epsilon: float | None = None,
    gate: Gate | None = None,
    norm_first: bool = False,
    rounds: bool = False,
) -> Launch:
    """Binds ``x @ w.T + bias`` for up to three matrices, each read once for all rows.

    With ``gate`` it gives ``activation(first) * second`` alone; with ``deferred_weight`` also the
    product times it, and its ``partial_squares``, which only some configurations take. ``epsilon``
    is that of an RMS norm of x, which has a launch of its own if ``norm_first``. If it ``rounds``,
    qmm_skinny rounds products before a gate or a residual, as operators one by one do.
    """
    x, config = specs.x, _fitting(config, specs, fmt, gate)
    norm_first |= x.dtype == mx.float16 or config.kernel in (SERIAL, INTEGERS, "qmm_skinny")
    if epsilon is not None and specs.partial_squares is None and norm_first:
        # Times the weight but not yet divided by its norm, x may exceed float16; and a processor
        # whose threads share nothing would norm it in each of them.
        product = qmv(specs._replace(norm_weight=None), fmt, config, gate=gate)
        return lambda x, weight, *others: product(
            mx.fast.rms_norm(x, weight, epsilon), None, *others
        )
    launch, shape = _bind(specs, fmt, config, epsilon, gate, rounds=rounds)
    places = (i for i, spec in enumerate(specs.flat) if spec is not None)
    return Launching(launch, places, shape)


def single_qmv(call: MatmulCall, config: Tile) -> Callable[..., mx.array]:
    """Binds :func:`qmv` for one matrix: x, w, scales, biases and bias, the last two maybe None."""
    specs = QmvArrays(call.x, matrices=[call.matrix])
    launch, shape = _bind(specs, call.fmt, _fitting(config, specs, call.fmt, None), None, None)
    given = itemgetter(*(i for i, spec in enumerate((call.x, *call.matrix)) if spec is not None))
    return lambda *arrays: launch([*given(arrays), *shape])[0]


def _fitting(config: Tile, specs: QmvArrays, fmt: Format, gate: Gate | None) -> Tile:
    """The configuration as these arrays admit it."""
    k = specs.x.shape[-1]
    if not config.units:
        return config
    if not config.takes(k):
        raise ValueError(f"{config} does not take rows of {k} elements")
    if not takes_deferred_norm(config, specs.matrices):
        # That kernel reads the shape of w, which so arrives as it is: in constant memory.
        return any_units(backend(), specs.x.size // k, fmt)
    if not gate or config.paired() == config:
        return config
    # With a gate tiles in pairs, one of each matrix that it joins.
    paired = config.paired()
    return paired if config.kernel == "qmm_skinny" else within_memory(paired, fmt)


def takes_deferred_norm(config: Tile, matrices: Sequence[PackedMatrix]) -> bool:
    """Whether a launch can take part of a norm from the launch before, and leave it to the next."""
    return config.units and all(m.w.size >= CONSTANT_BELOW for m in matrices)


_INPUTS = (*_ARRAYS, "shape")
_OUTPUTS = ("y", "y1", "y2", "scaled", "scaled_squares")


# Of each kernel its threadgroup memory and registers.
_KERNELS = {
    name: large_kernel(
        name, f"quantized_matmul/{name}.metal", threadgroup_memory=memory, registers=held
    )
    for name, memory, held in (
        ("qmv", 0, tile.registers),
        (SERIAL, 0, None),
        ("qmv_matrix", tile.matrix_memory, tile.matrix_registers),
        ("qmv_persistent", tile.persistent_memory, tile.persistent_registers),
        ("qmm_skinny", tile.skinny_memory, tile.skinny_registers),
    )
}


def kernel_of(function: str, omitted: tuple[str, ...] = ()) -> Kernel:
    """A kernel without some of its inputs and outputs."""
    name = function + numbered(_INPUTS + _OUTPUTS, omitted)
    return without(_KERNELS[function], omitted, name)


_SUM = ("planes", "bias", "residual", "deferred_weight")


# Adds up the planes of a product.
SUM = large_kernel("qmm_skinny_sum", "quantized_matmul/qmm_skinny.metal")


def _bind_parts(
    specs: QmvArrays,
    fmt: Format,
    config: Tile,
    epsilon: float | None,
    gate: Gate | None,
    rounds: bool,
) -> tuple[Bound, list[mx.array]]:
    """The launch of a product whose columns threadgroups share, and that which adds their sums."""
    (*leading, k), (matrix, *others) = specs.x.shape, specs.matrices
    n = matrix.w.shape[0]
    if others:
        raise ValueError(f"{config} takes no rows of {k} elements for several matrices")
    finish = matrix.bias, specs.residual, specs.deferred_weight
    plain = QmvArrays(*specs[:3], matrices=[matrix._replace(bias=None)])
    planes = Spec((config.parts(k), specs.x.size // k, n), mx.float32)
    launch, _ = _bind(plain, fmt, config, epsilon, gate, [planes.shape])
    there = [each for each in finish if each is not None]
    omitted = [name for name, each in zip(_SUM[1:], finish, strict=True) if each is None]
    omitted += _OUTPUTS[3:] if specs.deferred_weight is None else ()
    shapes = [(*leading, n)] * (1 if specs.deferred_weight is None else 2)
    rows = planes.shape[1]
    total = without(SUM, tuple(omitted)).bind(
        [planes, *there],
        template={"T": specs.x.dtype, "rounds": rounds},
        grid=(-(-n // 128) * 128, rows, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[*shapes, *([(rows, -(-n // 16))] * (len(shapes) - 1))],
    )
    names = [*specs.there()]
    of_product = [i for i, name in enumerate(names) if name not in _SUM]
    of_sum = [names.index(name) for name in _SUM[1:] if name in names]

    def run(arrays: list[mx.array]) -> list[mx.array]:
        sums = launch([arrays[i] for i in of_product])
        return total([*sums, *(arrays[i] for i in of_sum)])

    return run, []


def _bind(
    specs: QmvArrays,
    fmt: Format,
    config: Tile,
    epsilon: float | None,
    gate: Gate | None,
    planes: Sequence[tuple[int, ...]] = (),
    rounds: bool = False,
) -> tuple[Bound, list[mx.array]]:
    """The launch, and what it takes after the arrays; it may write planes of a product."""
    (*leading, k), matrices = specs.x.shape, specs.matrices
    rows, sizes = specs.x.size // k, [matrix.w.shape[0] for matrix in matrices]
    if config.parts(k) > 1 and not planes:
        return _bind_parts(specs, fmt, config, epsilon, gate, rounds)
    shapes = [*planes] or [(*leading, n) for n in (sizes[:1] if gate else sizes)]
    # The inputs and outputs of the kernel that the launch does without.
    omitted = [*_OUTPUTS[len(shapes) : 3], *_OUTPUTS[3:] * (specs.deferred_weight is None)]
    there = specs.there()
    omitted += [name for name in _ARRAYS if name not in there]
    omitted += [f"w{i}_shape" for i in range(len(matrices), MAX_MATRICES)]
    if specs.deferred_weight is not None:
        shapes += [*shapes, (rows, -(-sizes[0] // 16))]
    threads, shape = config.threads, [mx.array([rows, k, *sizes], mx.int32)] * (not config.units)
    template = packed_template(fmt, specs.x.dtype, matrices[0].scales.dtype)
    template["gate"] = GATES.index(gate)
    if config.kernel not in (SERIAL, INTEGERS):
        template["normed"] = epsilon is not None and specs.partial_squares is None
        (template["epsilon"],) = words(epsilon or 0.0)
    function = SERIAL if config.integers else config.kernel
    groups = config.threadgroups(tuple(sizes), gate is not None)
    grid = groups * threads, 1, 1
    if config.kernel == "qmm_skinny":
        grid = -(-rows // (8 * config.fragments)) * threads, groups, config.parts(k)
        template |= {"O": mx.float32 if planes else specs.x.dtype, "rounds": rounds}
    launch = kernel_of(function, tuple(omitted)).bind(
        [*there.values(), *shape],
        template=template | config.template(),
        grid=grid,
        threadgroup=(threads, 1, 1),
        output_shapes=shapes,
    )
    return launch, shape
