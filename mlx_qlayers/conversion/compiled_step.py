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
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import is_
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn

from ..decode.cache_tail import following, held_by, kind_of
from ..decode.ring_tail import kept, ring_tail
from ..decode.snapshot import Snapshot
from ..runtime.arena import View
from ..runtime.backend import use_backend
from ..runtime.explain import note
from ..runtime.transformed import is_transformed
from . import compiled
from .attention_patch import made_class, stock_class
from .cache_slots import STEPPED
from .effects import Effects, NotTheSame
from .long_prompts import in_turn
from .matcher import Match, Mismatch
from .step_caches import Inputs, leaves, put, reason_against, settings_of, taken, with_tail
from .step_graph import StepGraph, check, inside_of
from .step_kinds import Changes, OfCaches, Static, Unsupported, rows_of_all
from .step_progress import Again, Progress
from .step_slots import Step
from .step_trial import TRIAL_ROWS, trial
from .step_watch import Learned, Positions, learn, watched
from .step_weights import windows_of

# Sequences at most: for more the products are those of a prompt.
_MAX_BATCH = 128
# Graphs of one model: a cache that grows takes new ones.
_MAX_GRAPHS = 32
# Tokens that are left to the model where a graph failed with some caches alone; and how often
# random numbers are drawn in a call before they are the model's own.
_LEFT, _DRAWN = 256, 3
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
        return in_turn(function, self, *args, **options)

    return call  # type: ignore[return-value]


def step(model: Any, function: Callable[..., Any], tokens: mx.array, caches: list[Any]) -> Any:
    """The logits of a token of each sequence, and the caches with it; None if not by a graph."""
    if tokens.ndim != 2 or tokens.shape[1] != 1 or tokens.shape[0] > _MAX_BATCH:
        return None
    own = [*leaves(caches)]
    if (where := compiled.context()) is None or all(each.empty() for each in own):
        return None
    plan = _plans.get(id(model))
    if plan is None or not plan.is_of_now():
        if plan is None:
            weakref.finalize(model, _plans.pop, id(model), None).atexit = False
        plan = _plans[id(model)] = _Plan(model, function)
    logits = plan.run(where, tokens, caches, own)
    if logits is None:
        note(STEP, "layers", plan.reason)
    return logits


def stopped(model: nn.Module) -> str | None:
    """Why steps of a model run without a graph since its last change; None if they do not."""
    plan = _plans.get(id(model))
    return "no step was run" if plan is None else plan.reason or None


