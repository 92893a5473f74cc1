"""Products in 8-bit integers, in MLX's operators."""

from __future__ import annotations

import mlx.core as mx

# The largest code; -128 is left out, so that codes are symmetric.
MOST = 127


def int8_rows(x: mx.array) -> tuple[mx.array, mx.array]:
    """The rows of a matrix as int8 codes, and what their largest element is of 127 (float32)."""
    x = x.astype(mx.float32)
    most = mx.abs(x).max(axis=-1, keepdims=True)
    codes = mx.round(x * mx.where(most > 0, MOST / most, 0)).astype(mx.int8)
    return codes, most.squeeze(-1) / MOST


def int8_matmul(x: mx.array, w: mx.array, scales: mx.array, bias: mx.array | None) -> mx.array:
    """As the kernels: rows of ``x`` rounded to 8 bits, times ``w``, both scales, plus the bias."""
    codes, rows = int8_rows(x)
    y = codes.astype(mx.float32) @ w.astype(mx.float32).T * rows[..., None] * scales
    return (y if bias is None else y + bias).astype(x.dtype)
