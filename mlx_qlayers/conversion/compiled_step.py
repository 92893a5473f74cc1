"""A model's step of decoding as one compiled graph, by the model's own code.

For a token of each sequence the model's ``__call__`` runs once, inside a graph, with caches of
:mod:`.step_caches`; the modules in it compute as they do otherwise, by this package's operations.
Later tokens run the graph. What cannot be in one, such as code that looks at values, stops the
graph and leaves steps to the model, and its line is named.
"""

from __future__ import annotations

import inspect
import linecache
import traceback
import weakref
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..runtime.backend import Mode, mode, use_backend
from . import compiled
from .attention_patch import made_class, stock_class
from .compiled_blocks import Snapshot
from .matcher import Match, Mismatch
from .step_caches import (
    Inputs,
    Nested,
    Position,
    Rows,
    Static,
    Step,
    Unsupported,
    current_step,
    put,
    reason_against,
    taken,
)

# Sequences at most: for more the products are those of a prompt.
_MAX_BATCH = 64
# Graphs of one model: a cache that grows takes new ones.
_MAX_GRAPHS = 8
# The name of what a whole model is.
STEP = "step"
_PACKAGE = __name__.partition(".")[0]


@cache
def step_class(cls: type[nn.Module]) -> type[nn.Module] | Mismatch:
    """The class that stands in for that of a whole model, or why there is none."""
    stock, call = stock_class(cls), inspect.getattr_static(cls, "__call__", None)
    if not isinstance(call, FunctionType):
        return Mismatch("its __call__ is no plain method")
    if isinstance(whole := with_graph(call), Mismatch):
        return whole
    body = {"__call__": whole, "_fuses": cls, "_match": Match(STEP, {})}
    return made_class(stock, (cls,), body, step_class)


@cache
def with_graph(function: FunctionType) -> FunctionType | Mismatch:
    """The ``__call__`` of a model whose steps of decoding run as one graph."""
    names = [*inspect.signature(function).parameters]
    if "cache" not in names[2:]:
        return Mismatch("it takes no tokens and cache")
    second = names[2] == "cache"

    def call(self: Any, *args: Any, **options: Any) -> Any:
        caches = args[1] if second and len(args) == 2 else options.get("cache")
        plain = len(args) + len(options) == 2 and len(args) > 0
        if plain and caches and (logits := step(self, function, args[0], caches)) is not None:
            return logits
        return function(self, *args, **options)

    return call  # type: ignore[return-value]


def step(model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any]) -> Any:
    """The logits of a token of each sequence, and the caches with it; None if not by a graph."""
    if tokens.ndim != 2 or tokens.shape[1] != 1 or tokens.shape[0] > _MAX_BATCH or model.training:
        return None
    where = compiled.context()
    if where is None or reason_against(caches):
        return None
    plan = _plans.get(id(model))
    if plan is None or not plan.snapshot.holds():
        if plan is None:
            weakref.finalize(model, _plans.pop, id(model), None).atexit = False
        plan = _plans[id(model)] = _Plan(model, function)
    return None if plan.stopped else plan.run(where, tokens, caches)


class _Plan:
    """The graphs of a model, as it is now.

    Attributes:
        stopped: the line of code that no graph can hold, and why; empty if there is none.
    """

    def __init__(self, model: Any, function: Callable[..., Any]) -> None:
        self.model, self.function = weakref.ref(model), function
        self.snapshot = Snapshot([*model.modules()])
        self.stopped = ""
        self.graphs: dict[Any, _Graph] = {}
        self.following: dict[Position, mx.array] = {}

    def run(self, where: Any, tokens: mx.array, caches: list[Any]) -> Any:
        inputs = taken(caches)
        key = where, tokens.shape, inputs.static
        try:
            if (graph := self.graphs.get(key)) is None:
                graph = self._made(inputs, tokens)
                self.graphs = dict([*self.graphs.items()][1 - _MAX_GRAPHS :]) | {key: graph}
            at = [
                _array(each) if (array := self.following.get(each)) is None else array
                for each in inputs.positions
            ]
            logits, following, outputs = graph(tokens, at, inputs.arrays)
        except Exception as error:
            self.stopped = stopping_line(error)
            return None
        later = [(a + 1, b + 1, c + 1) for a, b, c in inputs.positions]
        self.following = dict(zip(later, following, strict=True))
        put(caches, outputs)
        return logits

    def _made(self, inputs: Inputs, tokens: mx.array) -> _Graph:
        model = self.model()
        assert model is not None
        if not self.graphs:
            check(model, self.function, inputs, tokens)
            if not self.snapshot.holds():
                raise Unsupported(f"the model changes {self.snapshot.difference()} in a call")
        mx.eval([a for part in model.modules() for a in _arrays_of(part)])
        return _Graph(self.model, self.function, inputs.static)


