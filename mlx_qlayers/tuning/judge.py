"""What decides which configuration is better: a clock, or the cost model."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import inf
from operator import itemgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import mlx.core as mx

from ..runtime.backend import backend, use_backend
from ..runtime.host import checks
from ..runtime.host.compiled_kernel import Counters
from ..runtime.wait import KernelTimeout, wait_for
from .cost import cost
from .family import Family, Problem
from .gate import Gate, Queued
from .machines import MACHINES
from .search import Stopped, Trial
from .store import device_name
from .timing import Sample

C = TypeVar("C")
Path = Callable[[list[mx.array]], mx.array]


class Times(NamedTuple):
    """Seconds of a launch: with its inputs in memory, and with its inputs in a cache."""

    cold: Sample
    warm: Sample


# Longer than any kernel here takes; one that is not back by then hangs.
PATIENCE = 20.0
# Bytes of inputs that no cache holds: copies of the inputs take turns until they have as many.
_COLD = 256 << 20
_MOST_SETS = 63
# Seconds that a chain should take, and launches that it has at most.
_CHAIN, _LAUNCHES = 3e-3, 160
# Noise beyond the first is no reason to stop a search sooner, and beyond the second one to repeat.
_MOST_NOISE, _NOISY = 0.03, 0.1
# With these in its environment MLX starts what it is given on CUDA in order, and at once.
IN_ORDER = {"MLX_USE_CUDA_GRAPHS": "0", "MLX_MAX_OPS_PER_BUFFER": "1000"}
# The name of the chain that launches nothing else.
_LINKS = "links"
_AT_ONCE: AbstractContextManager[Any] = nullcontext()


class Judge(ABC, Generic[C]):
    """Verifies and rates configurations for one problem.

    Attributes:
        name: of the device that results are kept for.
        device: ``"metal"``, ``"cuda"`` or ``"host"``, for heuristics.
        path: what its verdict on a kernel is called.
        whole: the problem, of which ``problem`` may be the part that is run.
        hung: whether a kernel did not come back, so that nothing else can run.
        noise: what the time of one configuration differs by from one time to the next.
    """

    name: str
    device: str
    path = "kernel"
    hung = False
    noise = 0.0

    def __init__(self, family: Family[C], problem: Problem) -> None:
        self.family, self.problem, self.whole = family, problem, problem
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
        """Build a configuration, then verify and rate it, when it is its turn."""
        try:
            y = wait_for(self.family.run(self.inputs, self.problem, config), PATIENCE)
            with turn:
                if error := self._error(y):
                    return Trial(config, problem=error)
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
        mx.eval(difference, largest)
        found = float(difference.item())  # type: ignore[arg-type]
        allowed = self.family.tolerance(self.problem) * float(largest.item())  # type: ignore[arg-type]
        return None if found <= allowed else f"wrong by {found:.2e}, {allowed:.2e} would pass"

    @abstractmethod
    def rate(self, config: C) -> float:
        """Seconds of one launch."""

    def build(self, stock: bool) -> None:
        """Have the other paths built, or those alone that are not the stock operator."""

    def others(self) -> float:
        """Seconds of the fastest other path but the stock operator, roughly; infinity without."""
        return inf

    @abstractmethod
    def compared(
        self, configs: Sequence[C], paths: bool = True
    ) -> tuple[list[Times], dict[str, Times]]:
        """Configurations side by side, and the other paths as far as they can be rated."""


class Measured(Judge[C]):
    """Rates by the clock of this machine's GPU.

    Each launch begins after the one before, and finds its inputs in memory, not in a cache: several
    sets of them take turns. All of them are queued behind a gate, and what the gate takes is left
    out. Where the device starts at once what does not depend on each other, each launch waits for
    the one before through its first input, and what such links take is left out too.
    """

    def __init__(self, family: Family[C], problem: Problem) -> None:
        super().__init__(family, problem)
        self.name, self.device = device_name(), backend()
        size = sum(x.nbytes for x in self.inputs)
        self.sets = [self.inputs]
        for _ in range(max(1, min(_MOST_SETS, _COLD // max(1, size)))):
            self.sets.append([mx.array(x) for x in self.inputs])
        self._true = mx.array([True])
        # By the number of sets: how often a chain goes through them, once that is known.
        self._rounds: dict[int, int] = {}
        self._ordered = self.device == "cuda" and IN_ORDER.items() <= os.environ.items()
        mx.eval(self.sets, self._true)

    def rate(self, config: C) -> float:
        for repeats in (4, 9, 19):  # more where something came between, as another process's launch
            found = self._times({"": self._path(config)}, self.sets, repeats)[""]
            if found.spread < _NOISY:
                break
        self.noise = self.noise or min(found.spread / 2, _MOST_NOISE)
        return found.median

    def build(self, stock: bool) -> None:
        for path in self._others(stock).values():
            mx.eval(mx.compile(path)(self.inputs))

    def others(self) -> float:
        found = self._times(self._others(False), self.sets, 3)
        return min((sample.median for sample in found.values()), default=inf)

    def compared(
        self, configs: Sequence[C], paths: bool = True
    ) -> tuple[list[Times], dict[str, Times]]:
        own = {str(i): self._path(config) for i, config in enumerate(configs)}
        others = self._others(True) if paths else {}
        cold = self._times(own | others, self.sets, 7)
        warm = self._times(own | others, self.sets[:1], 5)
        times = {name: Times(cold[name], warm[name]) for name in cold}
        return [times.pop(name) for name in own], times

    def _others(self, stock: bool) -> dict[str, Path]:
        paths = self.family.paths(self.problem)
        return {name: path for name, path in paths.items() if stock or name != "stock"}

    def _path(self, config: C) -> Path:
        return lambda inputs: self.family.run(inputs, self.problem, config)

    def _times(
        self, paths: Mapping[str, Path], sets: list[list[mx.array]], repeats: int
    ) -> dict[str, Sample]:
        """Seconds of one launch."""
        rounds = {name: self._round(path, sets) for name, path in paths.items()}
        if not rounds:
            return {}
        if len(sets) not in self._rounds:
            self._rounds[len(sets)] = _rounds_of(next(iter(rounds.values())), len(sets))
        times = self._rounds[len(sets)]
        rounds[_LINKS] = _nothing if self._ordered else self._round(itemgetter(0), sets)
        chains = {name: _chain(run, times) for name, run in rounds.items()}
        found = _gate().seconds(chains, repeats)
        floor, launches = found.pop(_LINKS), times * len(sets)
        return {name: sample.less(floor).scaled(1 / launches) for name, sample in found.items()}

    def _round(self, path: Path, sets: list[list[mx.array]]) -> Queued:
        """Launches one behind the other, each with a set of its own: MLX would share their work."""

        def once(y: mx.array) -> list[mx.array]:
            found = []
            for first, *others in sets:
                y = path([first if self._ordered else self._linked(first, y), *others])
                found.append(y)
            return found if self._ordered else [y]

        return cast(Queued, mx.compile(once))

    def _linked(self, x: mx.array, y: mx.array) -> mx.array:
        """x, but not before y is there."""
        return mx.where(self._true, x, y[(0,) * y.ndim].astype(x.dtype))


def _nothing(y: mx.array) -> list[mx.array]:
    return [y]


def _chain(run: Queued, rounds: int) -> Queued:
    def chain(y: mx.array) -> list[mx.array]:
        found = []
        for _ in range(rounds):
            found += run(y)
            y = found[-1]
        return found

    return chain


def _rounds_of(run: Queued, launches: int) -> int:
    """How often to run so many launches for a chain of a length that can be measured."""
    y, pace = mx.zeros((1,)), []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(run(y))
        pace.append(time.perf_counter() - start)
    return max(1, min(_LAUNCHES // launches, round(_CHAIN / min(pace))))


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
        self.name, self.machine, self.whole = machine, MACHINES[machine], problem
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

    def compared(
        self, configs: Sequence[C], paths: bool = True
    ) -> tuple[list[Times], dict[str, Times]]:
        samples = [Sample.of([trial.seconds]) for trial in self.attempts(configs)]
        return [Times(sample, sample) for sample in samples], {}

    def _cost(self, config: C, launches: list[Counters]) -> float:
        registers = self.family.registers(config, self.problem)
        # Apple's compiler is not told how many threadgroups should fit.
        resident = self.family.resident(config) if self.device == "cuda" else 0
        # The first launch is the configured one; a second one adds up what it left.
        own = [(registers, resident), *[(32, 0)] * (len(launches) - 1)]
        return sum(
            cost(counters, self.machine, self._times, *limits).seconds
            for counters, limits in zip(launches, own, strict=True)
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
