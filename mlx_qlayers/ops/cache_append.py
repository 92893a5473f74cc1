"""New keys and values in the buffers of a cache: checks, the choice of a path, and the gradient."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from ..metal import cache_append as kernels
from ..runtime.backend import choose
from .differentiable import with_gradient_of


def cache_append(
    k_buffer: mx.array, v_buffer: mx.array, k: mx.array, v: mx.array, length: mx.array
) -> list[mx.array]:
    """The buffers of a cache with new keys and values in them, in one launch.

    Args:
        k_buffer: (B, Hkv, S, D).
        v_buffer: (B, Hkv, S, Dv) in the dtype of ``k_buffer``.
        k: (B, Hkv, L, D) in the dtype of ``k_buffer``.
        v: (B, Hkv, L, Dv).
        length: int32, 0-d, from 0 to S - L: where the new rows begin.

    Returns:
        Two arrays of the shapes of the buffers.

    Raises:
        ValueError: a shape or a dtype does not fit; it is named.

    Example:
        >>> buffer, row = mx.zeros((1, 2, 256, 32)), mx.ones((1, 2, 1, 32))
        >>> [a.shape for a in cache_append(buffer, buffer, row, row, mx.array(7))]
        [(1, 2, 256, 32), (1, 2, 256, 32)]

    Source: ``buffer[..., length : length + L, :] = new`` of mlx-lm's ``KVCache``.
    """
    _check(k_buffer, v_buffer, k, v, length)
    whole = all(a.shape[3] * a.dtype.size % 16 == 0 for a in (k, v))
    path = choose(
        "cache_append",
        ("metal", "cuda", "host") if whole and k.size and v.size else (),
        arrays=(k_buffer, v_buffer, k, v, length),
    )
    found: list[mx.array] = _function(path)(k_buffer, v_buffer, k, v, length)
    return found


@cache
def _function(path: str) -> Any:
    return _composed if path == "ops" else with_gradient_of(_composed, kernels.appended)


def _composed(
    k_buffer: mx.array, v_buffer: mx.array, k: mx.array, v: mx.array, length: mx.array
) -> list[mx.array]:
    start, pairs = length.reshape(1), ((k_buffer, k), (v_buffer, v))
    return [mx.slice_update(buffer, rows, start, axes=(2,)) for buffer, rows in pairs]


def _check(
    k_buffer: mx.array, v_buffer: mx.array, k: mx.array, v: mx.array, length: mx.array
) -> None:
    if k_buffer.ndim != 4:
        raise ValueError(f"k_buffer must be (B, Hkv, S, D), not {k_buffer.shape}")
    batch, heads, size, _ = k_buffer.shape
    for name, array, buffer in (("k", k, k_buffer), ("v", v, v_buffer)):
        rows = k.shape[2] if k.ndim == 4 else 0
        shape = (batch, heads, rows, buffer.shape[-1])
        if array.shape != shape or array.dtype != k_buffer.dtype or rows > size:
            raise ValueError(
                f"{name} must be {k_buffer.dtype} {shape}, not {array.dtype} {array.shape}"
            )
    if v_buffer.ndim != 4 or v_buffer.shape[:3] != (batch, heads, size):
        raise ValueError(f"v_buffer must be like k_buffer {k_buffer.shape}, not {v_buffer.shape}")
    if length.ndim or length.dtype != mx.int32:
        raise ValueError(f"length must be one int32, not {length.dtype} {length.shape}")
