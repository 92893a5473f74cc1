"""Fair timing: contenders take turns, in an order that is reversed in every other round, so that a
machine that warms up or is shared favours nobody.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import hypot
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Repeated measurements of one quantity: the median, and the middle half around it.

    Times are in seconds. Where a rate is wanted, :meth:`per` turns a time into one.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        """Summarise the measurements; the spread is between the quartiles."""
        values = sorted(values)
        if len(values) < 2:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    @property
    def spread(self) -> float:
        """The distance between the quartiles as a fraction of the median."""
        return (self.high - self.low) / self.median

    def per(self, amount: float) -> Sample:
        """``amount`` a second: tokens/s, bytes/s or operations/s from seconds."""
        return Sample(amount / self.median, amount / self.high, amount / self.low, self.count)

    def scaled(self, factor: float) -> Sample:
        """The same in another unit, as 1e3 for milliseconds."""
        return Sample(self.median * factor, self.low * factor, self.high * factor, self.count)

    def less(self, floor: Sample) -> Sample:
        """What remains without a part that every measurement holds; a nanosecond at least.

        Both are uncertain, and independent of each other: their deviations add up in quadrature.

        Example:
            >>> found = Sample(7.0, 6.0, 8.0, 4).less(Sample(2.0, 2.0, 2.0, 4))
            >>> found.median, found.low, found.high
            (5.0, 4.0, 6.0)
        """
        median = max(self.median - floor.median, 1e-9)
        down = hypot(self.median - self.low, floor.high - floor.median)
        up = hypot(self.high - self.median, floor.median - floor.low)
        return Sample(median, max(median - down, 1e-9), median + up, self.count)

    def __str__(self) -> str:
        return f"{significant(self.median)} ±{self.spread / 2:.0%}"


def measure(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 10,
    warmup: int = 1,
    least: float = 0.02,
) -> dict[str, Sample]:
    """Time functions against each other.

    What a function returns is evaluated. A fast one is called several times a measurement, one
    call queued behind the other as in a running model, so that each measurement takes at least
    ``least`` seconds and neither the clock nor the wait for the device matters.

    Args:
        contenders: the functions by name.
        repeats: measurements of each.
        warmup: calls of each before the first measurement, besides one that finds its pace.
        least: the shortest measurement in seconds.

    Returns:
        Seconds a call by name.

    Example:
        >>> a = mx.random.normal((64, 64))
        >>> measure({"matmul": lambda: a @ a})["matmul"].median < 1
        True
    """
    calls = {}
    for name, function in contenders.items():
        pace = min(_seconds(function, 1) for _ in range(warmup + 1))
        calls[name] = max(1, round(least / pace))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name in turns(contenders, repeats):
        times[name].append(_seconds(contenders[name], calls[name]))
    return {name: Sample.of(values) for name, values in times.items()}


def turns(names: Iterable[T], repeats: int) -> Iterable[T]:
    """Each name once a round, in an order that alternates."""
    order = list(names)
    for _ in range(repeats):
        yield from order
        order.reverse()


def arrays(result: Any) -> list[mx.array]:
    """The arrays of whatever a function returned."""
    flat: Any = tree_flatten(result)
    return [array for _, array in flat if isinstance(array, mx.array)]


def _seconds(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls - 1):
        mx.async_eval(*arrays(function()))
    mx.eval(*arrays(function()))
    mx.synchronize()
    return (time.perf_counter() - start) / calls


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, and none in powers of ten."""
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}" if abs(value) >= 1e-4 else f"{value:.{digits - 1}e}"
