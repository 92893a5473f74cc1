"""Attention to the buffer of a cache in MLX's own operators."""

from __future__ import annotations

import mlx.core as mx

from .attention import attention


def attention_in_buffer(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_buffer: mx.array,
    v_buffer: mx.array,
    length: mx.array,
    *,
    scale: float,
    mask: mx.array | None,
) -> mx.array:
    """As :func:`mlx_qlayers.metal.attention_buffer.attention_in_buffer`; arguments as there."""
    batch, _, queries, _ = q.shape
    size = k_buffer.shape[2]
    new = mx.arange(queries)
    held = mx.broadcast_to(mx.arange(size) < length, (queries, size))
    seen = mx.concatenate([held, new <= new[:, None]], axis=-1)
    if mask is not None:
        own = mx.take(mask, mx.minimum(length + new, mask.shape[3] - 1), axis=3)
        past = mx.broadcast_to(mask[..., :size], (*mask.shape[:3], size))
        seen = seen & mx.concatenate([past, own], axis=-1)
    keys, values = (mx.concatenate(pair, axis=2) for pair in ([k_buffer, k], [v_buffer, v]))
    out = attention(q, keys, values, scale, seen)
    return out.swapaxes(1, 2).reshape(batch, queries, -1)
