"""Products in 8-bit integers, in MLX's operators."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

# The largest code; -128 is left out, so that codes are symmetric.
MOST = 127


@cache
def _hadamard(block: int, dtype: mx.Dtype) -> mx.array:
    """The Hadamard matrix of a power of two, an eighth of its ones: exact in every dtype."""
    matrix = mx.array([[1.0]])
    while len(matrix) < block:
        upper, lower = (mx.concatenate([matrix, part], axis=1) for part in (matrix, -matrix))
        matrix = mx.concatenate([upper, lower])
    matrix = (matrix / 8).astype(dtype)
    mx.eval(matrix)
    return matrix


def rotated(x: mx.array, block: int) -> mx.array:
    """Each ``block`` columns times a Hadamard matrix, which spreads large values; 0 for none."""
    if not block:
        return x
    return (x.reshape(*x.shape[:-1], -1, block) @ _hadamard(block, x.dtype)).reshape(x.shape)


def block_of(columns: int) -> int:
    """Columns that are mixed, the largest power of two up to 128 that divides them; 0 for few."""
    block = min(columns & -columns, 128)
    return block if block >= 16 else 0


def int8_rows(x: mx.array) -> tuple[mx.array, mx.array]:
    """The rows of a matrix as int8 codes, and what their largest element is of 127 (float32)."""
    x = x.astype(mx.float32)
    most = mx.abs(x).max(axis=-1, keepdims=True) if x.shape[-1] else mx.zeros((*x.shape[:-1], 1))
    codes = mx.round(x * mx.where(most > 0, MOST / most, 0)).astype(mx.int8)
    return codes, most.squeeze(-1) / MOST


def int8_matmul(x: mx.array, w: mx.array, scales: mx.array, bias: mx.array | None) -> mx.array:
    """As the kernels: rows of ``x`` rounded to 8 bits, times ``w``, both scales, plus the bias."""
    codes, rows = int8_rows(x)
    y = codes.astype(mx.float32) @ w.astype(mx.float32).T * rows[..., None] * scales
    return (y if bias is None else y + bias).astype(x.dtype)
