"""Tokens that came since a rotating cache was written, beside it: see :mod:`.cache_tail`.

A ring is only read, as long as its tail and its window have room for more tokens; what they
overwrite is hidden by a mask. Then ring and tail become a new ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..ops.attention_step import MIN_POSITIONS, MIN_TICKETS
from .cache_tail import kind_of, rows_of, tail_rows, watch, watched_kind


class RingTail(NamedTuple):
    """The keys and values of a rotating cache.

    Attributes:
        buffers: (B, Hkv, S, D) or Dv, of which the first ``offset`` rows count, or all.
        tails: (B, Hkv, R, D) or Dv.
        first: the row of the buffers that the first row of the tail overwrites.
        offset: how many tokens came before the tail.
        shown: the buffers with the tails in them, as the cache has them.
        tickets: what :func:`attention_step` takes for one launch.
    """

    buffers: Sequence[mx.array]
    tails: Sequence[mx.array]
    first: int
    offset: int
    shown: Sequence[mx.array]
    tickets: mx.array


def ring_tail(last: RingTail | None, c: Any) -> RingTail | None:
    """The tail of a cache with room for a token: the last, or a new one; None if it is tiny."""
    own = vars(c)
    keep, size, offset = own["keep"], own["max_size"], own["offset"]
    buffers = _held_by(c)
    if last is not None and type(c) is watched_kind(kind_of(c)):
        held, room = offset - last.offset, last.tails[0].shape[2]
        if last.offset < size:  # it does not go round
            room = min(room, rows_of(last.buffers[0]) - last.offset)
        alike = all(a is b for a, b in zip(buffers, last.shown, strict=True))
        if alike and 0 <= held < room and own["_idx"] == _row(last.first + held, keep, size):
            return last
    # What it keeps is never overwritten, so a tail begins behind it.
    if size - keep < 2 or rows_of(buffers[0]) > size or own["_idx"] < keep:
        return None
    batch, heads, there, _ = buffers[0].shape
    rows = min(tail_rows((batch, heads), size), size - keep)
    if there < size and (offset == there or there < rows):  # or it was trimmed behind a prompt
        more = min(c.step, size - there)
        buffers = [mx.pad(b, [(0, 0), (0, 0), (0, more), (0, 0)]) for b in buffers]
    tails = [mx.zeros((*b.shape[:2], rows, b.shape[3]), b.dtype) for b in buffers]
    tickets = mx.zeros(max(MIN_TICKETS, 8 * batch * heads), mx.int32)
    first = keep if own["_idx"] >= size else own["_idx"]
    return RingTail(buffers, tails, first, offset, buffers, tickets)


def _held_by(c: Any) -> list[mx.array]:
    return [vars(c)["keys"], vars(c)["values"]]


def _row(row: int, keep: int, size: int) -> int:
    """Where a cache says that its next token goes: ``size`` if it has to begin anew."""
    return row if row <= size else row - (size - keep)


def ring_positions(tail: RingTail, size: int, offset: int, batch: int) -> mx.array:
    """Rows that count, tokens in the tail, positions of the next, and the row it overwrites."""
    held = offset - tail.offset
    return mx.array(
        [min(tail.offset, size), held, *[offset] * max(MIN_POSITIONS, batch), tail.first + held]
    )


def kept(tail: RingTail, tails: Sequence[mx.array], c: Any) -> RingTail:
    """The tail behind a token, which the cache shows now."""
    watch([c])
    return tail._replace(tails=tails, shown=_held_by(c))
