"""Tuning kernels for problems: search, verify, measure side by side, keep."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..dispatch.entries import Entry
from ..dispatch.measurements import lookup
from ..dispatch.tunable import Problem, source_hash
from .evaluator import Evaluator, Times
from .family import Family, P
from .problems import Target
from .search import Stopped, Trial, beam_search
from .store import save
from .timing import Sample

C = TypeVar("C")
# So many of the best are measured anew, side by side with the heuristic's choice.
_FINALISTS = 3
# A kernel that takes so many times as long as another path is not searched.
_HOPELESS = 2.0
# Differences below this are noise, and a search that gains no more stops.
NOISE = 0.01


class DeviceLost(RuntimeError):
    """A candidate hangs, or made the device refuse all work; the process can tune no more."""


@dataclass(frozen=True)
class Tuned(Generic[C]):
    """What tuning found.

    Attributes:
        problem: what for.
        config: the fastest configuration.
        path: ``"kernel"``, a path that beats it, or ``"uncompared"`` where it ended before that.
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


def tune(
    family: Family[P, C],
    problem: P,
    *,
    beam: int = 4,
    budget_s: float = 60.0,
    progress: Callable[[Trial[C]], Any] = lambda trial: None,
    keep: bool = True,
    evaluator: Callable[[Family[P, C], P], Evaluator[P, C]] = Evaluator,
) -> Tuned[C]:
    """Find the fastest configuration of a kernel, and remember it.

    Every candidate is verified before its time counts. It is timed in chains of launches on inputs
    that no cache holds; the best are then timed again side by side with the heuristic's choice and
    with the other paths, on inputs that a cache holds too.

    Args:
        family: the kernel family.
        problem: shapes, dtype and format.
        beam: how many configurations the search keeps.
        budget_s: seconds after which it stops with what it has: at least the heuristic's choice.
        progress: called with each trial.
        keep: whether to store the result.
        evaluator: makes what verifies and rates configurations.

    Raises:
        ValueError: no backend here runs kernels.
        RuntimeError: not even the heuristic's configuration works.
        KeyboardInterrupt: the user had enough; what was found until then is stored.

    Example:
        >>> from mlx_qlayers.dispatch.tunable import RowSumProblem
        >>> from mlx_qlayers.tuning.families import FAMILIES
        >>> problem = RowSumProblem(64, 256, mx.float32)
        >>> tune(FAMILIES["row_sum"], problem, budget_s=1, keep=False).trials[0].problem
        ''
    """
    until = time.monotonic() + budget_s
    return _Search(evaluator(family, problem), beam, until, progress, keep).run()


def tune_all(
    problems: Sequence[Target],
    *,
    beam: int = 4,
    budget_s: float = 60.0,
    progress: Callable[[Target, float], Any] = lambda target, gain: None,
    keep: bool = True,
    evaluator: Callable[[Family[Any, Any], Any], Evaluator[Any, Any]] = Evaluator,
) -> Iterator[tuple[Target, Tuned[Any]]]:
    """Tune several problems within a budget; each has an even share of what is left of it.

    Args:
        problems: what to tune.
        beam, keep, evaluator: see :func:`tune`.
        budget_s: seconds for all of them.
        progress: called after each trial with the problem and its gain so far.

    Yields:
        Each problem and what was found, which is stored by then. What comes when the budget is
        spent is left out, and so is one of which not even the heuristic's configuration works.

    Raises:
        DeviceLost: a candidate hangs, or made the device refuse all work.
        KeyboardInterrupt: after what was found until then.
    """
    deadline = time.monotonic() + budget_s
    for i, target in enumerate(problems):
        now = time.monotonic()
        if now >= deadline:
            return
        until = now + (deadline - now) / (len(problems) - i)
        seconds: list[float] = []

        def tried(
            trial: Trial[Any], target: Target = target, seconds: list[float] = seconds
        ) -> None:
            seconds.append(trial.seconds)
            progress(target, seconds[0] / min(seconds) if min(seconds) < inf else 1.0)

        rates = evaluator(*target)
        try:
            yield target, _Search(rates, beam, until, tried, keep).run()
        except RuntimeError as error:
            print(f"mlx-qlayers: {target.key} is not tuned: {error}", file=sys.stderr)
        if rates.lost:
            raise DeviceLost(f"{target.key}: {rates.lost}")


