"""Timing what a GPU takes, not what it takes to hand the work over.

A launch of a few microseconds takes MLX longer to submit than the GPU to run. So the GPU is kept
busy by other work, a gate, until all that is to be measured is queued behind it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from math import ceil

import mlx.core as mx

from .timing import turns

# What is queued takes an array and must not start before that is there.
Queued = Callable[[mx.array], mx.array]
# Seconds of one product of the gate at least, and of the whole gate at first.
_PRODUCT, _GATE = 1e-4, 1e-3
_LARGEST = 8192
# The longest gate: where it does not hide the queuing, MLX waits by itself.
_MOST = 1e-2


class Gate:
    """Work of a known length, made of products of square matrices.

    Example:
        >>> Gate().seconds({"exp": mx.compile(mx.exp)})["exp"] > 0
        True
    """

    def __init__(self) -> None:
        size = 512
        while True:
            self._matrix = (mx.random.normal((size, size)) * size**-0.5).astype(mx.bfloat16)
            self._products = 1
            took = min(self._alone() for _ in range(3))
            if took >= _PRODUCT or size == _LARGEST:
                break
            size *= 2
        self._products = ceil(_GATE / took)
        self._length = min(self._alone() for _ in range(3))

    def seconds(self, contenders: Mapping[str, Queued], repeats: int = 9) -> dict[str, float]:
        """How long functions take behind the gate, with the gate; medians.

        The functions take turns, in an order that is reversed in every other round. Differences of
        these times are what the GPU takes.
        """
        for run in contenders.values():
            self._once(run)
        while True:
            times: dict[str, list[float]] = {name: [] for name in contenders}
            queued = 0.0
            for name in turns(contenders, repeats):
                took, until = self._once(contenders[name])
                times[name].append(took)
                queued = max(queued, until)
            if queued < self._length or self._length >= _MOST:
                return {name: statistics.median(values) for name, values in times.items()}
            # The GPU may have waited for what was not queued yet.
            longer = min(1.5 * queued, _MOST) / self._length
            self._products = ceil(self._products * max(longer, 1.5))
            self._length = min(self._alone() for _ in range(3))

    def _work(self) -> mx.array:
        y = self._matrix
        for _ in range(self._products):
            y = y @ self._matrix
        return y

    def _alone(self) -> float:
        start = time.perf_counter()
        mx.eval(self._work())
        return time.perf_counter() - start

    def _once(self, run: Queued) -> tuple[float, float]:
        """Seconds until all is done, and until all was queued."""
        start = time.perf_counter()
        gate = self._work()
        mx.async_eval(gate)
        result = run(gate)
        mx.async_eval(result)
        queued = time.perf_counter() - start
        mx.eval(result)
        return time.perf_counter() - start, queued
