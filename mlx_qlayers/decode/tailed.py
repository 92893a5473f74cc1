"""A step as one compiled function, whose attention takes tails, for caches that grow by tokens.

The caches' buffers are only read meanwhile: see :mod:`.tails`. Where a step leaves off, the next
one with the same caches goes on, as long as nobody looked at them or changed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx

from ..ops.attention_step import MIN_TICKETS, why_not
from ..options import StepCall
from ..runtime.arena import View, halves, joined
from ..runtime.backend import requested
from .caches import arrays_of as named
from .caches import places
from .capture import Captured, Unsupported
from .forms import Form, Progress
from .graph import Graph
from .rules.steps import Tails
from .tails import Tail, arrays_of, one_token, positions_of, tail_of, watch
from .weights import traced

_NAMES = ("keys", "values")
# With how many rows of a cache it is asked whether there is a kernel.
_TYPICAL_ROWS = 4096
# Steps that go on without a look at caches, where there are no tails.
_ROOM = 256


class TailState(NamedTuple):
    """What a step goes on with: what its compiled function takes and gives.

    Attributes:
        tails: of the groups of caches.
        at: the positions of the next token in them.
        fixed: other arrays that it takes, and ``states`` those that it changed.
    """

    tails: list[Tail]
    at: list[mx.array]
    fixed: list[mx.array]
    states: list[mx.array]


class Tailed(Form):
    """A captured step whose positions are arrays, for one batch size.

    Args:
        captured: the step.
        graph: the same after the rules, with tails: one for all batch sizes.
        batch: sequences.
        tails: what rules know of the caches.
        weights: where arrays of the model lie.

    Attributes:
        groups: the numbers of caches that hold as many tokens and have a tail together.
        counting: of each group what its caches count.

    Raises:
        Unsupported: something else than attention depends on positions.
    """

    def __init__(
        self,
        captured: Captured,
        graph: Graph,
        batch: int,
        tails: Tails,
        weights: Sequence[View] = (),
    ) -> None:
        super().__init__(captured, graph, batch)
        self.weights = weights
        if self.program.dynamic:
            raise Unsupported("its code computes with positions")
        groups: dict[int, list[int]] = {}
        for number in sorted({int(n.split(".")[1]) for n in graph.outputs if n[:5] == "tail."}):
            groups.setdefault(tails.first(number), []).append(number)
        self.groups = [*groups.values()]
        counting = self._counted(captured, tails)
        self.counting = [counting[first] for first in groups]
        # What goes in and out by turns, and what stays.
        self.at = [f"at.{first}" for first in groups]
        self.tails = [f"tail.{i}.{n}" for i in chain(*self.groups) for n in _NAMES]
        self.buffers = [*_buffers(self.groups, tails.keys)]
        moving = {"tokens", *self.at, *self.tails, *self.states, *self.buffers}
        self.fixed = [name for _, name in self.program.inputs if name not in moving]
        read = places(name for name in self.fixed if name.startswith("cache."))
        self.lists = sorted({*self.lists, *((i, name) for i, name, at in read if at is not None)})
        calls = [StepCall.of(node.src) for node in graph.nodes() if node.op == "AttentionStep"]
        if reason := next(filter(None, (_why_not(call, batch) for call in calls)), None):
            raise Unsupported(reason)
        # Attention takes at most one of a key head and 8 of its queries.
        heads = max((call.k_cache[0].shape[1] for call in calls), default=0)
        self.tickets = max(MIN_TICKETS, 8 * batch * heads)
        self.compiled = mx.compile(self._run)

    def _counted(self, captured: Captured, tails: Tails) -> dict[int, list[str]]:
        """By the numbers of caches what a token adds one to."""
        found: dict[int, list[str]] = {number: [] for number in chain(*self.groups)}
        for (number, name), count in zip(self.counts, captured.counts.values(), strict=True):
            begun = name == "_idx" and tails.keys[number][1] == "begins"
            if number not in found or not (begun or count == tails.counter(number, name, 1)):
                raise Unsupported("a cache without a tail counts, or in another way")
            found[number].append(name)
        return found

    def _run(self, tokens: mx.array, *given: Any) -> list[Any]:
        """Logits; positions of the next token, tails and states."""
        fixed, buffers, at, tails, states = given
        buffers = [a for some in buffers for buffer in some for a in arrays_of(buffer)]
        is_joined = len(tails) < len(self.tails)
        # What goes out as it came in are arrays of their own.
        with traced([*fixed, *buffers, *tails, *states], self.weights):
            apart = [y for x in tails for y in halves(x)] if is_joined else tails
            names = self.fixed, self.buffers, self.at, self.tails, self.states
            pairs = zip(chain(*names), [*fixed, *buffers, *at, *apart, *states], strict=True)
            made = self.program.run({"tokens": tokens, **dict(pairs)}, {})
            new = [made[name] for name in self.tails]
            if is_joined:
                new = [joined(*new[i : i + 2]) for i in range(0, len(new), 2)]
        later = [each + one_token(each.size) for each in at]
        return [made["logits"], later, new, [made[name] for name in self.states]]

    def begun(self, own: Sequence[Any], at: dict[str, int]) -> TailState:
        tails = [tail_of([own[i] for i in numbers]) for numbers in self.groups]
        pairs = zip(tails, self.groups, strict=True)
        positions = [positions_of(tail, own[numbers[0]]) for tail, numbers in pairs]
        names = [name for name in self.fixed if name.startswith("tickets.")]
        tickets = mx.split(mx.zeros(len(names) * self.tickets, mx.int32), len(names) or 1)
        arrays = named(own) | dict(zip(names, tickets, strict=False))
        fixed, states = ([arrays[name] for name in some] for some in (self.fixed, self.states))
        watch([own[i] for numbers in self.groups for i in numbers])
        return TailState(tails, positions, fixed, states)

    def run(
        self, tokens: mx.array, own: Sequence[Any], state: TailState
    ) -> tuple[mx.array, Progress]:
        given = [x for tail in state.tails for x in tail.tails]
        buffers = [tail.buffers for tail in state.tails]
        logits, at, new, states = self.compiled(
            tokens, state.fixed, buffers, state.at, given, state.states
        )
        items: list[dict[str, Any]] = [{} for _ in own]
        tails, start, room = list[Tail](), 0, _ROOM
        for numbers, names, old in zip(self.groups, self.counting, state.tails, strict=True):
            some, c = new[start : start + len(old.tails)], vars(own[numbers[0]])
            tail = old._replace(tails=some, held=old.held + 1, left=old.left - 1)
            start, room = start + len(some), min(room, tail.left)
            tails.append(tail)
            counts = {name: c[name] + 1 for name in names}
            if "max_size" in c and c["_idx"] == c["max_size"]:  # it begins anew
                counts["_idx"] = c.get("keep", 0) + 1
            for i, number in enumerate(numbers):
                items[number] = {**counts, "keys": (tail, 2 * i), "values": (tail, 2 * i + 1)}
        left = self.put_back(own, items, states)
        return logits, Progress(self, left, TailState(tails, at, state.fixed, states), room)


def _why_not(call: StepCall, batch: int) -> str | None:
    """Why attention has no kernel, unless nobody wants one."""
    if requested() == "reference":
        return None
    heads = call.k_cache[0].shape[1]
    share = call.q.shape[2] // (heads * call.width)
    shape = batch, heads, _TYPICAL_ROWS, call.width
    return why_not(call.q.dtype, share, shape, call.v_width, call.packing)


def _buffers(groups: Sequence[Sequence[int]], keys: Sequence[Any]) -> Iterator[str]:
    """The names of the buffers of caches that have tails."""
    for number in chain(*groups):
        parts = [".0", ".1", ".2"] if "bits" in dict(keys[number][2:]) else [""]
        yield from (f"cache.{number}.{name}{part}" for name in _NAMES for part in parts)
