"""A step of decoding whose graph does not depend on how many keys a cache holds, for traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..dispatch import KERNELS, Operation, Plan, choose, dispatch, gradient_of
from ..dispatch.measurements import configure
from ..metal.attention import step as kernels
from ..options import Rotation
from ..reference import attention_step as reference
from ..runtime.backend import backend
from ..runtime.limits import has_few_registers
from ..runtime.spec import Spec
from .attention_checks import check_rotation, check_scale
from .checks import FLOATS

__all__ = ["MIN_POSITIONS", "MIN_TICKETS", "Rotation", "attention_step", "why_not"]

_MAX_WIDTH = 256
# Where a threadgroup sees what others wrote.
_ORDERED = ("cuda",)
# Elements of `positions` and `tickets` at least: MLX passes fewer in another address space.
MIN_POSITIONS = MIN_TICKETS = 8


def attention_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    k_tail: mx.array,
    v_tail: mx.array,
    positions: mx.array,
    *,
    scale: float,
    rotation: Rotation,
    freqs: mx.array | None = None,
    mask: mx.array | None = None,
    tickets: mx.array | None = None,
) -> list[mx.array]:
    """Rotary embedding and attention to a cache and its tail, for one token a sequence.

    The cache is only read: what is written for each token is the tail, which holds the keys and
    values that came since the cache was written. What depends on their number is an array, so that
    ``mx.compile`` traces a step of decoding once for many, until the cache has to grow.

    Args:
        q: (B, 1, H * D) in float32, float16 or bfloat16: the product, before its rotation.
        k: (B, 1, Hkv * D) in the dtype of ``q``.
        v: (B, 1, Hkv * Dv).
        k_cache: (B, Hkv, S, D).
        v_cache: (B, Hkv, S, Dv).
        k_tail: (B, Hkv, R, D).
        v_tail: (B, Hkv, R, Dv).
        positions: (8 or more,) int32: how many keys of the cache count, from 0 to S; how many of
            the tail, from 0 to R - 1; the position of each sequence's token; then anything.
        scale: what the products of queries and keys are multiplied by.
        rotation: how queries and keys are turned; ``dims`` 0 turns nothing.
        freqs: (dims / 2,) the reciprocals of what elements turn by, if ``rotation.base`` is None.
        mask: booleans, true where a token sees a key; (B or 1, H or 1, 1, S or more), of which
            column j is that of key j: those of the cache that count, those of the tail, and the
            token's own. None hides nothing.
        tickets: (max(8, B * H),) int32 zeros, with which a GPU needs one launch where it needs two
            without. They are zeros again behind it: give them to no call that may run at once.

    Returns:
        (B, 1, H * Dv), the heads side by side; and both tails with the token's key and value as
        row ``positions[1]``, and zeros behind it.

    Raises:
        ValueError: a shape, a dtype or a number does not fit; it is named.

    Example:
        >>> x, cache, tail = mx.ones((1, 1, 64)), mx.ones((1, 2, 256, 32)), mx.ones((1, 2, 16, 32))
        >>> arrays = x, x, x, cache, cache, tail, tail, mx.array([256, 7, 263, 0, 0, 0, 0, 0])
        >>> [y.shape for y in attention_step(*arrays, scale=1.0, rotation=Rotation(32))]
        [(1, 1, 64), (1, 2, 16, 32), (1, 2, 16, 32)]

    Source: :func:`mlx_qlayers.ops.rotary.rotary_embedding` and :func:`mlx_qlayers.attention`.
    """
    arrays = q, k, v, k_cache, v_cache, k_tail, v_tail, positions, freqs, mask, tickets
    outputs: list[mx.array] = dispatch(_STEP, arrays, (scale, rotation))
    return outputs


def _plan(arrays: Sequence[Any], scale: float, rotation: Rotation) -> Plan:
    _check(arrays)
    q, _, _, k_cache, v_cache, _, _, _, freqs, *_ = arrays
    check_scale(scale)
    check_rotation(rotation, freqs, k_cache.shape[3])
    v_width, share = v_cache.shape[3], q.shape[2] // (k_cache.shape[1] * k_cache.shape[3])
    covered = _covers(q.dtype, share, k_cache.shape, v_width)
    choice = choose("attention_step", KERNELS if covered else ())
    composed = reference.attention_step(arrays, scale, rotation)
    if choice.path == "ops":
        return Plan(choice, composed)
    question = kernels.question(q, k_cache, v_width)
    config = configure("attention_step", choice.path, *question)
    known = arrays if choice.path in _ORDERED else arrays[:10]
    launch = kernels.attention_step(known, scale, rotation, config)
    return Plan(choice, launch, gradient_of(composed, arrays), composed)


_STEP = Operation("attention_step", _plan)


def why_not(dtype: mx.Dtype, share: int, k_shape: tuple[int, ...], v_width: int) -> str | None:
    """Why the kernel should not be used on this machine for such a cache, if so.

    Args:
        dtype: of the cache.
        share: queries of a key head.
        k_shape: (B, Hkv, S, D).
        v_width: Dv.
    """
    if not _covers(dtype, share, k_shape, v_width):
        return "no kernel for these shapes"
    choice = choose("attention_step")
    return choice.reason if choice.path == "ops" else None


def _covers(dtype: mx.Dtype, share: int, k_shape: tuple[int, ...], v_width: int) -> bool:
    width = k_shape[3]
    if width % 8 or v_width % 8 or max(width, v_width) > _MAX_WIDTH or not min(*k_shape, v_width):
        return False
    if backend() != "metal" or not has_few_registers():
        return True
    return kernels.fits_few_registers(dtype, share, width, v_width)


def _check(arrays: Sequence[Any]) -> None:
    q, k, v, k_cache, v_cache, k_tail, v_tail, positions, _, mask, tickets = arrays
    if q.ndim != 3 or q.shape[1] != 1 or q.dtype not in FLOATS:
        what = f"{q.dtype} {q.shape}"
        raise ValueError(f"q must be (B, 1, H * D) in a floating-point type, not {what}")
    if k_cache.ndim != 4 or k_cache.shape[0] != q.shape[0]:
        raise ValueError(f"k_cache must be ({q.shape[0]}, Hkv, S, D), not {k_cache.shape}")
    if v_cache.ndim != 4 or not v_cache.shape[3]:
        raise ValueError(f"v_cache must be (B, Hkv, S, Dv), not {v_cache.shape}")
    if k_tail.ndim != 4 or not k_tail.shape[2]:
        raise ValueError(f"k_tail must be (B, Hkv, R, D), not {k_tail.shape}")
    batch, kv_heads, size, width = k_cache.shape
    if 0 in (kv_heads, width, q.shape[2]) or q.shape[2] % (kv_heads * width):
        raise ValueError(f"q must have a multiple of {kv_heads} heads of {width}, not {q.shape}")
    heads, v_width, rows = q.shape[2] // width, v_cache.shape[-1], k_tail.shape[2]
    for name, array, shape in (
        ("v_cache", v_cache, (batch, kv_heads, size, v_width)),
        ("k", k, (batch, 1, kv_heads * width)),
        ("v", v, (batch, 1, kv_heads * v_width)),
        ("k_cache", k_cache, k_cache.shape),
        ("k_tail", k_tail, (batch, kv_heads, rows, width)),
        ("v_tail", v_tail, (batch, kv_heads, rows, v_width)),
    ):
        if array.shape != shape or array.dtype != q.dtype:
            raise ValueError(f"{name} must be {q.dtype} {shape}, not {array.dtype} {array.shape}")
    least, kind = max(MIN_POSITIONS, 2 + batch), positions.dtype
    if positions.ndim != 1 or positions.size < least or kind != mx.int32:
        what = f"{kind} {positions.shape}"
        raise ValueError(f"positions must be int32 and {least} or more, not {what}")
    if tickets is not None and (tickets.dtype != mx.int32 or tickets.ndim != 1):
        raise ValueError(f"tickets must be int32 and have one axis, not {Spec.of(tickets)}")
    if mask is None:
        return
    broadcast = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if mask.dtype != mx.bool_ or not broadcast or mask.shape[2] != 1 or mask.shape[3] < size:
        wanted, what = (batch, heads, 1, size), f"{mask.dtype} {mask.shape}"
        raise ValueError(f"mask must be bool {wanted}, not {what}")
