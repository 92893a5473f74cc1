"""Attention in plain MLX operators: the oracle of the kernels, and the path without one.

Where it can, this is ``mx.fast.scaled_dot_product_attention`` itself. On a CPU half precision goes
through float32, as stock loops convert every element in software, and heads are spread over the
cores, as every stock operator runs on one; neither changes a bit of a float32 result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from math import log
from typing import Any, cast

import mlx.core as mx

from ..options import AttentionCall, Packing
from ..runtime.devices import device_of
from .cores import on_core, parts

Run = Callable[..., list[mx.array]]

_ALL, _HERE = slice(None), nullcontext()
# The masks of windows that are kept for later calls: bytes of one, and how many.
_MASK_BYTES, _MASKS = 2 << 20, 16


def attention(call: AttentionCall, instead: Callable[..., mx.array] | None = None) -> Run:
    """:func:`mlx_qlayers.attention`, differentiable, or ``instead`` :func:`log_sums`."""
    q, k, _, (scale, causal, window, softcap, _), mask, _ = call
    queries, keys, dtype = q.shape[2], k[0].shape[2], mx.result_type(*call.dtypes)
    on_cpu = mx.default_device().type == mx.cpu
    work = mx.float32 if on_cpu or softcap is not None else dtype
    # No query reaches further back than this.
    first = max(0, keys - queries - window + 1) if window and mask is None else 0
    prepared: Any = _mask(causal, mask, window, queries, keys - first, work)
    added = mask is not None and mask.dtype != mx.bool_
    of_heads = mask is not None and mask.ndim > 2 and mask.shape[-3] > 1
    shares = _shares(q, k[0], keys - first) if on_cpu else [(_ALL, _ALL)]
    product: Any = mx.fast.scaled_dot_product_attention
    options: dict[str, Any] = {"scale": scale}
    if softcap is not None or len(k) > 1 or instead:
        product, options["softcap"] = instead or _composed, softcap
        options["packing"] = call.packing

    def run(*arrays: Any) -> list[mx.array]:
        (*parts, mask, sinks), outputs = arrays, list[mx.array]()
        mask = prepared(mask) if callable(prepared) else prepared
        for core, (heads, groups) in enumerate(shares):
            with on_core(core) if core else _HERE:
                given, seen = [], mask
                for i, a in enumerate(parts):
                    a = a[:, groups if i else heads] if len(shares) > 1 else a
                    a = a[..., first:, :] if first and i else a
                    given.append(a if a.dtype == mx.uint32 else a.astype(work))
                if of_heads and len(shares) > 1:
                    seen = mask[..., heads, :, :]
                if added:
                    # Queries that see nothing get no gradient through scores too small to matter.
                    sees = (seen > mx.finfo(work).min).any(axis=-1, keepdims=True)
                    given[0] = mx.where(sees, given[0], 0)
                sunk = None if sinks is None else sinks[heads].astype(work)
                out = product(*given, mask=seen, sinks=sunk, **options)
                outputs.append(out.astype(dtype))
        return outputs if len(outputs) == 1 else [mx.concatenate(outputs, axis=1)]

    return run


def stock(call: AttentionCall) -> Run | None:
    """The stock operator of q, k, v, mask and sinks, if that is all of :func:`attention` here."""
    q, (k, *packed), (v, *_), (scale, causal, window, softcap, _), mask, sinks = call
    queries, keys, on_gpu = q.shape[2], k.shape[2], mx.default_device().type == mx.gpu
    if packed or softcap is not None:
        return None
    if {q.dtype} != {a.dtype for a in (k, v, sinks) if a is not None}:
        return None
    if not on_gpu and (q.dtype != mx.float32 or len(_shares(q, k, keys)) > 1):
        return None
    product: Any = mx.fast.scaled_dot_product_attention
    options: dict[str, Any] = {"scale": scale}
    if mask is not None:
        if mask.dtype != mx.bool_ or window is not None:
            return None
    elif window is not None and window < keys:
        # cuDNN's operator makes these of booleans at each call, for every head.
        dtype = q.dtype if device_of().stock_is_cudnn and queries <= keys else mx.bool_
        # Of one query, the keys in its window are all that is needed.
        if not on_gpu or queries == 1 or queries * keys * dtype.size > _MASK_BYTES:
            return None

        def within(q: mx.array, k: mx.array, v: mx.array, _: None, sinks: Any) -> list[mx.array]:
            mask = _window_mask(queries, keys, window, dtype)
            return [product(q, k, v, **options, mask=mask, sinks=sinks)]

        return within
    elif queries > 1 and (causal or window is not None):
        options["mask"] = "causal"
    if mask is sinks is None:  # each argument that is handed over takes a tenth of a microsecond
        return lambda q, k, v, *_: [product(q, k, v, **options)]

    def run(q: mx.array, k: mx.array, v: mx.array, seen: Any, sinks: Any) -> list[mx.array]:
        given = options if seen is None else {**options, "mask": seen}
        return [product(q, k, v, **given, sinks=sinks)]

    return run


@lru_cache(_MASKS)
def _window_mask(queries: int, keys: int, window: int, dtype: mx.Dtype) -> mx.array:
    """The keys that each query sees, as booleans or zero and minus infinity; evaluated."""
    mask = visible(queries, keys, window)
    if dtype != mx.bool_:
        mask = mx.where(mask, mx.array(0, dtype), mx.array(-float("inf"), dtype))
    mx.eval(mask)
    return mask


def _shares(q: Any, k: Any, keys: int) -> list[tuple[slice, slice]]:
    """The query heads that each core computes, whole groups of those that share keys, and these."""
    batch, heads, queries, width = q.shape
    kv_heads = k.shape[1]
    share = heads // kv_heads if kv_heads > 1 else 1
    each = parts(heads // share, 2 * batch * share * queries * keys * width)
    groups = each if kv_heads > 1 else [_ALL] * len(each)
    of_q = [slice(s.start * share, s.stop * share) for s in each]
    return list(zip(of_q, groups, strict=True)) if len(each) > 1 else [(_ALL, _ALL)]


def visible(queries: int, keys: int, window: int | None) -> mx.array:
    """Which keys each query sees: (L, S) booleans, causal from the lower right corner."""
    row = mx.arange(keys - queries, keys)[:, None]
    column = mx.arange(keys)
    seen = column <= row
    return seen if window is None else seen & (column > row - window)


def _mask(
    causal: bool, mask: Any, window: int | None, queries: int, keys: int, dtype: mx.Dtype
) -> str | Callable[[Any], mx.array] | None:
    """One mask out of both: None, ``"causal"``, or a function to booleans or finite numbers."""
    if mask is None:
        if queries == 1 or not (causal or window):
            return None
        if window is None or window >= keys:
            return "causal"
        return lambda _: visible(queries, keys, window)
    if mask.dtype == mx.bool_:
        return lambda mask: mask if window is None else mask & visible(queries, keys, window)
    # Stock turns a row of -inf into NaN; the least finite number averages the values instead.
    least = mx.finfo(dtype).min

    def numbers(mask: mx.array) -> mx.array:
        mask = mx.maximum((mask if mask.ndim else mask[None]).astype(dtype), least)
        return mask if window is None else mx.where(visible(queries, keys, window), mask, least)

    return numbers


def log_sums(q: mx.array, *caches: Any, **options: Any) -> mx.array:
    """For each query the logarithm of the sum of its weights: (B, H, L, 1), to base 2."""
    scores = _scores(q, caches[: len(caches) // 2], **options)
    return mx.logsumexp(scores, axis=-1, keepdims=True) / log(2)


def _composed(
    q: mx.array, *caches: Any, sinks: mx.array | None, packing: Packing, **options: Any
) -> mx.array:
    """The products, softcap, mask and softmax one after the other; 0 bits are no packing."""
    k, v = caches[: len(caches) // 2], caches[len(caches) // 2 :]
    weights = mx.softmax(
        _scores(q, k, sinks=sinks, packing=packing, **options), axis=-1, precise=True
    )
    weights = weights if sinks is None else weights[..., 1:]
    batch, heads, queries, keys = weights.shape
    weights = weights.reshape(batch, v[0].shape[1], -1, keys)
    product, form = cast(Any, mx.quantized_matmul), (packing.group_size, packing.v_bits)
    out = product(weights, *v, False, *form) if packing.bits else weights @ v[0]
    return out.reshape(batch, heads, queries, -1)


def _scores(
    q: mx.array,
    k: Sequence[Any],
    *,
    mask: Any,
    sinks: mx.array | None,
    scale: float,
    softcap: float | None,
    packing: Packing,
) -> mx.array:
    """Of all keys, behind that of the sink if there is one."""
    batch, heads, queries, width = q.shape
    # The queries of all heads that share keys are rows of one product.
    rows = (q * scale).reshape(batch, k[0].shape[1], -1, width)
    product: Any = mx.quantized_matmul
    form = True, packing.group_size, packing.bits
    scores = product(rows, *k, *form) if packing.bits else rows @ k[0].swapaxes(-1, -2)
    scores = scores.reshape(batch, heads, queries, -1)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    if isinstance(mask, str):
        mask = visible(queries, scores.shape[-1], None)
    if mask is not None:
        hidden = mask.dtype == mx.bool_
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if hidden else scores + mask
    if sinks is None:
        return scores
    column = mx.broadcast_to(sinks[:, None, None], (batch, heads, queries, 1))
    return mx.concatenate([column, scores], axis=-1)
