"""Verifies configurations, and times those that are right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, cached_property, partial
from math import inf
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast

import mlx.core as mx

from ..dispatch.entries import file_of
from ..runtime.backend import backend
from ..runtime.cuda_ahead import together
from ..runtime.host import checks
from ..runtime.wait import KernelTimeout, wait_for
from .family import Family, Inputs, P, Path
from .queue_timer import Queued, QueueTimer
from .search import Trial
from .timing import Sample

C = TypeVar("C")


class Times(NamedTuple):
    """Seconds of a launch: with its inputs in memory, and with its inputs in a cache."""

    cold: Sample
    warm: Sample


# Longer than any kernel here takes; one that is not back by then hangs.
PATIENCE = 20.0
# Bytes of inputs that no cache holds: copies of the inputs alternate until they have as many.
_COLD = 256 << 20
_MOST_SETS = 63
# Seconds that a chain should take, and launches that it has at most.
_CHAIN, _LAUNCHES = 3e-3, 160
# Noise beyond the first is no reason to stop a search sooner, and beyond the second one to repeat.
_MOST_NOISE, _NOISY = 0.03, 0.1
# Bytes of inputs above which the checked build of the host takes too long.
_CHECKED = 4 << 20
# With these in its environment MLX starts what it is given on CUDA in order, and at once.
IN_ORDER = {"MLX_USE_CUDA_GRAPHS": "0", "MLX_MAX_OPS_PER_BUFFER": "1000"}
# The name of the chain that launches nothing else.
_LINKS = "links"


class Evaluator(Generic[P, C]):
    """Rates configurations for one problem by the clock.

    Each launch begins after the one before, and finds its inputs in memory, not in a cache: several
    sets of them alternate. All of them are queued behind other work, and what that takes is left
    out. Where the device starts at once what does not depend on each other, each launch waits for
    the one before through its first input, and what such links take is left out too. On ``host``
    small problems are verified by the checked build, which sees reads and writes outside.

    Attributes:
        name: of the device that results are stored for.
        device: ``"metal"``, ``"cuda"`` or ``"host"``, for heuristics.
        lost: why nothing else can run, after a kernel that hangs or that the device gave up on.
        truth_seconds: what the verified result took stock operators to compute in float32.
        noise: what the time of one configuration differs by from one time to the next.

    Raises:
        ValueError: no backend here runs kernels.
    """

    def __init__(self, family: Family[P, C], problem: P, checked: bool = True) -> None:
        self.family, self.problem, self.device = family, problem, backend()
        name = file_of(self.device)
        if name is None:
            raise ValueError(f"there is nothing to tune: the backend is {self.device}")
        self.name, self.lost, self.noise = name, "", 0.0
        self.inputs = family.inputs(problem)
        self.truth = family.reference(self.inputs, problem).astype(mx.float32)
        mx.eval(self.inputs)
        start = time.perf_counter()
        mx.eval(self.truth)
        self.truth_seconds = time.perf_counter() - start
        mx.clear_cache()
        self._size = sum(x.nbytes for x in self.inputs)
        self._checked = checked and self.device == "host" and self._size <= _CHECKED
        # By the number of sets: how often a chain goes through them, once that is known.
        self._rounds: dict[int, int] = {}
        self._ordered = self.device == "host" or (
            self.device == "cuda" and IN_ORDER.items() <= os.environ.items()
        )
        self._true = mx.array([True])

    @cached_property
    def sets(self) -> list[Inputs]:
        """The inputs and copies of them, made at the first use."""
        copies = min(_MOST_SETS, _COLD // max(1, self._size))
        sets = [self.inputs, *([mx.array(x) for x in self.inputs] for _ in range(copies))]
        mx.eval(sets, self._true)
        return sets

    def launch(self, config: C) -> None:
        """Run a configuration once, which compiles it."""
        mx.eval(self._path(config)(self.inputs))

    def prepare(self, configs: Sequence[C], waits: bool = True) -> None:
        """Have configurations compiled side by side on CUDA; nothing is run."""
        with together(waits):
            for config in configs if self.device == "cuda" else ():
                with suppress(Exception):  # what is wrong with it will be found where it is tried
                    self._path(config)(self.inputs)

    def attempt(self, config: C, rated: bool = True) -> Trial[C]:
        """Build a configuration, verify it and, unless that is left out, rate it."""
        seconds = inf

        def run() -> str | None:
            nonlocal seconds
            if not (error := self._verified(self._path(config))) and rated:
                seconds = self.rate(config)
            return error

        problem = self._problem(run)
        return Trial(config, seconds, problem)

    def _verified(self, path: Path) -> str | None:
        """Why the result of a path is wrong, if it is."""
        with checks() if self._checked else nullcontext():
            y = wait_for(path(self.inputs), PATIENCE)
        return self._error(y)

    def _problem(self, run: Callable[[], str | None]) -> str:
        """What a function says is wrong, or what it raises; whatever that is, others are tried."""
        try:
            return run() or ""
        except KernelTimeout as hang:
            self.lost = str(hang)
            return self.lost
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            self.lost = "" if _works() else f"the device runs nothing any more: {problem}"
            return problem

    def _paths(self, *but: str) -> dict[str, Path]:
        """The other paths but some, and but those that are wrong here; stock is the truth."""
        found = self.family.paths(self.inputs, self.problem).items()
        kept = {name: path for name, path in found if name not in but}
        return {
            name: path
            for name, path in kept.items()
            if name == "stock" or not self._problem(partial(self._verified, path))
        }

    def rate(self, config: C) -> float:
        """Seconds of one launch."""
        for repeats in (4, 9, 19):  # more where something came between, as another process's launch
            found = self._times({"": self._path(config)}, self.sets, repeats)[""]
            if found.spread < _NOISY:
                break
        self.noise = self.noise or min(found.spread / 2, _MOST_NOISE)
        return found.median

    def beside_stock(self, config: C, until: Callable[[Sample, Sample], bool]) -> dict[str, Sample]:
        """Seconds of a configuration, of other kernels and of the stock operator, side by side.

        Args:
            config: which has been verified.
            until: whether the times of the fastest kernel and of stock are sure enough; else all
                are taken once more, from more repeats.

        Returns:
            By path; nothing where one of them has lost the device.
        """
        every = {"kernel": self._path(config)} | self._paths("dequantized")
        if self.lost:
            return {}
        # On a CPU arithmetic counts, not memory.
        sets = [self.inputs] if self.device == "host" else self.sets
        for repeats in (3, 7, 15):
            found = self._times(every, sets, repeats)
            if until(found[fastest_kernel(found)], found["stock"]):
                break
        return found

    def others(self) -> float:
        """Seconds of the fastest other path but the stock operator, roughly; infinity without."""
        paths = self._paths("stock")  # which CUDA may take a minute to build
        found = self._times(paths, self.sets, 3)
        return min((sample.median for sample in found.values()), default=inf)

    def compared(
        self, configs: Sequence[C], paths: bool = True
    ) -> tuple[list[Times], dict[str, Times]]:
        """Configurations side by side, and the other paths."""
        own = {str(i): self._path(config) for i, config in enumerate(configs)}
        every = own | (self._paths() if paths else {})
        cold = self._times(every, self.sets, 7)
        warm = self._times(every, self.sets[:1], 5)
        times = {name: Times(cold[name], warm[name]) for name in cold}
        return [times.pop(name) for name in own], times

    def _error(self, y: mx.array) -> str | None:
        """Why a result is wrong, if it is."""
        difference = mx.abs(y.astype(mx.float32) - self.truth).max()
        largest = mx.abs(self.truth).max()
        mx.eval(difference, largest)
        found = float(difference.item())  # type: ignore[arg-type]
        allowed = self.family.tolerance(self.problem) * float(largest.item())  # type: ignore[arg-type]
        return None if found <= allowed else f"wrong by {found:.2e}, {allowed:.2e} would pass"

    def _path(self, config: C) -> Path:
        return self.family.bind(self.inputs, self.problem, config)

    def _times(
        self, paths: Mapping[str, Path], sets: list[Inputs], repeats: int
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
        found = _timer(self.device != "host").seconds(chains, repeats)
        floor, launches = found.pop(_LINKS), times * len(sets)
        return {name: sample.less(floor).scaled(1 / launches) for name, sample in found.items()}

    def _round(self, path: Path, sets: list[Inputs]) -> Queued:
        """Launches one behind the other, each with a set of its own: MLX would share their work."""

        def once(y: mx.array) -> list[mx.array]:
            found = []
            for first, *others in sets:
                y = path([first if self._ordered else self._linked(first, y), *others])
                found.append(y)
            return found if self._ordered else [y]

        # What is compiled has no values, which the host backend needs.
        return once if self.device == "host" else cast(Queued, mx.compile(once))

    def _linked(self, x: mx.array, y: mx.array) -> mx.array:
        """x, but not before y is there."""
        return mx.where(self._true, x, y[(0,) * y.ndim].astype(x.dtype))


def fastest_kernel(times: Mapping[str, Sample]) -> str:
    """The path that takes least of those that are not the stock operator."""
    return min((name for name in times if name != "stock"), key=lambda name: times[name].median)


def _works() -> bool:
    """Whether the device still takes work: after a kernel that reads outside CUDA refuses all."""
    try:
        mx.eval(mx.zeros(8) + 1)
    except RuntimeError:
        return False
    return True


def _nothing(y: mx.array) -> list[mx.array]:
    return [y]


def _chain(run: Queued, rounds: int) -> Queued:
    def chain(y: mx.array) -> list[mx.array]:
        found: list[Any] = []
        for _ in range(rounds):
            found += run(y)
            y = found[-1]
        return found

    return chain


def _rounds_of(run: Callable[[mx.array], list[mx.array]], launches: int) -> int:
    """How often to run so many launches for a chain of a length that can be measured."""
    y, pace = mx.zeros((1,)), []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(run(y))
        pace.append(time.perf_counter() - start)
    return max(1, min(_LAUNCHES // launches, round(_CHAIN / min(pace))))


@cache
def _timer(busy: bool) -> QueueTimer:
    return QueueTimer(busy)
