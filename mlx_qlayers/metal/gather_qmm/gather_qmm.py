"""Launches the tiled products of many rows with the quantized matrices that they choose."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from math import prod

import mlx.core as mx

from ...formats import MODES, Format
from ...runtime.kernel import MAX_THREADS, Kernel
from ..quantized_matmul.qmm import QmmConfig, threadgroup_memory

_LIST = Kernel(
    "gather_qmm_list",
    "gather_qmm/gather_qmm.metal",
    inputs=("right", "shape"),
    outputs=("list",),
    template=("threads",),
    threadgroup_memory=lambda threads: 4 * threads,
)
_TILES = Kernel(
    "gather_qmm_tiles",
    "gather_qmm/gather_qmm.metal",
    inputs=("x", "w", "scales", "biases", "factors", "list", "shape"),
    outputs=("y",),
    template=(
        "T",
        "S",
        "mode",
        "group",
        "bits",
        "transposed",
        "tile_m",
        "tile_n",
        "tile_k",
        "simds_m",
        "simds_n",
        "run",
        "stages",
        "ahead",
        "aligned",
        "scaled",
    ),
    threadgroup_memory=threadgroup_memory,
    large=True,
)


@cache
def gather_qmm_config(
    device: str, rows: int, matrices: int, dtype: mx.Dtype, fmt: Format
) -> QmmConfig:
    """The configuration for a backend.

    Args:
        device: ``"metal"``, ``"cuda"`` or ``"host"``.
        rows: of all products.
        matrices: among which they choose.
        dtype: of the rows.
        fmt: the format of the matrices.
    """
    run = 32 if fmt.bits % 2 else 16
    # Two tiles of float32 must fit into the threadgroup memory.
    wide = dtype == mx.float32
    if rows <= 8 * matrices:
        return QmmConfig(16, 64, 64 if wide else 128, 1, 4, run, ahead=False)
    return QmmConfig(32 if wide or rows <= 16 * matrices else 64, 64, 64, 2, 2, run, ahead=False)


def gather_qmm_sorted(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    factors: mx.array | None,
    right: mx.array,
    transpose: bool,
    fmt: Format,
    config: QmmConfig,
) -> mx.array:
    """Products of blocks of rows with the packed matrices that they chose, sorted.

    Args:
        x: (P, M, K) in float32, float16 or bfloat16.
        w: (..., N, K * bits / 32) uint32, or (..., K, N * bits / 32) if not ``transpose``.
        scales: one a group along the last axis of the matrices.
        biases: as ``scales`` (affine), else None.
        factors: one float32 number for each matrix, or None.
        right: (P,) uint32 that does not decrease: the matrix of each block.
        transpose: multiply with the transposes of the matrices.
        fmt: group_size, bits and mode of ``w``.
        config: how to cut the products.

    Returns:
        (P, M, N) in the dtype of ``x``; weights rounded to it, float32 sums rounded once.
    """
    (pairs, m, k), matrices = x.shape, prod(w.shape[:-2])
    n = w.shape[-2] if transpose else fmt.dims(w)
    tiles = pairs * m // config.tile_m + min(matrices, pairs)
    searching = min(1 << (matrices - 1).bit_length(), MAX_THREADS)
    (found,) = _LIST(
        [right, _numbers(pairs, matrices, m, config.tile_m, tiles)],
        template={"threads": searching},
        grid=(searching, 1, 1),
        threadgroup=(searching, 1, 1),
        output_shapes=[(tiles, 3)],
    )
    threads = config.threads(x.dtype)
    (y,) = _TILES(
        [
            x,
            w,
            scales,
            scales if biases is None else biases,
            _one() if factors is None else factors,
            found,
            _numbers(n, k),
        ],
        template=_template(x.dtype, scales.dtype, fmt, config, transpose, k, factors is not None),
        grid=(tiles * threads, -(-n // config.tile_n), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(pairs, m, n)],
    )
    return y


@cache
def _template(
    dtype: mx.Dtype,
    scale: mx.Dtype,
    fmt: Format,
    config: QmmConfig,
    transpose: bool,
    k: int,
    scaled: bool,
) -> dict[str, mx.Dtype | int | bool]:
    sizes = asdict(config)
    del sizes["parts"]
    return {
        "T": dtype,
        "S": scale,
        "mode": list(MODES).index(fmt.mode),
        "group": fmt.group_size,
        "bits": fmt.bits,
        "transposed": transpose,
        **sizes,
        "aligned": k * dtype.size % 16 == 0,
        "scaled": scaled,
    }


@cache
def _numbers(*values: int) -> mx.array:
    return mx.array(values, mx.int32)


@cache
def _one() -> mx.array:
    return mx.ones((1,))
