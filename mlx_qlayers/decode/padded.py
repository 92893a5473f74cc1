"""A step as one compiled function, whatever depends on positions: caches keep their own buffers.

Positions are an array, and a step writes its rows into the buffers where that says, so that one
graph serves as long as they do not grow: see :mod:`.rules.padded`. MLX writes in place where nobody
else holds a buffer, so what goes on from a step holds those behind it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..runtime.arena import View
from .capture import Captured, Unsupported
from .emit import Program
from .listed import Going, Listed
from .rules.padded import PaddedGraph
from .rules.padding import POSITIONS, WIDEST, rows_of
from .weights import traced


class Padded(Listed):
    """A captured step whose positions are an array, for one batch size.

    Args:
        captured: the step.
        graph: what :func:`.rules.padded.padded` gives of it.
        batch: sequences.
        weights: where arrays of the model lie.

    Raises:
        Unsupported: a position becomes something else than one further on.
    """

    def __init__(
        self,
        captured: Captured,
        graph: PaddedGraph,
        batch: int,
        weights: Sequence[View] = (),
    ) -> None:
        self.weights, self.names, self.positions = weights, captured.names, graph.positions
        super().__init__(captured, Program(graph.graph, batch, captured.weights))
        counts = dict(zip(self.counters, captured.counts.values(), strict=True))
        self.more = mx.array([_more(name, counts.get(name)) for name in self.positions], mx.int32)
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
        # What goes out as it came in are arrays of their own.
        with traced(arrays, self.weights):
            made = self.program.run({POSITIONS: at, **given}, rows)
        return [at + self.more, *(made[name] for name in ("logits", *self.states))]

    def computed(self, arrays: dict[str, mx.array], now: Going) -> tuple[dict[str, Any], Any]:
        """The outputs by their names, and the positions of the next step as an array."""
        at = now.array
        if at is None:
            at = mx.array([now.at[name] for name in self.positions], mx.int32)
        later, *made = self.compiled(at, [*arrays.values()])
        return dict(zip(("logits", *self.states), made, strict=True)), later


def _more(name: str, count: Any) -> int:
    """By how much a position goes on. Where it begins anew, the next step takes it from the cache.

    Raises:
        Unsupported: it becomes something else.
    """
    if count is None or isinstance(count, int):
        return 0
    if count.terms != ((name, 1),):
        raise Unsupported(f"{name} becomes {count}")
    return int(count.const)
