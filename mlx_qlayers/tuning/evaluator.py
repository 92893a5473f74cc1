"""Verifies configurations, and times those that are right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, cached_property, partial
from itertools import chain
from math import inf
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx

from ..measurements.entries import file_of
from ..metal.record import Inputs, Path, Record, in_float32
from ..reference.rounding import behind_one
from ..runtime.backend import backend
from ..runtime.cuda_ahead import compiled_in_parallel
from ..runtime.devices import device_of
from ..runtime.explain import recording
from ..runtime.host import checks
from ..runtime.proof import record, trial
from ..runtime.wait import KernelTimeout, wait_for
from .queue_timer import OutOfTime, Queued, QueueTimer
from .search import Trial
from .timing import Sample, is_sure

C = TypeVar("C")


class Times(NamedTuple):
    """Seconds of a launch: with its inputs in memory, and with its inputs in a cache."""

    cold: Sample
    warm: Sample


# Longer than any kernel here takes; one that is not back by then hangs.
PATIENCE = 20.0
# And than operators of MLX take on one core.
_STOCK = 3600.0
# Bytes of inputs that no cache holds: copies of the inputs alternate until they have as many. An
# M2 Ultra has 96 MB of cache, an H200 60.
_COLD = 128 << 20
_MOST_SETS = 63
# Seconds that a chain should take, and launches that it has at most.
_CHAIN, _LAUNCHES = 3e-3, 160
# Seconds from which one launch is a chain, whose inputs no cache holds.
_LONG = 2e-3
# Repeats of a comparison, and seconds of its chains; the second where the first leaves a doubt.
_FIRST_LOOK, _SECOND_LOOK = (5, _CHAIN / 2), (9, _CHAIN)
# Spread of times beyond which a measurement is repeated.
_NOISY = 0.1
# Bytes of inputs above which the checked build of the host takes too long.
_CHECKED = 4 << 20
# With these in its environment MLX starts what it is given on an NVIDIA GPU in order, and at once.
IN_ORDER = {"MLX_USE_CUDA_GRAPHS": "0", "MLX_MAX_OPS_PER_BUFFER": "1000"}
# The name of the chain that launches nothing else.
_LINKS = "links"


class Evaluator(Generic[C]):
    """Rates configurations for one key by the clock.

    Each launch begins after the one before, and finds its inputs in memory, not in a cache: several
    sets of them alternate. All of them are queued behind other work, and what that takes is left
    out. Where the device starts at once what does not depend on each other, each launch waits for
    the one before through its first input, and what such links take is left out too. On ``host``
    small ones are verified by the checked build, which sees reads and writes outside. ``lost`` is
    why nothing else can run, after a kernel that hangs or that the device gave up on.

    Raises:
        ValueError: no backend here runs kernels.
        OutOfTime: the ``deadline``, by ``time.monotonic``, came; so do its methods.
    """

    def __init__(self, record: Record, checked: bool = True, deadline: float = inf) -> None:
        self.record, self.device, self.deadline = record, backend(), deadline
        name = file_of(self.device)
        if name is None:
            raise ValueError(f"there is nothing to tune: the backend is {self.device}")
        self.name, self.lost = name, ""
        self.inputs = record.inputs()
        self._seconds("inputs", self.inputs, patience=_STOCK)
        self.truth = list(map(in_float32, record.reference(self.inputs)))
        self.truth_seconds = self._seconds("truth", self.truth, patience=_STOCK)
        mx.clear_cache()
        self._size = sum(x.nbytes for x in self.inputs)
        self._checked = checked and not device_of(self.device).gpu and self._size <= _CHECKED
        # By the number of sets what a launch with each takes, once that is known.
        self._rounds: dict[int, float] = {}
        self._is_short = True
        in_order = device_of(self.device).stock_compiles and IN_ORDER.items() <= os.environ.items()
        self._ordered = in_order or not device_of(self.device).gpu
        self._true = mx.array([True])

    @cached_property
    def sets(self) -> list[Inputs]:
        """The inputs and copies of them, made at the first use."""
        copies = min(_MOST_SETS, _COLD // max(1, self._size)) if self._is_short else 0
        sets = [self.inputs, *([mx.array(x) for x in self.inputs] for _ in range(copies))]
        self._seconds("copies", [self._true, *chain.from_iterable(sets)], patience=_STOCK)
        return sets

    def launch(self, config: C) -> None:
        """Run a configuration once, which compiles it; :func:`explain` does not count that."""
        with recording():
            mx.eval(self._path(config)(self.inputs))

    def prepare(self, configs: Sequence[C], waits: bool = True) -> None:
        """Have configurations compiled side by side where that takes long; nothing is run."""
        with compiled_in_parallel(waits):
            for config in configs if device_of(self.device).stock_compiles else ():
                with suppress(Exception):  # what is wrong with it will be found where it is tried
                    self._path(config)(self.inputs)

    def attempt(self, config: C, rated: bool = True) -> Trial[C]:
        """Build a configuration, verify it and, unless that is left out, rate it."""
        seconds = inf

        def run() -> str | None:
            nonlocal seconds
            if not (error := self._verified("kernel", self._path(config))) and rated:
                seconds = self.rate(config)
            return error

        with trial() as launches:
            problem = self._problem(run)
        if not problem:
            record(launches)  # what was compared here is proven
        return Trial(problem=problem, config=config, seconds=seconds)

    def _verified(self, name: str, path: Path) -> str | None:
        """Why an output of a path is wrong, if one is; on a GPU for arrays that begin anywhere."""
        inputs = [self.inputs]
        if device_of(self.device).gpu and name != "dequantized":  # most of which is MLX's
            inputs.append([*map(behind_one, self.inputs)])
        for given in inputs:
            with checks() if self._checked else nullcontext():
                outputs = path(given)
                self._seconds(name, outputs)
            if error := self._error(outputs):
                return error
        return None

    def _seconds(
        self, name: str, arrays: list[mx.array], launches: int = 1, patience: float = PATIENCE
    ) -> float:
        """The time to compute arrays by so many launches of a path."""
        if time.monotonic() > self.deadline:
            raise OutOfTime
        start = time.perf_counter()
        wait_for(arrays, patience)
        return time.perf_counter() - start

    def _problem(self, run: Callable[[], str | None]) -> str:
        """The error that a function returns or raises, as a text: others are tried then."""
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
        with trial() as launches:
            found = self.record.paths(self.inputs)
            kept = [(name, path) for name, path in found.items() if name not in but]
            right = dict(kept)
            for name, path in kept:
                if name != "stock" and self._problem(partial(self._verified, name, path)):
                    del right[name]
        if len(right) == len(kept):
            record(launches)
        return right

    def rate(self, config: C) -> float:
        """Seconds of one launch."""
        for repeats in (4, 9, 19):  # more where something came between, as another process's launch
            found = self._times({"": self._path(config)}, self.sets, repeats)[""]
            if found.spread < _NOISY:
                break
        return found.median

    def beside_stock(self, config: C) -> dict[str, Sample]:
        """Seconds of a verified configuration, other kernels and stock, side by side, by path.

        Five repeats each, or more if those leave a doubt; nothing if one has lost the device.
        """
        every = {"kernel": self._path(config)}
        pace = self._seconds("kernel", every["kernel"](self.inputs))
        every |= self._paths("dequantized")
        if self.lost:
            return {}
        # On a CPU arithmetic counts, not memory.
        self._is_short = pace < _LONG and device_of(self.device).gpu
        self._rounds |= {} if self._is_short or not device_of(self.device).gpu else {1: pace}
        found = self._times(every, self.sets, *_FIRST_LOOK)
        if not is_sure(found):
            with suppress(OutOfTime):
                found = self._times(every, self.sets, *_SECOND_LOOK)
        return found

    def others(self) -> float:
        """Seconds of the fastest other path but the stock operator, roughly; infinity without."""
        paths = self._paths("stock")  # which MLX may take a minute to build
        found = self._times(paths, self.sets, 3)
        return min((sample.median for sample in found.values()), default=inf)

    def compared(self, configs: Sequence[C]) -> tuple[list[Times], dict[str, Times]]:
        """Configurations side by side, and the other paths."""
        own = {str(i): self._path(config) for i, config in enumerate(configs)}
        every = own | self._paths()
        cold = self._times(every, self.sets, 7)
        warm = self._times(every, self.sets[:1], 5)
        times = {name: Times(cold[name], warm[name]) for name in cold}
        return [times.pop(name) for name in own], times

    def _error(self, outputs: Inputs) -> str | None:
        """Why outputs are wrong, if they are."""
        found = self.record.numbers(outputs)
        tolerances = self.record.tolerances(len(found))
        for y, truth, tolerance in zip(found, self.truth, tolerances, strict=True):
            difference = mx.abs(y.astype(mx.float32) - truth).max()
            error, largest = (float(a.item()) for a in (difference, mx.abs(truth).max()))  # type: ignore[arg-type]
            if not error <= tolerance * largest:
                return f"wrong by {error:.2e}, {tolerance * largest:.2e} would pass"
        return None

    def _path(self, config: C) -> Path:
        return self.record.bind(self.inputs, config)

    def _times(
        self, paths: Mapping[str, Path], sets: list[Inputs], repeats: int, seconds: float = _CHAIN
    ) -> dict[str, Sample]:
        """Seconds of one launch, from chains of so many."""
        if not paths:
            return {}
        count = len(sets)
        if count not in self._rounds:
            name, path = next(iter(paths.items()))
            run, y = self._chain(name, path, sets), mx.zeros((1,))
            self._rounds[count] = min(self._seconds(name, run(y), count) for _ in range(3))
        times = max(1, min(_LAUNCHES // count, round(seconds / self._rounds[count])))
        chains = {name: self._chain(name, path, sets, times) for name, path in paths.items()}
        linked = self._chain(_LINKS, itemgetter(slice(1)), sets, times)
        links = (lambda y: [y]) if self._ordered else linked
        timer, launches = timer_of(self.device), times * count
        found = timer.seconds({**chains, _LINKS: links}, repeats, self.deadline)
        floor = found.pop(_LINKS)
        return {name: sample.less(floor).scaled(1 / launches) for name, sample in found.items()}

    def _chain(self, name: str, path: Path, sets: list[Inputs], rounds: int = 1) -> Queued:
        """Launches one behind the other, each with a set of its own: MLX would share their work."""
        replaced = self.record.replaced(name) if name != _LINKS else ()

        def once(y: mx.array, sets: list[Inputs]) -> tuple[list[mx.array], list[Inputs]]:
            found, behind = [], []
            for first, *others in sets:
                if not self._ordered:  # not before y is there
                    first = mx.where(self._true, first, y[(0,) * y.ndim].astype(first.dtype))
                y, *more = path([first, *others])
                behind.append(more[: len(replaced)])
                found.append(mx.depends(y, more) if more else y)
                y = found[-1]
            return found if self._ordered else [y], behind

        # Compiled functions see no values, which the host backend needs.
        run: Any = mx.compile(once) if device_of(self.device).gpu else once

        def launches(y: mx.array) -> list[mx.array]:
            every = list[mx.array]()
            for _ in range(rounds):
                found, behind = run(y, sets)
                y, every = found[-1], every + found
                # Nothing else may hold what operators of MLX are to write into.
                for inputs, outputs in zip(sets, behind, strict=True):
                    for at, output in zip(replaced, outputs, strict=True):
                        inputs[at] = output
            return [*every, *(inputs[at] for inputs in sets for at in replaced)]

        return launches


def _works() -> bool:
    """Whether the device still takes work: after a kernel that reads outside, some refuse all."""
    try:
        mx.eval(mx.zeros(8) + 1)
    except RuntimeError:
        return False
    return True


@cache
def timer_of(device: str) -> QueueTimer:
    """The timer of launches on a device."""
    return QueueTimer(device_of(device).gpu)
