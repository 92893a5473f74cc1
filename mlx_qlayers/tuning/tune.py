"""Tuning one kernel for one problem: search, verify, measure, keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any, Generic, TypeVar

from .family import Family, Problem
from .judge import Judge, judge_of
from .search import Stopped, Trial, beam_search
from .shapes import Target
from .store import Entry, save, source_hash, stored
from .timing import turns
from .workers import Workers, processes

C = TypeVar("C")
# So many of the best are measured so many times more, in turns with the heuristic's choice.
_FINALISTS, _TURNS = 3, 4
# Differences below this are noise, and a search that gains no more stops.
_NOISE = 0.02


@dataclass(frozen=True)
class Tuned(Generic[C]):
    """What tuning found.

    Attributes:
        problem: what for.
        config: the fastest configuration.
        path: ``"kernel"``, a path that beats it, or ``"modelled"`` where costs were computed.
        heuristic: what the kernel takes without tuning.
        times: what it takes with the configuration, and what the other paths take.
        trials: every configuration that was tried, the fastest first.
    """

    problem: Problem
    config: C
    path: str
    heuristic: float
    times: Mapping[str, float]
    trials: list[Trial[C]]

    @property
    def seconds(self) -> float:
        """What the fastest path takes."""
        return self.times[self.path]

    @property
    def gain(self) -> float:
        """How many times as fast as without tuning."""
        return self.heuristic / self.seconds


def tune(
    family: Family[C],
    problem: Problem,
    *,
    beam: int = 4,
    budget_s: float = 60.0,
    machine: str | None = None,
    workers: Workers | None = None,
    progress: Callable[[Trial[C]], Any] = lambda trial: None,
    keep: bool = True,
) -> Tuned[C]:
    """Find the fastest configuration of a kernel, and remember it.

    Every candidate is verified before its time counts. On a GPU it is timed, in chains of launches
    on inputs that the cache does not hold; the best are then timed again side by side with the
    heuristic's choice and with the stock operator. On ``host`` its cost is computed for a machine.

    Args:
        family: the kernel family.
        problem: shapes, dtype and format.
        beam: how many configurations the search keeps.
        budget_s: seconds after which it stops with what it has: at least the heuristic's choice.
        machine: on ``host``: for which of :data:`machines.MACHINES` to compute costs.
        workers: processes that build and time candidates; without them this one does.
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
    judge = judge_of(family, problem, machine)
    attempts = judge.attempts if workers is None else partial(workers.attempts, family, problem)
    deadline = time.monotonic() + budget_s
    heuristic = family.heuristic(problem, judge.device)
    (first,) = attempts([heuristic])
    progress(first)
    if first.problem:
        raise RuntimeError(
            f"{family.name}, {problem}: the heuristic's {heuristic}: {first.problem}"
        )
    tried, paths = {heuristic: first}, judge.paths()

    def attempt(configs: Sequence[C]) -> Iterator[Trial[C]]:
        if time.monotonic() > deadline:
            raise Stopped
        for trial in attempts(configs):
            tried[trial.config] = trial
            progress(trial)
            yield trial
            if time.monotonic() > deadline:
                raise Stopped

    interrupt: KeyboardInterrupt | None = None
    try:
        near = partial(family.near, problem=problem)
        beam_search([first], _starts(family, problem, judge), near, attempt, width=beam)
    except KeyboardInterrupt as caught:
        interrupt = caught
    trials = sorted(tried.values(), key=lambda trial: trial.seconds)
    finalists = [heuristic, *(t.config for t in trials[:_FINALISTS] if t.config != heuristic)]
    seconds = [tried[config].seconds for config in finalists]
    if interrupt is None and not judge.hung and len(finalists) > 1:
        seconds = _again(attempts, finalists, tried)
    tuned = _verdict(problem, judge, finalists, seconds, paths, trials)
    if keep:
        save(judge.name, {family.key(problem): _entry(family, tuned)})
    if interrupt is not None:
        raise interrupt
    return tuned


def tune_all(
    problems: Sequence[Target],
    *,
    beam: int = 4,
    budget_s: float = 60.0,
    machine: str | None = None,
    progress: Callable[[Target, float], Any] = lambda target, gain: None,
) -> Iterator[tuple[Target, Tuned[Any]]]:
    """Tune one problem after the other within a budget, each with an even share of what is left.

    Args:
        problems: what to tune.
        beam: see :func:`tune`.
        budget_s: seconds for all of them.
        machine: see :func:`tune`.
        progress: called after each trial with the problem and its gain so far.

    Yields:
        Each problem and what was found, which is stored by then. What comes when the budget is
        spent is left out.
    """
    deadline = time.monotonic() + budget_s
    with processes(machine) as workers:
        for i, target in enumerate(problems):
            share = (deadline - time.monotonic()) / (len(problems) - i)
            if share <= 0:
                return
            seconds: list[float] = []

            def note(
                trial: Trial[Any], target: Target = target, seconds: list[float] = seconds
            ) -> None:
                seconds.append(trial.seconds)
                progress(target, seconds[0] / min(seconds))

            yield (
                target,
                tune(
                    *target,
                    beam=beam,
                    budget_s=share,
                    machine=machine,
                    workers=workers,
                    progress=note,
                ),
            )


def _starts(family: Family[C], problem: Problem, judge: Judge[C]) -> list[C]:
    """What the search begins with besides the heuristic's choice: what is known, and others."""
    known = stored(family.key(problem), family.configs, family.kernels, judge.name)
    starts = [*family.others(problem, judge.device), *([known[1]] if known is not None else [])]
    return [config for config in starts if family.why_not(config, problem) is None]


def _again(
    attempts: Callable[[Sequence[C]], Iterator[Trial[C]]],
    finalists: list[C],
    tried: dict[C, Trial[C]],
) -> list[float]:
    """The finalists measured anew, in turns; medians of all that was measured."""
    times = {config: [tried[config].seconds] for config in finalists}
    for config in turns(finalists, _TURNS):
        times[config] += [trial.seconds for trial in attempts([config])]
    return [median(times[config]) for config in finalists]


def _verdict(
    problem: Problem,
    judge: Judge[C],
    finalists: list[C],
    seconds: list[float],
    paths: Mapping[str, float],
    trials: list[Trial[C]],
) -> Tuned[C]:
    """The fastest of the finalists, of which the first is the heuristic's choice, or a path."""
    # What the noise does not tell apart stays as it is.
    adjusted = [seconds[0] * (1 - _NOISE), *seconds[1:]]
    winner = adjusted.index(min(adjusted))
    times = {judge.path: seconds[winner], **paths}
    path = min(times, key=times.__getitem__)
    return Tuned(problem, finalists[winner], path, seconds[0], times, trials)


def _entry(family: Family[C], tuned: Tuned[C]) -> Entry:
    config: Any = tuned.config
    return Entry(
        config=asdict(config),
        path=tuned.path,
        seconds=tuned.seconds,
        heuristic=tuned.heuristic,
        tried=len(tuned.trials),
        source=source_hash(*family.kernels),
        mlx=version("mlx"),
    )
