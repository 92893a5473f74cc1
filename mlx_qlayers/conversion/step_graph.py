"""The graph of a step, and the trial that shows what it depends on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..decode.cache_tail import arrays_of
from ..runtime.arena import View, arena
from ..runtime.cuda_ahead import finish
from . import compiled
from .effects import Effects
from .recorder import called
from .step_caches import Inputs
from .step_kinds import Static, Unsupported, with_rows
from .step_slots import Step
from .step_trial import examples, trial
from .step_watch import Learned, Positions, learn, watched


class StepGraph:
    """A step as a compiled function, and what of its results goes where."""

    def __init__(
        self,
        model: Any,
        inside: list[nn.Module],
        function: Callable[..., Any],
        static: tuple[Static, ...],
        learned: Learned | None,
        weights: Sequence[View],
    ) -> None:
        self.weights = weights
        self.model, self.inside, self.function, self.static = model, inside, function, static
        self.learned, self.changes, self.reads_keys = learned, list[str](), False
        # Whether no code but this package's looks at what caches hold.
        self.is_own = False
        self.pattern: list[list[bool]] = []
        self.by_step, self.rings, self.tails = frozenset[int](), frozenset[int](), 0
        self.compiled = compiled.Graph(self._run)

    def _run(self, tokens: mx.array, at: list[mx.array], arrays: list[Any]) -> list[Any]:
        # What goes out as it came in are arrays of their own.
        with arena([x for each in arrays for x in arrays_of(each)], self.weights):
            return self._outputs(tokens, at, arrays)

    def _outputs(self, tokens: mx.array, at: list[mx.array], arrays: list[Any]) -> list[Any]:
        inside, model = Step(self.static, at, arrays), self.model()
        effects = Effects([model, *self.inside])
        try:
            with watched(inside, self.learned):
                logits = called(self.function, model, tokens, cache=inside.caches)
            effects.check()
            if not effects.modules.holds():
                self.changes = effects.modules.difference()
        finally:
            effects.undo()
        if not isinstance(logits, mx.array):
            raise Unsupported("the model gives more than logits")
        outputs = inside.outputs()
        self.pattern = [[a is not None for a in each] for each in outputs]
        # Rows are counted in caches that are alike.
        counted = any(begin and begin.shift is not None for begin in self.learned or ())
        self.by_step = frozenset() if counted else inside.by_step()
        self.rings = frozenset() if counted else inside.rings()
        self.reads_keys, self.is_own = inside.reads_keys(), inside.is_own()
        changed = [a for each in outputs for a in each if a is not None]
        following, tails = inside.following(), inside.tails()
        self.tails = len(tails)
        inside.close()
        return [logits, *following, *tails, *changed]

    def computed(self, tokens: mx.array, at: list[mx.array], arrays: list[Any]) -> list[Any]:
        """Logits, positions, tails, and what changed of each cache."""
        found: list[Any] = self.compiled.graph(tokens, at, arrays)
        return found

    def __call__(self, tokens: mx.array, at: list[mx.array], arrays: list[Any]) -> Any:
        self.compiled.ready(tokens, at, arrays)
        logits, *rest = self.computed(tokens, at, arrays)
        following, tails = rest[: len(at)], rest[len(at) :][: self.tails]
        flat = iter(rest[len(at) + self.tails :])
        outputs = [[next(flat) if there else None for there in each] for each in self.pattern]
        return logits, following, tails, outputs


def inside_of(model: nn.Module) -> list[nn.Module]:
    """The modules in a model."""
    return [part for part in model.modules() if part is not model]


def check(
    model: nn.Module,
    function: Callable[..., Any],
    inputs: Inputs,
    tokens: mx.array,
    rows: int,
    weights: Sequence[View],
) -> StepGraph:
    """A graph for other caches of the same kinds, that ran.

    Raises unless what it gives depends on nothing but the rows of a cache that count. Nobody knows
    what a model does with keys outside of attention. So it is tried out, with caches of so many
    rows: other numbers in those that do not count must not change a bit, and more of them no more
    than rounding does.
    """
    given, call = partial(trial, inputs.static, rows), partial(function, model, tokens)
    tried = partial(_tried, model, function, inputs, tokens, weights)
    for more in (64, -1):
        try:
            return tried((rows, rows + more), None)
        except Positions:  # they are learned
            pass
        try:
            learned = learn(given, lambda step: call(cache=step.caches), more)
            return tried((rows, rows + more), learned)
        except Positions as problem:  # with so many rows more it takes another branch
            error = problem
    raise error


def _tried(
    model: nn.Module,
    function: Callable[..., Any],
    inputs: Inputs,
    tokens: mx.array,
    weights: Sequence[View],
    rows: tuple[int, int],
    learned: Learned | None,
) -> StepGraph:
    results, inside = [], inside_of(model)
    for size, fillings in ((rows[0], (0.25, -40.0)), (rows[1], (0.25,))):
        static = tuple(with_rows(each, size) for each in inputs.static)
        graph = StepGraph(weakref.ref(model), inside, function, static, learned, weights)
        at = [mx.array([3, 3, 3])] * len(inputs.groups)
        for filling in fillings:
            arrays = [a for each in static for a in examples(each, filling)]
            results.append(graph(mx.zeros_like(tokens), at, arrays)[0])
    finish()
    one, other, larger = (each.astype(mx.float32) for each in results)
    if not mx.array_equal(one, other, equal_nan=True).item():
        raise Unsupported("the model looks at rows of a cache that are not written yet")
    if not ((one - larger).square().mean() <= 0.01 * one.square().mean()).item():
        raise Unsupported("the model looks at how many rows a cache has")
    return graph
