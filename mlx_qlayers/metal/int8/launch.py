"""Launches the rounding of rows to 8 bits and their product with a matrix of 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import mlx.core as mx

from ...runtime.backend import backend
from ...runtime.kernel import Kernel
from ...runtime.launch import Bound
from ...runtime.spec import Spec

# What K is a multiple of: integers that are copied at once.
DEPTH = 16
_THREADS = 256

_ROWS = Kernel(
    "int8_rows",
    "int8/int8.metal",
    inputs=("x", "shape"),
    outputs=("q", "scales"),
    template=("T", "threads"),
    threadgroup_memory=lambda threads, **_: threads // 8,
    large=True,
)


def registers(tile_m: int, tile_n: int, **_: object) -> int:
    """Words of the sums of a thread."""
    return tile_m * tile_n // _THREADS


_PRODUCT = Kernel(
    "int8_product",
    "int8/int8.metal",
    inputs=("x", "w", "row_scales", "column_scales", "bias", "shape"),
    outputs=("y",),
    template=("T", "tile_m", "tile_n", "biased", "SHARED"),
    registers=registers,
    large=True,
)


def int8_products(x: Spec, matrices: Sequence[tuple[int, bool]]) -> Callable[..., list[mx.array]]:
    """The launches of products of many rows in 8-bit integers, the rows rounded once.

    Args:
        x: (..., K), K a multiple of :data:`DEPTH`.
        matrices: of each the columns of its result, and whether a bias is added.

    Returns:
        A function of x, and of each matrix w (N, K) int8, its scales (N,) float32 and bias (N,) or
        None, that gives (..., N) for each in the dtype of ``x``.
    """
    (*leading, k), m = x.shape, prod(x.shape[:-1])
    tile_m, tile_n, stages = (128, 256, 4) if backend() == "cuda" else (128, 128, 0)
    depth = mx.array([k], mx.int32)
    rows = _ROWS.bind(
        [x, depth],
        template={"T": x.dtype, "threads": _THREADS},
        grid=(m * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(m, k), (m,)],
        output_dtypes=[mx.int8, mx.float32],
    )

    def product_of(n: int, biased: bool) -> tuple[Bound, mx.array]:
        sizes = mx.array([m, n, k], mx.int32)
        bias, scales = Spec((n,), x.dtype), (Spec((m,), mx.float32), Spec((n,), mx.float32))
        given = [Spec((m, k), mx.int8), Spec((n, k), mx.int8), *scales, bias if biased else x]
        return _PRODUCT.bind(
            [*given, sizes],
            template={
                "T": x.dtype,
                "tile_m": tile_m,
                "tile_n": tile_n,
                "biased": biased,
                "SHARED": stages * (tile_m + tile_n) * 128,
            },
            grid=(-(-m // tile_m) * _THREADS, -(-n // tile_n), 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(*leading, n)],
            output_dtypes=[x.dtype],
        ), sizes

    launches = [product_of(*matrix) for matrix in matrices]

    def run(x: mx.array, *flat: Any) -> list[mx.array]:
        q, row_scales = rows([x, depth])
        products = []
        for i, (product, sizes) in enumerate(launches):
            w, scales, bias = flat[3 * i : 3 * i + 3]
            products += product([q, w, row_scales, scales, x if bias is None else bias, sizes])
        return products

    return run
