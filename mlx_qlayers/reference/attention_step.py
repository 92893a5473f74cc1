"""A step of decoding in MLX's own operators."""

from __future__ import annotations

import mlx.core as mx

from .attention import attention
from .rotary import rotated


def attention_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_buffer: mx.array,
    v_buffer: mx.array,
    positions: mx.array,
    *,
    dims: int,
    traditional: bool,
    base: float | None,
    rope_scale: float,
    freqs: mx.array | None,
    scale: float,
    mask: mx.array | None,
) -> list[mx.array]:
    """As :func:`mlx_qlayers.metal.attention.step.attention_step`; arguments as there."""
    batch, _, size, width = k_buffer.shape
    length, positions = positions[0], positions[1 : 1 + batch]
    if dims:
        q, k = (x.reshape(batch, 1, -1, width) for x in (q, k))
        q, k = rotated(
            *(q, k, positions),
            dims=dims,
            traditional=traditional,
            base=base,
            scale=rope_scale,
            freqs=freqs,
        )
    else:
        q, k = (x.reshape(batch, -1, 1, width) for x in (q, k))
    row = mx.arange(size)
    buffers = [
        mx.where((row < length)[:, None], buffer, mx.where((row == length)[:, None], new, 0))
        for buffer, new in ((k_buffer, k), (v_buffer, v.reshape(batch, -1, 1, v_buffer.shape[3])))
    ]
    seen = row <= length
    if mask is not None:
        seen = seen & mask[..., :size]
    keys, values = buffers
    out = attention(q, keys, values, scale, seen)
    return [out.reshape(batch, 1, -1), *buffers]
