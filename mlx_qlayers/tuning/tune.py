"""Tuning kernels: search, verify, measure side by side, keep."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any, Generic, TypeVar

from ..dispatch.measurements import entry_of, lookup
from ..measurements.store import save
from ..metal.record import Record
from .evaluator import Evaluator, Times
from .search import Stopped, Trial, beam_search
from .timing import Sample, verdict

C = TypeVar("C")
# So many of the best are measured anew, side by side with the heuristic's choice.
_FINALISTS = 3
# A kernel that takes so many times as long as another path is not searched.
_HOPELESS = 2.0
# Differences below this are noise.
NOISE = 0.01


class DeviceLost(RuntimeError):
    """A candidate hangs, or made the device refuse all work; the process can tune no more."""


@dataclass(frozen=True)
class Tuned(Generic[C]):
    """The result of tuning."""

    record: Record  # what for
    config: C  # the fastest configuration
    path: str  # `"kernel"`, what is taken in its place, or `"uncompared"` where it ended before
    untuned: Times  # what the kernel takes without tuning
    times: Mapping[str, Times]  # of the kernel with the configuration, and of the other paths
    trials: list[Trial[C]]  # every configuration that was tried, the fastest first
    lost: str = ""  # why the device runs nothing any more, if so

    @property
    def heuristic(self) -> float:
        """Seconds without tuning."""
        return self.untuned.cold.median

    @property
    def seconds(self) -> float:
        """The time of that path."""
        return self.times[self.path].cold.median

    @property
    def gain(self) -> float:
        """How many times as fast as without tuning."""
        return self.heuristic / self.seconds


def tune(
    record: Record,
    *,
    beam: int = 4,
    budget_s: float = 60.0,
    progress: Callable[[Trial[C]], Any] = lambda trial: None,
    keep: bool = True,
    evaluator: Callable[[Record], Evaluator[C]] = Evaluator,
) -> Tuned[C]:
    """Find the fastest configuration of a kernel, and remember it.

    Every candidate is verified before its time counts. It is timed in chains of launches on inputs
    that no cache holds; the best are then timed again side by side with the heuristic's choice and
    with the other paths, on inputs that a cache holds too.

    Args:
        record: of the kernel family, for shapes, dtype and format.
        beam: how many configurations the search keeps.
        budget_s: seconds after which it stops with what it has: at least the heuristic's choice.
        progress: called with each trial.
        keep: whether to store the result.
        evaluator: makes what verifies and rates configurations.

    Raises:
        ValueError: no backend here runs kernels.
        RuntimeError: not even the heuristic's configuration works; :class:`DeviceLost` if after it
            nothing does.
        KeyboardInterrupt: the user had enough; what was found until then is stored.

    Example:
        >>> from mlx_qlayers.formats import Format
        >>> from mlx_qlayers.metal.quantized_matmul.records import QmvRecord
        >>> record = QmvRecord(1, 64, 128, mx.float32, Format(64, 4))
        >>> tune(record, budget_s=1, keep=False).trials[0].problem
        ''
    """
    until, rates = time.monotonic() + budget_s, evaluator(record)
    heuristic: C = record.heuristic(rates.device)
    trials: dict[C, Trial[C]] = {}

    def attempt(config: C) -> Trial[C]:
        if trials and (time.monotonic() > until or rates.lost):
            raise Stopped
        trial = trials[config] = rates.attempt(config)
        progress(trial)
        return trial

    def ranked() -> list[Trial[C]]:
        return sorted(trials.values(), key=lambda trial: trial.seconds)

    interrupt: KeyboardInterrupt | None = None
    compared: tuple[list[Times], dict[str, Times]] | None = None
    try:
        first = attempt(heuristic)
        works = not first.problem
        # Another path may be so fast that no configuration will make up for it.
        if works and time.monotonic() < until and first.seconds <= _HOPELESS * rates.others():
            _search(rates, first, attempt, beam)
        if works and not rates.lost:
            compared = rates.compared(finalists(heuristic, ranked()))
    except KeyboardInterrupt as caught:
        interrupt = caught
        if heuristic not in trials:
            raise
    if why := trials[heuristic].problem:
        kind = DeviceLost if rates.lost else RuntimeError
        raise kind(f"{record.key}: {heuristic}: {why}")
    tuned = _tuned(record, heuristic, ranked(), compared, rates.lost)
    if keep:
        paths = {name: times.cold.median for name, times in tuned.times.items()}
        best = entry_of(record, tuned.config, tuned.path, paths, tuned.heuristic, len(trials))
        save(rates.name, {record.key: best})
    if interrupt is not None:
        raise interrupt
    return tuned


def _search(
    rates: Evaluator[C], first: Trial[C], attempt: Callable[[C], Trial[C]], beam: int
) -> None:
    record = rates.record
    stored = lookup(record, rates.name)
    starts = [*record.starts(rates.device)[1:], *([] if stored is None else [stored.config])]
    starts = [config for config in starts if record.why_not(config) is None]
    beam_search([first], starts, record.near, attempt, width=beam, prepare=rates.prepare)


def _tuned(
    record: Record,
    heuristic: C,
    trials: list[Trial[C]],
    compared: tuple[list[Times], dict[str, Times]] | None,
    lost: str,
) -> Tuned[C]:
    """The verdict on what was measured side by side, or else on the trials."""
    finals = finalists(heuristic, trials)
    once = {trial.config: Sample.of([trial.seconds]) for trial in trials}
    times, paths = compared or ([Times(once[config], once[config]) for config in finals], {})
    best = fastest(times)
    every = {"kernel" if compared else "uncompared": times[best], **paths}
    path = verdict({name: found.cold for name, found in every.items()})
    return Tuned(record, finals[best], path, times[0], every, trials, lost)


def tune_all(
    records: Sequence[Record],
    *,
    budget_s: float = 60.0,
    progress: Callable[[Record, float], Any] = lambda record, gain: None,
    **options: Any,
) -> Iterator[Tuned[Any]]:
    """Tune kernels within a budget; each has an even share of what is left of it.

    Args:
        records: what to tune.
        budget_s: seconds for all of them.
        progress: called after each trial with the record and its gain so far.
        options: beam, keep and evaluator of :func:`tune`.

    Yields:
        A result for each, which is stored by then. Problems that come when the budget is
        spent are left out, and so are those of which not even the heuristic's configuration works.

    Raises:
        DeviceLost: a candidate hangs, or made the device refuse all work.
        KeyboardInterrupt: after what was found until then.
    """
    deadline = time.monotonic() + budget_s
    for i, record in enumerate(records):
        share = (deadline - time.monotonic()) / (len(records) - i)
        if share <= 0:
            return
        seconds: list[float] = []

        def tried(
            trial: Trial[Any], record: Record = record, seconds: list[float] = seconds
        ) -> None:
            seconds.append(trial.seconds)
            progress(record, seconds[0] / min(seconds) if min(seconds) < inf else 1.0)

        try:
            tuned = tune(record, budget_s=share, progress=tried, **options)
        except DeviceLost:
            raise
        except RuntimeError as error:
            print(f"mlx-qlayers: not tuned: {error}", file=sys.stderr)
            continue
        yield tuned
        if tuned.lost:
            raise DeviceLost(f"{record.key}: {tuned.lost}")


def finalists(heuristic: C, trials: Iterable[Trial[C]]) -> list[C]:
    """The heuristic's choice, and the best of the others that work, of trials in their order."""
    works = (t.config for t in trials if t.config != heuristic and not t.problem)
    return [heuristic, *islice(works, _FINALISTS)]


def fastest(times: Sequence[Times]) -> int:
    """Which finalist to take: the heuristic's, unless another is faster by more than noise.

    With inputs in a cache it must not be slower.
    """
    untuned = times[0]

    def beats(found: Times) -> bool:
        noise = max(NOISE, (found.cold.spread + untuned.cold.spread) / 4)
        no_slower = found.warm.median <= untuned.warm.median * (1 + max(NOISE, untuned.warm.spread))
        return found.cold.median < untuned.cold.median * (1 - noise) and no_slower

    better = [i for i, found in enumerate(times) if beats(found)]
    return min(better, key=lambda i: times[i].cold.median, default=0)
