"""Launches the tiled product of many rows with a quantized matrix; and qvm.

Qvm is up to 16 rows times a matrix that is not transposed, on a CPU: GPUs have qmm for such.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import mlx.core as mx

from ...formats import Format
from ...measurements.thresholds import row_of, tabled
from ...options import MatmulCall
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.launch import Size, TemplateValue
from ...runtime.spec import Spec
from ..common.kernels import large_kernel, of_kernel
from .qmv_config import MAX_QMV_ROWS
from .tile import packed_template, whole_words

PADDING = 8


def threadgroup_memory(
    T: mx.Dtype, transposed: bool, tile_m: int, tile_n: int, tile_k: int, stages: int, **_: object
) -> int:
    """The bytes that tiles of these extents take, by the values of the kernel's template."""
    rows, width = (tile_n, tile_k) if transposed else (tile_k, tile_n)
    elements = tile_m * (tile_k + PADDING) + rows * (width + PADDING)
    return stages * elements * T.size


def registers(
    T: mx.Dtype,
    bits: int,
    tile_m: int,
    tile_n: int,
    tile_k: int,
    simds_m: int,
    simds_n: int,
    run: int,
    **_: object,
) -> int:
    """Words of the arrays of a thread: sums, operands, and its share of the next tiles."""
    rows, columns, threads = tile_m // simds_m // 16, tile_n // simds_n // 8, 32 * simds_m * simds_n
    of_x = -(-tile_m * tile_k * T.size // 16 // threads) * 4
    of_w = -(-tile_n * tile_k // run // threads) * (run * bits // 32 + T.size // 2)
    return 4 * rows * columns + (2 * rows + columns) * device_of().operand_bytes(T) + of_x + of_w


QMM = large_kernel(
    "qmm", "quantized_matmul/qmm.metal", threadgroup_memory=threadgroup_memory, registers=registers
)

QMM_SUM = large_kernel("qmm_sum", "quantized_matmul/qmm.metal")


@dataclass(frozen=True)
class QmmConfig:
    """How a product of many rows is cut into tiles."""

    tile_m: int  # rows of the result that a threadgroup computes; a multiple of 16 * `simds_m`
    tile_n: int  # columns of the result that it computes; a multiple of 8 * `simds_n`
    tile_k: int  # depth of its tiles in threadgroup memory; a multiple of 16
    simds_m: int  # SIMD groups along the rows
    simds_n: int  # SIMD groups along the columns
    # Neighbouring elements of the matrix that a thread unpacks at once; 16, or 32 where `bits` is
    # odd or half of a word; divides the group size.
    run: int
    stages: int = 1  # pairs of tiles, 1 or 2. With 2 one is filled while the other is multiplied
    # Whether the memory is told that the rows of the matrix are read to their end.
    ahead: bool = True
    parts: int = 1  # threadgroups that share the depth; above 1 a second launch adds their sums

    def count(self, m: int, n: int) -> int:
        """The tiles of a result of m rows and n columns."""
        return -(-m // self.tile_m) * -(-n // self.tile_n)

    def fills(self, m: int, n: int) -> bool:
        """Whether its tiles keep an NVIDIA GPU busy: two for each core."""
        return self.count(m, n) >= 2 * device_of("cuda").cores

    def threads(self, dtype: mx.Dtype) -> int:
        """The threads of a threadgroup; a ValueError if they cannot divide the tiles evenly."""
        threads = 32 * self.simds_m * self.simds_n
        if (
            self.tile_m % (16 * self.simds_m)
            or self.tile_n % (8 * self.simds_n)
            or self.tile_k % 16
        ):
            raise ValueError(f"{threads} threads cannot share {self} of {dtype} evenly")
        return threads


def qmm_config(
    device: str, m: int, n: int, k: int, dtype: mx.Dtype, fmt: Format, transpose: bool
) -> QmmConfig:
    """The configuration on the device of a backend."""
    run = whole_words(fmt)
    if device_of(device).tensor_cores and dtype != mx.float32:
        tile: tuple[int, int, int, int, int] = row_of(tabled("qmm_tiles", device="cuda"), m)
        short = min(fmt.group_size, 32)
        config = QmmConfig(*tile, short if fmt.bits % 2 or tile[0] < 128 else 16)
        if config.fills(m, n):
            return config
        # Smaller tiles, and several to a column of the result, give every core something to do.
        config = QmmConfig(min(config.tile_m, 64) // 32 * 32, 64, 64, 2, 2, short)
        most = 2 * device_of("cuda").cores // config.count(m, n)
        return replace(config, parts=max(1, min(most, k // 512)))
    tile_m = next(size for size in (16, 32, 64) if size >= min(m, 64))
    tile_k = 64 if run == 32 or tile_m == 16 else 32
    if dtype == mx.float32 and tile_k == 64:
        tile_m = min(tile_m, 32)  # two tiles must fit
    return QmmConfig(tile_m, 64, tile_k, *((2, 2) if tile_m > 16 else (1, 4)), run)


def qmm(call: MatmulCall, config: QmmConfig) -> Callable[..., mx.array]:
    """Binds a product of many rows: weights are rounded to the dtype of ``x``, sums once."""
    m, n, k = call.shape
    dtype, steps = call.x.dtype, -(-k // config.tile_k)
    depth = -(-steps // config.parts) * config.tile_k
    threads, aligned = config.threads(dtype), k * dtype.size % 16 == 0
    return split_k(
        QMM,
        call,
        depth,
        template=asdict(config) | {"transposed": call.transpose, "aligned": aligned},
        grid=(-(-m // config.tile_m) * threads, -(-n // config.tile_n), -(-k // depth)),
        threadgroup=(threads, 1, 1),
    )


def split_k(
    kernel: Kernel,
    call: MatmulCall,
    depth: int,
    *,
    template: dict[str, TemplateValue],
    grid: Size,
    threadgroup: Size,
) -> Callable[..., mx.array]:
    """Binds a product whose depth several threadgroups may divide (split-K).

    The last extent of ``grid`` is the number of parts, each of ``depth``; with several the kernel
    writes float32 planes, which another launch adds.
    """
    (x, matrix, _, fmt), (m, n, k), parts = call, call.shape, grid[2]
    shape, planes, whole = (*x.shape[:-1], n), (parts, m, n), parts == 1
    sizes = mx.array([m, n, k, depth], mx.int32)
    added = matrix.bias if whole else None
    packed = packed_template(fmt, x.dtype, matrix.scales.dtype)
    out = {"O": x.dtype if whole else mx.float32, "biased": added is not None}
    launch = kernel.bind(
        [x, matrix.w, matrix.scales, matrix.biases or matrix.scales, added or x, sizes],
        template=of_kernel(kernel, packed | out | template),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape if whole else planes],
    )
    total = None if whole else sum_of_parts(planes, x.dtype, shape, matrix.bias is not None)

    def run(x: mx.array, w: mx.array, scales: mx.array, *rest: mx.array | None) -> mx.array:
        biases, bias = rest[:2]
        last = x if bias is None or total else bias
        (y,) = launch([x, w, scales, scales if biases is None else biases, last, sizes])
        return y if total is None else total(y, bias)

    return run


def sum_of_parts(
    planes: tuple[int, int, int], dtype: mx.Dtype, shape: tuple[int, ...], biased: bool
) -> Callable[[mx.array, mx.array | None], mx.array]:
    """The launch of the sum of float32 planes (parts, M, N), and of a bias (N,), rounded once."""
    parts, m, n = planes
    sizes, nothing = mx.array([m * n, n, parts], mx.int32), mx.array([0.0], dtype)
    launch = QMM_SUM.bind(
        [Spec(planes, mx.float32), Spec((n if biased else 1,), dtype), sizes],
        template={"T": dtype, "biased": biased},
        grid=(m * n, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[shape],
    )

    def run(parts: mx.array, bias: mx.array | None) -> mx.array:
        return launch([parts, nothing if bias is None else bias, sizes])[0]

    return run


# Threads of a threadgroup, and rows of the matrix that a thread unpacks before it multiplies them.
_THREADS, _BLOCK = 8, 8
_QVM = large_kernel(
    "qvm",
    "quantized_matmul/qvm.metal",
    registers=lambda rows, run, block, **_: (rows + block) * run,
)


def qvm(call: MatmulCall) -> Callable[..., mx.array]:
    """Binds ``x @ w + bias`` for 1 to 16 rows; ``w`` is read once, sums are rounded once."""
    rows, n, k = call.shape
    # The sums of a row fill two of the widest vectors there are while they meet the weights.
    run = min(call.fmt.group_size, 32)
    return split_k(
        _QVM,
        call,
        k,
        template={"rows": 1 if rows == 1 else MAX_QMV_ROWS, "run": run, "block": _BLOCK},
        grid=(-(-n // (run * _THREADS)) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
    )
