"""Attention by the stock operator alone, where `auto` leaves a call to it on a GPU.

The operator is launched there in less time than Python takes to look at the arguments twice: what
depends on their shapes and dtypes alone is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx

from ..metal.attention.forward import Scores
from ..reference.attention import Packed, visible
from ..runtime.backend import backend, requested
from ..runtime.legacy import Note, count

# The masks of windows that are kept for later calls: bytes of one, and how many.
_BYTES, _KEPT = 2 << 20, 16


def alone(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    scores: Scores,
    why: str | None,
) -> Callable[..., mx.array] | None:
    """What calls the operator for any arrays with the shapes and dtypes of these.

    Args:
        q, k, v, mask, sinks: of :func:`mlx_qlayers.attention`, checked. None of them is kept.
        scores: its other options.
        why: why ``auto`` leaves the kernels, or None.

    Returns:
        A function of q, k, v, the mask if it is an array, and sinks; None where a kernel may run,
        or where there is more to do than the operator does.
    """
    if why is None or requested() != "auto" or mx.default_device().type != mx.gpu:
        return None
    if not (isinstance(k, mx.array) and isinstance(v, mx.array) and q.dtype == k.dtype == v.dtype):
        return None
    if scores.softcap is not None or (sinks is not None and sinks.dtype != q.dtype):
        return None
    queries, keys, scale, window = q.shape[2], k.shape[2], scores.scale, scores.window
    note: Note = "attention", "ops", why
    if isinstance(mask, mx.array):
        return None if mask.dtype != mx.bool_ or window else _run(note, scale)
    if window is None or window >= keys:
        causal = queries > 1 and (scores.causal or window is not None)
        return _run(note, scale, "causal" if causal else None, plain=sinks is None)
    # Of one query, the keys in its window are all that is needed.
    dtype = q.dtype if backend() == "cuda" and queries <= keys else mx.bool_
    if queries == 1 or queries * keys * dtype.size > _BYTES:
        return None
    return _within(note, scale, (queries, keys, window, dtype))


def _run(
    note: Note, scale: float, usual: str | None = None, *, plain: bool = False
) -> Callable[..., mx.array]:
    def bare(q: mx.array, k: mx.array, v: mx.array, _: None, __: None) -> mx.array:
        count(note)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)

    def causal(q: mx.array, k: mx.array, v: mx.array, _: None, __: None) -> mx.array:
        count(note)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")

    def run(
        q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        count(note)
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=usual if mask is None else mask, sinks=sinks
        )

    if not plain:
        return run
    # Each argument that is handed over takes a tenth of a microsecond.
    return bare if usual is None else causal


def _within(
    note: Note, scale: float, window: tuple[int, int, int, mx.Dtype]
) -> Callable[..., mx.array]:
    def run(q: mx.array, k: mx.array, v: mx.array, _: None, sinks: mx.array | None) -> mx.array:
        count(note)
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=_mask(*window), sinks=sinks
        )

    return run


@lru_cache(_KEPT)
def _mask(queries: int, keys: int, window: int, dtype: mx.Dtype) -> mx.array:
    """Which keys each query sees: booleans, or zero and minus infinity.

    On CUDA the operator makes these of booleans at each call, for every head. The mask is
    evaluated at once: what is being traced can use it, and so can what comes after that.
    """
    mask = visible(queries, keys, window)
    if dtype != mx.bool_:
        mask = mx.where(mask, mx.array(0, dtype), mx.array(-float("inf"), dtype))
    mx.eval(mask)
    return mask
