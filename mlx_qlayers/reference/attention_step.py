"""A step of decoding in MLX's own operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..options import AttentionCall, Rotation, Scores
from ..runtime.spec import Spec
from .attention import attention
from .rotary import rotary_embedding


def attention_step(
    arrays: Sequence[Any], scale: float, rotation: Rotation
) -> Callable[..., list[mx.array]]:
    """A function of arrays of these specs, those of :func:`.ops.attention_step.attention_step`."""
    q, _, _, k_buffer, v_buffer, _, _, mask = arrays
    batch, _, size, width = k_buffer.shape
    leading = () if mask is None else mask.shape[:3]
    queries, seen = (batch, q.shape[2] // width, 1, width), Spec((*leading, size), mx.bool_)
    call = AttentionCall(Spec(queries, q.dtype), (k_buffer,), (v_buffer,), Scores(scale), seen)
    attend, turn = attention(call), rotary_embedding(rotation)

    def run(*arrays: Any) -> list[mx.array]:
        q, k, v, k_buffer, v_buffer, positions, freqs, mask = arrays
        length, row = positions[0], mx.arange(size)
        heads = (batch, 1, -1, width) if rotation.dims else (batch, -1, 1, width)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(batch, -1, 1, v_buffer.shape[3])
        if rotation.dims:
            q, k = turn(q, k, positions[1 : 1 + batch], freqs)
        before, here = (row < length)[:, None], (row == length)[:, None]
        k_buffer = mx.where(before, k_buffer, mx.where(here, k, 0))
        v_buffer = mx.where(before, v_buffer, mx.where(here, v, 0))
        seen = row <= length
        if mask is not None:
            seen = seen & mask[..., :size]
        (out,) = attend(q, k_buffer, v_buffer, seen, None)
        return [out.reshape(batch, 1, -1), k_buffer, v_buffer]

    return run
