"""What a compiled graph of a step takes of a model's caches, and what they hold after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..decode.cache_tail import (
    Buffer,
    Held,
    Tail,
    arrays_of,
    grown,
    kind_of,
    layout,
    layout_of,
    more_rows,
    positions,
    positions_of,
    rows_of,
    tail_of,
    watch,
    with_tickets,
)
from ..decode.ring_tail import RingTail, ring_positions
from .step_kinds import Nested, OfCaches, Rows, States, Static

# What a stand-in keeps of the cache that it stands for: what no token changes.
_SETTINGS = ("max_size", "keep", "chunk_size", "group_size", "bits")
# Where the next token is written, the last row that counts then, and its position.
Position = tuple[int, int, int]


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches, those in lists of caches too."""
    from mlx_lm.models.cache import CacheList

    for each in caches:
        if type(each) is CacheList:
            yield from leaves(each.caches)
        elif each is not None:
            yield each


def reason_against(own: Sequence[Any]) -> str | None:
    """Why such caches cannot be in a graph, if so."""
    from mlx_lm.models.cache import ArraysCache

    strange = {kind_of(each) for each in own} - {ArraysCache, *_kinds()}
    return "".join(f"a cache is a {kind.__name__}" for kind in list(strange)[:1]) or None


def settings_of(c: Any) -> tuple[Any, ...]:
    """The kind of a cache, and what of it no token changes."""
    return kind_of(c), *map(vars(c).get, _SETTINGS)


@cache
def _kinds() -> dict[type, Callable[[Any], Position]]:
    from mlx_lm.models import cache as kinds

    return {
        kinds.KVCache: _plain,
        kinds.QuantizedKVCache: _plain,
        kinds.ChunkedKVCache: _chunked,
        kinds.RotatingKVCache: _ring,
        kinds.BatchKVCache: _batch,
        kinds.BatchRotatingKVCache: _batch_ring,
    }


def _plain(c: Any) -> Position:
    if c.offset == rows_of(c.keys):
        _grow(c, more_rows(c))
    return c.offset, c.offset, c.offset


def _chunked(c: Any) -> Position:
    c.maybe_trim_front()
    at = c.offset - c.start_position
    if at == c.keys.shape[2]:
        _grow(c, more_rows(c))
    return at, at, c.offset


def _batch(c: Any) -> Position:
    if c._idx == c.keys.shape[2]:
        _grow(c, more_rows(c))
    return c._idx, c._idx, 0


def _ring(c: Any) -> Position:
    return _in_ring(c, c.offset)


def _batch_ring(c: Any) -> Position:
    if c._lengths is not None:
        raise OfCaches("a cache is not finalized")
    return _in_ring(c, c._offset)


def _in_ring(c: Any, offset: int) -> Position:
    """As its ``update_and_fetch`` makes room for a token."""
    if offset >= c.keys.shape[2] and c.keys.shape[2] < c.max_size:
        _grow(c, min(c.step, c.max_size - offset))
        c._idx = offset
    if (extra := c.keys.shape[2] - c.max_size) > 0:
        c.keys, c.values = c._trim(extra, c.keys), c._trim(extra, c.values)
        c._idx = c.max_size
        if hasattr(c, "left_padding"):
            c.left_padding = c.left_padding - extra
    if c._idx == c.max_size:
        c._idx = getattr(c, "keep", 0)
        if hasattr(c, "rotated"):
            c.rotated = True
    return c._idx, offset, offset


def _grow(c: Any, rows: int) -> None:
    for name in ("keys", "values"):
        setattr(c, name, grown(getattr(c, name), rows))


class Group(NamedTuple):
    """Caches at the same positions.

    Attributes:
        at: where they are: a position; with a tail, where that starts, how many rows it holds, and
            how many sequences there are.
        later: the same after the token.
        make: makes the array of it that a graph takes.
    """

    at: tuple[Any, ...]
    later: tuple[Any, ...]
    make: Callable[[], mx.array]

    def after(self) -> Group:
        """The same caches a token later, where they have a tail."""
        kind, start, held, batch = self.later
        return self._replace(at=self.later, later=(kind, start, held + 1, batch))


