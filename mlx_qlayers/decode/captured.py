"""A step that is captured: in which settings a model's code runs for it, and where it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt
from typing import Any

import mlx.core as mx

from .caches import REACH, Facts, settings
from .capture import Captured, Differs, Solver, Trace, Unsupported
from .emit import Program
from .graph import Graph
from .rules import fused

# Sequences at most: for more, the products are those of a prompt.
MAX_BATCH = 128


@dataclass(eq=False)
class CapturedStep:
    """A captured step, and where it holds."""

    captured: Captured  # the graph as the model's code has it
    batches: tuple[int, int]  # the smallest and the largest batch that it is for
    # The least and the largest number of positions, by their names in the graph.
    limits: dict[str, tuple[int, int]]
    rows: dict[str, int]  # of buffers that are numbers in the graph, by the same names
    reach: int  # how far positions went on
    replaces: bool  # whether the code puts equal arrays in the place of the model's
    programs: dict[Any, Any] = field(default_factory=dict)  # by batch size and what plans depend on
    # Graphs after the rules by the names of forms: one for all batch sizes.
    forms: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def graph(self) -> Graph:
        """The graph after the rules, without append buffers."""
        return fused(self.captured.graph)

    def holds(self, batch: int, at: dict[str, int]) -> bool:
        """Whether it computes such a step."""
        least, most = self.batches
        if not least <= batch <= most or not self.rows.items() <= at.items():
            return False
        return all(a <= at[n] <= b for n, (a, b) in self.limits.items())


def captured(
    model: Any,
    caches: Sequence[Any],
    some: Sequence[Facts],
    batch: int,
    length: int,
    reach: int = REACH,
) -> CapturedStep:
    """A model's step, with where it holds: wherever two settings are alike, in which its code runs.

    They are for most models and positions the first tokens of a text, and those far behind, for as
    many sequences as can be. Where the code takes another branch there, it runs for nearer ones, or
    for other sequences. ``Unsupported`` names a line or a primitive.
    """
    most, first, last = MAX_BATCH, None, None
    tries = [(True, most, reach), (True, batch, reach), (False, most, reach)]
    tries += [(False, most, isqrt(reach)), (False, batch, reach), (False, most, -1)]
    for low, other, way in dict.fromkeys(tries):
        one, two = settings(some, batch, length, other, way, low)
        if first is None or first.setting != one:
            first = Trace(model, caches, one)
        try:
            step = Solver(first, Trace(model, caches, two)).solved()
            break
        except Differs as error:
            last = error
    else:
        raise last or AssertionError
    limits = {}
    for (number, name), value in one.counters.items():
        least, largest = sorted((value, two.counters[number, name]))
        if name in ("offset", "_offset") or largest - least > 2:
            limits[f"{number}.{name}"] = least, largest
    batches = one.batch, max(one.batch, two.batch)
    rows = {f"{i}.rows": n for i, n in one.rows.items() if n == two.rows[i]}
    return CapturedStep(step, batches, limits, rows, way, _replaces(step, batch))


def _replaces(step: Captured, batch: int) -> bool:
    """Leave out of a captured step what takes the place of equal arrays of the model; if there is.

    ``Unsupported`` says that what it takes the place of is not equal.
    """
    outputs = step.graph.outputs
    if changed := {n: outputs.pop(n) for n in [*outputs] if n.startswith("model.")}:
        made = Program(Graph(changed), batch, step.weights).run({}, {})
        for name, array in made.items():
            if not mx.array_equal(array, step.weights[name]).item():
                raise Unsupported(f"the model changes {name} in a call")
    return bool(changed)
