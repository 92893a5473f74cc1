"""What a model's code works with inside the compiled graph of a step, for one token a sequence.

Its caches are those of :mod:`.cache_slots`; recurrent states are arrays that go in and come out.

What nobody uses in a graph is not computed: so keys are turned, and rows written, whether or not
attention then does it itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

from ..decode.cache_tail import Buffer, one_token
from ..ops.latent_attention import latent_attention, takes_latent
from ..options import Rotation
from ..runtime.arena import joined
from .cache_slots import RING, STEPPED, Slot, TailSlot, Turned, slot_class
from .recorder import Node, Recorder, current, keeps_order
from .step_kinds import Nested, OfCaches, States, Static
from .step_products import HeadNorm, Products


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
        # Of them those that hide nothing but what does not count yet.
        self.plain: list[mx.array] = []
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
            new = slot_class(static.kind, static.tail > 0, static.is_ring)(self, static, self.given)
        self.slots.append(new)
        return new

    def turn(self, y: mx.array, x: mx.array, how: Rotation, freqs: Any, offset: Any) -> None:
        """Keep what a rotary embedding did, for attention that turns queries and keys itself."""
        self.turned[id(y)] = Turned(y, x, (how, freqs), offset)

    def without_factor(self, q: mx.array) -> tuple[mx.array, mx.array | None]:
        """What a rotary embedding gave and a number that it was multiplied with, or ``q``, None."""
        recorder = current.get()
        node = recorder.node(q) if recorder else None
        for y, factor in (node.args, node.args[::-1]) if node and node.op == "mul" else ():
            if id(y) in self.turned and isinstance(factor, mx.array) and factor.size == 1:
                return y, factor
        return q, None

    def keep_rows(self, x: mx.array, rows: mx.array) -> mx.array:
        """Keep that ``x`` has its elements as rows (B, 1, K) did: to go back is no reshape then."""
        self.flat[id(x)] = x, rows
        return x

    def rows(self, x: mx.array) -> mx.array:
        """Heads side by side: (B, 1, H, D) or (B, H, 1, D) to (B, 1, H * D)."""
        shape = len(x), 1, x.size // len(x)
        y = next((y for y in self._views(x) if y.shape == shape), None)
        return x.reshape(shape) if y is None else y

    def viewed(self, recorder: Recorder, node: Node) -> mx.array | None:
        """For an array that describes another one anew: one before it that has its shape."""
        if not keeps_order(node):
            return None
        *ahead, first = self._views(node.args[0])
        if node.op == "contiguous" and not ahead:
            part = recorder.node(first)
            whole = part.args[0] if part and part.op == "getitem" else None
            # Of a part of another array, which it lets go of: a copy, unless most of that is it.
            keeps = isinstance(whole, mx.array) and 2 * first.size > whole.size
            return first if keeps else None
        y = next((y for y in (*ahead, first) if y.shape == node.y.shape), None)
        if y is None and ahead:
            return self.keep_rows(first.reshape(node.y.shape), first)
        return y

    def _views(self, x: mx.array) -> Iterator[mx.array]:
        """Arrays of the same elements in the same order, of which ``x`` is a view."""
        recorder, y = current.get(), x
        while y is not None:
            yield y
            node = recorder.node(y) if recorder else None
            before: Any = node.args[0] if node and keeps_order(node) else None
            _, y = self.flat.get(id(y), (y, before))

    def normed(self, heads: mx.array) -> HeadNorm | None:
        """The RMS norm of each head, of which (B, H, 1, D) or (B, 1, H, D) is a view; or None."""
        norms = self.products.of_heads
        found = next((norms[id(y)] for y in self._views(heads) if id(y) in norms), None)
        if found is None or found.x.shape[-1] != heads.shape[-1]:
            return None
        if found.weight is None:  # a constant of the graph
            mx.eval(ones := mx.ones(heads.shape[-1:], heads.dtype))
            found = found._replace(weight=ones)
        return found

    def delta_heads(self, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array, Any]:
        """Heads for the gated delta rule, before norms and factors, and these if there are any."""
        recorder = current.get()
        nodes = [recorder.node(each) if recorder else None for each in (q, k)]
        pairs = [node.args if node and node.op == "mul" else (None, None) for node in nodes]
        factors = [factor for factor, _ in pairs if isinstance(factor, float)]
        of_q, of_k = (self.products.of_heads.get(id(y)) for _, y in pairs)
        if len(factors) < 2 or of_q is None or of_k is None or of_q.eps != of_k.eps:
            return q, k, None
        if of_q.weight is not None or of_k.weight is not None:
            return q, k, None
        return of_q.x, of_k.x, (of_q.eps, *factors)

    def attending(self, k: Buffer) -> None:
        """Note that a fused module took a cache's keys, for attention and nothing else."""
        if (slot := self.found.get(id(k))) is not None:
            slot.is_fused = True

    def attended(
        self, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, sinks: Any
    ) -> tuple[mx.array | None, Any]:
        """Attention to what a cache gave, or None and the mask for it."""
        slot = self.found.get(id(k))
        if slot is None:
            return None, mask
        if any(mask is each for each in self.plain):
            mask = None  # as mlx-lm's caches give it
        elif v is k and sinks is None and (out := self._latent(slot, q, scale, mask)) is not None:
            slot.steps = False
            return out, None
        could = v is slot.buffers[1] and slot.could_step(q, mask)
        out = slot.by_step(q, scale, mask, sinks) if could else None
        slot.steps = slot.steps is not False and could
        return out, mask if out is not None else slot.visible(mask)

    def _latent(self, slot: Slot, q: mx.array, scale: float, mask: Any) -> mx.array | None:
        """Attention whose mask is scores of keys beside its own: that is latent attention."""
        recorder, shown = current.get(), None
        node = recorder.node(mask) if recorder else None
        if recorder is None or node is None:
            return None
        if node.op == "where":
            shown, scores, _ = node.args
            node = recorder.node(scores)
        factors = (
            [recorder.node(each) for each in node.args] if node and node.op == "matmul" else []
        )
        if [each and each.op for each in factors] != ["mul", "swapaxes"]:
            return None
        (r, factor), (beside, *axes) = (each.args for each in factors if each)
        plain = shown is None or any(shown is each for each in self.plain)
        known = plain or any(shown is each for each in self.masks.values())
        if beside is not slot.buffers[1] or {*axes} != {-1, -2} or factor != scale or not known:
            return None
        c, p = slot.buffers
        if type(slot).__name__ not in STEPPED or not takes_latent(q, r, c, p):
            return None
        _, last = slot.rows()
        return latent_attention(q, r, c, p, last, scale=scale, mask=None if plain else shown)

    def outputs(self) -> list[list[Buffer | None]]:
        """The arrays of each cache, None where they are what they were."""
        return [_changed(slot) for slot in self.slots]

    def following(self) -> list[mx.array]:
        """The positions of the next token."""
        tails = {s.static.group for s in self.slots if isinstance(s, TailSlot)}
        return [a + one_token(a.size) if i in tails else a + 1 for i, a in enumerate(self.at)]

    def tails(self) -> list[mx.array]:
        """The tails with the token in them, those of rings behind the others."""
        slots = [slot for slot in self.slots if isinstance(slot, TailSlot)]
        slots.sort(key=lambda slot: slot.static.is_ring)
        pairs = ([joined(*s.tails)] if s.static.joined else s.tails for s in slots)
        return [tail for tails in pairs for tail in tails]

    def rings(self) -> frozenset[int]:
        """Which rings nothing but :func:`attention_step` would look at."""
        rings = [(i, s) for i, s in enumerate(self.slots) if type(s).__name__ == RING]
        slots = [(i, s) for i, s in rings if isinstance(s, Slot) and s.updated]
        return frozenset(i for i, s in slots if s.steps and not s.replaced)

    def reads_keys(self) -> bool:
        """Whether attention looks at keys of some caches, and the model's code at others."""
        return len({s.steps is None for s in self.slots if isinstance(s, Slot) and s.updated}) > 1

    def is_own(self) -> bool:
        """Whether all caches are read by :func:`attention_step`, asked by a fused module."""
        slots = [slot for slot in self.slots if isinstance(slot, Slot)]
        looked = any(s.looked or s.replaced or not (s.is_fused and s.steps) for s in slots)
        return len(slots) == len(self.slots) and not looked

    def counted(self) -> mx.array:
        """How many rows of a cache count with the token, as many in all of them."""
        slots = [slot for slot in self.slots if isinstance(slot, Slot)]
        if len({slot.static.group for slot in slots}) != 1:
            raise OfCaches("caches hold different numbers of tokens")
        return mx.minimum(slots[0].rows()[1] + 1, slots[0].static.shapes[0][2])

    def close(self) -> None:
        """Let go of the caches, which hold this too: nobody else shall hold their arrays."""
        for each in (self.caches, self.slots, self.found):
            each.clear()

    def by_step(self) -> frozenset[int]:
        """Which caches nothing but :func:`attention_step` would look at."""
        slots = [(i, s) for i, s in enumerate(self.slots) if isinstance(s, Slot) and s.updated]
        in_order = [(i, s) for i, s in slots if type(s).__name__ in STEPPED]
        return frozenset(i for i, s in in_order if s.steps and not s.replaced)


def _changed(slot: Any) -> list[Buffer | None]:
    if isinstance(slot, Slot):
        return list(slot.outputs())
    if not slot.before:
        if not slot.empty():
            raise OfCaches("a cache was empty")
        return []
    after = [*slot.cache, slot.left_padding, slot.lengths]
    return [new if new is not old else None for new, old in zip(after, slot.before, strict=True)]


# The graph whose model code runs now.
current_step: ContextVar[Step | None] = ContextVar("current_step", default=None)
