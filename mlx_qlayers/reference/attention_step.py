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
    q, _, _, k_cache, v_cache, k_tail, _, _, _, mask, *_ = arrays
    batch, _, size, width = k_cache.shape
    rows, v_width = k_tail.shape[2], v_cache.shape[3]
    leading, keys = () if mask is None else mask.shape[:3], size + rows
    queries, seen = (batch, q.shape[2] // width, 1, width), Spec((*leading, keys), mx.bool_)
    k, v = (Spec((*a.shape[:2], keys, a.shape[3]), a.dtype) for a in (k_cache, v_cache))
    call = AttentionCall(Spec(queries, q.dtype), (k,), (v,), Scores(scale), seen)
    attend, turn = attention(call), rotary_embedding(rotation)

    def run(*arrays: Any) -> list[mx.array]:
        q, k, v, k_cache, v_cache, k_tail, v_tail, positions, freqs, mask, *_ = arrays
        before, held, row = positions[0], positions[1], mx.arange(rows)
        heads = (batch, 1, -1, width) if rotation.dims else (batch, -1, 1, width)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(batch, -1, 1, v_width)
        if rotation.dims:
            q, k = turn(q, k, positions[2 : 2 + batch], freqs)
        kept, here = (row < held)[:, None], (row == held)[:, None]
        k_tail = mx.where(kept, k_tail, mx.where(here, k, 0))
        v_tail = mx.where(kept, v_tail, mx.where(here, v, 0))
        k, v = mx.concatenate([k_cache, k_tail], 2), mx.concatenate([v_cache, v_tail], 2)
        seen = mx.concatenate([mx.arange(size) < before, row <= held])
        if mask is not None:
            last = mask.shape[3] - 1
            columns = [mx.minimum(mx.arange(size), last), mx.minimum(before + row, last)]
            seen = seen & mask[..., mx.concatenate(columns)]
        (out,) = attend(q, k, v, seen, None)
        return [out.reshape(batch, 1, -1), k_tail, v_tail]

    return run
