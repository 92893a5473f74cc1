"""Keys and values that came since a cache's buffers were written, beside them.

Those of a quantized cache are packed, in rows of :func:`~.ops.attention_step.packed_rows`.

A kernel cannot write into the buffers of a cache, and to copy them for each token takes longer the
more they hold. So a token's keys and values go to a small tail, beside which the buffers are only
read, and as soon as it is full both become new buffers. Whoever asks a cache for its keys or values
meanwhile gets arrays that MLX computes out of both as soon as somebody evaluates them. They may be
written into, as ``update_and_fetch`` does: a cache of which they were taken begins a new tail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain, cycle, repeat
from operator import is_
from typing import Any, NamedTuple

import mlx.core as mx

from ..ops.attention_step import MIN_POSITIONS, MIN_TICKETS, packed_rows, parts_of_rows
from ..runtime.arena import are_alike, halves, joined
from ..runtime.devices import device_of
from .tails import arrays_of as arrays_of
from .tails import one_token as one_token
from .tails import tail_rows as tail_rows

# Rows of a tail at most, as many as a cache grows by; and of all sequences and key heads together.
_ROWS = 256
_ALL_ROWS = 8 * _ROWS
# Rows that a long cache grows by at most.
_MOST_ROWS = 2048

Buffer = mx.array | tuple[mx.array, ...]
# What a cache has in the place of keys or values: a buffer, its tail, which half if it is one of
# an array, and the rows ahead of it.
Held = tuple[Any, ...]


class Tail(NamedTuple):
    """The keys and values of all layers, in turn, of a cache that grows by a token at a time.

    Attributes:
        buffers: (B, Hkv, S, D) or Dv, of which the first ``start`` rows count; or packed, scales
            and biases.
        tails: (B, Hkv, R, D) or Dv: the rows behind them; or where launches share arrays
            (2 B, Hkv, R, D), those of both keys and values.
        start: it is at most S - R.
        held: what the caches have of it in turn, once they have.
        tickets: of each cache what :func:`attention_step` takes for one launch; none if not asked.
    """

    buffers: list[Buffer]
    tails: list[mx.array]
    start: int
    held: Sequence[Held] = ()
    tickets: Sequence[mx.array] = ()

    @property
    def joined(self) -> bool:
        """Whether keys and values are the halves of one array."""
        return len(self.tails) < len(self.buffers)

    def of_cache(self, number: int) -> Sequence[mx.array]:
        """The arrays of a cache: one or two."""
        count = 1 if self.joined else 2
        return self.tails[count * number : count * number + count]


@lru_cache(maxsize=64)
def positions(before: int, held: int, batch: int) -> mx.array:
    """What :func:`attention_step` takes where all sequences have the same length."""
    return mx.array([before, held, *[before + held] * max(MIN_POSITIONS, batch)])


def positions_of(before: int, held: int, offsets: mx.array) -> mx.array:
    """What :func:`attention_step` takes where sequences have positions of their own."""
    return mx.concatenate([positions(before, held, 0)[:2], offsets, positions(0, 0, 0)])


def tail_of(last: Tail | None, caches: Sequence[Any], length: int) -> Tail:
    """The tail of caches that hold so many keys, with room for a token: the last, or a new one."""
    last = last if last is not None and _untouched(last, caches) else None
    if last and last.start <= length < last.start + last.tails[0].shape[2]:
        return last
    rows, more = layout(caches[0]).keys[2], more_rows(caches[0])
    if last and length == rows == last.start + last.tails[0].shape[2]:
        # They grow as the caches do it themselves, here by one copy.
        tails = [y for x in last.tails for y in halves(x)] if last.joined else last.tails
        pairs = zip(last.buffers, tails, strict=True)
        buffers = [grown(buffer, more, tail, last.start) for buffer, tail in pairs]
    else:
        buffers = [each for c in caches for each in (c.keys, c.values)]
        buffers = [grown(buffer, more) for buffer in buffers] if length == rows else buffers
    rows = rows_of(buffers[0])
    size = tail_rows(layout(caches[0]).keys[:2], rows)
    start = min(length, rows - size)
    tails = [_cut(buffer, start, size) for buffer in buffers]
    both = [*zip(tails[::2], tails[1::2], strict=True)]
    if device_of().launches_views and all(are_alike(*each) for each in both):
        tails = [joined(*each) for each in both]
    return Tail(buffers, tails, start)


def more_rows(cache: Any) -> int:
    """How many rows its buffers grow by: as mlx-lm's, or a quarter. Each size takes a graph."""
    step: int = cache.step
    return max(step, min(layout(cache).keys[2] // 4, _MOST_ROWS) // step * step)


def with_tickets(tail: Tail) -> Tail:
    """The tail with tickets, which no two caches share: their attention may run at once."""
    if tail.tickets:
        return tail
    keys = [arrays_of(buffer)[0] for buffer in tail.buffers[::2]]
    # Attention takes at most one of a key head and 8 of its queries.
    size = max(MIN_TICKETS, *(8 * len(k) * k.shape[1] for k in keys))
    return tail._replace(tickets=[*mx.split(mx.zeros(len(keys) * size, mx.int32), len(keys))])


class Layout(NamedTuple):
    """How a cache has its keys (B, Hkv, S, D) and values (B, Hkv, S, Dv).

    Attributes:
        dtype: of them, or of their scales.
        bits: of packed ones, else 0.
        keys, values: their shapes.
        group_size: of packed ones, else 0.
    """

    dtype: mx.Dtype
    bits: int
    keys: tuple[int, ...]
    values: tuple[int, ...]
    group_size: int = 0


def layout(cache: Any) -> Layout:
    """That of a cache of keys and values that is not empty."""
    return layout_of(_buffers(cache), vars(cache))


def layout_of(buffers: Sequence[Buffer], attributes: dict[str, Any]) -> Layout:
    """That of keys and values, packed as the attributes of their cache say."""
    keys, values = buffers
    if isinstance(keys, mx.array) and isinstance(values, mx.array):
        return Layout(keys.dtype, 0, keys.shape, values.shape)
    bits: int = attributes["bits"]
    of_k, of_v = ((*a[0].shape[:3], a[0].shape[3] * 32 // bits) for a in (keys, values))
    return Layout(keys[1].dtype, bits, of_k, of_v, attributes["group_size"])


def rows_of(buffer: Buffer) -> int:
    """S of a buffer."""
    return arrays_of(buffer)[0].shape[2]


def merged(buffer: Buffer, tail: mx.array, start: mx.array) -> Buffer:
    """A buffer with its tail in it."""
    if isinstance(buffer, mx.array):
        return mx.slice_update(buffer, tail, start, (2,))
    parts = parts_of_rows(tail, buffer)
    pairs = zip(buffer, parts, strict=True)
    return tuple(mx.slice_update(each, part, start, (2,)) for each, part in pairs)


def grown(buffer: Buffer, step: int, tail: mx.array | None = None, start: int = 0) -> Buffer:
    """A buffer with so many more rows; with a tail, that instead of what it has from ``start``."""
    arrays, tails = arrays_of(buffer), list[list[mx.array]]()
    if tail is not None:
        parts = (tail,) if len(arrays) == 1 else parts_of_rows(tail, arrays)
        arrays, tails = [array[:, :, :start] for array in arrays], [[part] for part in parts]
    new = []
    for array, behind in zip(arrays, tails or [[]] * len(arrays), strict=True):
        batch, heads, _, width = array.shape
        more = mx.zeros((batch, heads, step, width), array.dtype)
        new.append(mx.concatenate([array, *behind, more], axis=2))
    return new[0] if isinstance(buffer, mx.array) else tuple(new)


def _cut(buffer: Buffer, start: int, size: int) -> mx.array:
    """Rows of a buffer as a tail has them."""
    parts = [array[:, :, start : start + size] for array in arrays_of(buffer)]
    return parts[0] if isinstance(buffer, mx.array) else packed_rows(parts)


def _buffers(cache: Any) -> list[Buffer]:
    """Keys and values, without a tail."""
    own = vars(cache)
    return [each[0] if _is_held(each) else each for each in (own["keys"], own["values"])]


def _is_held(x: Any) -> bool:
    return isinstance(x, tuple) and isinstance(x[-1], int)


def following(tail: Tail, tails: list[mx.array]) -> Tail:
    """A tail with the next token in it."""
    held: Any = zip(tail.buffers, tails, repeat(tail.start))
    if tail.joined:
        twice = chain.from_iterable(zip(tails, tails, strict=True))
        held = zip(tail.buffers, twice, cycle((0, 1)), repeat(tail.start))
    return tail._replace(tails=tails, held=[*held])


def advance(caches: Sequence[Any], tail: Tail, counts: Sequence[dict[str, Any]]) -> None:
    """Let caches have a tail, and set their counts, so that no signal sees some of them changed."""
    pairs = zip(tail.held[::2], tail.held[1::2], counts, strict=True)
    new = [{"keys": keys, "values": values, **count} for keys, values, count in pairs]
    watch(caches)
    deque(map(dict.update, map(vars, caches), new), maxlen=0)


def watch(caches: Sequence[Any]) -> None:
    """Notice who takes keys or values of caches."""
    if caches:
        kind = watched_kind(kind_of(caches[0]))
        deque(map(setattr, caches, repeat("__class__"), repeat(kind)), maxlen=0)


def kind_of(cache: Any) -> type:
    """The class of mlx-lm's that a cache is of."""
    return vars(type(cache)).get("_kind", type(cache))


def given_by(tail: Tail, paddings: list[mx.array]) -> list[Any]:
    """What a graph takes of each cache: keys, values, their tails, tickets; of a batch padding."""
    in_twos: list[Sequence[Any]] = [tail.buffers, *([] if tail.joined else [tail.tails])]
    columns = [part[i::2] for part in in_twos for i in (0, 1)]
    columns += [tail.tails] if tail.joined else []
    columns += [tail.tickets, *([paddings] if paddings else [])]
    return [*chain(*zip(*columns, strict=True))]


def held_by(caches: Sequence[Any]) -> list[dict[str, Any]]:
    """What caches have, to see later whether they still do."""
    return [*map(dict, map(vars, caches))]


def as_left(caches: Sequence[Any], left: list[dict[str, Any]]) -> bool:
    """Whether caches have what they had, and nobody took keys or values."""
    try:  # dicts compare what is not identical, and arrays have no truth value
        return _are_watched(caches) and [*map(vars, caches)] == left
    except Exception:
        return False


def _merged(held: Held) -> Buffer:
    buffer, tail, *half, start = held
    if half:
        tail = halves(tail)[half[0]]
    return merged(buffer, tail, mx.array([start]))


def _untouched(tail: Tail, caches: Sequence[Any]) -> bool:
    """Whether nobody took keys or values of these caches since they have this tail."""
    if not _are_watched(caches):
        return False
    held = [vars(c)[name] for c in caches for name in ("keys", "values")]
    return len(held) == len(tail.held) and all(map(is_, held, tail.held))


def _are_watched(caches: Sequence[Any]) -> bool:
    return {*map(type, caches)} == {watched_kind(kind_of(caches[0]))}


@cache
def watched_kind(kind: type) -> type:
    """The class of caches whose keys and values nobody took since a token; else ``kind``."""

    def released(cache: Any) -> Any:
        own = vars(cache)
        new = {name: _merged(own[name]) for name in ("keys", "values") if _is_held(own[name])}
        own.update(new)
        cache.__class__ = kind
        return cache

    def attribute(name: str) -> property:
        def put(self: Any, value: Any) -> None:
            setattr(released(self), name, value)

        return property(lambda self: getattr(released(self), name), put)

    body = {
        "_kind": kind,
        "keys": attribute("keys"),
        "values": attribute("values"),
        "empty": lambda self: False,
        "nbytes": property(
            lambda self: sum(a.nbytes for each in _buffers(self) for a in arrays_of(each))
        ),
        "__reduce_ex__": lambda self, protocol: released(self).__reduce_ex__(protocol),
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), body)
