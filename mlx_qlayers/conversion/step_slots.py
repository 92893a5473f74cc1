"""Caches as a model's code sees them inside the compiled graph of a step, for one token a sequence.

A step writes its keys and values into buffers of a fixed size, at a position that is an array, so
that one graph serves until a cache grows. What is not written yet, a mask hides. Where attention
goes by :func:`~mlx_qlayers.ops.attention_step.attention_step`, buffers are only read, and what is
written is the tail of :mod:`.cache_tail`. Recurrent states are arrays that go in and come out.

What nobody uses in a graph is not computed: so keys are turned, and rows written, whether or not
attention then does it itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..ops.attention_step import attention_step, packed_rows, why_not
from ..options import Rotation
from .cache_tail import Buffer, layout_of, merged, one_token
from .step_kinds import Nested, Rows, States, Static, Unsupported
from .step_products import Products

# Caches whose keys lie in the order of their tokens.
_STEPPED = ("KVCache", "BatchKVCache", "QuantizedKVCache")


class Turned(NamedTuple):
    """What a rotary embedding gave, of what, and how."""

    y: mx.array
    x: mx.array
    how: tuple[Rotation, mx.array | None]
    offset: Any


def _same(one: Turned, other: Turned) -> bool:
    return one.how[0] == other.how[0] and one.how[1] is other.how[1]


class Step:
    """Stand-ins for caches inside a graph, made of its inputs.

    Attributes:
        caches: what the model's code is called with.
    """

    def __init__(
        self, static: Sequence[Static], at: Sequence[mx.array], arrays: Sequence[Buffer]
    ) -> None:
        self.at, self.given = at, iter(arrays)
        self.slots: list[Any] = []
        self.found: dict[int, Slot] = {}
        self.masks: dict[Any, mx.array] = {}
        self.turned: dict[int, Turned] = {}
        self.flat: dict[int, tuple[mx.array, mx.array]] = {}
        self.products = Products()
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
            new = _slot_class(static.kind, static.tail > 0)(self, static, self.given)
        self.slots.append(new)
        return new

    def turn(self, y: mx.array, x: mx.array, how: Rotation, freqs: Any, offset: Any) -> None:
        """Keep what a rotary embedding did, for attention that turns queries and keys itself."""
        self.turned[id(y)] = Turned(y, x, (how, freqs), offset)

    def keep_rows(self, x: mx.array, rows: mx.array) -> mx.array:
        """Keep that ``x`` has its elements as rows (B, 1, K) did: to go back is no reshape then."""
        self.flat[id(x)] = x, rows
        return x

    def rows(self, x: mx.array) -> mx.array:
        """Heads side by side: (B, 1, H, D) or (B, H, 1, D) to (B, 1, H * D)."""
        _, rows = self.flat.get(id(x), (x, None))
        return x.reshape(len(x), 1, -1) if rows is None else rows

    def attended(
        self, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, sinks: Any
    ) -> tuple[mx.array | None, Any]:
        """Attention to what a cache gave, or None and the mask for it."""
        slot = self.found.get(id(k))
        if slot is None:
            return None, mask
        could = v is slot.buffers[1] and slot.could_step(q, mask)
        out = slot.by_step(q, scale, mask, sinks) if could else None
        slot.steps = slot.steps is not False and could
        return out, mask if out is not None else slot.visible(mask)

    def outputs(self) -> list[list[Buffer | None]]:
        """The arrays of each cache, None where they are what they were."""
        return [_changed(slot) for slot in self.slots]

    def following(self) -> list[mx.array]:
        """The positions of the next token."""
        tails = {s.static.group for s in self.slots if isinstance(s, TailSlot)}
        return [a + one_token(a.size) if i in tails else a + 1 for i, a in enumerate(self.at)]

    def tails(self) -> list[mx.array]:
        """The tails with the token in them."""
        return [tail for s in self.slots if isinstance(s, TailSlot) for tail in s.tails]

    def reads_keys(self) -> bool:
        """Whether attention looks at keys of some caches, and the model's code at others."""
        return len({s.steps is None for s in self.slots if isinstance(s, Slot) and s.updated}) > 1

    def counted(self) -> mx.array:
        """How many rows of a cache count with the token, as many in all of them."""
        slots = [slot for slot in self.slots if isinstance(slot, Slot)]
        if len({slot.static.group for slot in slots}) != 1:
            raise Unsupported("caches hold different numbers of tokens")
        return mx.minimum(slots[0].rows()[1] + 1, slots[0].static.shapes[0][2])

    def close(self) -> None:
        """Let go of the caches, which hold this too: nobody else shall hold their arrays."""
        for each in (self.caches, self.slots, self.found):
            each.clear()

    def by_step(self) -> frozenset[int]:
        """Which caches nothing but :func:`attention_step` would look at."""
        slots = enumerate(self.slots)
        return frozenset(
            i for i, s in slots if isinstance(s, Slot) and s.updated and s.steps and not s.replaced
        )


