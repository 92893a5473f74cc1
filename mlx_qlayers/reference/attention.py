"""Attention in plain MLX operators: the oracle of the kernels, and the path without one.

Where it can, this is ``mx.fast.scaled_dot_product_attention`` itself. On a CPU half precision goes
through float32, as stock loops convert every element in software, and heads are spread over the
cores, as every stock operator runs on one; neither changes a bit of a float32 result.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .cores import on_core, parts

Packed = tuple[mx.array, mx.array, mx.array]
_ALL = slice(None)


def attention(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    scale: float,
    mask: mx.array | str | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """:func:`mlx_qlayers.attention` with checked arguments; differentiable by autodiff."""
    queries = q.shape[2]
    dtype = mx.result_type(q, *(a[1] if isinstance(a, tuple) else a for a in (k, v)))
    on_cpu = mx.default_device().type == mx.cpu
    work = mx.float32 if on_cpu or softcap is not None else dtype
    if window is not None and not isinstance(mask, mx.array):
        # No query reaches further back than this.
        first = max(0, keys(k) - queries - window + 1)
        k, v = _each(k, lambda a: a[..., first:, :]), _each(v, lambda a: a[..., first:, :])
    mask = _prepare(mask, window, queries, keys(k), work)
    outputs = []
    for core, head in enumerate(_split(q, k) if on_cpu else [_ALL]):
        with on_core(core):
            some = _take_heads(head, q, k, v, mask, sinks)
            outputs.append(_products(*some, scale, softcap, work).astype(dtype))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def _split(q: mx.array, k: mx.array | Packed) -> list[slice]:
    """The query heads that each core computes, whole groups of those that share keys."""
    batch, heads, queries, width = q.shape
    kv_heads = (k[0] if isinstance(k, tuple) else k).shape[1]
    share = heads // kv_heads if kv_heads > 1 else 1
    each = parts(heads // share, 2 * batch * share * queries * keys(k) * width)
    return [slice(s.start * share, s.stop * share) for s in each] if len(each) > 1 else [_ALL]


def _take_heads(
    heads: slice,
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> tuple[mx.array, mx.array | Packed, mx.array | Packed, mx.array | str | None, mx.array | None]:
    """What some query heads need of the arguments."""
    if heads == _ALL:
        return q, k, v, mask, sinks
    kv_heads = (k[0] if isinstance(k, tuple) else k).shape[1]
    if kv_heads > 1:
        share = q.shape[1] // kv_heads
        groups = slice(heads.start // share, heads.stop // share)
        k, v = _each(k, lambda a: a[:, groups]), _each(v, lambda a: a[:, groups])
    if isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask[..., heads, :, :]
    return q[:, heads], k, v, mask, None if sinks is None else sinks[heads]


def _products(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    scale: float,
    softcap: float | None,
    work: mx.Dtype,
) -> mx.array:
    """Attention in the dtype ``work``: by the stock operator where it has what is asked for."""
    q, k, v = q.astype(work), _cast(k, work), _cast(v, work)
    sinks = None if sinks is None else sinks.astype(work)
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        # Queries that see nothing must not get a gradient through scores too small to matter.
        sees = (mask > mx.finfo(work).min).any(axis=-1, keepdims=True)
        q = mx.where(sees, q, 0)
    if softcap is not None or isinstance(k, tuple) or isinstance(v, tuple):
        return _composed(q, k, v, scale, mask, softcap, sinks)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def keys(k: mx.array | Packed) -> int:
    """How many keys there are, packed or not."""
    return (k[0] if isinstance(k, tuple) else k).shape[2]


def packing(k: Packed, width: int) -> tuple[int, int]:
    """The group size and the bits with which rows of ``width`` numbers are packed."""
    return width // k[1].shape[-1], 32 * k[0].shape[-1] // width


def visible(queries: int, keys: int, window: int | None) -> mx.array:
    """Which keys each query sees: (L, S) booleans, causal from the lower right corner."""
    row = mx.arange(keys - queries, keys)[:, None]
    column = mx.arange(keys)
    seen = column <= row
    return seen if window is None else seen & (column > row - window)


def _prepare(
    mask: mx.array | str | None, window: int | None, queries: int, keys: int, dtype: mx.Dtype
) -> mx.array | str | None:
    """One mask out of both: None, ``"causal"``, booleans, or finite numbers in ``dtype``."""
    if not isinstance(mask, mx.array):
        causal = mask is not None or window is not None
        if not causal or queries == 1:
            return None
        return "causal" if window is None or window >= keys else visible(queries, keys, window)
    if mask.dtype == mx.bool_:
        return mask if window is None else mask & visible(queries, keys, window)
    # Stock turns a row of -inf into NaN; the least finite number averages the values instead.
    least = mx.finfo(dtype).min
    mask = mx.maximum(mask.astype(dtype), least)
    return mask if window is None else mx.where(visible(queries, keys, window), mask, least)


def _composed(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    scale: float,
    mask: mx.array | str | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """The products, softcap, mask and softmax one after the other."""
    batch, heads, queries, width = q.shape
    # The queries of all heads that share keys are rows of one product.
    rows = (q * scale).reshape(batch, (k[0] if isinstance(k, tuple) else k).shape[1], -1, width)
    if isinstance(k, tuple):
        group_size, bits = packing(k, width)
        scores = mx.quantized_matmul(rows, *k, transpose=True, group_size=group_size, bits=bits)
    else:
        scores = rows @ k.swapaxes(-1, -2)
    scores = scores.reshape(batch, heads, queries, -1)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    if isinstance(mask, str):
        mask = visible(queries, scores.shape[-1], None)
    if mask is not None:
        hidden = mask.dtype == mx.bool_
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if hidden else scores + mask
    if sinks is not None:
        column = mx.broadcast_to(sinks[:, None, None], (batch, heads, queries, 1))
        scores = mx.concatenate([column, scores], axis=-1)
    shares = mx.softmax(scores, axis=-1, precise=True)
    shares = shares if sinks is None else shares[..., 1:]
    shares = shares.reshape(*rows.shape[:-1], -1)
    if isinstance(v, tuple):
        out = mx.quantized_matmul(shares, *v, transpose=False, group_size=group_size, bits=bits)
    else:
        out = shares @ v
    return out.reshape(batch, heads, queries, -1)


def _each(k: mx.array | Packed, function: Callable[[mx.array], mx.array]) -> mx.array | Packed:
    if isinstance(k, tuple):
        return function(k[0]), function(k[1]), function(k[2])
    return function(k)


def _cast(k: mx.array | Packed, dtype: mx.Dtype) -> mx.array | Packed:
    return _each(k, lambda a: a if a.dtype == mx.uint32 else a.astype(dtype))
