"""Beam search over configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

C = TypeVar("C")


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
    prepare: Callable[[Sequence[C]], object] = lambda configs: None,
) -> list[Trial[C]]:
    """Try neighbours of the best configuration, a few at a time, until the best few have no more.

    Args:
        known: what was tried before.
        starts: configurations to begin with besides.
        near: the legal configurations one move away from another.
        attempt: measures one, unless it cannot. It may raise :class:`Stopped`.
        width: of how many of the best all neighbours are tried, and how many are at a time, before
            the best of them takes the place of the one that it goes on from.
        prepare: called with configurations that are tried next.

    Returns:
        All that was tried, the fastest first; those that do not work last.

    Example:
        >>> near = lambda n: [n - 1, n + 1]
        >>> beam_search([], [3], near, lambda n: Trial(n, abs(n - 7) + 1.0))[0].config
        7
    """
    seen = {trial.config: trial for trial in known}
    done, at = set[C](), 0

    def ranked() -> list[Trial[C]]:
        return sorted(seen.values(), key=lambda trial: trial.seconds)

    def attempt_all(configs: Sequence[C]) -> None:
        prepare(configs)
        for config in configs:
            if (trial := attempt(config)) is not None:
                seen[config] = trial

    try:
        attempt_all([config for config in dict.fromkeys(starts) if config not in seen])
        while True:
            kept = [trial.config for trial in ranked()[:width] if not trial.problem]
            if (start := next((each for each in kept if each not in done), None)) is None:
                break
            # Moves take turns: one that gained nothing here is not tried next elsewhere.
            every = [*near(start)]
            turn = [config for config in every[at:] + every[:at] if config not in seen][:width]
            attempt_all(turn)
            if len(turn) < width:
                done.add(start)
            at = every.index(turn[-1]) + 1 if turn else at
    except Stopped:
        pass
    return ranked()
