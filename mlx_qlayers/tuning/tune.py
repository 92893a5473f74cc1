"""Tuning one kernel for one problem: search, verify, measure, keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Generic, TypeVar

from .family import Family, Problem
from .judge import Judge, judge_of
from .search import Stopped, Trial, beam_search
from .store import Entry, save, source_hash, stored
from .workers import Workers

C = TypeVar("C")
# Differences below this are noise, and a search that gains no more stops.
_NOISE = 0.01


@dataclass(frozen=True)
class Tuned(Generic[C]):
    """What tuning found.

    Attributes:
        problem: what for.
        config: the fastest configuration.
        path: ``"kernel"``, a path that beats it, or ``"modelled"`` where costs were computed.
        seconds: what that path takes.
        heuristic: what the kernel takes without tuning.
        trials: every configuration that was tried, the fastest first.
    """

    problem: Problem
    config: C
    path: str
    seconds: float
    heuristic: float
    trials: list[Trial[C]]

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
        >>> tune(ROW_SUM, Problem((64, 4096), mx.float32), machine="applegpu_g13s").config
        RowSum(upcast=2, unroll=4, local=1, group=4, blocked=False, padded=False)
    """
    judge = judge_of(family, problem, machine)
    deadline = time.monotonic() + budget_s
    heuristic = family.heuristic(problem, judge.device)
    tried: dict[C, Trial[C]] = {}

    def attempts(configs: Sequence[C]) -> Iterator[Trial[C]]:
        if workers is None or len(configs) == 1:
            run = judge.attempts(configs)
        else:
            run = workers.attempts(family, problem, configs)
        for trial in run:
            tried[trial.config] = trial
            progress(trial)
            yield trial
            if time.monotonic() > deadline:
                raise Stopped

    first = next(attempts([heuristic]))
    if first.problem:
        raise RuntimeError(
            f"{family.name}, {problem}: the heuristic's {heuristic}: {first.problem}"
        )
    interrupted: KeyboardInterrupt | None = None
    try:
        beam_search(
            [first],
            _starts(family, problem, judge),
            lambda config: family.near(config, problem),
            attempts,
            width=beam,
            noise=_NOISE,
        )
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    trials = sorted(tried.values(), key=lambda trial: trial.seconds)
    tuned = _final(judge, heuristic, trials, 0 if interrupted else beam)
    if keep:
        save(judge.name, {family.key(problem): _entry(family, tuned)})
    if interrupted:
        raise interrupted
    return tuned


def _starts(family: Family[C], problem: Problem, judge: Judge[C]) -> list[C]:
    """What the search begins with besides the heuristic's choice: what is known, and others."""
    known = stored(family.key(problem), family.configs, family.kernels, judge.name)
    starts = [*family.others(problem), *([known[1]] if known is not None else [])]
    return [config for config in starts if family.why_not(config, problem) is None]


def _final(judge: Judge[C], heuristic: C, trials: list[Trial[C]], best: int) -> Tuned[C]:
    """The best few, the heuristic's choice and the other paths, compared once more."""
    before = next(trial.seconds for trial in trials if trial.config == heuristic)
    if judge.hung or best == 0:
        seconds, paths = [before, trials[0].seconds], dict[str, float]()
        configs = [heuristic, trials[0].config]
    else:
        good = [t.config for t in trials if not t.problem and t.config != heuristic]
        configs = [heuristic, *good[:best]]
        seconds, paths = judge.compare(configs)
    # What the noise does not tell apart stays as it is.
    adjusted = [seconds[0] * (1 - _NOISE), *seconds[1:]]
    config = configs[adjusted.index(min(adjusted))]
    times = {judge.path: seconds[configs.index(config)], **paths}
    path = min(times, key=times.__getitem__)
    return Tuned(judge.problem, config, path, times[path], seconds[0], trials)


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
