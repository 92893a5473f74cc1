"""Tuning one kernel for one problem: search, verify, measure, keep."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Generic, TypeVar

import mlx.core as mx

from ..runtime.backend import backend, use_backend
from ..runtime.host import checks
from ..runtime.wait import KernelTimeout, wait_for
from .cost import cost
from .family import Family, Problem
from .machines import MACHINES
from .search import Stopped, Trial, beam_search, neighbours
from .store import Entry, device_name, save, source_hash, stored
from .timing import measure

C = TypeVar("C")
# Longer than any kernel here takes; one that is not back by then hangs.
_PATIENCE = 20.0
# Differences below this are noise, and a search that gains no more stops.
_NOISE = 0.01
# Bytes of inputs that no cache holds: copies of the inputs take turns until they have as many.
_COLD = 256 << 20


@dataclass(frozen=True)
class Tuned(Generic[C]):
    """What tuning found.

    Attributes:
        problem: what for.
        config: the fastest configuration.
        path: ``"kernel"``, or a path that beats it.
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
        progress: called with each trial.
        keep: whether to store the result.

    Raises:
        ValueError: there is no such machine, or no machine is named and there is no GPU.
        RuntimeError: not even the heuristic's configuration works.

    Example:
        >>> tune(ROW_SUM, Problem((64, 4096), mx.float32), machine="applegpu_g13s").config
        RowSum(upcast=2, unroll=4, local=1, group=4, blocked=False, padded=False)
    """
    judge = _judge(family, problem, machine)
    deadline = time.monotonic() + budget_s

    def attempt(config: C) -> Trial[C]:
        if judge.hung or time.monotonic() > deadline:
            raise Stopped
        trial = judge.attempt(config)
        progress(trial)
        return trial

    heuristic = family.heuristic(problem, judge.device)
    first = judge.attempt(heuristic)
    progress(first)
    if first.problem:
        raise RuntimeError(
            f"{family.name}, {problem}: the heuristic's {heuristic}: {first.problem}"
        )
    starts = [heuristic]
    kind: Any = family.config
    known = stored(family.key(problem), kind, family.kernels, judge.name)
    if known is not None and family.why_not(known, problem) is None:
        starts.append(known)
    trials = beam_search(
        starts,
        lambda config: neighbours(config, family.axes, lambda c: family.why_not(c, problem)),
        lambda config: first if config == heuristic else attempt(config),
        width=beam,
        noise=_NOISE,
    )
    tuned = judge.final(heuristic, trials, beam)
    if keep:
        save(judge.name, {family.key(problem): _entry(family, tuned)})
    return tuned


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


def _judge(family: Family[C], problem: Problem, machine: str | None) -> _Judge[C]:
    if machine is not None:
        if machine not in MACHINES:
            raise ValueError(f"machine must be one of {', '.join(MACHINES)}, not {machine!r}")
        return _Computed(family, problem, machine)
    if backend() not in ("metal", "cuda"):
        raise ValueError("there is no GPU here; name a machine to compute costs for")
    return _Measured(family, problem)


class _Judge(ABC, Generic[C]):
    """Verifies and rates configurations for one problem."""

    name: str
    device: str
    hung = False

    def __init__(self, family: Family[C], problem: Problem) -> None:
        self.family, self.problem = family, problem
        self.inputs = family.inputs(problem)
        self.truth = family.reference(self.inputs, problem).astype(mx.float32)
        mx.eval(self.inputs, self.truth)

    def attempt(self, config: C) -> Trial[C]:
        """Verify a configuration, then rate it."""
        try:
            if error := self._error(self.family.run(self.inputs, self.problem, config)):
                return Trial(config, problem=error)
            return Trial(config, self.rate(config))
        except KernelTimeout as hang:
            # Nothing else can run on this device until the kernel ends.
            self.hung = True
            return Trial(config, problem=str(hang))
        except (RuntimeError, ValueError) as error:
            return Trial(config, problem=f"{type(error).__name__}: {error}")

    def _error(self, y: mx.array) -> str | None:
        """Why a result is wrong, if it is."""
        difference = mx.abs(y.astype(mx.float32) - self.truth).max()
        largest = mx.abs(self.truth).max()
        wait_for((difference, largest), _PATIENCE)
        found = float(difference.item())  # type: ignore[arg-type]
        allowed = self.family.tolerance(self.problem) * float(largest.item())  # type: ignore[arg-type]
        return None if found <= allowed else f"wrong by {found:.2e}, {allowed:.2e} would pass"

    @abstractmethod
    def rate(self, config: C) -> float:
        """Seconds of one launch."""

    def final(self, heuristic: C, trials: list[Trial[C]], beam: int) -> Tuned[C]:
        """The fastest trial; a judge that can measure better compares the best ones again."""
        before = next(trial.seconds for trial in trials if trial.config == heuristic)
        best = trials[0]
        return Tuned(self.problem, best.config, "kernel", best.seconds, before, trials)


class _Measured(_Judge[C]):
    """Rates by the clock of this machine's GPU."""

    def __init__(self, family: Family[C], problem: Problem) -> None:
        super().__init__(family, problem)
        self.name, self.device = device_name(), backend()
        size = sum(x.nbytes for x in self.inputs)
        copies = [family.inputs(problem) for _ in range(min(16, _COLD // max(1, size)))]
        self.sets = [self.inputs, *copies]
        mx.eval(copies)

    def rate(self, config: C) -> float:
        return measure({"": self._chain(config)}, repeats=3, least=0.002)[""].median / len(
            self.sets
        )

    def final(self, heuristic: C, trials: list[Trial[C]], beam: int) -> Tuned[C]:
        if self.hung:
            return super().final(heuristic, trials, beam)
        configs = [heuristic, *(trial.config for trial in trials if not trial.problem)][: beam + 1]
        paths = self.family.paths(self.problem)
        contenders = {str(i): self._chain(config) for i, config in enumerate(configs)}
        contenders |= {name: self._each(path) for name, path in paths.items()}
        times = {name: s.median / len(self.sets) for name, s in measure(contenders).items()}
        # What the noise does not tell apart stays as it is.
        times["0"] *= 1 - _NOISE
        winner = min(times, key=times.__getitem__)
        kernel = min(map(str, range(len(configs))), key=times.__getitem__)
        return Tuned(
            self.problem,
            configs[int(kernel)],
            winner if winner in paths else "kernel",
            times[winner],
            times["0"],
            trials,
        )

    def _chain(self, config: C) -> Callable[[], list[mx.array]]:
        return self._each(lambda inputs: self.family.run(inputs, self.problem, config))

    def _each(self, path: Callable[[list[mx.array]], mx.array]) -> Callable[[], list[mx.array]]:
        return lambda: [path(inputs) for inputs in self.sets]


class _Computed(_Judge[C]):
    """Rates by what the checked host backend counts, for a machine that need not be here."""

    def __init__(self, family: Family[C], problem: Problem, machine: str) -> None:
        super().__init__(family, problem)
        self.name, self.machine = machine, MACHINES[machine]
        self.device = "metal" if machine.startswith("applegpu") else "cuda"

    def attempt(self, config: C) -> Trial[C]:
        with use_backend("host"), checks() as report:
            self.report = report
            return super().attempt(config)

    def rate(self, config: C) -> float:
        return sum(cost(counters, self.machine).seconds for _, counters in self.report.launches)
