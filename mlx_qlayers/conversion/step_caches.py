"""Caches as a model's code sees them inside the compiled graph of a step, for one token a sequence.

A step writes its keys and values into buffers of a fixed size, at a position that is an array, so
that one graph serves until a cache grows. What is not written yet, a mask hides. Recurrent states
are arrays that go in and come out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from .cache_tail import kind_of

# What a stand-in keeps of the cache that it stands for: what no token changes.
_SETTINGS = ("max_size", "keep", "chunk_size")


class Unsupported(Exception):
    """Why a step is left to the model."""


class Rows(NamedTuple):
    """What a graph is made for, of a cache of keys and values.

    Attributes:
        kind: its class.
        shapes: of keys and values: (B, Hkv, S, D) and (B, Hkv, S, Dv).
        dtype: of both.
        group: caches of one group are at the same positions.
        full: all rows count.
        rotated: a batch of which each sequence loses a token for a new one.
        settings: attributes that no token changes.
    """

    kind: type
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: mx.Dtype
    group: int
    full: bool
    rotated: bool
    settings: tuple[tuple[str, Any], ...]


class States(NamedTuple):
    """What a graph is made for, of a cache of arrays: which of them there are, and their shapes."""

    kind: type
    shapes: tuple[Any, ...]


class Nested(NamedTuple):
    """What a graph is made for, of a list of caches."""

    parts: tuple[Any, ...]


Static = Rows | States | Nested | None
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


def reason_against(caches: Sequence[Any]) -> str | None:
    """Why such caches cannot be in a graph, if so; the caches stay as they are."""
    from mlx_lm.models.cache import ArraysCache

    empty = []
    for each in leaves(caches):
        kind = kind_of(each)
        if kind is not ArraysCache and kind not in _kinds():
            return f"a cache is a {kind.__name__}"
        empty.append(each.empty())
    return "the caches are empty" if all(empty) else None


@cache
def _kinds() -> dict[type, Callable[[Any], Position]]:
    from mlx_lm.models import cache as kinds

    return {
        kinds.KVCache: _plain,
        kinds.ChunkedKVCache: _chunked,
        kinds.RotatingKVCache: _ring,
        kinds.BatchKVCache: _batch,
        kinds.BatchRotatingKVCache: _batch_ring,
    }


def _plain(c: Any) -> Position:
    if c.offset == c.keys.shape[2]:
        _grow(c, c.step)
    return c.offset, c.offset, c.offset


def _chunked(c: Any) -> Position:
    c.maybe_trim_front()
    at = c.offset - c.start_position
    if at == c.keys.shape[2]:
        _grow(c, c.step)
    return at, at, c.offset


def _batch(c: Any) -> Position:
    if c._idx == c.keys.shape[2]:
        _grow(c, c.step)
    return c._idx, c._idx, 0


def _ring(c: Any) -> Position:
    return _in_ring(c, c.offset)


def _batch_ring(c: Any) -> Position:
    if c._lengths is not None:
        raise Unsupported("a cache is not finalized")
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
        array = getattr(c, name)
        batch, heads, _, width = array.shape
        more = mx.zeros((batch, heads, rows, width), array.dtype)
        setattr(c, name, mx.concatenate([array, more], axis=2))


class Inputs(NamedTuple):
    """Caches as a graph takes them.

    Attributes:
        static: what it is made for.
        positions: of each group.
        arrays: of all caches.
    """

    static: tuple[Static, ...]
    positions: list[Position]
    arrays: list[mx.array]


def taken(caches: Sequence[Any]) -> Inputs:
    """Make room for a token, and take the caches' arrays."""
    groups: dict[Any, int] = {}
    arrays: list[mx.array] = []

    def of(c: Any) -> Static:
        from mlx_lm.models.cache import ArraysCache, CacheList

        if c is None:
            return None
        if type(c) is CacheList:
            return Nested(tuple(map(of, c.caches)))
        kind = kind_of(c)
        if kind is ArraysCache:
            own = [*c.cache, c.left_padding, c.lengths]
            arrays.extend(a for a in own if a is not None)
            return States(kind, tuple(a if a is None else (a.shape, a.dtype) for a in own))
        if c.empty():  # one that no layer uses
            return States(kind, ())
        at = _kinds()[kind](c)
        arrays.extend((c.keys, c.values))
        is_batch, rotated = hasattr(c, "left_padding"), getattr(c, "rotated", False)
        if is_batch:
            arrays.extend((c.offset, c.left_padding))
        rows = c.keys.shape[2]
        full = hasattr(c, "max_size") and not is_batch and at[1] >= rows - 1
        settings = tuple((name, vars(c)[name]) for name in _SETTINGS if name in vars(c))
        key = kind, at, rows, full
        shapes = c.keys.shape, c.values.shape
        group = groups.setdefault(key, len(groups))
        return Rows(kind, shapes, c.keys.dtype, group, full, rotated, settings)

    static = tuple(map(of, caches))
    return Inputs(static, [key[1] for key in groups], arrays)