class _Plan:
    """The graphs of a model, as it is now.

    Attributes:
        reason: why the last step that was left to the model was.
        stopped: the line of code that no graph can hold, and why, by the kinds of all caches and
            their settings.
        changing: what the model changes itself in a call.
        drawn: how often random numbers were drawn in a call, maybe by another thread.
        tried: a graph that was tried out, by kinds; also by rows, if the code looks at keys itself.
        weights: its arrays that lie side by side.
        replaces: whether a call of the model puts arrays into it that are equal to those there.
    """

    def __init__(self, model: Any, function: Callable[..., Any]) -> None:
        # The model itself is not held, with which this is let go.
        self.model, self.function = weakref.ref(model), function
        self.items = dict(model)
        self.snapshot = Snapshot(inside_of(model), vars(model), dict(model))
        self.reason, self.drawn, self.changing = "", 0, frozenset[str]()
        self.stopped: dict[Any, str] = {}
        self.tried: dict[Any, StepGraph] = {}
        self.graphs: dict[Any, StepGraph] = {}
        self.replaces = False
        self.weights: Sequence[View] = ()
        # As long as the first cache lives.
        self.progress: WeakKeyDictionary[Any, Progress] = WeakKeyDictionary()

    def is_of_now(self) -> bool:
        """Whether the model is still as it was."""
        model, items = self.model(), self.items
        if model is None:
            return False
        same = [*model] == [*items] and all(map(is_, model.values(), items.values()))
        if same and self.snapshot.holds():
            return True
        if self.changing:
            own = (n for n in model.keys() | items.keys() if model.get(n) is not items.get(n))
            names = {f"{n} of {type(model).__name__}" for n in own}
            return self.changing >= names | {*self.snapshot.difference()}
        if equal := same and self.replaces and self.snapshot.equal():
            self.snapshot.restore()
        return equal

    def run(self, where: Any, tokens: mx.array, caches: list[Any], own: list[Any]) -> Any:
        """The logits, and the caches with the token; None if it cannot be."""
        if (now := self.progress.get(own[0])) is None:
            now = self.progress[own[0]] = Progress()
        # MLX would make a graph anew for tokens of another dtype, and not as Graph does.
        asked, settings, tried = (where, tokens.shape, tokens.dtype), None, None
        try:
            again = now.again and now.again.run(asked, tokens, own, now)
            if again is not None:
                return again
            settings = tuple(map(settings_of, own))
            if self._is_left(settings, now):
                return None
            tried = self._tried(where, tokens, caches, own)
            tailed, offsets = _tailed(own, tried.by_step, now)
            tails_of = {i: ring_tail(now.rings.get(i), own[i]) for i in tried.rings}
            rings = {i: tail for i, tail in tails_of.items() if tail is not None}
            inputs = taken(caches, tailed, now.tail, offsets, rings)
            key = where, tokens.shape, inputs.static
            # The last to be used stays longest.
            if (graph := self.graphs.pop(key, None)) is None:
                graph = self._graph(inputs.static, tried.learned)
                self.graphs = dict([*self.graphs.items()][1 - _MAX_GRAPHS :])
            self.graphs[key] = graph
            at = [
                group.make() if (array := now.following.get(group.at)) is None else array
                for group in inputs.groups
            ]
            logits, later, tails, outputs = graph(tokens, at, inputs.arrays)
        except Exception as error:
            self._leave(error, settings, now, tried is None)
            return None
        now.following = {g.later: array for g, array in zip(inputs.groups, later, strict=True)}
        count = len(inputs.tail.tails) if inputs.tail else 0
        tails, of_rings = tails[:count], tails[count:]
        if inputs.tail is not None:
            now.tail = following(inputs.tail, tails)
        put(own, outputs, tailed, now.tail.held if now.tail else ())
        now.offsets = [vars(own[i])["offset"] for i in tailed]
        now.rings = {
            number: kept(rings[number], of_rings[2 * i : 2 * i + 2], own[number])
            for i, number in enumerate(sorted(rings))
        }
        now.again = None
        if len(tailed) == len(own):
            group = inputs.groups[0].after()
            now.again = Again(asked, graph.computed, group, held_by(own))
        return logits

    def _is_left(self, settings: Any, now: Progress) -> bool:
        """Whether a step is left to the model, as one before it with such caches was."""
        if reason := self.stopped.get(settings):
            self.reason = reason
        elif now.left:
            now.left, self.reason = now.left - 1, now.reason
        return bool(reason or now.left)

    def _leave(self, error: Exception, settings: Any, now: Progress, before_caches: bool) -> None:
        """Leave steps to the model: with such caches for good, or with these for a while.

        What is the model's own doing is so with any of them. Else a failure may be due to what
        these caches hold, and random numbers may be those of another thread.
        """
        self.reason = stopping_line(error)
        self.drawn += isinstance(error, NotTheSame)
        if isinstance(error, Changes):
            self.changing |= error.names
        lasts = before_caches or isinstance(error, Unsupported)
        others = isinstance(error, NotTheSame) and self.drawn < _DRAWN
        if lasts and not others and not isinstance(error, OfCaches):
            self.stopped[settings] = self.reason
        else:
            now.left, now.reason = _LEFT, self.reason

    def _graph(self, static: tuple[Static, ...], learned: Learned | None = None) -> StepGraph:
        parts = self.snapshot.parts
        return StepGraph(self.model, parts, self.function, static, learned, self.weights)

    def _tried(self, where: Any, tokens: mx.array, caches: list[Any], own: list[Any]) -> StepGraph:
        """A graph that was tried out, with caches like these."""
        kinds = tuple(map(kind_of, own))
        if (tried := self.tried.get(kinds)) is None:
            tried = self.tried[kinds] = self._first(where, tokens, caches, own)
        if not tried.reads_keys:
            return tried
        # By how many there are, its code may take another branch.
        rows = max(rows_of_all(taken(caches).static))
        if (kinds, rows) not in self.tried:
            self.tried[kinds, rows] = self._checked(tokens, caches, rows)
        return self.tried[kinds, rows]

    def _first(self, where: Any, tokens: mx.array, caches: list[Any], own: list[Any]) -> StepGraph:
        """A graph with caches of these kinds: what it shows holds for others."""
        if reason := reason_against(own):
            raise Unsupported(reason)
        if not self.snapshot.held.is_known:
            raise Unsupported("this MLX does not show whether an array changes in place")
        model = self.model()
        assert model is not None
        arrays = [a for part in model.modules() for a in _arrays_of(part)]
        if is_transformed(arrays):
            raise Unsupported("a gradient of the model's arrays is taken")
        mx.eval(arrays)
        self.weights = windows_of(model)
        recognised = self._recognised(where, tokens, caches, own)
        return recognised or self._checked(tokens, caches, TRIAL_ROWS)

    def _recognised(
        self, where: Any, tokens: mx.array, caches: list[Any], own: list[Any]
    ) -> StepGraph | None:
        """A graph that needs no trial: only this package's own code looks at keys and values."""
        if {kind_of(each).__name__ for each in own} - {*STEPPED}:
            return None
        now = self.progress[own[0]]
        tailed, offsets = _tailed(own, frozenset(range(len(own))), now)
        if len(tailed) < len(own):
            return None
        inputs = taken(caches, tailed, now.tail, offsets)
        graph = self._graph(inputs.static)
        try:
            graph.compiled.ready(tokens, [group.make() for group in inputs.groups], inputs.arrays)
        except Exception as error:  # maybe with these caches alone
            if isinstance(error, Unsupported) and not isinstance(error, Positions):
                raise
            return None
        if not graph.is_own or graph.changes:
            return None
        self.graphs[where, tokens.shape, inputs.static] = graph
        return graph

    def _checked(self, tokens: mx.array, caches: list[Any], rows: int) -> StepGraph:
        """A graph for caches of so many rows, which computes what the model does."""
        model, static = self.model(), taken(caches).static
        assert model is not None
        graph = check(model, self.function, taken(caches), tokens, rows, self.weights)
        if graph.changes:
            # Arrays of the same numbers do not count.
            step, effects = trial(static, rows), Effects([model, *self.snapshot.parts])
            try:
                with watched(step, graph.learned):
                    self.function(model, tokens, cache=step.caches)
                self.replaces = effects.modules.equal()
            finally:
                effects.undo()
            if not self.replaces:
                raise Changes(graph.changes)
        return graph


