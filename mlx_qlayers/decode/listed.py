"""A step whose calls run one by one, as on a CPU, and what the next one goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .caches import Held, held_by, places, put
from .capture import Captured
from .emit import Program, resolver


class Listed:
    """A captured step for one batch size.

    Args:
        captured: the step.
        program: what computes it.
    """

    def __init__(self, captured: Captured, program: Program) -> None:
        self.program = program
        names = [name for _, name in program.inputs if name.startswith("cache.")]
        self.given = [*zip(names, places(names), strict=True)]
        self.states = [name for name in program.outputs if name != "logits"]
        self.places = places(self.states)
        self.lists = sorted({(i, name) for i, name, index in self.places if index is not None})
        self.counts = [each[:2] for each in places([*captured.counts])]
        self.counters = [path.removeprefix("cache.") for path in captured.counts]
        self.counted = resolver(tuple(captured.counts.values()))

    def run(self, tokens: mx.array, own: Sequence[Any], now: Going) -> Any:
        """The logits, and what the next step with the same caches goes on with."""
        at = now.at
        held, arrays = [*map(vars, own)], {"tokens": tokens}
        for path, (number, name, index) in self.given:
            value = held[number][name]
            arrays[path] = value if index is None else value[index]
        made, array = self.computed(arrays, now)
        items: list[dict[str, Any]] = [{} for _ in own]
        for path, (number, name, index) in zip(self.states, self.places, strict=True):
            if index is None:
                items[number][name] = made[path]
            else:
                items[number].setdefault(name, [*held[number][name]])[index] = made[path]
        for number, name in self.lists:
            items[number][name] = type(held[number][name])(items[number][name])
        counts = self.counted({**self.program.values, **at})
        for (number, name), count in zip(self.counts, counts, strict=True):
            items[number][name] = count
        put(own, items)
        after = {**at, **dict(zip(self.counters, counts, strict=True))}
        return made["logits"], Going(self, after, held_by(own, self.lists), array)

    def computed(self, arrays: dict[str, mx.array], now: Going) -> tuple[dict[str, Any], Any]:
        """The outputs by their names, and the positions of the next step as an array, if any."""
        return self.program.run(arrays, now.at), None


class Going(NamedTuple):
    """What a step leaves for the next one with the same caches.

    Attributes:
        step: which goes on.
        at: the positions of the next token.
        held: what all caches have.
        array: the positions on the device, for a step that takes them so.
    """

    step: Listed
    at: dict[str, int]
    held: Held | None = None
    array: mx.array | None = None

    def holds(self, own: Sequence[Any]) -> bool:
        """Whether the caches are as the step left them."""
        return self.held is not None and self.held.same(own)
