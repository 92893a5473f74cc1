"""Beam search over configurations, and the search of all of them that it is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any, Generic, TypeVar

from .moves import Axis

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


Try = Callable[[C], Trial[C]]


class Stopped(Exception):
    """The budget is spent; raised by a try, it ends the search with what was found so far."""


def neighbours(config: C, axes: Sequence[Axis], why_not: Callable[[C], str | None]) -> list[C]:
    """The legal configurations one move away."""
    moved = [move(config) for axis in axes for move in axis.moves(config)]
    return [c for c in moved if why_not(c) is None]


def beam_search(
    starts: Iterable[C],
    near: Callable[[C], Iterable[C]],
    attempt: Try[C],
    *,
    width: int = 4,
    noise: float = 0.01,
) -> list[Trial[C]]:
    """Keep the best few configurations, try their neighbours, and repeat while that gains.

    Args:
        starts: configurations to begin with.
        near: the legal configurations one move away from another.
        attempt: measures one. It may raise :class:`Stopped`.
        width: how many are kept.
        noise: the least gain of a round, as a fraction, that counts. A first round without one may
            be a plateau; after a second one the search ends.

    Returns:
        All that was tried, the fastest first; those that do not work last.

    Example:
        >>> near = lambda n: [n - 1, n + 1]
        >>> beam_search([3], near, lambda n: Trial(n, abs(n - 7) + 1.0))[0].config
        7
    """
    seen: dict[C, Trial[C]] = {}
    expanded: set[C] = set()

    def ranked() -> list[Trial[C]]:
        return sorted(seen.values(), key=lambda trial: trial.seconds)

    def attempt_all(configs: Iterable[C]) -> None:
        for config in configs:
            if config not in seen:
                seen[config] = attempt(config)

    try:
        attempt_all(starts)
        idle = 0
        while idle < 2:
            kept = [trial.config for trial in ranked()[:width] if not trial.problem]
            beam = [config for config in kept if config not in expanded]
            if not beam:
                break
            best = ranked()[0].seconds
            for config in beam:
                expanded.add(config)
                attempt_all(near(config))
            idle = 0 if ranked()[0].seconds < best * (1 - noise) else idle + 1
    except Stopped:
        pass
    return ranked()


def exhaustive_search(
    example: C, axes: Sequence[Axis], why_not: Callable[[C], str | None], attempt: Try[C]
) -> list[Trial[C]]:
    """Try every legal configuration; what the beam is judged by.

    Returns:
        All that was tried, the fastest first.
    """
    return sorted(
        (attempt(config) for config in all_configurations(example, axes, why_not)),
        key=lambda trial: trial.seconds,
    )


def all_configurations(
    example: C, axes: Sequence[Axis], why_not: Callable[[C], str | None]
) -> list[C]:
    """Every legal configuration that differs from an example along the axes."""
    found: list[C] = []
    for values in product(*(axis.values for axis in axes)):
        config: Any = example
        for axis, value in zip(axes, values, strict=True):
            config = axis.move(axis.field, value)(config)
        if why_not(config) is None:
            found.append(config)
    return found
