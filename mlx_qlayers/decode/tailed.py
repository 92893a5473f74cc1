"""A step as one compiled function, whose attention takes tails, for caches that grow by tokens.

The caches' buffers are only read meanwhile: see :mod:`.tails`. Where a step leaves off, the next
one with the same caches goes on, as long as nobody looked at them or changed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx

from ..ops.attention_step import MIN_TICKETS
from ..runtime.backend import Mode, mode
from ..runtime.windows import halves, joined, windows
from .caches import arrays_of, put
from .capture import Captured, Unsupported
from .emit import Program
from .rules import fused
from .rules.steps import Tails
from .tails import Tail, one_token, positions_of, tail_of, watch

_NAMES = ("keys", "values")
# Steps that go on without a look at caches, where there are no tails.
_ROOM = 256


class Tailed:
    """A captured step whose positions are arrays, for one batch size.

    Args:
        captured: the step.
        batch: sequences.
        keys: of the caches, what the capture is for.

    Attributes:
        groups: the numbers of caches that hold as many tokens and have a tail together.
        counts: of each group what its caches count.

    Raises:
        Unsupported: something else than attention depends on positions.
    """

    def __init__(self, captured: Captured, batch: int, keys: Sequence[tuple[Any, ...]]) -> None:
        tails = Tails(keys, captured.names)
        graph = fused(captured.graph, tails)
        self.program = Program(graph, batch, captured.weights)
        if self.program.dynamic:
            raise Unsupported("its code computes with positions")
        groups: dict[int, list[int]] = {}
        for number in sorted({int(n.split(".")[1]) for n in graph.outputs if n[:5] == "tail."}):
            groups.setdefault(tails.first(number), []).append(number)
        self.groups = [*groups.values()]
        counts = self._counted(captured, tails)
        self.counts = [counts[first] for first in groups]
        # What goes in and out by turns, and what stays.
        self.at = [f"at.{first}" for first in groups]
        self.tails = [f"tail.{i}.{n}" for i in chain(*self.groups) for n in _NAMES]
        self.states = [n for n in graph.outputs if n != "logits" and n[:5] != "tail."]
        moving = {"tokens", *self.at, *self.tails, *self.states}
        self.fixed = [name for _, name in self.program.inputs if name not in moving]
        self.places = _places(self.states)
        # Attention takes at most one of a key head and 8 of its queries.
        steps = (node.src[3] for node in graph.nodes() if node.op == "AttentionStep")
        self.tickets = max((8 * batch * node.shape[1] for node in steps if node), default=0)
        self.compiled = mx.compile(self._run)

    def _counted(self, captured: Captured, tails: Tails) -> dict[int, list[str]]:
        """By the numbers of caches what a token adds one to."""
        found: dict[int, list[str]] = {number: [] for number in chain(*self.groups)}
        for path, count in captured.counts.items():
            number, name = int(path.split(".")[1]), path.split(".")[2]
            if number not in found or count != tails.counter(number, name)._replace(const=1):
                raise Unsupported("a cache without a tail counts, or in another way")
            found[number].append(name)
        return found

    def _run(self, tokens: mx.array, fixed: Any, at: Any, tails: Any, states: Any) -> list[Any]:
        """Logits; positions of the next token, tails and states."""
        is_joined = len(tails) < len(self.tails)
        # What goes out as it came in are arrays of their own.
        with windows([*fixed, *tails, *states]), mode(Mode.INFERENCE):
            given = [y for x in tails for y in halves(x)] if is_joined else tails
            names = ["tokens", *self.fixed, *self.at, *self.tails, *self.states]
            made = self.program.run(
                dict(zip(names, [tokens, *fixed, *at, *given, *states], strict=True)), {}
            )
            new = [made[name] for name in self.tails]
            if is_joined:
                new = [joined(*new[i : i + 2]) for i in range(0, len(new), 2)]
        later = [each + one_token(each.size) for each in at]
        return [made["logits"], later, new, [made[name] for name in self.states]]

    def begun(self, own: Sequence[Any]) -> Progress:
        """What the first step with some caches goes on with.

        Raises:
            Unsupported: they hold tokens in another way than those of the capture.
        """
        arrays, tails = arrays_of(own), list[Tail]()
        for numbers in self.groups:
            tails.append(tail_of([own[i] for i in numbers]))
        count = len({name for name in self.fixed if name.startswith("tickets.")})
        size = max(MIN_TICKETS, self.tickets)
        tickets = iter(mx.split(mx.zeros(count * size, mx.int32), count) if count else ())
        fixed = [next(tickets) if n.startswith("tickets.") else arrays[n] for n in self.fixed]
        at = [
            positions_of(tail, own[numbers[0]])
            for tail, numbers in zip(tails, self.groups, strict=True)
        ]
        return Progress(self, tails, at, fixed, [arrays[name] for name in self.states])

    def run(self, tokens: mx.array, own: Sequence[Any], last: Progress | None) -> Any:
        """The logits, and what the next step with the same caches goes on with.

        Raises:
            Unsupported: the caches hold tokens in another way than those of the capture.
        """
        now, is_first = last or self.begun(own), last is None
        given = [x for tail in now.tails for x in tail.tails]
        logits, at, new, states = self.compiled(tokens, now.fixed, now.at, given, now.states)
        items: list[dict[str, Any]] = [{} for _ in own]
        tails, start, room = list[Tail](), 0, _ROOM
        for numbers, names, old in zip(self.groups, self.counts, now.tails, strict=True):
            some, c = new[start : start + len(old.tails)], vars(own[numbers[0]])
            tail = old._replace(tails=some, held=old.held + 1, left=old.left - 1)
            start, room = start + len(some), min(room, tail.left)
            tails.append(tail)
            counts = {name: c[name] + 1 for name in names}
            if "max_size" in c and c["_idx"] == c["max_size"]:  # it begins anew
                counts["_idx"] = c.get("keep", 0) + 1
            for i, number in enumerate(numbers):
                items[number] = {**counts, "keys": (tail, 2 * i), "values": (tail, 2 * i + 1)}
        for number, name, index, i in self.places:
            if index is None:
                items[number][name] = states[i]
            else:
                whole = items[number].setdefault(name, [*vars(own[number])[name]])
                whole[index] = states[i]
        if is_first:
            watch([own[i] for numbers in self.groups for i in numbers])
        put(own, items)
        left, kinds = [*map(dict, map(vars, own))], [*map(type, own)]
        return logits, Progress(self, tails, at, now.fixed, states, room, left, kinds)


def _places(states: Sequence[str]) -> list[tuple[int, str, int | None, int]]:
    """Where arrays of caches are: the cache, the attribute, the place in a list; which array."""
    found = []
    for i, path in enumerate(states):
        _, number, name, *index = path.split(".")
        found.append((int(number), name, int(index[0]) if index else None, i))
    return found


class Progress(NamedTuple):
    """What a step leaves for the next one with the same caches.

    Attributes:
        step: which goes on.
        tails: of the groups of caches.
        at: the positions of the next token in them.
        fixed: other arrays that it takes, and ``states`` those that it changed.
        room: for how many tokens.
        left: what all caches have, and ``kinds`` their classes.
    """

    step: Tailed
    tails: list[Tail]
    at: list[mx.array]
    fixed: list[mx.array]
    states: list[mx.array]
    room: int = 0
    left: Sequence[dict[str, Any]] = ()
    kinds: Sequence[type] = ()

    def holds(self, own: Sequence[Any]) -> bool:
        """Whether there is room for another token, and the caches are as the step left them."""
        if not self.room or [*map(type, own)] != self.kinds:
            return False
        try:  # dicts compare what is not identical, and arrays have no truth value
            return [*map(vars, own)] == self.left
        except Exception:
            return False
