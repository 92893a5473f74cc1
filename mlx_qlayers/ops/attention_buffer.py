"""Attention whose graph does not depend on how many keys a cache holds: for traces of decoding."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from ..metal import attention_buffer as kernels
from ..reference import attention_buffer as reference
from ..runtime.backend import backend, choose
from .differentiable import with_gradient_of

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_MAX_QUERIES, _MAX_WIDTH = 8, 256
# Keys of a buffer up to which all heads of a group may well read them one by one.
MOST_KEYS = 8192


def attention_in_buffer(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_buffer: mx.array,
    v_buffer: mx.array,
    length: mx.array,
    *,
    scale: float,
    mask: mx.array | None = None,
) -> mx.array:
    """Attention of new tokens to what a cache's buffer holds and, causally, to themselves.

    The buffer does not hold the new keys and values yet. Its shape changes only where it grows, so
    that ``mx.compile`` traces a step of decoding once for many.

    Args:
        q: (B, H, L, D) in float32, float16 or bfloat16, L from 1 to 8.
        k: (B, Hkv, L, D), the keys of the new tokens, in the dtype of ``q``.
        v: (B, Hkv, L, Dv).
        k_buffer: (B, Hkv, S, D), of which the first ``length`` keys count.
        v_buffer: (B, Hkv, S, Dv).
        length: int32, 0-d, from 0 to S.
        scale: what the products of queries and keys are multiplied by.
        mask: booleans, true where a query sees a key; broadcasts to (B, H, L, S + L). Column j is
            that of key j, and column ``length + i`` that of new token i. None hides nothing.

    Returns:
        (B, L, H * Dv), the heads side by side. Every query should see a key: one that sees
        none gets some average of values.

    Raises:
        ValueError: a shape or a dtype does not fit; it is named.

    Example:
        >>> q, k, buffer = mx.ones((1, 4, 1, 32)), mx.ones((1, 2, 1, 32)), mx.ones((1, 2, 256, 32))
        >>> attention_in_buffer(q, k, k, buffer, buffer, mx.array(7), scale=1.0).shape
        (1, 1, 128)

    Source: :func:`mlx_qlayers.attention` of ``concatenate([buffer[:, :, :length], new], axis=2)``.
    """
    _check(q, k, v, k_buffer, v_buffer, length, mask)
    arrays = [q, k, v, k_buffer, v_buffer, length, *([] if mask is None else [mask])]
    path = choose(
        "attention_in_buffer",
        ("metal", "cuda", "host") if _covers(q.shape, v.shape[3]) else (),
        arrays=arrays,
    )
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    out: list[mx.array] = _function(path, scale)(q, k, v, k_buffer, v_buffer, length, mask)
    return out[0]


def why_not(q_shape: tuple[int, ...], size: int, v_width: int) -> str | None:
    """Why the kernel should not be used on this machine for such queries and a buffer, if so.

    Args:
        q_shape: (B, H, L, D).
        size: the keys of the buffer, S.
        v_width: Dv.
    """
    if not _covers(q_shape, v_width):
        return "no kernel for these shapes"
    if (device := backend()) != "cuda":
        return f"it was not measured on {device}"
    return f"more than {MOST_KEYS} keys" if size > MOST_KEYS else None


def _covers(q_shape: tuple[int, ...], v_width: int) -> bool:
    width = q_shape[3]
    widths_fit = width % 8 == v_width % 8 == 0 and 0 < max(width, v_width) <= _MAX_WIDTH
    return widths_fit and min(q_shape) > 0 and q_shape[2] <= _MAX_QUERIES


@cache
def _function(path: str, scale: float) -> Any:
    def composed(*given: Any) -> list[mx.array]:
        *arrays, mask = given
        return [reference.attention_in_buffer(*arrays, scale=scale, mask=mask)]

    if path == "ops":
        return composed

    def launch(*given: Any) -> list[mx.array]:
        *arrays, mask = given
        config = kernels.configure(arrays[4].shape[2], arrays[4].shape[3])
        return [kernels.attention_in_buffer(*arrays, scale=scale, mask=mask, config=config)]

    return with_gradient_of(composed, launch)


def _check(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_buffer: mx.array,
    v_buffer: mx.array,
    length: mx.array,
    mask: mx.array | None,
) -> None:
    if q.ndim != 4 or q.dtype not in _FLOATS:
        raise ValueError(
            f"q must be (B, H, L, D) in a floating-point type, not {q.dtype} {q.shape}"
        )
    batch, heads, queries, width = q.shape
    if v_buffer.ndim != 4 or v_buffer.shape[1] == 0 or heads % v_buffer.shape[1]:
        raise ValueError(
            f"v_buffer must be (B, Hkv, S, Dv) for {heads} heads, not {v_buffer.shape}"
        )
    _, kv_heads, size, v_width = v_buffer.shape
    for name, array, shape in (
        ("k", k, (batch, kv_heads, queries, width)),
        ("v", v, (batch, kv_heads, queries, v_width)),
        ("k_buffer", k_buffer, (batch, kv_heads, size, width)),
        ("v_buffer", v_buffer, (batch, kv_heads, size, v_width)),
    ):
        if array.shape != shape or array.dtype != q.dtype:
            raise ValueError(f"{name} must be {q.dtype} {shape}, not {array.dtype} {array.shape}")
    if length.ndim or length.dtype != mx.int32:
        raise ValueError(f"length must be one int32, not {length.dtype} {length.shape}")
    if mask is not None:
        full = (batch, heads, queries, size + queries)
        fits = zip(mask.shape[::-1], full[::-1], strict=False)
        if mask.dtype != mx.bool_ or mask.ndim > 4 or not all(n in (1, m) for n, m in fits):
            raise ValueError(f"mask must be bool {full}, not {mask.dtype} {mask.shape}")
