"""The calls of a step, which take arrays out of registers and put others in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..runtime.explain import Row
from .primitives import Dispatched


class Called(NamedTuple):
    """A call of a function with registers."""

    function: Callable[..., Any]  # what is called
    taken: Callable[[Sequence[Any]], Sequence[Any]]  # takes its arrays out of the registers
    # Taken behind those by a launch, which gets all in a list; None for calls with single arrays.
    more: Sequence[Any] | None
    target: int | slice  # the register of the result, or those of several
    free: tuple[int, ...]  # registers that nobody needs any more
    given: list[int]  # those of its arrays
    binds: Dispatched | None = None  # what may be bound to a launch


def made_by(target: int | slice) -> range:
    """The registers of what a call gives."""
    if isinstance(target, slice):
        return range(target.start, target.stop)
    return range(target, target + 1)


class BoundCalls(NamedTuple):
    """Calls, and what those count that are bound to a launch."""

    calls: list[Called]
    rows: list[Row]
    # The same calls with lists of launches in the place of many; each serves one thread at a time.
    listed: list[Any]


def called(calls: Iterable[Called], registers: list[Any], frees: bool = True) -> None:
    """Make calls in turn."""
    for function, taken, more, target, free, _, _ in calls:
        if more is None:
            registers[target] = function(*taken(registers))
        else:
            registers[target] = function([*taken(registers), *more])
        for each in free if frees else ():
            registers[each] = None
