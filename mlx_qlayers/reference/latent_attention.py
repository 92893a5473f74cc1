"""Attention of a token to latent rows in MLX's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def latent_attention(scale: float) -> Callable[..., list[mx.array]]:
    """A function of what :func:`.ops.latent_attention.latent_attention` describes."""

    def run(*arrays: Any) -> list[mx.array]:
        q, r, c, p, last, mask = arrays
        scores = q @ c.swapaxes(-1, -2) + r @ p.swapaxes(-1, -2)
        shown = mx.arange(c.shape[2]) <= last
        shown = shown if mask is None else mask & shown
        scores = mx.where(shown, scores.astype(mx.float32) * scale, -mx.inf)
        return [mx.softmax(scores, axis=-1).astype(c.dtype) @ c]

    return run
