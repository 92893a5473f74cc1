"""The exponential in MLX's operators."""

from __future__ import annotations

import mlx.core as mx


def exp(x: mx.array) -> mx.array:
    """exp(x), element by element, in the shape and dtype of ``x``."""
    return mx.exp(x)
