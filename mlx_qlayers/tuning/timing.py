"""Repeated measurements, and the order in which contenders are measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import hypot
from typing import TypeVar

from ..runtime.explain import significant

T = TypeVar("T")
# A kernel has to take so much less than the stock operator.
_MARGIN = 0.97


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
        """Subtract a part that every measurement holds; deviations add up in quadrature."""
        median = max(self.median - floor.median, 1e-9)
        down = hypot(self.median - self.low, floor.high - floor.median)
        up = hypot(self.high - self.median, floor.median - floor.low)
        return Sample(median, max(median - down, 1e-9), median + up, self.count)

    def __str__(self) -> str:
        return f"{significant(self.median)} ±{self.spread / 2:.0%}"


def verdict(times: Mapping[str, Sample]) -> str:
    """The path to take: the fastest kernel if it is surely faster than ``"stock"`` by a margin."""
    kernels = (name for name in times if name != "stock")
    best = min(kernels, key=lambda name: times[name].median, default="stock")
    beaten = "stock" in times and times[best].high >= _MARGIN * times["stock"].low
    return "stock" if beaten else best


def is_sure(times: Mapping[str, Sample]) -> bool:
    """Whether a verdict is no matter of doubt."""
    kernels = [name for name in times if name != "stock"]
    slower = min(times[name].low for name in kernels) > _MARGIN * times["stock"].high
    return slower or verdict(times) != "stock"


def turns(names: Iterable[T], repeats: int) -> Iterable[T]:
    """Each name once a round, reversed in every other round, so that a drift favours nobody."""
    order = list(names)
    for _ in range(repeats):
        yield from order
        order.reverse()