def check(model: nn.Module, function: Callable[..., Any], inputs: Inputs, tokens: mx.array) -> None:
    """Raise unless a graph depends on nothing but the rows of a cache that count.

    Nobody knows what a model does with keys outside of attention. So it is tried out, with small
    caches: other numbers in the rows that do not count must not change a bit, and more of those
    rows no more than rounding does.
    """
    results = []
    for rows, filling in ((16, 0.25), (16, -40.0), (80, 0.25)):
        static = tuple(_with_rows(each, rows) for each in inputs.static)
        graph = _Graph(weakref.ref(model), function, static)
        arrays = [a for each in static for a in _examples(each, filling)]
        at = [_array((3, 3, 3))] * len(inputs.positions)
        results.append(graph(mx.zeros_like(tokens), at, arrays)[0])
    one, other, larger = (each.astype(mx.float32) for each in results)
    if not mx.array_equal(one, other, equal_nan=True).item():
        raise Unsupported("the model looks at rows of a cache that are not written yet")
    if not ((one - larger).square().mean() <= 0.01 * one.square().mean()).item():
        raise Unsupported("the model looks at how many rows a cache has")


def _with_rows(static: Static, rows: int) -> Static:
    """The same with buffers of so many rows."""
    if isinstance(static, Rows):
        keys, values = ((b, h, rows, d) for b, h, _, d in static.shapes)
        settings = tuple((n, rows if n == "max_size" else v) for n, v in static.settings)
        return static._replace(shapes=(keys, values), full=False, rotated=False, settings=settings)
    if isinstance(static, Nested):
        return Nested(tuple(_with_rows(part, rows) for part in static.parts))
    return static


def _examples(static: Static, filling: float) -> list[mx.array]:
    """Arrays of a cache whose first three rows count."""
    key = mx.random.key(0)
    if isinstance(static, Rows):
        arrays, batch = [], static.shapes[0][0]
        for b, h, rows, width in static.shapes:
            written = mx.random.normal((b, h, 3, width), key=key)
            rest = mx.full((b, h, rows - 3, width), filling)
            arrays.append(mx.concatenate([written, rest], axis=2).astype(static.dtype))
        positions = [mx.full((batch,), 3), mx.zeros((batch,), mx.int32)]
        return arrays + positions * hasattr(static.kind, "finalize")
    if isinstance(static, Nested):
        return [a for part in static.parts for a in _examples(part, filling)]
    shapes = [each for each in static.shapes if each is not None] if static else []
    return [(0.1 * mx.random.normal(s, key=key)).astype(dtype) for s, dtype in shapes]


def why_not(model: Any) -> str:
    """The line of a model's code that stops a graph of a step, and why; empty if none does.

    The code runs for a prompt and a token without a number being computed.
    """
    from mlx_lm.models.cache import make_prompt_cache

    function = inspect.getattr_static(type(model), "__call__")

    def run(prompt: mx.array, token: mx.array) -> mx.array:
        caches = make_prompt_cache(model)
        function(model, prompt, cache=caches)
        if reason := reason_against(caches):
            raise Unsupported(reason)
        inputs, seen = taken(caches), Snapshot([*model.modules()])
        at = [token.flatten() + mx.array([*each]) for each in inputs.positions]
        logits = function(model, token, cache=Step(inputs.static, at, inputs.arrays).caches)
        if not seen.holds():
            raise Unsupported(f"the model changes {seen.difference()} in a call")
        return logits

    before = Snapshot([*model.modules()])
    try:
        with use_backend("ops"):
            mx.compile(run)(mx.zeros((1, 2), mx.int32), mx.zeros((1, 1), mx.int32))
    except Exception as error:
        return stopping_line(error)
    finally:
        before.restore()
    return ""


class _Graph:
    """A step as a compiled function, and what of its results goes where."""

    def __init__(
        self, model: Any, function: Callable[..., Any], static: tuple[Static, ...]
    ) -> None:
        self.model, self.function, self.static = model, function, static
        self.pattern: list[list[bool]] = []
        self.compiled = mx.compile(self._run)

    def _run(self, tokens: mx.array, at: list[mx.array], arrays: list[mx.array]) -> list[mx.array]:
        inside = Step(self.static, at, arrays)
        before = current_step.set(inside)
        try:
            with mode(Mode.INFERENCE):
                logits = self.function(self.model(), tokens, cache=inside.caches)
        finally:
            current_step.reset(before)
        if not isinstance(logits, mx.array):
            raise Unsupported("the model gives more than logits")
        outputs = inside.outputs()
        self.pattern = [[a is not None for a in each] for each in outputs]
        following = [each + 1 for each in at]
        return [logits, *following, *(a for each in outputs for a in each if a is not None)]

    def __call__(self, tokens: mx.array, at: list[mx.array], arrays: list[mx.array]) -> Any:
        logits, *rest = self.compiled(tokens, at, arrays)
        following, flat = rest[: len(at)], iter(rest[len(at) :])
        outputs = [[next(flat) if there else None for there in each] for each in self.pattern]
        return logits, following, outputs


def _array(at: Position) -> mx.array:
    return mx.array([*at, *[0] * 5], mx.int32)


def _arrays_of(part: nn.Module) -> list[mx.array]:
    return [a for a in (*part.values(), *vars(part).values()) if isinstance(a, mx.array)]


def stopping_line(error: Exception) -> str:
    """The line of the model's code at which a graph stopped, and why."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"/{_PACKAGE}/" not in f.filename and "/mlx/" not in f.filename]
    reason = (
        f"{type(error).__name__}: {error}" if not isinstance(error, Unsupported) else str(error)
    )
    reason = " ".join(reason.split())[:200]
    if not own:
        return reason
    line = linecache.getline(own[-1].filename, own[-1].lineno or 0).strip()
    return f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}: {line}: {reason}"


# By the identity of models, which are dicts and cannot be keys.
_plans: dict[int, _Plan] = {}
