"""Stand-ins for caches of keys and values in the graph of a step, as mlx-lm's caches are.

A step writes its keys and values into buffers of a fixed size, at a position that is an array, so
that one graph serves until a cache grows. What is not written yet, a mask hides. Where attention
goes by :func:`~mlx_qlayers.ops.attention_step.attention_step`, buffers are only read, and what is
written is the tail of :mod:`.cache_tail`, or a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..decode.cache_tail import Buffer, layout_of, merged
from ..ops.attention_step import attention_step, packed_rows, why_not
from ..options import Rotation
from ..runtime.arena import halves
from .step_kinds import Rows, Unsupported

# Caches whose keys lie in the order of their tokens, and one that overwrites the oldest.
STEPPED = ("KVCache", "BatchKVCache", "QuantizedKVCache")
RING = "RotatingKVCache"


class Turned(NamedTuple):
    """What a rotary embedding gave, of what, and how."""

    y: mx.array
    x: mx.array
    how: tuple[Rotation, mx.array | None]
    offset: Any


def entry(at: mx.array, i: int) -> mx.array:
    """One of the positions, as a view: to gather it would be a launch."""
    return at[i : i + 1].reshape(())


def counting(rows: int) -> mx.array:
    """The numbers of rows: a constant of a graph."""
    row = mx.arange(rows)
    mx.eval(row)
    return row


def _same(one: Turned, other: Turned) -> bool:
    return one.how[0] == other.how[0] and one.how[1] is other.how[1]


class Slot:
    """A cache of keys and values for a token, as mlx-lm's caches are.

    Attributes:
        looked: whether code looked at keys or values but for what ``update_and_fetch`` gives.
        is_fused: whether a fused module took that.
    """

    looked = is_fused = False

    def __init__(self, step: Any, static: Rows, given: Iterator[mx.array]) -> None:
        self.owner, self.static = step, static
        vars(self).update(static.settings)
        self.buffers: Sequence[Any] = (next(given), next(given))
        self.padding: mx.array | None = None
        self.updated = self.replaced = False
        self.steps: bool | None = None  # not known before attention
        self.first = self.offset = entry(step.at[static.group], 2)
        if hasattr(static.kind, "finalize"):  # of a batch
            self.first = self.offset = next(given)
            self.padding = next(given)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Sequence[Any]:
        """Write the token's keys and values; gives all rows, those that do not count too."""
        if self.updated:
            raise Unsupported("a cache is updated twice in a step")
        if keys.shape[2] != 1:
            raise Unsupported("more than a token is written into a cache")
        self.updated, self.token = True, (keys, values)
        self.buffers = self.written(*map(self.stored, (keys, values)))
        self.offset = self.offset + 1
        self.owner.found[id(self.buffers[0])] = self
        return self.buffers

    @property
    def keys(self) -> Buffer:
        """All rows, those that do not count too."""
        self.looked = True
        return self.buffers[0]

    @keys.setter
    def keys(self, value: Buffer) -> None:
        self._replace(value, self.buffers[1])

    @property
    def values(self) -> Buffer:
        """All rows, those that do not count too."""
        self.looked = True
        return self.buffers[1]

    @values.setter
    def values(self, value: Buffer) -> None:
        self._replace(self.buffers[0], value)

    def _replace(self, *buffers: Buffer) -> None:
        alike = layout_of(buffers, vars(self)) == layout_of(self.buffers, vars(self))
        if not self.updated or not alike:
            raise Unsupported("the model changes what a cache holds")
        self.buffers, self.replaced = buffers, True

    @property
    def start_position(self) -> mx.array:
        """That of the first row, of a cache that lets go of others."""
        return entry(self.owner.at[self.static.group], 2) - self.rows()[0]

    def stored(self, rows: mx.array) -> mx.array:
        """Rows as a tail has them."""
        rows, settings = rows.astype(self.static.dtype), dict(self.static.settings)
        if "bits" not in settings:
            return rows
        return packed_rows(mx.quantize(rows, settings["group_size"], settings["bits"]))

    def written(self, *token: mx.array) -> tuple[Buffer, ...]:
        """The buffers with the token's rows in them."""
        return self.placed(self.buffers, token, self.owner.at[self.static.group][:1])

    def placed(
        self, buffers: Sequence[Any], rows: Sequence[mx.array], start: mx.array
    ) -> tuple[Any, ...]:
        """Buffers with rows in them, from one on."""
        pairs = zip(buffers, rows, strict=True)
        return tuple(merged(buffer, new, start) for buffer, new in pairs)

    def could_step(self, q: mx.array, mask: Any) -> bool:
        """Whether :func:`attention_step` takes the place of attention to these rows."""
        kinds, shapes = {q.dtype, *(a.dtype for a in self.token)}, self.static.shapes
        in_order = type(self).__name__ in (*STEPPED, RING)
        if not in_order or kinds != {self.static.dtype} or q.shape[2] != 1:
            return False
        if mask is not None and not any(mask is each for each in self.owner.masks.values()):
            return False
        (_, heads, _, width), (*_, v_width) = shapes
        if q.shape[1] % heads or q.shape[3] != width:
            return False
        packing = getattr(self, "group_size", 0), getattr(self, "bits", 0)
        return why_not(q.dtype, q.shape[1] // heads, shapes[0], v_width, packing) is None

    def by_step(self, q: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array | None:
        """Attention by it, (B, H, 1, Dv); None without a tail."""
        return None

    def stepped(self, q: mx.array, arrays: Any, options: dict[str, Any]) -> list[mx.array]:
        """Attention that turns the token's query and key, if they are turned as it can; tails."""
        (k, v), q_heads = self.token, q.shape[1]
        options |= {"rotation": Rotation(0), "freqs": None}
        turned, factor = self.owner.without_factor(q)
        of_q, of_k = (self.owner.turned.get(id(each)) for each in (turned, k))
        if of_q and of_k and _same(of_q, of_k) and of_q.offset is of_k.offset is self.first:
            q, k = of_q.x if factor is None else of_q.x * factor, of_k.x
            options["rotation"], options["freqs"] = of_q.how
        of_q, of_k = (self.owner.normed(each) for each in (q, k))
        if of_q and of_k and of_q.eps == of_k.eps:
            q, k = of_q.x, of_k.x
            options |= {"norms": (of_q.weight, of_k.weight), "epsilon": of_q.eps}
        out, *tails = attention_step(*map(self.owner.rows, (q, k, v)), *arrays, **options)
        return [self.owner.keep_rows(out.reshape(len(out), q_heads, 1, -1), out), *tails]

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
        alike = self.padding is None or static.tail
        key = static.group if alike else id(self), window
        if key not in masks:
            masks[key] = self._mask(window)
            self.owner.plain += [masks[key]] if window is None and self.padding is None else []
        return masks[key]

    def _mask(self, window: int | None) -> mx.array:
        static, (at, last) = self.static, self.rows()
        rows = static.shapes[0][2]
        row = counting(rows)
        # How many tokens came before that of a row: behind the token's row is the oldest.
        first = (row + (rows - 1) - at) % rows
        if static.rotated and self.padding is not None:
            return first >= (self.padding - 1)[:, None, None, None]
        seen = (row <= last)[None, None, None]
        if window is not None:
            settings = dict(static.settings)
            if settings.get("keep"):
                raise Unsupported("a window is smaller than its cache, which keeps its first rows")
            ring = "max_size" in settings
            seen = seen & ((first if ring else row + (rows - 1) - last) >= rows - window)
        if self.padding is not None:
            seen = seen & (row >= self.padding[:, None, None, None])
        return seen

    def rows(self) -> tuple[mx.array, mx.array]:
        """The row that is written, and the last one that counts."""
        at = self.owner.at[self.static.group]
        return entry(at, 0), entry(at, 1)

    def keys_and_values(self) -> Sequence[Any]:
        """All rows, those that do not count too."""
        self.looked = True
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

    def outputs(self) -> Iterator[Buffer | None]:
        """What changed: keys, values; of a batch offset and padding."""
        yield from self.buffers if self.updated else (None, None)
        if self.padding is not None:
            yield self.offset if self.updated else None
            yield self.padding - 1 if self.updated and self.static.rotated else None

    def empty(self) -> bool:
        """Whether nothing was written: it is not for an empty one that a graph is made."""
        return False


class TailSlot(Slot):
    """One whose buffers are only read, with a tail."""

    def __init__(self, step: Any, static: Rows, given: Iterator[mx.array]) -> None:
        self.owner, self.static = step, static
        vars(self).update(static.settings)
        self.buffers = self.read = next(given), next(given)
        self.given_tails = halves(next(given)) if static.joined else (next(given), next(given))
        self.tickets = next(given)
        self.tails: Sequence[mx.array] = self.given_tails
        self.updated, self.replaced, self.steps = False, False, None
        at, batch = step.at[static.group], static.shapes[0][0]
        is_batch = hasattr(static.kind, "finalize")
        self.padding = next(given) if is_batch else None
        self.first = self.offset = at[2 : 2 + batch] if is_batch else entry(at, 2)

    def rows(self) -> tuple[mx.array, mx.array]:
        """The same row twice."""
        at = self.owner.at[self.static.group]
        row = entry(at, 0) + entry(at, 1)
        return row, row

    def written(self, *token: mx.array) -> tuple[Buffer, ...]:
        """The buffers with the tail in them, and the token's row in that."""
        at = self.owner.at[self.static.group]
        self.tails = self.placed(self.given_tails, token, at[1:2])
        return self.placed(self.read, self.tails, at[:1])

    def by_step(self, q: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array | None:
        """Attention that turns the token's query and key, if they are turned as it can."""
        if mask is None and self.padding is not None:
            mask = self.mask()
        at = self.owner.at[self.static.group]
        arrays = *self.read, *self.given_tails, at
        options = {"scale": scale, "mask": mask, "sinks": sinks, "tickets": self.tickets}
        out, *self.tails = self.stepped(q, arrays, options)
        return out

    def outputs(self) -> Iterator[Buffer | None]:
        """What changed: the positions of a batch."""
        yield from (None, None)
        if self.padding is not None:
            yield from (self.offset, None)


class RingTailSlot(TailSlot):
    """A ring that is only read, with a tail."""

    def mask(self, window: int | None = None) -> mx.array:
        """Which rows of the ring and the tail the token sees: those in order that are not gone."""
        settings, masks = dict(self.static.settings), self.owner.masks
        size, keep = settings["max_size"], settings.get("keep", 0)
        window = size if window is None else min(window, size)
        key = self.static.group, None if window == size else window
        if key not in masks:
            if keep and window < size:
                raise Unsupported("a window is smaller than its cache, which keeps its first rows")
            row = counting(self.static.shapes[0][2] + self.static.tail)
            held, order = self._order(row)
            # How many tokens came since that of a row.
            start = entry(self.owner.at[self.static.group], 0)
            age = mx.where(row < start, size - keep - order + held, held - (row - start))
            seen = (age < window - keep) | (row < keep)
            masks[key] = seen[None, None, None]
        return masks[key]

    def _order(self, row: mx.array) -> tuple[mx.array, mx.array]:
        """How many tokens the tail holds, and which of its rows overwrites one of the ring's."""
        settings, at = dict(self.static.settings), self.owner.at[self.static.group]
        size, keep = settings["max_size"], settings.get("keep", 0)
        held = entry(at, 1)
        return held, (row - entry(at, at.size - 1) + held) % (size - keep)

    def by_step(self, q: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array | None:
        """Attention that turns the token's query and key, if they are turned as it can."""
        # The mask may be that of another ring, whose tail holds more or fewer tokens.
        windows = [key[1] for key, each in self.owner.masks.items() if each is mask]
        arrays = *self.read, *self.given_tails, self.owner.at[self.static.group]
        hides = self.static.full or windows not in ([], [None])
        options = {"scale": scale, "mask": self.mask(*windows) if hides else None}
        options |= {"sinks": sinks, "tickets": self.tickets}
        out, *self.tails = self.stepped(q, arrays, options)
        return out

    def outputs(self) -> Iterator[Buffer | None]:
        """What changed: keys and values as the cache shows them."""
        keep, row = dict(self.static.settings).get("keep", 0), counting(self.static.shapes[0][2])
        held, order = self._order(row)
        new = ((order <= held) & (row >= keep))[:, None]
        at = mx.minimum(order, self.static.tail - 1)
        for ring, tail in zip(self.read, self.tails, strict=True):
            yield mx.where(new, mx.take(tail, at, axis=2), ring)


@cache
def slot_class(kind: type, tail: bool, is_ring: bool = False) -> type:
    """The class that stands in for a cache, which looks like one of its own."""
    base = (RingTailSlot if is_ring else TailSlot) if tail else Slot
    return type(kind.__name__, (base, kind), {})