class Step:
    """Stand-ins for caches inside a graph, made of its inputs.

    Attributes:
        caches: what the model's code is called with.
    """

    def __init__(
        self, static: Sequence[Static], at: Sequence[mx.array], arrays: Sequence[mx.array]
    ) -> None:
        self.at, self.given = at, iter(arrays)
        self.slots: list[Any] = []
        self.found: dict[int, Slot] = {}
        self.masks: dict[Any, mx.array] = {}
        self.caches = [self._stand_in(each) for each in static]

    def _stand_in(self, static: Static) -> Any:
        from mlx_lm.models.cache import CacheList

        if static is None:
            return None
        if isinstance(static, Nested):
            return CacheList(*map(self._stand_in, static.parts))
        if isinstance(static, States):
            kind: Any = static.kind
            new = kind.__new__(kind)
            new.before = [shape and next(self.given) for shape in static.shapes]
            if new.before:
                *new.cache, new.left_padding, new.lengths = new.before
            else:
                new.keys = None
        else:
            new = _slot_class(static.kind)(self, static, self.given)
        self.slots.append(new)
        return new

    def outputs(self) -> list[list[mx.array | None]]:
        """The arrays of each cache, None where they are what they were."""
        return [_changed(slot) for slot in self.slots]


def _changed(slot: Any) -> list[mx.array | None]:
    if isinstance(slot, Slot):
        return list(slot.outputs())
    if not slot.before:
        if not slot.empty():
            raise Unsupported("a cache was empty")
        return []
    after = [*slot.cache, slot.left_padding, slot.lengths]
    return [new if new is not old else None for new, old in zip(after, slot.before, strict=True)]


