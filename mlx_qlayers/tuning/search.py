"""Beam search over configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import inf
from statistics import median
from typing import Any, Generic, TypeVar

C = TypeVar("C")
# Configurations that should take so many times as long as the best are not tried.
_FAR = 1.15


@dataclass(frozen=True)
class Trial(Generic[C]):
    """One configuration that was tried."""

    config: C  # the configuration
    seconds: float = inf  # what it takes, or infinity if it does not work
    problem: str = ""  # why it does not work, if so


class Stopped(Exception):
    """The budget is spent; raised by a try, it ends the search with what was found so far."""


def beam_search(
    known: Iterable[Trial[C]],
    starts: Iterable[C],
    near: Callable[[C], Iterable[C]],
    attempt: Callable[[C], Trial[C] | None],
    *,
    width: int = 4,
    noise: float = 0.01,
    prepare: Callable[[Sequence[C]], object] = lambda configs: None,
) -> list[Trial[C]]:
    """Keep the best few configurations, try their neighbours, and repeat while that gains.

    A change of a configuration should gain elsewhere as much as it gained where it was tried. The
    most promising neighbour is tried first. Then the others are rated anew, by what it told and by
    the best so far, until all that are left should be far from that: in the same round, so that a
    change that is of no use is tried once, not from each of the best few.

    Args:
        known: what was tried before.
        starts: configurations to begin with besides.
        near: the legal configurations one move away from another.
        attempt: measures one, unless it cannot. It may raise :class:`Stopped`.
        width: how many are kept.
        noise: the least gain of a round, as a fraction, that counts. A first round without one may
            be a plateau; after a second one the search ends.
        prepare: called with configurations that are likely to be tried next.

    Returns:
        All that was tried, the fastest first; those that do not work last.

    Example:
        >>> near = lambda n: [n - 1, n + 1]
        >>> beam_search([], [3], near, lambda n: Trial(n, abs(n - 7) + 1.0))[0].config
        7
    """
    search = _Search({trial.config: trial for trial in known}, attempt)
    expanded: set[C] = set()
    try:
        first = [config for config in dict.fromkeys(starts) if config not in search.seen]
        prepare(first)
        for config in first:
            search.attempt_one(config)
        idle = 0
        while idle < 2:
            kept = [trial.config for trial in search.ranked()[:width] if not trial.problem]
            beam = [config for config in kept if config not in expanded]
            if not beam:
                break
            best = search.ranked()[0].seconds
            expanded.update(beam)
            search.attempt_near(
                [(start, config) for start in beam for config in near(start)], prepare
            )
            idle = 0 if search.ranked()[0].seconds < best * (1 - noise) else idle + 1
    except Stopped:
        pass
    return search.ranked()


class _Search(Generic[C]):
    """The state of a search: what was tried, and what the changes gained."""

    def __init__(self, seen: dict[C, Trial[C]], attempt: Callable[[C], Trial[C] | None]) -> None:
        self.seen, self.attempt, self.gains = seen, attempt, _Gains()

    def ranked(self) -> list[Trial[C]]:
        return sorted(self.seen.values(), key=lambda trial: trial.seconds)

    def attempt_one(self, config: C) -> None:
        if (trial := self.attempt(config)) is not None:
            self.seen[config] = trial

    def attempt_near(
        self, pairs: Sequence[tuple[C, C]], prepare: Callable[[Sequence[C]], object]
    ) -> None:
        """Try what lies one move from a start, while any of it is hopeful."""
        left = [(start, config) for start, config in pairs if config not in self.seen]
        prepare(
            [*dict.fromkeys(c for start, c in left if not self._is_far(self._expected(start, c)))]
        )
        while left:
            expected = [self._expected(*pair) for pair in left]
            best = min(range(len(left)), key=expected.__getitem__)
            if self._is_far(expected[best]):
                return
            config = left[best][1]
            self.attempt_one(config)
            for start in (start for start, other in left if other == config):
                self.gains.learn(self.seen[start], self.seen.get(config))
            left = [pair for pair in left if pair[1] != config]

    def _expected(self, start: C, config: C) -> float:
        return self.seen[start].seconds * self.gains.ratio(start, config)

    def _is_far(self, seconds: float) -> bool:
        return seconds > self.ranked()[0].seconds * _FAR


class _Gains:
    """The times of configurations over those of their neighbours, by the fields that differ."""

    def __init__(self) -> None:
        self._ratios: dict[Any, list[float]] = {}

    def learn(self, before: Trial[Any], after: Trial[Any] | None) -> None:
        """Remember what a change did, if that is known."""
        if after is not None and not (before.problem or after.problem):
            ratios = self._ratios.setdefault(_change(before.config, after.config), [])
            ratios.append(after.seconds / before.seconds)

    def ratio(self, before: Any, after: Any) -> float:
        """The ratio that a change gained where it was tried; 1 if it was not."""
        return median(self._ratios.get(_change(before, after), [1.0]))


def _change(before: Any, after: Any) -> Any:
    if not is_dataclass(before):
        return before, after
    pairs = (
        (f.name, getattr(before, f.name), getattr(after, f.name, None)) for f in fields(before)
    )
    return tuple(pair for pair in pairs if pair[1] != pair[2])
