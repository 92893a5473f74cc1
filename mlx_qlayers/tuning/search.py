"""Beam search over configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import inf
from statistics import median
from typing import Any, Generic, TypeVar

C = TypeVar("C")
# What should take so many times as long as the best is not tried.
_FAR = 1.15


@dataclass(frozen=True)
class Trial(Generic[C]):
    """One configuration that was tried.

    Attributes:
        config: the configuration.
        seconds: what it takes, or infinity if it does not work.
        problem: why it does not work, if so.
    """

    config: C
    seconds: float = inf
    problem: str = ""


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

    What a change of a configuration gained where it was tried is what it should gain elsewhere. The
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
    seen = {trial.config: trial for trial in known}
    expanded: set[C] = set()
    gains = _Gains()

    def ranked() -> list[Trial[C]]:
        return sorted(seen.values(), key=lambda trial: trial.seconds)

    def attempt_one(config: C) -> None:
        if (trial := attempt(config)) is not None:
            seen[config] = trial

    def expectation(start: Trial[C], config: C) -> float:
        return start.seconds * gains.ratio(start.config, config)

    def is_far(seconds: float) -> bool:
        return seconds > ranked()[0].seconds * _FAR

    def attempt_near(beam: Sequence[C]) -> None:
        pairs = [(seen[start], config) for start in beam for config in near(start)]
        left = [pair for pair in pairs if pair[1] not in seen]
        hopeful = [c for start, c in left if not is_far(expectation(start, c))]
        prepare([*dict.fromkeys(hopeful)])
        while left:
            expected = [expectation(*pair) for pair in left]
            best = min(range(len(left)), key=expected.__getitem__)
            if is_far(expected[best]):
                return
            config = left[best][1]
            attempt_one(config)
            for before in (before for before, other in left if other == config):
                gains.learn(before, seen.get(config))
            left = [pair for pair in left if pair[1] != config]

    try:
        first = [config for config in dict.fromkeys(starts) if config not in seen]
        prepare(first)
        for config in first:
            attempt_one(config)
        idle = 0
        while idle < 2:
            kept = [trial.config for trial in ranked()[:width] if not trial.problem]
            beam = [config for config in kept if config not in expanded]
            if not beam:
                break
            best = ranked()[0].seconds
            expanded.update(beam)
            attempt_near(beam)
            idle = 0 if ranked()[0].seconds < best * (1 - noise) else idle + 1
    except Stopped:
        pass
    return ranked()


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
        """What the change did where it was tried; 1 if it was not."""
        return median(self._ratios.get(_change(before, after), [1.0]))


def _change(before: Any, after: Any) -> Any:
    if not is_dataclass(before):
        return before, after
    pairs = (
        (f.name, getattr(before, f.name), getattr(after, f.name, None)) for f in fields(before)
    )
    return tuple(pair for pair in pairs if pair[1] != pair[2])
