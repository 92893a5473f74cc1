"""The Hadamard transform of heads, which spreads over all channels what few of them hold."""

from __future__ import annotations

import mlx.core as mx


def rotated_heads(x: mx.array) -> mx.array:
    """An orthonormal Hadamard transform of the last axis, which is its own inverse.

    It is that of blocks of the largest power of two that divides the width. On a CPU MLX rounds
    sums of half precision after each of its steps, so they are computed in float32.

    Example:
        >>> rotated_heads(mx.array([[3.0, 1.0]])).tolist()
        [[2.82..., 1.41...]]

    Source: Ashkboos et al., 2024, https://arxiv.org/abs/2404.00456.
    """
    width = x.shape[-1]
    block = width & -width
    rows = x if block == width else x.reshape(*x.shape[:-1], -1, block)
    exact = rows.astype(mx.float32) if mx.default_device().type == mx.cpu else rows
    return mx.hadamard_transform(exact).astype(x.dtype).reshape(x.shape)
