"""The tuner without a clock: costs by what the checked build of the host counts, or a test says."""

from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any

import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.tuning import evaluator, measuring
from mlx_qlayers.tuning.evaluator import Evaluator, Times
from mlx_qlayers.tuning.queue_timer import QueueTimer
from mlx_qlayers.tuning.timing import Sample

DEVICE = "some_gpu"


def rated_by(patch: pytest.MonkeyPatch, rates: Any) -> None:
    """Let such evaluators rate what is calibrated."""
    patch.setattr(measuring, "Evaluator", rates)


def timed_by(patch: pytest.MonkeyPatch, make: Callable[[], QueueTimer]) -> None:
    """Let another timer be that of the device, from its first use on."""
    timer_of = cache(lambda device: make())
    for module in (evaluator, measuring):
        patch.setattr(module, "timer_of", timer_of)


class Counted(Evaluator):
    """Verifies as ever, and rates configurations the same way on every machine."""

    def __init__(self, record):
        with use_backend("host"):
            super().__init__(record)
        self.name, self.device, self._checked = DEVICE, "metal", False

    def attempt(self, config):
        with use_backend("host"), checks() as self.report:
            return super().attempt(config)

    def rate(self, config):
        c = self.report.launches[0][1]
        waits = 4 + c.turns / c.threads
        busy = c.turns + 20 * (c.simd_operations + c.threadgroup_barriers) + 4 * c.threads
        return 4e-7 * waits + 1e-11 * busy + 1e-10 * c.threads / c.threadgroups

    def others(self):
        return inf

    def compared(self, configs, paths=True):
        samples = [Sample.of([trial.seconds]) for trial in map(self.attempt, configs)]
        return [Times(sample, sample) for sample in samples], {}
