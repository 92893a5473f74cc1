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
        if rotation.dims:
            q, k = (x.reshape(batch, 1, -1, width) for x in (q, k))
            q, k = turn(q, k, positions[1 : 1 + batch], freqs)
        else:
            q, k = (x.reshape(batch, -1, 1, width) for x in (q, k))
        v = v.reshape(batch, -1, 1, v_buffer.shape[3])
        before, here = (row < length)[:, None], (row == length)[:, None]
        k_buffer, v_buffer = (
            mx.where(before, buffer, mx.where(here, new, 0))
            for buffer, new in ((k_buffer, k), (v_buffer, v))
        )
        seen = row <= length
        if mask is not None:
            seen = seen & mask[..., :size]
        (out,) = attend(q, k_buffer, v_buffer, seen, None)
        return [out.reshape(batch, 1, -1), k_buffer, v_buffer]

    return run
