"""Launches the product of many rows with a quantized matrix by Metal 4's tensor operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

import mlx.core as mx

from ...formats import Format
from ...measurements.thresholds import row_of, tabled
from ...options import MatmulCall, PackedMatrix
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from ..common.kernels import large_kernel, numbered, of_kernel, without
from .qmv import GATES, Gate
from .tile import packed_template

# Columns of the result that a SIMD group computes.
COLUMNS = 32
# Groups whose scales packed codes take at once, as qmm_codes.metal has it.
_AT_ONCE = 4
# Elements behind each row of an unpacked part, as packed_runs.metal has it.
_PADDING = 8


@dataclass(frozen=True)
class TensorConfig:
    """How a product by tensor operations is cut."""

    rows: int  # of the result that a SIMD group computes; a multiple of 16
    tile_k: int  # depth of a step; a multiple of 16
    simds_m: int  # SIMD groups along the rows
    simds_n: int  # SIMD groups along the columns, 32 each
    ragged: bool  # whether `tile_k` does not divide the depth
    resident: int = 1  # on NVIDIA GPUs, threadgroups that a multiprocessor must have registers for
    staged: bool = False  # unpack the matrix once into threadgroup memory, not in each SIMD group

    @property
    def tile_m(self) -> int:
        """Rows of the result that a threadgroup computes."""
        return self.rows * self.simds_m

    @property
    def tile_n(self) -> int:
        """Columns of the result that it computes."""
        return COLUMNS * self.simds_n

    def threads(self, dtype: mx.Dtype) -> int:
        """The threads of a threadgroup."""
        return 32 * self.simds_m * self.simds_n


@dataclass(frozen=True)
class CodesConfig:
    """How a product is cut whose 4-bit codes are operands as they are packed."""

    tile_m: int  # rows of the result that a threadgroup computes; a multiple of 16
    tile_n: int  # columns of the result that it computes
    simds: int = 4  # its SIMD groups, which share each operation

    def threads(self, dtype: mx.Dtype) -> int:
        """The threads of a threadgroup."""
        return 32 * self.simds


def tensor_config(
    m: int,
    k: int,
    dtype: mx.Dtype,
    fmt: Format,
    transpose: bool,
    gated: bool = False,
    device: str | None = None,
) -> TensorConfig:
    """The configuration for so many rows, of a matrix or of all experts'."""
    if device_of(device).tensor_cores:
        tile = row_of(tabled("qmm_tensor_tiles", device="cuda"), m)
        return TensorConfig(ragged=bool(k % tile["tile_k"]), **tile)
    # A destination of 64 x 32, or a gate's two of half of that, leave room in 128 words.
    most = (32 if dtype == mx.float32 else 64) // (1 + gated)
    rows = next(size for size in (16, 32, 64) if size >= min(m, most))
    simds = (2, 2) if m > rows else (1, 2 if dtype == mx.float32 else 4)
    # Steps are as deep as fits twice into threadgroup memory, and as K lets them be whole.
    long_steps = simds == (2, 2) and dtype != mx.float32 and k % 64 == 0
    narrow = transpose and k % 32 and fmt.group_size == 16
    tile_k = 64 if long_steps else 16 if narrow else 32
    return TensorConfig(rows, tile_k, *simds, bool(k % tile_k), staged=True)


def codes_config(m: int) -> CodesConfig:
    """The configuration of packed codes for so many rows."""
    rows = next(size for size in (16, 32, 64) if size >= min(m, 64))
    # The sums of a gate's two matrices, and the products of a group, take a thread 96 words.
    return CodesConfig(rows, 64 if rows == 64 else 128)


def why_no_codes(call: MatmulCall) -> str | None:
    """Why codes are no operands as they are packed, if they are not."""
    fmt = call.fmt
    if fmt.mode != "affine" or fmt.bits != 4 or fmt.group_size % 32:
        return f"{fmt} is not of 4 bits in groups of 32 and more"
    if not call.transpose:
        return "scales differ from row to row of a matrix that is not transposed"
    return "rows are of float32" if call.x.dtype == mx.float32 else None


def _part(
    bits: int, group: int, transposed: bool, tile_k: int, simds_n: int
) -> tuple[int, int, int]:
    """Rows, words and groups of the packed part of a step."""
    width = COLUMNS * simds_n
    rows, columns = (width, tile_k) if transposed else (tile_k, width)
    return rows, columns * bits // 32, max(columns // group, 1)


def threadgroup_memory(
    T: mx.Dtype,
    mode: int,
    group: int,
    bits: int,
    transposed: bool,
    tile_k: int,
    simds_n: int,
    staged: bool,
    **_: object,
) -> int:
    """The bytes of packed words, scales and biases of two steps, or of two unpacked parts."""
    if staged:
        width = COLUMNS * simds_n
        outer, inner = (width, tile_k) if transposed else (tile_k, width)
        return 2 * outer * (inner + _PADDING) * T.size + 12
    rows, words, groups = _part(bits, group, transposed, tile_k, simds_n)
    affine = mode == 0
    return 8 * rows * (words + groups * (1 + affine)) + (0 if affine else 4) + 16