def _tailed(
    own: list[Any], by_step: frozenset[int], last: Progress
) -> tuple[tuple[int, ...], mx.array | None]:
    """The caches that have a tail, and the positions that the caches of a batch share."""
    tailed = with_tail(own, by_step)
    offsets = [vars(own[i])["offset"] for i in tailed]
    if not offsets or isinstance(offsets[0], int):
        return tailed, None
    if len(offsets) != len(last.offsets) or not all(map(is_, offsets, last.offsets)):
        last.following = {}
        paddings = mx.stack([vars(own[i])["left_padding"] for i in tailed])
        differ = (mx.stack(offsets) != offsets[0]) | (paddings != paddings[0])
        if differ.any().item():
            return (), None
    return tailed, offsets[0]


def why_not(model: Any) -> str:
    """The line of a model's code that stops a graph of a step, and why; empty if none does.

    The code runs for a prompt and a token without a number being computed.
    """
    before = Effects(model.modules())
    for _ in range(_DRAWN):
        try:
            _run_uncomputed(model)
        except NotTheSame as error:
            reason = stopping_line(error)
        except Exception as error:
            return stopping_line(error)
        else:
            return ""
        finally:
            before.undo()
    return reason


def _run_uncomputed(model: Any) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    function = inspect.getattr_static(type(model), "__call__")

    def begun(prompt: mx.array) -> Inputs:
        caches = make_prompt_cache(model)
        function(model, prompt, cache=caches)
        if reason := reason_against([*leaves(caches)]):
            raise Unsupported(reason)
        return taken(caches)

    def run(prompt: mx.array, token: mx.array) -> mx.array:
        inputs, effects = begun(prompt), Effects(model.modules())
        at = [token.flatten() + group.make() for group in inputs.groups]
        step = Step(inputs.static, at, inputs.arrays)
        with watched(step, learned):
            logits = function(model, token, cache=step.caches)
        effects.check()
        if not effects.modules.alike():
            raise Changes(effects.modules.difference())
        return logits

    learned = None
    prompt, token = mx.zeros((1, 2), mx.int32), mx.zeros((1, 1), mx.int32)
    with use_backend("reference"):
        begun(prompt)  # what a model keeps of its first call is there then
        effects = Effects(model.modules())
        begun(prompt)
        effects.check()
        if not effects.modules.holds() and not effects.modules.equal():
            raise Changes(effects.modules.difference())
        try:
            mx.compile(run)(prompt, token)
        except Positions:
            given = partial(trial, begun(prompt).static, TRIAL_ROWS)
            learned = learn(given, lambda step: function(model, token, cache=step.caches), 64)
            mx.compile(run)(prompt, token)


def _arrays_of(part: nn.Module) -> list[mx.array]:
    return [a for a in (*part.values(), *vars(part).values()) if isinstance(a, mx.array)]


def stopping_line(error: Exception) -> str:
    """The line of the model's code at which a graph stopped, and why."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"/{_PACKAGE}/" not in f.filename and "/mlx/" not in f.filename]
    reason = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
    reason = " ".join(reason.split())[:200]
    if not own:
        return reason
    line = linecache.getline(own[-1].filename, own[-1].lineno or 0).strip()
    return f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}: {line}: {reason}"


# By the identity of models, which are dicts and cannot be keys.
_plans: dict[int, _Plan] = {}
