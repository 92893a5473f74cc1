"""How kernels are tried: how far roundings may take a result, and arrays that begin anywhere."""

from __future__ import annotations

import math

import mlx.core as mx

from ..runtime.program import CONSTANT_BELOW


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


def behind_one(array: mx.array) -> mx.array:
    """A view of the same elements that begins one element into its buffer, as a user's slice may.

    Few elements are not a view: MLX passes them as constants.
    """
    if array.size < CONSTANT_BELOW:
        return array
    flat = array.flatten()
    return mx.concatenate([flat[:1], flat])[1:].reshape(array.shape)
