"""Tuning one kernel for one problem: search, verify, measure, keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any, Generic, TypeVar

from .family import Family, Problem
from .judge import Judge, Times, judge_of
from .search import Stopped, Trial, beam_search
from .store import Entry, save, source_hash, stored
from .timing import Sample

C = TypeVar("C")
# So many of the best are measured anew, side by side with the heuristic's choice.
_FINALISTS = 3
# A kernel that takes so many times as long as another path is not searched.
_HOPELESS = 2.0
# Differences below this are noise, and a search that gains no more stops.
NOISE = 0.01


@dataclass(frozen=True)
class Tuned(Generic[C]):
    """What tuning found.

    Attributes:
        problem: what for.
        config: the fastest configuration.
        path: ``"kernel"``, a path that beats it, or ``"modelled"`` where costs were computed.
        untuned: what the kernel takes without tuning.
        times: what it takes with the configuration, and what the other paths take.
        trials: every configuration that was tried, the fastest first.
    """

    problem: Problem
    config: C
    path: str
    untuned: Times
    times: Mapping[str, Times]
    trials: list[Trial[C]]

    @property
    def heuristic(self) -> float:
        """Seconds without tuning."""
        return self.untuned.cold.median

    @property
    def seconds(self) -> float:
        """What the fastest path takes."""
        return self.times[self.path].cold.median

    @property
    def gain(self) -> float:
        """How many times as fast as without tuning."""
        return self.heuristic / self.seconds


@dataclass
class Search(Generic[C]):
    """The search for the fastest configuration.

    Attributes:
        judge: what verifies and rates configurations.
        beam: how many are kept.
        until: the time, by ``time.monotonic``, after which it stops with what it has.
        begun: called with each configuration before it is tried.
        tried: called with each trial.
        turn: gives the GPU to this search alone, in a ``with`` block.
        building: keeps others from building the same stock operator meanwhile, in a ``with`` block.
        trials: by configuration; those that are there already are not tried again.
    """

    judge: Judge[C]
    beam: int
    until: Callable[[], float]
    begun: Callable[[C], Any] = lambda config: None
    tried: Callable[[Trial[C]], Any] = lambda trial: None
    turn: Callable[[], AbstractContextManager[Any]] = nullcontext
    building: Callable[[], AbstractContextManager[Any]] = nullcontext
    trials: dict[C, Trial[C]] = field(default_factory=dict)

    def run(self) -> Tuned[C]:
        """Search, and measure the best side by side.

        Raises:
            RuntimeError: not even the heuristic's configuration works.
        """
        judge, family, problem = self.judge, self.judge.family, self.judge.whole
        heuristic = family.heuristic(problem, judge.device)
        if heuristic not in self.trials:
            self._try(heuristic)
        first = self.trials[heuristic]
        if first.problem:
            raise RuntimeError(f"{family.name}, {problem}: {heuristic}: {first.problem}")
        interrupt: KeyboardInterrupt | None = None
        try:
            if not self._is_hopeless(first):
                beam_search(
                    list(self.trials.values()),
                    _starts(family, problem, judge),
                    partial(family.near, problem=problem),
                    self._attempts,
                    width=self.beam,
                    noise=max(NOISE, judge.noise),
                )
        except KeyboardInterrupt as caught:
            interrupt = caught
        ranked = sorted(self.trials.values(), key=lambda trial: trial.seconds)
        last = finalists(heuristic, ranked)
        times = [_once(self.trials[config]) for config in last]
        paths: Mapping[str, Times] = {}
        if not judge.hung and interrupt is None:
            with self.building():
                judge.build(stock=True)
            with self.turn():
                times, paths = judge.compared(last)
        best = fastest(times)
        every = {judge.path: times[best], **paths}
        path = min(every, key=lambda name: every[name].cold.median)
        tuned = Tuned(problem, last[best], path, times[0], every, ranked)
        if interrupt is not None:
            raise Interrupted(tuned)
        return tuned

    def _is_hopeless(self, first: Trial[C]) -> bool:
        """Whether another path is so fast that no configuration will make up for it."""
        if time.monotonic() > self.until():
            return True
        self.judge.build(stock=False)
        with self.turn():
            return first.seconds > _HOPELESS * self.judge.others()

    def _attempts(self, configs: Sequence[C]) -> Iterator[Trial[C]]:
        for config in configs:
            if time.monotonic() > self.until() or self.judge.hung:
                raise Stopped
            yield self._try(config)

    def _try(self, config: C) -> Trial[C]:
        self.begun(config)
        trial = self.trials[config] = self.judge.attempt(config, self.turn())
        self.tried(trial)
        return trial


class Interrupted(KeyboardInterrupt):
    """The user had enough; what was found until then comes along as ``args[0]``."""


def tune(
    family: Family[C],
    problem: Problem,
    *,
    beam: int = 4,
    budget_s: float = 60.0,
    machine: str | None = None,
    progress: Callable[[Trial[C]], Any] = lambda trial: None,
    keep: bool = True,
) -> Tuned[C]:
    """Find the fastest configuration of a kernel, and remember it.

    Every candidate is verified before its time counts. On a GPU it is timed, in chains of launches
    on inputs that the cache does not hold; the best are then timed again side by side with the
    heuristic's choice and with the stock operator, on inputs that the cache holds too. On ``host``
    its cost is computed for a machine.

    Args:
        family: the kernel family.
        problem: shapes, dtype and format.
        beam: how many configurations the search keeps.
        budget_s: seconds after which it stops with what it has: at least the heuristic's choice.
        machine: on ``host``: for which of :data:`machines.MACHINES` to compute costs.
        progress: called with each trial.
        keep: whether to store the result.

    Raises:
        ValueError: there is no such machine, or no machine is named and there is no GPU.
        RuntimeError: not even the heuristic's configuration works.
        KeyboardInterrupt: the user had enough; what was found until then is stored.

    Example:
        >>> from mlx_qlayers.tuning.families import ROW_SUM
        >>> problem = Problem((64, 256), mx.float32)
        >>> tune(ROW_SUM, problem, budget_s=1, machine="applegpu_g13s", keep=False).gain >= 1
        True
    """
    end = time.monotonic() + budget_s
    judge = judge_of(family, problem, machine)
    try:
        tuned = Search(judge, beam, lambda: end, tried=progress).run()
    except Interrupted as interrupt:
        if keep:
            remember(judge.name, family, interrupt.args[0])
        raise
    if keep:
        remember(judge.name, family, tuned)
    return tuned


def remember(device: str, family: Family[C], tuned: Tuned[C]) -> None:
    """Store what was found."""
    config: Any = tuned.config
    entry = Entry(
        config=asdict(config),
        path=tuned.path,
        seconds=tuned.seconds,
        heuristic=tuned.heuristic,
        tried=len(tuned.trials),
        source=source_hash(*family.kernels),
        mlx=version("mlx"),
    )
    save(device, {family.key(tuned.problem): entry})


def _starts(family: Family[C], problem: Problem, judge: Judge[C]) -> list[C]:
    """What the search begins with besides the heuristic's choice: what is known, and others."""
    known = stored(family.key(problem), family.configs, family.kernels, judge.name)
    starts = [*family.others(problem, judge.device), *([known[1]] if known is not None else [])]
    return [config for config in starts if family.why_not(config, problem) is None]