class Slot:
    """A cache of keys and values for a token, as mlx-lm's caches are."""

    def __init__(self, step: Step, static: Rows, given: Iterator[mx.array]) -> None:
        self.owner, self.static = step, static
        vars(self).update(static.settings)
        self.buffers = next(given), next(given)
        self.padding: mx.array | None = None
        self.updated = False
        at = step.at[static.group]
        self.offset = at[2]
        if hasattr(static.kind, "finalize"):  # of a batch
            self.offset, self.padding = next(given), next(given)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the token's keys and values; gives all rows, those that do not count too."""
        if self.updated:
            raise Unsupported("a cache is updated twice in a step")
        if keys.shape[2] != 1:
            raise Unsupported("more than a token is written into a cache")
        self.updated, start = True, self.owner.at[self.static.group][:1]
        new = (keys, values)
        self.buffers = tuple(
            mx.slice_update(buffer, each.astype(buffer.dtype), start, (2,))
            for buffer, each in zip(self.buffers, new, strict=True)
        )  # type: ignore[assignment]
        self.offset = self.offset + 1
        self.owner.found[id(self.buffers[0])] = self
        return self.buffers

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Which rows the token sees, (B or 1, 1, 1, S); None for all of them."""
        if N != 1:
            raise Unsupported("a mask for more than a token")
        return self.mask(window_size)

    def mask(self, window: int | None = None) -> mx.array | None:
        """That of :meth:`make_mask`."""
        static, masks = self.static, self.owner.masks
        size = dict(static.settings).get("max_size")
        if window is not None and size is not None and window >= size:
            window = None
        if static.full and window is None:
            return None
        key = (static.group, window) if self.padding is None else (id(self), window)
        if key not in masks:
            masks[key] = self._mask(window)
        return masks[key]

    def _mask(self, window: int | None) -> mx.array:
        static, at = self.static, self.owner.at[self.static.group]
        rows = static.shapes[0][2]
        row = mx.arange(rows)
        # How many tokens came before that of a row: behind the token's row is the oldest.
        first = (row + (rows - 1) - at[0]) % rows
        if static.rotated and self.padding is not None:
            return first >= (self.padding - 1)[:, None, None, None]
        seen = (row <= at[1])[None, None, None]
        if window is not None:
            settings = dict(static.settings)
            if settings.get("keep"):
                raise Unsupported("a window is smaller than its cache, which keeps its first rows")
            ring = "max_size" in settings
            seen = seen & ((first if ring else row + (rows - 1) - at[1]) >= rows - window)
        if self.padding is not None:
            seen = seen & (row >= self.padding[:, None, None, None])
        return seen

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows, those that do not count too."""
        return self.buffers

    def maybe_trim_front(self) -> None:
        """That was done ahead of the graph."""

    def visible(self, mask: Any) -> mx.array | None:
        """A mask that the model's code gave, and this one's."""
        own = self.mask()
        if mask is None or own is None or any(mask is each for each in self.owner.masks.values()):
            return own if mask is None else mask
        if mask.dtype == mx.bool_:
            return mask & own
        return mx.where(own, mask, mx.array(-mx.inf, mask.dtype))

    def outputs(self) -> Iterator[mx.array | None]:
        """What changed: keys, values; of a batch offset and padding."""
        yield from self.buffers if self.updated else (None, None)
        if self.padding is not None:
            yield self.offset if self.updated else None
            yield self.padding - 1 if self.updated and self.static.rotated else None

    def empty(self) -> bool:
        """Whether nothing was written: it is not for an empty one that a graph is made."""
        return False


@cache
def _slot_class(kind: type) -> type:
    return type(kind.__name__, (Slot, kind), {})


# The graph whose model code runs now.
current_step: ContextVar[Step | None] = ContextVar("current_step", default=None)


def put(caches: Sequence[Any], outputs: Sequence[Sequence[mx.array | None]]) -> None:
    """Let caches hold what a graph gave, so that no signal sees some of them changed."""
    items: list[dict[str, Any]] = []
    own = [*leaves(caches)]
    for each, new in zip(own, outputs, strict=True):
        if not isinstance(getattr(each, "cache", None), list):
            items.append(_counted(each, new))
            continue
        old = [*each.cache, each.left_padding, each.lengths]
        *states, left, lengths = [b if a is None else a for a, b in zip(new, old, strict=True)]
        items.append({"cache": states, "left_padding": left, "lengths": lengths})
    deque(map(dict.update, map(vars, own), items), maxlen=0)


def _counted(c: Any, new: Sequence[mx.array | None]) -> dict[str, Any]:
    """The attributes of a cache of keys and values one token later."""
    if not new or new[0] is None:
        return {}
    keys, values, *of_batch = new
    counts: dict[str, Any] = {"keys": keys, "values": values}
    if hasattr(c, "_idx"):
        counts["_idx"] = c._idx + 1
    if not of_batch:
        return counts | {"offset": c.offset + 1}
    if hasattr(c, "_offset"):
        counts["_offset"] = c._offset + 1
    padding = of_batch[1] if of_batch[1] is not None else c.left_padding
    return counts | {"offset": of_batch[0], "left_padding": padding}
