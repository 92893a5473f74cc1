"""Launches the rounding of rows to 8 bits and their product with a matrix of 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import mlx.core as mx

from ...runtime.devices import device_of
from ...runtime.spec import Spec
from ..common.kernels import constants, large_kernel

# A divisor of K: integers that are copied at once.
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


def int8_rows(x: Spec, block: int = 0) -> Callable[[mx.array], list[mx.array]]:
    """Binds the quantization of rows (..., K) to codes (M, K) int8 and scales (M,) float32.

    ``block`` columns are multiplied by a Hadamard matrix first. The kernel also has a norm and a
    gate of rows, which nothing asks for.
    """
    k, m = x.shape[-1], prod(x.shape[:-1])
    count, threads = -(-k // _RUN), 32
    while threads < 1024 and threads * _MOST_RUNS < count:
        threads *= 2
    shape = constants([k, 0])
    values: dict[str, Any] = {"T": x.dtype, "threads": threads, "block": block}
    launch = _ROWS.bind(
        [x, x, shape],
        template=values | {"runs": -(-count // threads), "gate": 0, "normed": 0},
        grid=(m * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(m, k), (m,)],
    )
    return lambda x: launch([x, x, shape])


def int8_product(x: Spec, n: int, biased: bool, block: int = 0) -> Callable[..., mx.array]:
    """Binds the product of rows (..., K), which are quantized first, with a matrix of n columns.

    The launch takes x, w (N, K) int8, scales (N,) float32, and a bias (N,) or None.
    """
    (*leading, k), m = x.shape, prod(x.shape[:-1])
    tile_m, tile_n, stages = (128, 256, 4) if device_of().dynamic_memory else (128, 128, 0)
    rows, sizes = int8_rows(x, block), mx.array([m, n, k], mx.int32)
    bias, scales = Spec((n,), x.dtype), (Spec((m,), mx.float32), Spec((n,), mx.float32))
    given = [Spec((m, k), mx.int8), Spec((n, k), mx.int8), *scales, bias if biased else x]
    values: dict[str, Any] = {"T": x.dtype, "tile_m": tile_m, "tile_n": tile_n}
    launch = _PRODUCT.bind(
        [*given, sizes],
        template=values | {"biased": biased, "SHARED": stages * (tile_m + tile_n) * 128},
        grid=(-(-m // tile_m) * _THREADS, -(-n // tile_n), 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*leading, n)],
    )

    def run(x: mx.array, w: mx.array, scales: mx.array, bias: mx.array | None) -> mx.array:
        codes, row_scales = rows(x)
        return launch([codes, w, row_scales, scales, x if bias is None else bias, sizes])[0]

    return run