def _once(trial: Trial[Any]) -> Times:
    sample = Sample.of([trial.seconds])
    return Times(sample, sample)


def finalists(heuristic: C, trials: Iterable[Trial[C]]) -> list[C]:
    """The heuristic's choice, and the best of the others that work: to be measured side by side.

    Args:
        heuristic: the heuristic's choice.
        trials: what was tried, the fastest first.
    """
    works = (t.config for t in trials if t.config != heuristic and not t.problem)
    return [heuristic, *islice(works, _FINALISTS)]


def fastest(times: Sequence[Times]) -> int:
    """Which of the finalists to take: the first, unless another one beats it."""
    best, untuned = 0, times[0]
    for i, found in enumerate(times):
        if _beats(found, untuned) and found.cold.median < times[best].cold.median:
            best = i
    return best


def _beats(found: Times, untuned: Times) -> bool:
    """Whether a configuration is faster than the heuristic's by more than noise, which stays as it
    is otherwise; and no slower where a cache holds its inputs."""
    noise = max(NOISE, (found.cold.spread + untuned.cold.spread) / 4)
    no_slower = found.warm.median <= untuned.warm.median * (1 + max(NOISE, untuned.warm.spread))
    return found.cold.median < untuned.cold.median * (1 - noise) and no_slower
