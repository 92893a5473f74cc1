"""Launches the rounding of rows to 8 bits and their product with a matrix of 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from struct import pack, unpack
from typing import Any

import mlx.core as mx

from ...runtime.devices import device_of
from ...runtime.launch import Bound
from ...runtime.spec import Spec
from ..common.kernels import large_kernel
from ..quantized_matmul.qmv import GATES, Gate

# What K is a multiple of: integers that are copied at once.
DEPTH = 16
_THREADS = 256
# Neighbours that a thread of int8_rows reads at once, and how often it should do so at most.
_RUN, _MOST_RUNS = 8, 5

_ROWS = large_kernel(
    "int8_rows",
    "int8/int8.metal",
    threadgroup_memory=lambda threads, **_: threads // 4,
    registers=lambda runs, **_: (runs + 1) * _RUN,
)


def registers(tile_m: int, tile_n: int, **_: object) -> int:
    """Words of the sums of a thread."""
    return tile_m * tile_n // _THREADS


_PRODUCT = large_kernel("int8_product", "int8/int8.metal", registers=registers)


def int8_rows(
    x: Spec,
    other: Spec | None = None,
    block: int = 0,
    eps: float | None = None,
    gate: Gate | None = None,
) -> Callable[[mx.array, mx.array | None], list[mx.array]]:
    """Binds the quantization of rows (..., K) to codes (M, K) int8 and scales (M,) float32.

    ``other`` is the gate's second factor, or the norm's weight (K,); ``block`` columns are
    multiplied by a Hadamard matrix.
    """
    k, m = x.shape[-1], prod(x.shape[:-1])
    count, threads = -(-k // _RUN), 32
    while threads < 1024 and threads * _MOST_RUNS < count:
        threads *= 2
    (bits,) = unpack("i", pack("f", eps or 0.0))
    shape = mx.array([k, bits], mx.int32)
    launch = _ROWS.bind(
        [x, other or x, shape],
        template={
            "T": x.dtype,
            "threads": threads,
            "runs": -(-count // threads),
            "block": block,
            "gate": GATES.index(gate),
            "normed": 0 if eps is None else 1 if other is None else 2,
        },
        grid=(m * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(m, k), (m,)],
        output_dtypes=[mx.int8, mx.float32],
    )
    return lambda x, other: launch([x, x if other is None else other, shape])


def int8_products(
    rows: Callable[[mx.array, mx.array | None], list[mx.array]],
    x: Spec,
    matrices: Sequence[tuple[int, bool]],
) -> Callable[..., list[mx.array]]:
    """Binds products of rows, quantized once, with matrices of so many columns, with a bias or not.

    The launch takes the arrays of ``rows`` and, of each matrix, w (N, K) int8, scales and bias.
    """
    (*leading, k), m = x.shape, prod(x.shape[:-1])
    tile_m, tile_n, stages = (128, 256, 4) if device_of().dynamic_memory else (128, 128, 0)

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

    def run(x: mx.array, other: mx.array | None, *flat: Any) -> list[mx.array]:
        q, row_scales = rows(x, other)
        products = []
        for i, (product, sizes) in enumerate(launches):
            w, scales, bias = flat[3 * i : 3 * i + 3]
            products += product([q, w, row_scales, scales, x if bias is None else bias, sizes])
        return products

    return run