class Inputs(NamedTuple):
    """Caches as a graph takes them.

    Attributes:
        static: what it is made for.
        groups: of the caches of keys and values.
        arrays: of all caches.
        tail: of those that have one.
    """

    static: tuple[Static, ...]
    groups: list[Group]
    arrays: list[Buffer]
    tail: Tail | None = None


def taken(
    caches: Sequence[Any],
    tailed: tuple[int, ...] = (),
    last: Tail | None = None,
    offsets: mx.array | None = None,
    rings: dict[int, RingTail] | None = None,
) -> Inputs:
    """Make room for a token, and take the caches' arrays.

    Args:
        caches: those of a model.
        tailed: which of them have a tail: of one kind, and with as many keys.
        last: their tail after the last step.
        offsets: the positions of a batch in these caches.
        rings: tails of others, which are full rings.
    """
    return _Taking([*leaves(caches)], tailed, last, offsets, rings or {}).all(caches)


class _Taking:
    """What of some caches was taken so far.

    Nobody may hold their arrays longer than a call: MLX writes a token into those that nobody else
    has, and copies others. A function that calls itself would.
    """

    def __init__(
        self,
        own: list[Any],
        tailed: tuple[int, ...],
        last: Tail | None,
        offsets: mx.array | None,
        rings: dict[int, RingTail],
    ) -> None:
        self.rings = rings
        self.keys = dict[Any, int]()
        self.groups, self.arrays = list[Group](), list[Buffer]()
        self.numbers = {number: i for i, number in enumerate(tailed)}
        self.count, self.tail = iter(range(len(own))), None
        if tailed:
            some = [own[i] for i in tailed]
            length = _length(some[0])
            self.tail = tail = with_tickets(tail_of(last, some, length))
            batch = len(arrays_of(tail.buffers[0])[0])
            self.together = _tail_group(tail.start, length, batch, offsets)

    def all(self, caches: Sequence[Any]) -> Inputs:
        """All of them."""
        return Inputs(tuple(map(self.of, caches)), self.groups, self.arrays, self.tail)

    def of(self, c: Any) -> Static:
        """What a graph is made for of a cache, whose arrays are taken."""
        if c is None:
            return None
        attributes = vars(c)
        if "caches" in attributes:
            return Nested(tuple(map(self.of, c.caches)))
        kind, number = kind_of(c), next(self.count)
        if "cache" in attributes:
            states = [*c.cache, c.left_padding, c.lengths]
            self.arrays.extend(a for a in states if a is not None)
            return States(kind, tuple(a if a is None else (a.shape, a.dtype) for a in states))
        if c.empty():  # one that no layer uses
            return States(kind, ())
        settings = tuple((name, attributes[name]) for name in _SETTINGS if name in attributes)
        is_batch, full, rows, joined = "left_padding" in attributes, False, 0, False
        is_ring = number in self.rings
        if self.tail is not None and number in self.numbers:
            at = self.numbers[number]
            buffers, tails = self.tail.buffers[2 * at : 2 * at + 2], self.tail.of_cache(at)
            self.arrays.extend((*buffers, *tails, self.tail.tickets[at]))
            self.arrays.extend([c.left_padding] if is_batch else [])
            rows, group, joined = rows_of(tails[0]), self.together, self.tail.joined
        elif (ring := self.rings.get(number)) is not None:
            buffers, rows = [*ring.buffers], rows_of(ring.tails[0])
            self.arrays.extend((*buffers, *ring.tails, ring.tickets))
            group, full = _ring_group(ring, c), ring.offset >= attributes["max_size"]
        else:
            group = _group(_kinds()[kind](c))
            buffers = [c.keys, c.values]
            self.arrays.extend(buffers)
            self.arrays.extend([c.offset, c.left_padding] if is_batch else [])
            full = "max_size" in attributes and not is_batch
            full = full and group.at[1] >= rows_of(buffers[0]) - 1
        key = group.at, rows_of(buffers[0]), full
        if key not in self.keys:
            self.keys[key] = len(self.groups)
            self.groups.append(group)
        whole = layout_of(buffers, attributes)
        rotated, shapes = attributes.get("rotated", False), (whole.keys, whole.values)
        return Rows(
            *(kind, shapes, whole.dtype, self.keys[key], full, rotated, settings, rows),
            *(is_ring, joined),
        )


