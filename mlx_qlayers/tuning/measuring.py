"""Measures kernels one after the other until a deadline: here or, for NVIDIA, in another process.

MLX compiles for NVIDIA GPUs behind a lock, for up to half a minute, and nothing ends that. So a
process of its own waits for it: it is left behind at the deadline, ends with what it compiles, and
the next one finds that in MLX's folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from math import inf
from typing import Any, NamedTuple

from ..dispatch.measurements import entry_of
from ..measurements.entries import COMPUTED, Entry
from ..metal.record import Record
from ..runtime.backend import backend
from ..runtime.cuda_ahead import finish
from ..runtime.devices import device_of
from ..runtime.worker import Worker
from .evaluator import IN_ORDER, Evaluator, timer_of
from .queue_timer import OutOfTime
from .timing import Sample, verdict

# Problems whose kernels are compiled while others are measured: their inputs take memory.
_AHEAD = 4
# Seconds that a GPU works before anything is measured.
_WARM = 0.5
# The time to measure a prompt: seconds, and times a product of the same size as MLX computes it.
_SETUP, _PRODUCTS = 0.2, 24
# Seconds after which a process that was left behind ends, whatever it is doing.
_PATIENCE = 60
_left_behind: list[subprocess.Popen[bytes]] = []


class Result(NamedTuple):
    """The outcome of a measurement."""

    key: str  # the record's
    entry: Entry | None  # what is stored, or None for what the stock operator does not take
    note: tuple[str, str] | None = None  # what is wrong with it, and what follows from that
    lost: str = ""  # why nothing can run in this process any more


def results(records: Sequence[Record], deadline: float, longest: float) -> Iterator[Result]:
    """Measure kernels in their order until ``deadline``, by ``time.monotonic``.

    A prompt that would take longer than ``longest`` seconds is left to the tuner.
    """
    if device_of().stock_compiles:
        return _of_process(records, deadline)
    return _measured(records, deadline, longest)


def _measured(records: Sequence[Record], deadline: float, longest: float = inf) -> Iterator[Result]:
    """Measure them here; kernels are compiled while others are measured, where that can be."""
    on = device_of()
    workers = _AHEAD * on.stock_compiles if on.gpu else os.cpu_count() or 1
    pool = None if on.gpu else ThreadPoolExecutor(workers, "calibrate")
    ahead: list[tuple[Record, Evaluator[Any] | Result, Future[None] | None]] = []
    if pool is None and records:
        timer_of(backend()).warm(_WARM)
    rest = iter(records)
    try:
        while (left := deadline - time.monotonic()) > 0:
            while len(ahead) <= workers and (record := next(rest, None)) is not None:
                estimate, is_long = 0.0, on.gpu and record.stage == 2
                if is_long:
                    products = _PRODUCTS * record.operations()
                    estimate = _SETUP + products / timer_of(backend()).rate
                if estimate > longest:  # than a whole calibration; it is not tried again
                    config, paths = record.heuristic(backend()), {COMPUTED: estimate}
                    why = f"{record.key}: takes {estimate:.1f} s"
                    why += "; mlx-qlayers tune --prompt-tokens measures it"
                    entry = entry_of(record, config, COMPUTED, paths, tried=0)
                    yield Result(record.key, entry, ("left to tune", why))
                elif estimate <= deadline - time.monotonic():
                    ahead.append((record, *_begun(record, pool, deadline)))
            if not ahead:
                return
            record, rates, compiled = ahead.pop(0)
            # The verification will show any error of the kernel.
            if compiled is not None and not futures.wait([compiled], left).done:
                return
            yield rates if isinstance(rates, Result) else _rated(record, rates)
    except OutOfTime:
        return
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _begun(
    record: Record, pool: ThreadPoolExecutor | None, deadline: float
) -> tuple[Evaluator[Any] | Result, Future[None] | None]:
    """The evaluator of a kernel, and its kernel being compiled if there are threads for that."""
    try:
        part = record if device_of().gpu else record.part()
        rates: Evaluator[Any] = Evaluator(part, False, deadline)
        if device_of().stock_compiles:
            rates.prepare([record.heuristic(rates.device)], waits=False)
    except Exception as error:  # whatever stock does not take stays with the rules
        why = f"{record.key}: {type(error).__name__}: {error}"
        return Result(record.key, None, ("left out", why)), None
    if pool is None:
        return rates, None
    return rates, pool.submit(copy_context().run, rates.launch, part.heuristic(rates.device))


def _rated(record: Record, rates: Evaluator[Any]) -> Result:
    """The verdict on a kernel."""
    config, note = record.heuristic(rates.device), None
    scale = record.bytes() / rates.record.bytes()
    trial = rates.attempt(config, rated=False)
    times = {} if trial.problem else rates.beside_stock(config)
    if not times:
        note = "stock", f"{record.key}: {trial.problem or rates.lost}"
        times = {"stock": Sample(rates.truth_seconds, 0.0, inf, 1)}
    paths = {way: sample.median * scale for way, sample in times.items()}
    return Result(record.key, entry_of(record, config, verdict(times), paths), note, rates.lost)


def _of_process(records: Sequence[Record], deadline: float) -> Iterator[Result]:
    """Yield what another process measures until the deadline."""
    worker = Worker(measure, IN_ORDER)
    _left_behind.append(worker.process)
    with worker.messages:
        try:
            with worker.jobs:
                worker.jobs.send((records, deadline, sys.argv))
            while (left := deadline - time.monotonic()) > 0 and worker.messages.poll(left):
                yield worker.messages.recv()
        except (EOFError, OSError):
            if worker.process.wait(_PATIENCE):
                yield Result("", None, ("ended", worker.ending()))
        except BaseException:
            worker.process.kill()
            raise


def measure(job: Any, tell: Callable[[Any], None]) -> None:
    """Measure what a job says, and tell each result."""
    signal.alarm(_PATIENCE)
    records, deadline, sys.argv = job
    for result in _measured(records, deadline):
        tell(result)
    finish()
