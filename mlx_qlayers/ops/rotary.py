"""Rotary embedding of queries and keys at once: checks, the choice of a path, and the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..dispatch import Operation, Plan, choose, dispatch, either
from ..dispatch.choice import unmeasured
from ..measurements.thresholds import Measured, threshold
from ..metal.rotary import launch as kernels
from ..options import Rotation
from ..reference import rotary as reference
from ..runtime.devices import device_of
from .attention_checks import check_rotation
from .signature import Signature

# Heads that a thread of a GPU rotates by one sine and cosine.
_SHARE = 4


def rotary_embedding(
    q: mx.array,
    k: mx.array,
    offset: mx.array,
    *,
    dims: int,
    traditional: bool = False,
    base: float | None = 10000.0,
    scale: float = 1.0,
    freqs: mx.array | None = None,
) -> list[mx.array]:
    """Rotary embedding of queries and keys, and their heads in front of the sequence.

    Args:
        q: (B, L, H, D) in float32, float16 or bfloat16.
        k: (B, L, Hkv, D) in the dtype of ``q``.
        offset: the position of the first row, int32: 0-d, or (B,).
        dims: leading elements of a head that are rotated; even, at most D.
        traditional: rotate neighbours, not elements half of ``dims`` apart.
        base: pair i rotates by ``base ** (-2 i / dims)`` a position; None with ``freqs``.
        scale: of positions.
        freqs: (dims / 2,) the reciprocals of what pairs rotate by, or None. Like ``offset`` it has
            no gradient: MLX's operator has none on a GPU.

    Returns:
        (B, H, L, D) and (B, Hkv, L, D).

    Raises:
        ValueError: a shape, a dtype or a number does not fit; it is named.

    Example:
        >>> q, k = mx.ones((1, 3, 4, 32)), mx.ones((1, 3, 2, 32))
        >>> [y.shape for y in rotary_embedding(q, k, mx.array(7), dims=32)]
        [(1, 4, 3, 32), (1, 2, 3, 32)]

    Source: ``mx.fast.rope``; arXiv 2104.09864.
    """
    return dispatch(ROTARY, (q, k, offset, freqs), (dims, traditional, base, scale))


def _plan(arrays: Sequence[Any], *options: Any) -> Plan:
    (q, k, offset, freqs), rotation = arrays, Rotation(*options)
    check_rotation(rotation, freqs, _TAKES.check(q, k, offset)["D"])
    empty = "there is nothing to rotate" if 0 in (*q.shape, *k.shape, rotation.dims) else None
    took = threshold("rotary_stock")
    as_fast = took and Measured(f"two launches of the stock operator are as fast: {took}")
    choice = choose(
        "rotary_embedding",
        not empty,
        reason=empty or unmeasured() or as_fast,
        host_gain=threshold("rotary_gain", device="host"),
    )
    composed = reference.rotary_embedding(rotation)
    share = _SHARE if device_of(choice.path).gpu else q.shape[2] + k.shape[2]
    bind = partial(kernels.rotary_embedding, q, k, offset, rotation, share)
    return either(choice, composed, arrays, bind)


def _sample(arrays: list[Any], *options: Any) -> list[Any]:
    q, k, offset, freqs = arrays
    return [q, k, offset + 5, None if freqs is None else 1 + mx.abs(freqs)]


_TAKES = Signature("""
    q: float (B, L, H, D)
    k: q (B, L, Hkv, D)
    offset: integer () or (B,)
""")
ROTARY = Operation("rotary_embedding", _plan, compiled=True, sample=_sample)