def _changed(slot: Any) -> list[Buffer | None]:
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
        self.buffers: Sequence[Any] = (next(given), next(given))
        self.padding: mx.array | None = None
        self.updated = self.replaced = False
        self.steps: bool | None = None  # not known before attention
        self.first = self.offset = step.at[static.group][2]
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
        return self.buffers[0]

    @keys.setter
    def keys(self, value: Buffer) -> None:
        self._replace(value, self.buffers[1])

    @property
    def values(self) -> Buffer:
        """All rows, those that do not count too."""
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
        _, _, position = self.owner.at[self.static.group]
        return position - self.rows()[0]

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
        if type(self).__name__ not in _STEPPED or kinds != {self.static.dtype} or q.shape[2] != 1:
            return False
        if mask is not None and not any(mask is each for each in self.owner.masks.values()):
            return False
        (_, heads, _, width), (*_, v_width) = shapes
        if q.shape[1] % heads or q.shape[3] != width:
            return False
        bits = getattr(self, "bits", 0)
        return why_not(q.dtype, q.shape[1] // heads, shapes[0], v_width, bits) is None

    def by_step(self, q: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array | None:
        """Attention by it, (B, H, 1, Dv); None without a tail."""
        return None

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
        return masks[key]

    def _mask(self, window: int | None) -> mx.array:
        static, (at, last) = self.static, self.rows()
        rows = static.shapes[0][2]
        row = mx.arange(rows)
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
        return at[0], at[1]

    def keys_and_values(self) -> Sequence[Any]:
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

    def __init__(self, step: Step, static: Rows, given: Iterator[mx.array]) -> None:
        self.owner, self.static = step, static
        vars(self).update(static.settings)
        self.buffers = self.read = next(given), next(given)
        self.given_tails, self.tickets = (next(given), next(given)), next(given)
        self.tails: Sequence[mx.array] = self.given_tails
        self.updated, self.replaced, self.steps = False, False, None
        at, batch = step.at[static.group], static.shapes[0][0]
        is_batch = hasattr(static.kind, "finalize")
        self.padding = next(given) if is_batch else None
        self.first = self.offset = at[2 : 2 + batch] if is_batch else at[2]

    def rows(self) -> tuple[mx.array, mx.array]:
        """The same row twice."""
        at = self.owner.at[self.static.group]
        return at[0] + at[1], at[0] + at[1]

    def written(self, *token: mx.array) -> tuple[Buffer, ...]:
        """The buffers with the tail in them, and the token's row in that."""
        at = self.owner.at[self.static.group]
        self.tails = self.placed(self.given_tails, token, at[1:2])
        return self.placed(self.read, self.tails, at[:1])

    def by_step(self, q: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array | None:
        """Attention that turns the token's query and key, if they are turned as it can."""
        (k, v), at = self.token, self.owner.at[self.static.group]
        rotation, freqs, q_heads = Rotation(0), None, q.shape[1]
        of_q, of_k = (self.owner.turned.get(id(each)) for each in (q, k))
        if of_q and of_k and _same(of_q, of_k) and of_q.offset is of_k.offset is self.first:
            q, k, (rotation, freqs) = of_q.x, of_k.x, of_q.how
        if mask is None and self.padding is not None:
            mask = self.mask()
        elif self.padding is None and mask is self.owner.masks.get((self.static.group, None)):
            mask = None  # it hides what does not count yet, and nothing else
        options: dict[str, Any] = {"scale": scale, "rotation": rotation, "freqs": freqs}
        options |= {"mask": mask, "sinks": sinks, "tickets": self.tickets}
        given = *map(self.owner.rows, (q, k, v)), *self.read, *self.given_tails, at
        out, *self.tails = attention_step(*given, **options)
        return self.owner.keep_rows(out.reshape(len(out), q_heads, 1, -1), out)

    def outputs(self) -> Iterator[Buffer | None]:
        """What changed: keys and values as the cache shows them."""
        at = self.owner.at[self.static.group]
        yield from self.placed(self.read, self.tails, at[:1])
        if self.padding is not None:
            yield from (self.offset, None)


@cache
def _slot_class(kind: type, tail: bool) -> type:
    return type(kind.__name__, (TailSlot if tail else Slot, kind), {})


# The graph whose model code runs now.
current_step: ContextVar[Step | None] = ContextVar("current_step", default=None)
