"""What decides which configuration is better: a clock, or the cost model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import itemgetter
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx

from ..runtime.backend import backend, use_backend
from ..runtime.host import checks
from ..runtime.host.kernel import Counters
from ..runtime.wait import KernelTimeout, wait_for
from .cost import cost
from .family import Family, Problem
from .gate import Gate, Queued
from .machines import MACHINES
from .search import Stopped, Trial
from .store import device_name

C = TypeVar("C")
Path = Callable[[list[mx.array]], mx.array]
# Longer than any kernel here takes; one that is not back by then hangs.
PATIENCE = 20.0
# Bytes of inputs that no cache holds: copies of the inputs take turns until they have as many.
_COLD = 256 << 20
_MOST_SETS = 63
# Launches of a chain, and times that it goes through all sets at most.
_LAUNCHES, _MOST_ROUNDS = 128, 8
# The name of the chain that launches nothing else.
_LINKS = "links"
_AT_ONCE: AbstractContextManager[Any] = nullcontext()


class Judge(ABC, Generic[C]):
    """Verifies and rates configurations for one problem.

    Attributes:
        name: of the device that results are kept for.
        device: ``"metal"``, ``"cuda"`` or ``"host"``, for heuristics.
        path: what its verdict on a kernel is called.
        hung: whether a kernel did not come back, so that nothing else can run.
    """

    name: str
    device: str
    path = "kernel"
    hung = False

    def __init__(self, family: Family[C], problem: Problem) -> None:
        self.family, self.problem = family, problem
        self.inputs = family.inputs(problem)
        self.truth = family.reference(self.inputs, problem).astype(mx.float32)
        mx.eval(self.inputs, self.truth)
        mx.clear_cache()

    def attempts(self, configs: Sequence[C]) -> Iterator[Trial[C]]:
        """Verify and rate configurations."""
        for config in configs:
            if self.hung:
                raise Stopped
            yield self.attempt(config)

    def attempt(self, config: C, turn: AbstractContextManager[Any] = _AT_ONCE) -> Trial[C]:
        """Verify a configuration, then rate it, when it is its turn."""
        try:
            if error := self._error(self.family.run(self.inputs, self.problem, config)):
                return Trial(config, problem=error)
            with turn:
                return Trial(config, self.rate(config))
        except KernelTimeout as hang:
            self.hung = True
            return Trial(config, problem=str(hang))
        except Exception as error:  # whatever is wrong with it, the search goes on
            return Trial(config, problem=f"{type(error).__name__}: {error}")

    def _error(self, y: mx.array) -> str | None:
        """Why a result is wrong, if it is."""
        difference = mx.abs(y.astype(mx.float32) - self.truth).max()
        largest = mx.abs(self.truth).max()
        wait_for((difference, largest), PATIENCE)
        found = float(difference.item())  # type: ignore[arg-type]
        allowed = self.family.tolerance(self.problem) * float(largest.item())  # type: ignore[arg-type]
        return None if found <= allowed else f"wrong by {found:.2e}, {allowed:.2e} would pass"

    @abstractmethod
    def rate(self, config: C) -> float:
        """Seconds of one launch."""

    def paths(self) -> dict[str, float]:
        """Seconds of the other paths, as far as they can be rated."""
        return {}


class Measured(Judge[C]):
    """Rates by the clock of this machine's GPU.

    Each launch waits for the one before, through its first input, and finds its inputs in memory,
    not in a cache: several sets of them take turns. All of them are queued behind a gate, and what
    the gate and the links between launches take is left out.
    """

    def __init__(self, family: Family[C], problem: Problem) -> None:
        super().__init__(family, problem)
        self.name, self.device = device_name(), backend()
        size = sum(x.nbytes for x in self.inputs)
        self.sets = [self.inputs]
        for _ in range(max(1, min(_MOST_SETS, _COLD // max(1, size)))):
            self.sets.append([mx.array(x) for x in self.inputs])
        self._rounds = max(1, min(_MOST_ROUNDS, round(_LAUNCHES / len(self.sets))))
        self._true, self._gate = mx.array([True]), _gate()
        mx.eval(self.sets, self._true)

    def rate(self, config: C) -> float:
        return self._seconds({"": self._path(config)}, repeats=7)[""]

    def paths(self) -> dict[str, float]:
        return self._seconds(self.family.paths(self.problem), repeats=15)

    def _path(self, config: C) -> Path:
        return lambda inputs: self.family.run(inputs, self.problem, config)

    def _chain(self, path: Path) -> Queued:
        """Launches one behind the other, each with a set of its own: MLX would share their work."""

        @mx.compile
        def once(y: mx.array) -> mx.array:
            for first, *others in self.sets:
                y = path([self._linked(first, y), *others])
            return y

        def run(y: mx.array) -> mx.array:
            for _ in range(self._rounds):
                y = once(y)
                mx.async_eval(y)
            return y

        return run

    def _linked(self, x: mx.array, y: mx.array) -> mx.array:
        """x, but not before y is there."""
        return mx.where(self._true, x, y[(0,) * y.ndim].astype(x.dtype))

    def _seconds(self, paths: Mapping[str, Path], repeats: int) -> dict[str, float]:
        links: Path = itemgetter(0)
        chains = {name: self._chain(path) for name, path in {_LINKS: links, **paths}.items()}
        times = self._gate.seconds(chains, repeats)
        floor, launches = times.pop(_LINKS), self._rounds * len(self.sets)
        return {n: max((t - floor) / launches, 1e-9) for n, t in times.items()}


class Computed(Judge[C]):
    """Rates by what the checked host backend counts, for a machine that need not be here.

    A problem that is too large to run on a CPU is counted in part.
    """

    path = "modelled"
    # What configurations do on a part of a problem is the same for every machine.
    _counted: ClassVar[dict[Any, tuple[str, list[Counters]]]] = {}

    def __init__(self, family: Family[C], problem: Problem, machine: str) -> None:
        part, self._times = family.part(problem)
        super().__init__(family, part)
        self.name, self.machine = machine, MACHINES[machine]
        self.device = "metal" if machine.startswith("applegpu") else "cuda"

    def attempt(self, config: C, turn: AbstractContextManager[Any] = _AT_ONCE) -> Trial[C]:
        key = type(self.family), self.problem, config
        if key not in self._counted:
            with use_backend("host"), checks() as self._report:
                trial = super().attempt(config, turn)
            if self.hung:
                return trial
            launches = [counters for _, counters in self._report.launches]
            self._counted[key] = trial.problem, launches
        problem, launches = self._counted[key]
        return (
            Trial(config, problem=problem)
            if problem
            else Trial(config, self._cost(config, launches))
        )

    def rate(self, config: C) -> float:
        return self._cost(config, [counters for _, counters in self._report.launches])

    def _cost(self, config: C, launches: list[Counters]) -> float:
        registers = self.family.registers(config, self.problem)
        # The first launch is the configured one; a second one adds up what it left.
        return sum(
            cost(counters, self.machine, self._times, 32 if i else registers).seconds
            for i, counters in enumerate(launches)
        )


@cache
def _gate() -> Gate:
    return Gate()


def judge_of(family: Family[C], problem: Problem, machine: str | None = None) -> Judge[C]:
    """The clock of this machine's GPU, or the cost model of a named machine.

    Raises:
        ValueError: no machine has that name, or none is named and there is no GPU.
    """
    if machine is not None:
        if machine not in MACHINES:
            raise ValueError(f"machine must be one of {', '.join(MACHINES)}, not {machine!r}")
        return Computed(family, problem, machine)
    if backend() not in ("metal", "cuda"):
        raise ValueError("there is no GPU here; name a machine to compute costs for")
    return Measured(family, problem)