@dataclass
class _Search(Generic[P, C]):
    """The search for the fastest configuration.

    Attributes:
        evaluator: what verifies and rates configurations.
        beam: how many are kept.
        until: the time, by ``time.monotonic``, after which it stops with what it has.
        progress: called with each trial.
        keep: whether to store the result.
        trials: by configuration.
    """

    evaluator: Evaluator[P, C]
    beam: int
    until: float
    progress: Callable[[Trial[C]], Any]
    keep: bool
    trials: dict[C, Trial[C]] = field(default_factory=dict)

    def run(self) -> Tuned[C]:
        """Search, measure the best side by side, and store what was found."""
        family, problem = self.evaluator.family, self.evaluator.problem
        heuristic: C = problem.heuristic(self.evaluator.device)
        interrupt: KeyboardInterrupt | None = None
        compared: tuple[list[Times], dict[str, Times]] | None = None
        finals: list[C] = [heuristic]
        try:
            first = self._try(heuristic)
            if not first.problem and not self._is_hopeless(first):
                self._beam_search(first)
            finals = finalists(heuristic, self._ranked())
            if not first.problem and not self.evaluator.lost:
                compared = self.evaluator.compared(finals)
        except KeyboardInterrupt as caught:
            interrupt = caught
            if heuristic not in self.trials:
                raise
            finals = finalists(heuristic, self._ranked())
        if problem_of_first := self.trials[heuristic].problem:
            raise RuntimeError(f"{family.name}, {problem}: {heuristic}: {problem_of_first}")
        times, paths = compared or ([_once(self.trials[config]) for config in finals], {})
        best = fastest(times)
        every = {"kernel" if compared else "uncompared": times[best], **paths}
        path = min(every, key=lambda name: every[name].cold.median)
        tuned = Tuned(problem, finals[best], path, times[0], every, self._ranked())
        if self.keep:
            remember(self.evaluator.name, tuned)
        if interrupt is not None:
            raise interrupt
        return tuned

    def _beam_search(self, first: Trial[C]) -> None:
        family, problem = self.evaluator.family, self.evaluator.problem
        stored = lookup(problem, self.evaluator.name)
        starts = [*family.others(problem, self.evaluator.device)]
        starts += [] if stored is None else [stored.config]
        beam_search(
            [first],
            [config for config in starts if family.why_not(config, problem) is None],
            partial(family.near, problem=problem),
            self._attempts,
            width=self.beam,
            noise=max(NOISE, self.evaluator.noise),
        )

    def _is_hopeless(self, first: Trial[C]) -> bool:
        """Whether another path is so fast that no configuration will make up for it."""
        if time.monotonic() > self.until:
            return True
        return first.seconds > _HOPELESS * self.evaluator.others()

    def _attempts(self, configs: Sequence[C]) -> Iterator[Trial[C]]:
        for config in configs:
            if time.monotonic() > self.until or self.evaluator.lost:
                raise Stopped
            yield self._try(config)

    def _try(self, config: C) -> Trial[C]:
        trial = self.trials[config] = self.evaluator.attempt(config)
        self.progress(trial)
        return trial

    def _ranked(self) -> list[Trial[C]]:
        return sorted(self.trials.values(), key=lambda trial: trial.seconds)


def remember(device: str, tuned: Tuned[Any]) -> None:
    """Store what was found."""
    entry = Entry(
        config=asdict(tuned.config),
        path=tuned.path,
        seconds=tuned.seconds,
        heuristic=tuned.heuristic,
        tried=len(tuned.trials),
        source=source_hash(*tuned.problem.kernels()),
        mlx=version("mlx"),
        paths={name: times.cold.median for name, times in tuned.times.items()},
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    )
    save(device, {tuned.problem.key: entry})


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