def _length(c: Any) -> int:
    """How many keys a cache holds whose keys lie in the order of their tokens."""
    return vars(c)["_idx" if "_idx" in vars(c) else "offset"]


def _group(at: Position) -> Group:
    later = tuple(each + 1 for each in at)
    return Group(at, later, lambda: mx.array(at, mx.int32))


def _tail_group(start: int, length: int, batch: int, offsets: mx.array | None) -> Group:
    held, later = length - start, ("tail", start, length - start + 1, batch)
    if offsets is None:
        make: Callable[[], mx.array] = partial(positions, start, held, batch)
    else:
        make = partial(positions_of, start, held, offsets)
    return Group(("tail", start, held, batch), later, make)


def _ring_group(ring: RingTail, c: Any) -> Group:
    own, batch = vars(c), len(ring.buffers[0])
    at = "ring", ring.first, ring.offset, own["offset"], own["max_size"], batch
    make = partial(ring_positions, ring, own["max_size"], own["offset"], batch)
    return Group(at, (*at[:3], own["offset"] + 1, *at[4:]), make)


def with_tail(own: Sequence[Any], by_step: frozenset[int]) -> tuple[int, ...]:
    """Which of some caches can have a tail together: of one kind, and with as many keys."""
    tailed = tuple(i for i in sorted(by_step) if not own[i].empty())
    alike = {(kind_of(own[i]), _length(own[i]), _rows_and_packing(own[i])) for i in tailed}
    return tailed if len(alike) == 1 else ()


def _rows_and_packing(c: Any) -> tuple[int, int, int]:
    whole = layout(c)
    return whole.keys[2], whole.group_size, whole.bits


def put(
    own: Sequence[Any],
    outputs: Sequence[Sequence[Any]],
    tailed: Sequence[int],
    held: Sequence[Held],
) -> None:
    """Let caches hold what a graph gave, so that no signal sees some of them changed.

    Args:
        own: the caches.
        outputs: what changed of each.
        tailed: which of them have a tail.
        held: what these have of it in turn.
    """
    items: list[dict[str, Any]] = []
    outputs = [*outputs]
    for i, number in enumerate(tailed):
        outputs[number] = [*held[2 * i : 2 * i + 2], *outputs[number][2:]]
    for each, new in zip(own, outputs, strict=True):
        if not isinstance(getattr(each, "cache", None), list):
            items.append(_counted(each, new))
            continue
        old = [*each.cache, each.left_padding, each.lengths]
        *states, left, lengths = [b if a is None else a for a, b in zip(new, old, strict=True)]
        items.append({"cache": states, "left_padding": left, "lengths": lengths})
    watch([own[i] for i in tailed])
    deque(map(dict.update, map(vars, own), items), maxlen=0)


def _counted(c: Any, new: Sequence[Any]) -> dict[str, Any]:
    """The attributes of a cache of keys and values one token later."""
    if not new or new[0] is None:
        return {}
    keys, values, *of_batch = new
    counts: dict[str, Any] = {"keys": keys, "values": values}
    if hasattr(c, "_idx"):
        begins = not of_batch and hasattr(c, "keep") and c._idx == c.max_size
        counts["_idx"] = (c.keep if begins else c._idx) + 1
    if not of_batch:
        return counts | {"offset": c.offset + 1}
    if hasattr(c, "_offset"):
        counts["_offset"] = c._offset + 1
    padding = of_batch[1] if of_batch[1] is not None else c.left_padding
    return counts | {"offset": of_batch[0], "left_padding": padding}
