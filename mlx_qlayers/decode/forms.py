"""Forms of a captured step for one batch size: each runs it and puts the caches back.

A :class:`Form` runs the calls of a step one by one, as on a CPU. A :class:`PaddedForm` is one
compiled function, whatever depends on positions. An :class:`~.append_form.AppendForm` is one as
well, and leaves the buffers of caches as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..ops.attention_step import MIN_POSITIONS
from ..runtime.arena import View
from .caches import RECHECK_AFTER, Held, held_by, places, put
from .capture import Captured, Unsupported
from .emit import Program, resolver
from .graph import Graph
from .rules.padded import PaddedGraph
from .rules.padding import POSITIONS, WIDEST, rows_of
from .weights import traced


class Progress(NamedTuple):
    """The state from which the next step with the same caches goes on."""

    step: Form  # the form that goes on
    held: Held  # what all caches have
    state: Any  # what the form goes on with
    left: int = RECHECK_AFTER  # for how many more tokens of each sequence
    asked: Any = None  # shape and dtype of tokens, and what the step's program belongs to

    def holds(self, own: Sequence[Any]) -> bool:
        """Whether the caches are as the step left them, and have room for another such step."""
        return self.left >= self.step.length and self.held.same(own)


class Form:
    """A captured step whose calls run one by one. Its state are positions, by name.

    Its graph is that after the rules; ``binds`` is whether calls are bound, see
    :class:`.emit.Program`.
    """

    # Of a form whose positions are an array: which of them go on with the tokens.
    moving: mx.array

    def __init__(self, captured: Captured, graph: Graph, batch: int, binds: bool = False) -> None:
        self.length: int = graph.outputs["logits"].shape[1]  # tokens of each sequence
        self.program = Program(graph, batch, captured.weights, binds)
        names = [name for _, name in self.program.inputs if name.startswith("cache.")]
        self.given = [*zip(names, places(names), strict=True)]
        self.states = [name for name in self.program.outputs if name.startswith("cache.")]
        self.places = places(self.states)
        self.lists = sorted({(i, name) for i, name, index in self.places if index is not None})
        self.counts = [each[:2] for each in places([*captured.counts])]
        self.counters = [path.removeprefix("cache.") for path in captured.counts]
        self.counted = resolver(tuple(captured.counts.values()))

    def begun(self, own: Sequence[Any], at: dict[str, int], goes_on: bool = False) -> Any:
        """The state of the first step with some caches; whether another left them as they are.

        ``Unsupported`` says that they hold tokens in another way than those of the capture.
        """
        return at, False if goes_on else None

    def dropped(
        self, own: Sequence[Any], state: Any, count: int, gone: mx.array | None = None
    ) -> tuple[Any, list[dict[str, Any]]] | None:
        """The state, and attributes of caches, without the last so many tokens; None if unknown.

        Positions of append buffers, which are arrays, may have gone back by ``gone`` before.
        """
        at, array = state
        before = {name: v - count * (name in self.counters) for name, v in at.items()}
        if isinstance(array, mx.array):
            array = array - count * self.moving
        return (before, array), [{"offset": vars(c)["offset"] - count} for c in own]

    def run(self, tokens: mx.array, own: Sequence[Any], state: Any) -> tuple[mx.array, Progress]:
        """The logits, and what the next step with the same caches goes on with."""
        (at, array), held = state, [*map(vars, own)]
        if self.program.binds and len(tokens) > 1:  # a list reads them where they are
            tokens = mx.contiguous(tokens)
        arrays = {"tokens": tokens}
        for path, (number, name, index) in self.given:
            value = held[number][name]
            arrays[path] = value if index is None else value[index]
        made, array = self.computed(arrays, at, array)
        items: list[dict[str, Any]] = [{} for _ in own]
        counts = self.counted({**self.program.values, **at})
        for (number, name), count in zip(self.counts, counts, strict=True):
            items[number][name] = count
        left = self.put_back(own, items, map(made.__getitem__, self.states))
        after = {**at, **dict(zip(self.counters, counts, strict=True))}
        return made["logits"], Progress(self, left, (after, array))

    def computed(self, arrays: dict[str, mx.array], at: dict[str, int], array: Any) -> Any:
        """The outputs by their names, and what the next step goes on with besides positions."""
        return self.program.run(arrays, at, array), True

    def put_back(
        self, own: Sequence[Any], items: list[dict[str, Any]], states: Iterable[mx.array]
    ) -> Held:
        """Let caches have other attributes and the arrays of states, all at once."""
        for (number, name, index), array in zip(self.places, states, strict=True):
            if index is None:
                items[number][name] = array
            else:
                items[number].setdefault(name, [*vars(own[number])[name]])[index] = array
        for number, name in self.lists:
            if name in items[number]:
                items[number][name] = type(vars(own[number])[name])(items[number][name])
        put(own, items)
        return held_by(own, self.lists)


class PaddedForm(Form):
    """A captured step whose positions are an array: caches keep their own buffers.

    A step writes its rows into the buffers where that array says, so that one graph serves as long
    as they do not grow: see :mod:`.rules.padded`. MLX writes in place where nobody else holds a
    buffer, so what goes on from a step holds those behind it alone. ``Unsupported`` says that a
    position becomes something else than one further on.
    """

    def __init__(
        self, captured: Captured, graph: PaddedGraph, batch: int, weights: Sequence[View] = ()
    ) -> None:
        self.weights, self.names, self.positions = weights, captured.names, graph.positions
        super().__init__(captured, graph.graph, batch)
        counts = dict(zip(self.counters, captured.counts.values(), strict=True))
        more = [_more(name, counts.get(name)) for name in self.positions]
        # MLX keeps arrays of up to 8 bytes in memory of the host, which GPUs of NVIDIA wait for.
        self.unused = [0] * max(0, MIN_POSITIONS - len(more))
        self.more = mx.array(more + self.unused, mx.int32)
        self.moving = mx.array([int(each > 0) for each in more] + self.unused, mx.int32)
        self.compiled = mx.compile(self._run)

    def _run(self, at: mx.array, arrays: list[mx.array]) -> list[Any]:
        """The outputs, and the positions of the next token."""
        given = dict(zip(["tokens", *(path for path, _ in self.given)], arrays, strict=True))
        of_cache = {path.split(".")[1]: a for path, a in given.items() if a.ndim == 4}
        rows: dict[str, int] = {}
        for name, own in self.names.items():
            number, _, kind = name.partition(".")
            key = rows_of(own) if kind == "rows" else f"{WIDEST}{own}.rows"
            there = of_cache[number].shape[2] if number in of_cache else 0
            rows[key] = max(rows.get(key, 0), there)
        # Arrays that leave as they came in must not share a buffer.
        with traced(arrays, self.weights):
            made = self.program.run({POSITIONS: at, **given}, rows)
        return [at + self.more, *(made[name] for name in ("logits", *self.states))]

    def tried(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """The logits of a step that has these inputs, and its positions zero."""
        given = [arrays[path] for path in ("tokens", *(path for path, _ in self.given))]
        logits: mx.array = self.compiled(mx.zeros_like(self.more), given)[1]
        return logits

    def computed(self, arrays: dict[str, mx.array], at: dict[str, int], array: Any) -> Any:
        if not isinstance(array, mx.array):
            array = mx.array([at[name] for name in self.positions] + self.unused, mx.int32)
        later, *made = self.compiled(array, [*arrays.values()])
        return dict(zip(("logits", *self.states), made, strict=True)), later


def _more(name: str, count: Any) -> int:
    """By how much a position goes on. Where it begins anew, the next step asks the cache."""
    if count is None or isinstance(count, int):
        return 0
    if count.terms != ((name, 1),):
        raise Unsupported(f"{name} becomes {count}")
    return int(count.const)
