"""Timing what a device takes, not what it takes to hand the work over.

A launch of a few microseconds takes MLX longer to submit than a GPU to run. So the GPU is kept busy
by products of matrices until all that is to be measured is queued behind them. On CUDA the GPU's
clock is read between the two; elsewhere the time of the products is part of what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from math import ceil, inf
from typing import Any, cast

import mlx.core as mx

from ..runtime.cuda_ahead import begin
from ..runtime.spec import Spec
from .timing import Sample, turns

# Queued work takes an array and must not start before that is there.
Queued = Callable[[mx.array], list[mx.array]]
# Seconds of one product at least, of all of them at first, and at most.
_PRODUCT, _BUSY, _MOST = 1.5e-4, 1e-3, 3e-2
_SMALLEST, _LARGEST = 512, 8192
# Gives the nanoseconds of an NVIDIA GPU's clock when it begins.
_CLOCK = """
uint64_t now;
asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
time[0] = now;
"""


class OutOfTime(BaseException):
    """The time for a measurement is over before it is: no error, and no handler's of errors."""


class QueueTimer:
    """Times functions behind work of a known length, if ``busy``: a CPU begins at once."""

    def __init__(self, busy: bool = True) -> None:
        self._busy, self._product, self._products = busy, 0.0, 0
        self._start = mx.zeros((1,))
        size = _SMALLEST
        while True:
            self._matrix = (mx.random.normal((size, size)) * size**-0.5).astype(mx.bfloat16)
            if not busy:
                return
            # One product takes longer to hand over than to compute; what more of them add, counts.
            self._product = max((self._unqueued(9) - self._unqueued(1)) / 8, 1e-6)
            if self._product >= _PRODUCT or size >= _LARGEST:
                break
            size *= 2
        self._products = ceil(_BUSY / self._product)

    def warm(self, seconds: float) -> None:
        """Keep the device busy for so long: its clock rises while it works."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._unqueued(self._products)

    @property
    def rate(self) -> float:
        """Multiplications and additions of large matrices a second."""
        return 2.0 * float(self._matrix.shape[0]) ** 3 / self._product

    def seconds(
        self, contenders: Mapping[str, Queued], repeats: int = 9, deadline: float = inf
    ) -> dict[str, Sample]:
        """How long functions take, with the work before them, in alternation.

        Differences of these times, for the same :attr:`length`, are what the device takes. It
        raises OutOfTime if the deadline, by ``time.monotonic``, comes first.
        """
        self._products = ceil(_BUSY / self._product) if self._busy else 0
        for run in contenders.values():
            self._once(run)
        while True:
            times: dict[str, list[float]] = {name: [] for name in contenders}
            late: list[float] = []
            for name in turns(contenders, repeats):
                if time.monotonic() > deadline:
                    raise OutOfTime
                took, until = self._once(contenders[name])
                times[name].append(took)
                late += [until] * (until >= self.length)
                # One that was held up does not count.
                if self._busy and len(late) > (repeats > 2) and self.length < _MOST:
                    break
            else:
                return {name: Sample.of(values) for name, values in times.items()}
            # The GPU may have waited for what was not queued yet.
            self._products = ceil(min(1.5 * min(late), _MOST) / self._product) + 1

    @property
    def length(self) -> float:
        """Seconds that the work takes."""
        return self._products * self._product

    def _work(self, products: int) -> mx.array:
        y = self._matrix
        for _ in range(products):
            y = y @ self._matrix
        return y

    def _unqueued(self, products: int) -> float:
        def once() -> float:
            start = time.perf_counter()
            mx.eval(self._work(products))
            return time.perf_counter() - start

        return min(once() for _ in range(4))

    def _once(self, run: Queued) -> tuple[float, float]:
        """Seconds of the device, if it tells, or until all is done; and until all was queued."""
        start = time.perf_counter()
        work = self._work(self._products)
        mx.async_eval(work)
        before = self._time()
        result = run(work)
        mx.async_eval(result)
        after = self._time()
        queued = time.perf_counter() - start
        mx.eval(work, result)
        took = time.perf_counter() - start
        if before is not None and after is not None:
            took = 1e-9 * float((after - before).item())  # type: ignore[arg-type]
        return took, queued

    def _time(self) -> mx.array | None:
        """The device's clock behind what is queued, which MLX runs in order; None off CUDA."""
        if not (self._busy and mx.cuda.is_available()):
            return None
        (now,) = _clock()(
            inputs=[self._start],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.uint64],
        )
        mx.async_eval(now)
        return now


@cache
def _clock() -> Callable[..., list[mx.array]]:
    given = Spec((1,), mx.float32)
    begin("device_clock", "", _CLOCK, [("start", given)], [("time", mx.uint64)])
    kernel: Any = mx.fast.cuda_kernel("device_clock", ["start"], ["time"], _CLOCK)
    return cast(Callable[..., list[mx.array]], kernel)
