"""Launches the rotary embedding of queries and keys."""

from __future__ import annotations

from functools import cache
from struct import pack, unpack

import mlx.core as mx

from ...runtime.kernel import Kernel
from ...runtime.program import CONSTANT_BELOW

_INPUTS = ("q", "k", "offset", "freqs", "sizes", "numbers")
_AT, _EACH = (
    Kernel(
        name,
        "rotary/rotary.metal",
        inputs=_INPUTS,
        outputs=("q_out", "k_out"),
        template=("T", "traditional", "listed"),
    )
    for name in ("rotary_at", "rotary_each")
)


def rotated(
    q: mx.array,
    k: mx.array,
    offset: mx.array,
    *,
    dims: int,
    traditional: bool,
    base: float | None,
    scale: float,
    freqs: mx.array | None,
    share: int,
) -> list[mx.array]:
    """Queries (B, H, L, D) and keys (B, Hkv, L, D), turned by their positions.

    Args:
        q: (B, L, H, D).
        k: (B, L, Hkv, D) in the dtype of ``q``.
        offset: the position of the first row, int32: 0-d, or (B,).
        dims: leading elements of a head that are turned; even.
        traditional: turn neighbours, not elements half of ``dims`` apart.
        base: of the geometric series of frequencies; None with ``freqs``.
        scale: of positions.
        freqs: (dims / 2,) float32, the reciprocals of the frequencies, or None.
        share: heads that one thread turns.
    """
    (batch, length, heads, width), kv_heads = q.shape, k.shape[2]
    kernel = _EACH if offset.ndim else _AT
    return kernel(
        [
            q,
            k,
            offset,
            _none() if freqs is None else freqs,
            _sizes(length, heads, kv_heads, width, dims, share),
            _numbers(dims, base, scale),
        ],
        template={"T": q.dtype, "traditional": traditional, "listed": freqs is not None},
        grid=(dims // 2, -(-(heads + kv_heads) // share), batch * length),
        threadgroup=(min(dims // 2, 64), 1, 1),
        output_shapes=[(batch, heads, length, width), (batch, kv_heads, length, width)],
    )


@cache
def _none() -> mx.array:
    return mx.zeros((8,))


@cache
def _sizes(*sizes: int) -> mx.array:
    return mx.array(sizes, mx.int32)


@cache
def _numbers(dims: int, base: float | None, scale: float) -> mx.array:
    numbers = [*two_floats(scale), *rates(dims, base, scale)]
    return mx.array(numbers + [0.0] * (CONSTANT_BELOW - len(numbers)), mx.float32)


def rates(dims: int, base: float | None, scale: float) -> list[float]:
    """What each pair turns by from one position to the next, as the sum of two floats.

    Args:
        dims: elements that are turned.
        base: of the geometric series of frequencies; None gives nothing.
        scale: of positions.
    """
    if base is None:
        return []
    return [part for i in range(0, dims, 2) for part in two_floats(scale * base ** (-i / dims))]


def two_floats(number: float) -> tuple[float, float]:
    """The float nearest to a number, and what it lacks."""
    (nearest,) = unpack("f", pack("f", number))
    return nearest, number - nearest
