"""Attention of a few queries over a long cache, by kernel: what it takes, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..metal.attention_decode import (
    BITS,
    MAX_QUERIES,
    MAX_WIDTH,
    attention_decode,
    configure,
    question,
)
from ..reference import attention as reference
from ..reference.attention import Packed
from ..runtime.backend import backend, choose, requested
from ..tuning.lookup import decided, found
from . import attention_tiled

# Numbers in the keys from which the kernel makes up for its launches on CUDA, which take Python
# longer than the stock operator's: of plain and of packed keys.
_WORTH_LAUNCHES = (1 << 27, 1 << 22)
_BACKENDS = ("metal", "cuda", "host")


def covers(q: mx.array, k: mx.array | Packed, v: mx.array | Packed) -> bool:
    """Whether the kernel takes these arguments."""
    queries, width = q.shape[2:]
    bits = reference.packing(k, width)[1] if isinstance(k, tuple) else 0
    v_width = 32 * v[0].shape[-1] // bits if isinstance(v, tuple) else v.shape[-1]
    widths_fit = width % 8 == v_width % 8 == 0 and 0 < max(width, v_width) <= MAX_WIDTH
    return 0 < queries <= MAX_QUERIES and q.size > 0 and widths_fit and bits in (0, *BITS)


def attention(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    scale: float,
    mask: mx.array | str | None,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """:func:`mlx_qlayers.attention` of arguments that the kernel takes."""
    keys = k if isinstance(k, tuple) else (k,)
    values = v if isinstance(v, tuple) else (v,)
    arrays = [q, *keys, *values]
    best = found("attention_decode", *question(q, k, v))
    by, unless = decided(best, "few queries", _stock_is_better(q, keys))
    path = choose(
        "attention",
        _BACKENDS,
        unless=unless,
        host_gain=_host_gain(q, keys[0].shape[2]),
        arrays=arrays,
        by=by if best else "",
    )
    if path == "ops":
        return reference.attention(q, k, v, scale, mask, window, softcap, sinks)
    if len({a.dtype for a in arrays} - {mx.uint32}) > 1:
        dtype = mx.result_type(*(a for a in arrays if a.dtype != mx.uint32))
        arrays = [a if a.dtype == mx.uint32 else a.astype(dtype) for a in arrays]
    masked = isinstance(mask, mx.array)
    arrays += [a for a in (mask, sinks) if isinstance(a, mx.array)]
    operator = _operator(
        path, len(keys), scale, None if masked else mask, masked, window, softcap, sinks is not None
    )
    out: mx.array = operator(*arrays)
    return out


def _stock_is_better(q: mx.array, keys: tuple[mx.array, ...]) -> str | None:
    """Why ``auto`` leaves this kernel for the stock operator on a GPU."""
    device = backend()
    if device == "metal":
        return "the kernel was not measured on an Apple GPU"
    batch, kv_heads, length, _ = keys[0].shape
    numbers = batch * kv_heads * length * q.shape[3]
    if device == "cuda" and numbers < _WORTH_LAUNCHES[len(keys) > 1]:
        return "on CUDA the stock operator is launched faster, and the cache is short"
    return None


def _host_gain(q: mx.array, keys: int) -> float:
    """How many times as fast as the reference the kernel is on a CPU.

    By the million of multiply-adds, as `benchmarks/bench_attention.py --decode` measured on two
    cores; what either costs without any is the launch.
    """
    work = q.size * keys * 2e-6
    return (0.06 + 0.42 * work) / (0.09 + 0.13 * work)


def _with_gradient(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    scale: float,
    mask: mx.array | str | None,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """The same on the path that has a gradient: by kernels if those were asked for."""
    by_kernels = requested() != "auto" and not attention_tiled.lacking(q, k, v, scale)
    way = attention_tiled.attention if by_kernels else reference.attention
    return way(q, k, v, scale, mask, window, softcap, sinks)


@cache
def _operator(
    path: str,
    parts: int,
    scale: float,
    mask_name: str | None,
    masked: bool,
    window: int | None,
    softcap: float | None,
    sinking: bool,
) -> Callable[..., Any]:
    """The kernel with the gradient of the tiled ones, for keys and values of 1 or 3 arrays."""

    def arguments(arrays: tuple[mx.array, ...]) -> tuple[Any, ...]:
        q, *rest = arrays
        keys, values, rest = rest[:parts], rest[parts : 2 * parts], rest[2 * parts :]
        k, v = (keys[0], values[0]) if parts == 1 else (tuple(keys), tuple(values))
        mask = rest[0] if masked else mask_name
        return q, k, v, scale, mask, window, softcap, rest[-1] if sinking else None

    @mx.custom_function
    def operator(*arrays: mx.array) -> mx.array:
        found = arguments(arrays)
        return partial(attention_decode, config=configure(path, *found[:3]))(*found)

    @operator.vjp
    def gradient(arrays: tuple[mx.array, ...], d_out: mx.array, _: mx.array) -> list[mx.array]:
        floats = [i for i, a in enumerate(arrays) if mx.issubdtype(a.dtype, mx.floating)]

        def function(*given: mx.array) -> mx.array:
            merged = list(arrays)
            for i, a in zip(floats, given, strict=True):
                merged[i] = a
            return _with_gradient(*arguments(tuple(merged)))

        found = mx.vjp(function, [arrays[i] for i in floats], [d_out])[1]
        gradients = [mx.zeros_like(a) for a in arrays]
        for i, d in zip(floats, found, strict=True):
            gradients[i] = d
        return gradients

    return operator
