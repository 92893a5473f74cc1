"""Beam search over configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

C = TypeVar("C")


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


Try = Callable[[Sequence[C]], Iterable[Trial[C]]]


class Stopped(Exception):
    """The budget is spent; raised by a try, it ends the search with what was found so far."""


def beam_search(
    known: Iterable[Trial[C]],
    starts: Iterable[C],
    near: Callable[[C], Iterable[C]],
    attempt: Try[C],
    *,
    width: int = 4,
    noise: float = 0.01,
) -> list[Trial[C]]:
    """Keep the best few configurations, try their neighbours, and repeat while that gains.

    Args:
        known: what was tried before.
        starts: configurations to begin with besides.
        near: the legal configurations one move away from another.
        attempt: measures some. It may raise :class:`Stopped`.
        width: how many are kept.
        noise: the least gain of a round, as a fraction, that counts. A first round without one may
            be a plateau; after a second one the search ends.

    Returns:
        All that was tried, the fastest first; those that do not work last.

    Example:
        >>> near = lambda n: [n - 1, n + 1]
        >>> attempt = lambda some: [Trial(n, abs(n - 7) + 1.0) for n in some]
        >>> beam_search([], [3], near, attempt)[0].config
        7
    """
    seen = {trial.config: trial for trial in known}
    expanded: set[C] = set()

    def ranked() -> list[Trial[C]]:
        return sorted(seen.values(), key=lambda trial: trial.seconds)

    def attempt_new(configs: Iterable[C]) -> None:
        new = [config for config in dict.fromkeys(configs) if config not in seen]
        for trial in attempt(new):
            seen[trial.config] = trial

    try:
        attempt_new(starts)
        idle = 0
        while idle < 2:
            kept = [trial.config for trial in ranked()[:width] if not trial.problem]
            beam = [config for config in kept if config not in expanded]
            if not beam:
                break
            best = ranked()[0].seconds
            expanded.update(beam)
            attempt_new(config for start in beam for config in near(start))
            idle = 0 if ranked()[0].seconds < best * (1 - noise) else idle + 1
    except Stopped:
        pass
    return ranked()
