"""How far roundings may take a result from the truth."""

from __future__ import annotations

import math

import mlx.core as mx


def rounding_error(
    actual: mx.array, expected: mx.array, terms: int, steps: int = 1
) -> tuple[float, float]:
    """The error of a result, and how much of it so many roundings of sums of ``terms`` explain."""
    if actual.shape != expected.shape:
        raise ValueError(f"gives shape {actual.shape}, the stock layer {expected.shape}")
    finite = mx.isfinite(expected.astype(actual.dtype))  # else the stock layer overflows as well
    error = float(mx.where(finite, mx.abs(actual.astype(mx.float32) - expected), 0).max())
    largest = float(mx.where(finite, mx.abs(expected), 0).max())
    roundings = 2 * mx.finfo(actual.dtype).eps + 4 * math.sqrt(terms) * mx.finfo(mx.float32).eps
    return error, steps * roundings * largest