def registers(
    T: mx.Dtype, rows: int, ragged: bool, simds_m: int, gate: int = 0, **part: Any
) -> int:
    """Words of a thread's tensors, the sums and the inputs, and of what it brings of a part."""
    sums, threads = rows * (1 + bool(gate)), 32 * simds_m * part["simds_n"]
    if part["staged"]:
        run = 32 if part["bits"] % 2 else 16
        pieces = -(-COLUMNS * part["simds_n"] * part["tile_k"] // (run * threads))
        return sums + pieces * (run * part["bits"] // 32 + 2)
    inputs = (COLUMNS + rows * ragged) * part["tile_k"] * T.size // 128
    return sums + inputs + -(-threadgroup_memory(T, **part) // (8 * threads))


def codes_registers(rows: int, columns: int, simds: int, gate: int, **_: object) -> int:
    """Words of the tensors of a thread: the sums and the products of a group."""
    return (3 if gate else 2) * rows * columns // (32 * simds)


_INPUTS = (
    *("x", "w", "scales", "biases", "bias"),
    *("residual", "w1", "scales1", "biases1", "bias1"),
)
_KERNELS: dict[type, Kernel] = {
    TensorConfig: large_kernel(
        "qmm_tensor",
        "quantized_matmul/qmm_tensor.metal",
        threadgroup_memory=threadgroup_memory,
        registers=registers,
    ),
    CodesConfig: large_kernel(
        "qmm_codes",
        "quantized_matmul/qmm_codes.metal",
        threadgroup_memory=lambda rows, columns, **_: 4 * columns * (rows + 2 * _AT_ONCE),
        registers=codes_registers,
    ),
}
_GROUP_SUMS = large_kernel("group_sums", "quantized_matmul/qmm_codes.metal")


def qmm_tensor(
    call: MatmulCall,
    config: TensorConfig | CodesConfig,
    residual: Any = None,
    other: PackedMatrix | None = None,
    gate: Gate | None = None,
) -> Callable[..., mx.array]:
    """Binds a product of many rows, and ``residual`` or the gated product with ``other`` behind it.

    The launch takes x, w, scales, biases, bias, the residual, and the four arrays of the other
    matrix; those without a spec may be None.

    Raises:
        ValueError: the codes are not packed as the configuration needs them.
    """
    (x, matrix, transpose, fmt), (m, n, k) = call, call.shape
    tile_k = getattr(config, "tile_k", k)
    # No other threadgroup shares the depth, which is as long as whole steps.
    sizes = mx.array([m, n, k, -(-k // tile_k) * tile_k], mx.int32)
    threads = config.threads(x.dtype)
    specs = [x, *matrix, residual, *(other or PackedMatrix(None, None))]
    omitted = tuple(name for name, spec in zip(_INPUTS, specs, strict=True) if spec is None)
    whole = _KERNELS[type(config)]
    kernel = without(whole, omitted, whole.name + numbered(_INPUTS, omitted))
    sums, more = None, list[Spec]()
    values = packed_template(fmt, x.dtype, matrix.scales.dtype) | asdict(config)
    values |= {"transposed": transpose, "gate": GATES.index(gate)}
    values |= {"O": x.dtype, "RESIDENT": values.get("resident", 1)}
    # With tensor cores SIMD groups that have the same rows of x read them together.
    values["LOCKSTEP"] = values.get("simds_m") == 1 and not values["ragged"]
    if isinstance(config, CodesConfig):
        if why := why_no_codes(call):
            raise ValueError(f"{config} does not take this product: {why}")
        values |= {"rows": config.tile_m, "columns": config.tile_n}
        more = [Spec((m, 2 * k // fmt.group_size), mx.bfloat16)]
        sums = _GROUP_SUMS.bind(
            [x, sizes[:3:2]],
            template={"T": x.dtype, "group": fmt.group_size},
            grid=(more[0].size // 2, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[more[0].shape],
        )
    launch = kernel.bind(
        [*(spec for spec in specs if spec is not None), *more, sizes],
        template=of_kernel(kernel, values),
        grid=(-(-m // config.tile_m) * threads, -(-n // config.tile_n), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*x.shape[:-1], n)],
    )
    given = itemgetter(*(i for i, spec in enumerate(specs) if spec is not None))
    if sums is None:
        return lambda *arrays: launch([*given(arrays), sizes])[0]
    rows_and_depth = sizes[:3:2]
    return lambda *arrays: launch([*given(arrays), *sums([arrays[0], rows_and_depth]), sizes])[0]


def tensor_product(
    codes: bool,
    call: MatmulCall,
    residual: Any = None,
    other: PackedMatrix | None = None,
    gate: Gate | None = None,
) -> Callable[..., mx.array]:
    """The launch of :func:`qmm_tensor`, by packed codes or by what is unpacked."""
    (rows, _, k), x = call.shape, call.x
    cut: Any = codes_config(rows)
    if not codes:
        cut = tensor_config(rows, k, x.dtype, call.fmt, call.transpose, gate is not None)
    return qmm_tensor(call, cut, residual, other, gate)
