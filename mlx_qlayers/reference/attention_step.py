"""A step of decoding in MLX's own operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..options import AttentionCall, Rotation, Scores, StepCall, row_words
from ..runtime.spec import Spec
from .attention import attention
from .rotary import rotary_embedding


def attention_step(
    arrays: Sequence[Any], scale: float, rotation: Rotation, epsilon: float = 0.0
) -> Callable[..., list[mx.array]]:
    """A function of arrays of these specs, those of :func:`.ops.attention_step.attention_step`."""
    call = StepCall.of(arrays)
    q, mask, width, v_width = call.q, call.mask, call.width, call.v_width
    (batch, _, size, _), rows = call.k_cache[0].shape, call.k_append.shape[2]
    group_size, *bits = call.packing
    leading, keys, tokens = () if mask is None else mask.shape[:2], size + rows, q.shape[1]
    queries = batch, q.shape[2] // width, tokens, width
    seen = Spec((*leading, tokens, keys), mx.bool_)
    k, v = (
        tuple(Spec((*a.shape[:2], keys, a.shape[3]), a.dtype) for a in parts)
        for parts in (call.k_cache, call.v_cache)
    )
    attend = attention(AttentionCall(Spec(queries, q.dtype), k, v, Scores(scale), seen, call.sinks))
    rotate = rotary_embedding(rotation)

    def run(*arrays: Any) -> list[mx.array]:
        q, k, v, k_cache, v_cache, *rest = StepCall.of(arrays)
        k_append, v_append, positions, freqs, mask, sinks, q_norm, k_norm, _ = rest
        # By a number MLX gathers, with a kernel that it compiles for seconds on NVIDIA GPUs.
        before, held, row = positions[:1], positions[1:2], mx.arange(rows)
        widths = width, width, v_width
        q, k, v = (a.reshape(batch, tokens, -1, n) for a, n in zip((q, k, v), widths, strict=True))
        v = v.transpose(0, 2, 1, 3)
        if q_norm is not None:
            q, k = (
                mx.fast.rms_norm(x, weight.astype(x.dtype), epsilon)
                for x, weight in ((q, q_norm), (k, k_norm))
            )
        q, k = rotate(q, k, positions[2 : 2 + batch], freqs)
        if group_size:
            pairs = zip((k, v), bits, strict=True)
            k, v = (packed_rows(mx.quantize(a, group_size, n)) for a, n in pairs)
        kept = (row < held)[:, None]
        k_append, v_append = (
            mx.slice_update(mx.where(kept, old, 0), new, held, (2,))
            for old, new in ((k_append, k), (v_append, v))
        )
        k, v = _joined(k_cache, k_append), _joined(v_cache, v_append)
        ahead = mx.broadcast_to(mx.arange(size) < before, (tokens, size))
        seen = mx.concatenate([ahead, row <= held + mx.arange(tokens)[:, None]], axis=1)
        if mask is not None:
            last = mask.shape[3] - 1
            columns = [mx.minimum(mx.arange(size), last), mx.minimum(before + row, last)]
            seen = seen & mask[..., mx.concatenate(columns)]
        (out,) = attend(q, *k, *v, seen, sinks)
        out = out.transpose(0, 2, 1, 3)
        return [out.reshape(batch, tokens, -1), k_append, v_append]

    return run


def packed_rows(parts: Sequence[mx.array]) -> mx.array:
    """Packed numbers, scales and biases in one array of words, (..., row_words), a row in a row."""
    words = mx.concatenate([parts[0], mx.concatenate([*parts[1:]], -1).view(mx.uint32)], axis=-1)
    return mx.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, row_words(parts) - words.shape[-1])])


def parts_of_rows(rows: mx.array, like: Sequence[Any]) -> tuple[mx.array, ...]:
    """The inverse of :func:`packed_rows`, of the widths and dtypes of ``like``."""
    words, scales, _ = like
    first, groups = words.shape[-1], scales.shape[-1]
    behind = rows[..., first : first + 2 * groups * scales.dtype.size // 4].view(scales.dtype)
    return rows[..., :first], behind[..., :groups], behind[..., groups:]


def _joined(cache: tuple[mx.array, ...], beside: mx.array) -> list[mx.array]:
    appended = (beside,) if len(cache) == 1 else parts_of_rows(beside, cache)
    return [mx.concatenate([*pair], axis=2) for pair in zip(cache, appended, strict=True)]
