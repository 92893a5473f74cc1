"""Steps of models by their graphs: what is captured for whom, and when it is valid."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import is_
from typing import Any

import mlx.core as mx

from ..runtime.arena import View
from ..runtime.backend import Mode, current, epoch
from ..runtime.devices import device_of, on_cpu
from ..runtime.explain import note
from ..runtime.memory import uncollected
from ..runtime.threads import here
from ..runtime.transformed import is_traced, is_transformed
from . import ahead
from .append_buffers import released
from .append_form import AppendForm
from .caches import REACH, Facts, arrays_of, facts, more_steps
from .capture import Differs, Unsupported, stopping_line
from .captured import MAX_BATCH, CapturedStep, captured
from .effects import Effects
from .emit import Program, each_kind_once
from .forms import Form, PaddedForm, Progress
from .rules import fused
from .rules.attention_step import BATCHES, TracedCaches
from .rules.invariant import invariant
from .rules.padded import padded
from .snapshot import Snapshot
from .twin import arrays_of as arrays_in
from .twin import leaves
from .weights import views_of

# A step as one function of mx.compile.
Compiled = AppendForm | PaddedForm
# Tokens of a sequence at most: for more, the products are those of a prompt.
MAX_LENGTH = 16
# Captures and programs of one model that are kept.
_KEPT = 32


def step(model: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array | None:
    """The logits (B, L, vocabulary) of tokens (B, L), with caches that have some behind them.

    None where the step is left to the model: :func:`stopped` says why.
    """
    if tokens.ndim != 2 or tokens.shape[1] > MAX_LENGTH or tokens.shape[0] > MAX_BATCH:
        return None
    if not caches or current.get().mode is not Mode.EAGER:
        return None
    steps = _steps.get(id(model))
    if steps is None or not steps.is_of_now():
        if steps is None:
            weakref.finalize(model, _steps.pop, id(model), None).atexit = False
        elif steps.is_in_vain():
            return None
        steps = _steps[id(model)] = Steps(model, steps)
    return steps.run(tokens, caches)


def last_of(model: Any, own: Sequence[Any]) -> tuple[Steps, Progress] | None:
    """The graphs of a model and the progress of caches that are as their last step left them."""
    steps = _steps.get(id(model))
    last = steps.progress.get(own[0]) if steps else None
    return None if steps is None or last is None or not last.held.same(own) else (steps, last)


def stopped(model: Any) -> str | None:
    """Why steps of a model run without a graph since its last change; None if they do not."""
    steps = _steps.get(id(model))
    if steps is None:
        return "no step was run"
    return "; ".join(dict.fromkeys(steps.stopped.values())) or None


def where() -> Any:
    """The key of compiled steps that are made and used now; None where calls run one by one.

    So they do on a CPU, inside another graph, and where a debug mode wants to see each launch.
    """
    device, state = mx.default_device(), current.get()
    if device.type == mx.cpu or epoch.debug or state.mode is not Mode.EAGER:
        return None
    return state, here.number, str(mx.default_stream(device)), epoch.number


def place_now() -> Any:
    """The key of steps that are made and used now, also where their calls run one by one."""
    return where() or (current.get(), epoch.state, mx.default_device().type)


class Steps:
    """The graphs of a model as it is now."""

    def __init__(self, model: Any, before: Steps | None = None) -> None:
        self.model = weakref.ref(model)
        # The model itself is not held, with which this is let go.
        inside = [part for part in model.modules() if part is not model]
        self.items, self.type = dict(model), type(model)
        self.snapshot = Snapshot(inside, vars(model), self.items, types=[type(model)])
        self.stopped: dict[Any, str] = {}  # why steps are left to the model, by their caches
        # Where those were that are not alike any two of which are captured.
        self.branches: dict[Any, dict[str, int]] = {}
        vain = before is not None and before.failed()
        self.wait: int = min(2 * before.wait + 1, 1000) if before and vain else 0
        self.waits = self.wait
        self.steps: dict[Any, list[CapturedStep]] = {}
        self.reaches: dict[Any, int] = {}
        self.replaces = False
        self.is_ahead = False  # whether steps of other batch sizes were begun
        # The last step with append buffers that was begun for some tokens, and its capture.
        self.appending: dict[Any, tuple[AppendForm, CapturedStep]] = {}
        # The last step's progress, by the first of its caches as long as that lives.
        self.progress: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def failed(self) -> bool:
        """Whether nothing was captured."""
        return bool(self.stopped) and not self.steps

    def is_in_vain(self) -> bool:
        """Whether a model that changes in its calls is left alone for now."""
        self.waits -= 1
        return self.failed() and self.waits >= 0

    def is_of_now(self) -> bool:
        """Whether nothing in the model was replaced, or changed in place."""
        model, items = self.model(), self.items
        if model is None or type(model) is not self.type or [*model] != [*items]:
            return False
        same = all(map(is_, model.values(), items.values()))
        return same and (self.snapshot.holds() or self._replaced_by_equal_ones())

    def _replaced_by_equal_ones(self) -> bool:
        """Whether the model's code did to arrays what it does in each call; they are put back."""
        if not self.replaces or not self.snapshot.equal():
            return False
        self.snapshot.restore()
        return True

    def run(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array | None:
        """The logits, and the caches with the tokens; None if it cannot be."""
        own = leaves(caches)
        if not own or is_traced(tokens):
            return None
        asked = tokens.shape, tokens.dtype, place_now()
        last = self.progress.get(own[0])
        key: Any = asked
        at: dict[str, int] = {}
        try:
            if last is not None and last.asked == asked and last.holds(own):
                return self._goes_on(tokens, own, last)
            if all(c.empty() for c in own):
                return None
            if last is not None and (found := self.behind(asked, own, last)) is not None:
                return self._goes_on(tokens, own, found)
            released(own)
            some = [facts(c, tokens.shape[1]) for c in own]
            key = tokens.shape[1], tuple(each.key for each in some), _alike(some)
            at = _positions(some)
            if key not in self.stopped or not self._is_behind(key, len(tokens), at):
                if is_transformed([*arrays_of(own).values()]):
                    raise Unsupported("a gradient of a cache's arrays is taken")
                goes_on = last is not None and type(last.step) is Form and last.held.same(own)
                with uncollected(), ahead.first():
                    return self._first(key, tokens, caches, some, goes_on)
        except Exception as error:
            # A call of the model writes what it would have written, whatever has been by now.
            self.progress.pop(own[0], None)
            self.stopped[key] = stopping_line(error)
            self.branches[key] = at if isinstance(error, Differs) else {}
        note("step", "layers", self.stopped[key])
        return None

    def outputs(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """The logits of a step inside another graph; the caches stay as they are.

        ``Unsupported`` says that the step is left to the model.
        """
        own, (batch, length) = [*leaves(caches)], tokens.shape
        some = [facts(c, length) for c in own]
        found = self._captured((length,), caches, some, batch)
        program = Program(found.graph, batch, found.captured.weights)
        return program.run({"tokens": tokens, **arrays_of(own)}, _positions(some))["logits"]

    def _is_behind(self, key: Any, batch: int, at: dict[str, int]) -> bool:
        """Whether the model's code takes its other branch here as well, if it does for a key."""
        ahead = any(at[n] < v for n, v in self.branches[key].items() if not n.endswith("rows"))
        known = self.branches[key] and any(s.holds(batch, at) for s in self.steps.get(key, ()))
        return not (ahead or known)

    def _first(
        self, key: Any, tokens: mx.array, caches: Sequence[Any], some: list[Facts], goes_on: bool
    ) -> mx.array:
        """A step that goes on from no other, or from another one."""
        (batch, length), at = tokens.shape, _positions(some)
        found = next((s for s in self.steps.get(key, ()) if s.holds(batch, at)), None)
        if found is None:
            found = self._captured(key, caches, some, batch)
            self.steps[key] = [found, *self.steps.get(key, ())][:_KEPT]
        own = leaves(caches)
        for step in self._forms(found, batch, some):
            try:
                state = step.begun(own, at, goes_on)
            except Unsupported:  # as long as these caches hold what they do
                continue
            logits, now = step.run(tokens, own, state)
            if not self.is_ahead and isinstance(step, Compiled) and length == 1:
                self._prepare_ahead(step, found, some)
            steps = [(most - at[name]) // length for name, (_, most) in found.limits.items()]
            if not isinstance(step, AppendForm):
                pairs = zip(some, own, strict=True)
                steps += [more_steps(each, c, length) for each, c in pairs]
            asked = tokens.shape, tokens.dtype, place_now()
            left = min([*(count * length for count in steps), now.left])
            self.progress[own[0]] = now._replace(asked=asked, left=left)
            if isinstance(step, AppendForm):
                if len(self.appending) >= _KEPT:
                    self.appending.clear()
                self.appending[asked] = step, found
            return logits
        raise AssertionError

    def behind(self, asked: Any, own: list[Any], last: Progress) -> Progress | None:
        """The progress from which a step goes on behind one of another number of tokens.

        Both have append buffers, which the caches keep.
        """
        step, found = self.appending.get(asked, (None, None))
        if step is None or found is None or not isinstance(last.step, AppendForm):
            return None
        at = {f"{i}.{name}": v for i, c in enumerate(own) for name, v in vars(c).items()}
        if not last.held.same(own) or not found.holds(asked[0][0], at):
            return None
        if (state := step.behind(last.step, own, last.state)) is None:
            return None
        limits = [most - at[name] for name, (_, most) in found.limits.items()]
        return Progress(step, last.held, state, min([last.left, *limits]), asked)

    def _goes_on(self, tokens: mx.array, own: list[Any], last: Progress) -> mx.array:
        logits, now = last.step.run(tokens, own, last.state)
        left = min(last.left - last.step.length, now.left)
        self.progress[own[0]] = now._replace(asked=last.asked, left=left)
        return logits

    def _forms(self, found: CapturedStep, batch: int, some: Sequence[Facts]) -> Iterator[Form]:
        """The forms that can run a step with such caches, the fastest first.

        ``Unsupported`` says that none has the bits of a batch-invariant model.
        """
        place, caches = where(), TracedCaches([each.key for each in some], found.captured.names)
        alike = current.get().invariant
        kinds = ("invariant",) if alike else ("append", "padded")
        for kind in kinds if place else ():
            key: Any = (kind, batch, current.get(), place)
            if key not in found.programs:
                try:
                    found.programs[key] = self._compiled(kind, found, batch, caches)
                except Unsupported as error:
                    found.programs[key] = None
                    if kind != "append":
                        self.stopped[key] = str(error)
            if found.programs[key] is not None:
                yield found.programs[key]
        if alike:
            raise Unsupported("only prompts have a batch-invariant model's bits")
        key = "listed", batch, place_now()
        if key not in found.programs:
            found.programs[key] = Form(found.captured, found.graph, batch, binds=on_cpu())
        yield found.programs[key]

    def _prepare_ahead(self, step: Compiled, found: CapturedStep, some: Sequence[Facts]) -> None:
        """Have the steps of other batch sizes made, of a batch that may grow."""
        grows = step.program.batch > 1 or any(each.key[0] in BATCHES for each in some)
        if not grows or not device_of().gpu:
            return
        self.is_ahead = True
        # Sums over ranks have to come in the same order in all of them.
        if any(node.op == "AllSum" for node in found.captured.graph.nodes):
            return
        caches = TracedCaches([each.key for each in some], found.captured.names)
        programs = found.programs
        kind, _, *now = next(key for key, form in [*programs.items()] if form is step)
        graph = found.forms[kind] if kind == "append" else found.forms[kind].graph

        # Where a function ends, MLX 0.32.4 forgets its traces in the thread alone that called it
        # last, and gives others to the next function at its address: a request's are not called.
        def logits(batch: int) -> mx.array | None:
            ahead.give_way()
            if (key := (kind, batch, *now)) in programs:
                return None
            form = self._compiled(kind, found, batch, caches)
            with each_kind_once(ahead.give_way):
                tried = form.tried(ahead.zeros(graph, batch, found.captured.weights))
            programs.setdefault(key, form)  # where requests have not met that size by now
            return tried

        ahead.begin([n for n in ahead.SIZES if n <= found.batches[1]], logits)

    def _compiled(
        self, kind: str, found: CapturedStep, batch: int, caches: TracedCaches
    ) -> Compiled:
        if kind not in found.forms:
            rules: Any = {"append": fused, "padded": padded, "invariant": invariant}[kind]
            graph = found.graph if kind == "padded" else found.captured.graph
            found.forms[kind] = rules(graph, caches)
        given = found.captured, found.forms[kind], batch
        if kind == "append":
            return AppendForm(*given, caches, self.weights)
        return PaddedForm(*given, self.weights)

    @cached_property
    def weights(self) -> list[View]:
        """Where arrays of the model lie."""
        model: Any = self.model()
        return views_of(model)

    def _captured(
        self, key: Any, caches: Sequence[Any], some: list[Facts], batch: int, again: bool = True
    ) -> CapturedStep:
        """A step for these caches, and for as many positions and batch sizes as are alike."""
        model: Any = self.model()
        arrays = [array for _, array in arrays_in(model)]
        if is_transformed(arrays):
            raise Unsupported("a gradient of the model's arrays is taken")
        mx.eval(arrays)
        # Where the code takes another branch further on, that is looked for from what did last.
        reach = self.reaches.get(key, REACH)
        effects, error, found = Effects(model.modules()), None, None
        try:
            found = captured(model, caches, some, batch, key[0], reach)
        except Unsupported as stopped:
            error = stopped
        finally:
            changed = effects.undo()
            if not self.is_of_now():
                names = ", ".join(self.snapshot.difference())
                changed = changed or f"the model changes {names} in a call"
                self.snapshot.restore()
        if changed and again:  # it may have been another thread
            return self._captured(key, caches, some, batch, again=False)
        if changed:
            raise Unsupported(changed) from error
        if found is None:
            raise error or Unsupported("nothing was captured")
        self.reaches[key] = REACH if found.reach == REACH else 4 * max(found.reach, 1)
        self.replaces |= found.replaces
        return found


def _alike(some: Sequence[Facts]) -> tuple[int, ...]:
    """Which positions of caches are the same, and which have as many rows."""
    groups: dict[Any, int] = {}
    values = [v for f in some for v in f.counters.values()] + [("rows", f.rows) for f in some]
    return tuple(groups.setdefault(v, len(groups)) for v in values)


def _positions(some: Sequence[Facts]) -> dict[str, int]:
    """The values of all positions by their names."""
    at = {f"{i}.{name}": v for i, each in enumerate(some) for name, v in each.counters.items()}
    return at | {f"{i}.rows": each.rows for i, each in enumerate(some) if each.rows is not None}


# The keys are identities, because models are dicts, which have no hash.
_steps: dict[int, Steps] = {}
