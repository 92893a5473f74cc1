"""Measures problems one after the other until a deadline: here or, on CUDA, in another process.

MLX compiles for CUDA behind a lock, for up to half a minute, and nothing ends that. So a process
of its own waits for it: it is left behind at the deadline, ends with what it compiles, and the next
one finds that in MLX's folder.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, replace
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple, cast

import mlx.core as mx

from ..dispatch.entries import COMPUTED, Entry, parsed
from ..dispatch.problem import Problem
from ..dispatch.products import QmvProblem
from ..runtime.backend import backend
from ..runtime.explain import recording
from .evaluator import IN_ORDER, Evaluator, fastest_kernel, timer_of
from .families import FAMILIES
from .problems import Target
from .queue_timer import OutOfTime
from .store import entry_of
from .timing import Sample

# A kernel has to be so much faster than the stock operator.
_MARGIN = 0.97
# Of a matrix with more elements a CPU, on which all columns take the same, multiplies with a part.
_PART = 1 << 20
# Problems whose kernels are compiled while others are measured on CUDA: their inputs take memory.
_AHEAD = 4
# Seconds that a GPU works before anything is measured.
_WARM = 0.5
# What measuring a prompt takes: seconds, and times a product of the same size as MLX computes it.
_SETUP, _PRODUCTS = 0.2, 24
# Seconds after which a process that was left behind ends, whatever it is doing.
_PATIENCE = 60
_left_behind: list[subprocess.Popen[bytes]] = []


class Result(NamedTuple):
    """What came of a problem.

    Attributes:
        key: the problem's.
        entry: what is stored, or None for what the stock operator does not take.
        note: what is wrong with it, and what follows from that.
        lost: why nothing can run in this process any more.
    """

    key: str
    entry: Entry | None
    note: tuple[str, str] | None = None
    lost: str = ""


def results(targets: Sequence[Target], deadline: float, longest: float) -> Iterator[Result]:
    """Measure problems in their order, as many as there is time for.

    Args:
        targets: the problems.
        deadline: by ``time.monotonic``; what is under way then is left. On CUDA none is waited for.
        longest: seconds of a prompt beyond which it is left to the tuner.
    """
    if backend() == "cuda":
        return _of_process([target.problem for target in targets], deadline)
    return _measured(targets, deadline, longest)


def _measured(targets: Sequence[Target], deadline: float, longest: float = inf) -> Iterator[Result]:
    """Measure them here; kernels are compiled while others are measured, where that can be."""
    workers = {"host": os.cpu_count() or 1, "cuda": _AHEAD}.get(backend(), 0)
    pool = ThreadPoolExecutor(workers, "calibrate") if backend() == "host" else None
    ahead: list[tuple[Target, Evaluator[Any, Any] | Result, Future[None] | None]] = []
    if pool is None and targets:
        timer_of(backend()).warm(_WARM)
    rest = iter(targets)
    try:
        while (left := deadline - time.monotonic()) > 0:
            while len(ahead) <= workers and (target := next(rest, None)) is not None:
                if (estimate := _estimated(target.problem)) > longest:
                    yield _left_to_tune(target, estimate)
                elif estimate <= deadline - time.monotonic():
                    ahead.append((target, *_begun(target, pool, deadline)))
            if not ahead:
                return
            target, rates, compiled = ahead.pop(0)
            # What is wrong with a kernel will show where it is verified.
            if compiled is not None and not futures.wait([compiled], left).done:
                return
            yield rates if isinstance(rates, Result) else _rated(target, rates)
    except OutOfTime:
        return
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _estimated(problem: Problem) -> float:
    """Seconds that it takes to measure a problem of a prompt, on a GPU; 0 for all others."""
    if backend() == "host" or problem.stage < 2:
        return 0.0
    return _SETUP + _PRODUCTS * problem.operations() / timer_of(backend()).rate


def _left_to_tune(target: Target, estimate: float) -> Result:
    """What takes longer than a whole calibration: it is not tried again."""
    config, paths = target.problem.heuristic(backend()), {COMPUTED: estimate}
    why = f"{target.key}: takes {estimate:.1f} s; mlx-qlayers tune --prompt-tokens measures it"
    entry = entry_of(target.problem, config, COMPUTED, paths, tried=0)
    return Result(target.key, entry, ("left to tune", why))


def _begun(
    target: Target, pool: ThreadPoolExecutor | None, deadline: float
) -> tuple[Evaluator[Any, Any] | Result, Future[None] | None]:
    """What rates a problem, and its kernel being compiled if there are threads for that."""
    problem = _part(target.problem) if backend() == "host" else target.problem
    try:
        rates: Evaluator[Any, Any] = Evaluator(target.family, problem, False, deadline)
        if backend() == "cuda":
            rates.prepare([problem.heuristic(rates.device)], waits=False)
    except Exception as error:  # whatever stock does not take stays with the rules
        why = f"{target.key}: {type(error).__name__}: {error}"
        return Result(target.key, None, ("left out", why)), None
    if pool is None:
        return rates, None
    return rates, pool.submit(copy_context().run, _launch, rates)


def _rated(target: Target, rates: Evaluator[Any, Any]) -> Result:
    """The verdict on a problem."""
    whole, part, note = target.problem, rates.problem, None
    config = whole.heuristic(rates.device)
    scale = whole.n / part.n if isinstance(whole, QmvProblem) else 1.0
    trial, path = rates.attempt(config, rated=False), "stock"
    times = {} if trial.problem else rates.beside_stock(config, _is_sure)
    if not times:
        note = "stock", f"{target.key}: {trial.problem or rates.lost}"
        times = {"stock": Sample(rates.truth_seconds, 0.0, inf, 1)}
    elif _is_faster(times[kernel := fastest_kernel(times)], times["stock"]):
        path = kernel
    paths = {way: sample.median * scale for way, sample in times.items()}
    return Result(target.key, entry_of(whole, config, path, paths), note, rates.lost)


def _part(problem: Problem) -> Problem:
    """The same product with so few columns that a CPU multiplies with them in milliseconds."""
    if not isinstance(problem, QmvProblem) or problem.n * problem.k <= _PART:
        return problem
    return replace(problem, n=max(1, _PART // problem.k // 48) * 48)


def _launch(rates: Evaluator[Any, Any]) -> None:
    with recording():
        rates.launch(rates.problem.heuristic(rates.device))


def _is_faster(kernel: Sample, stock: Sample) -> bool:
    """Whether there is no doubt that the kernel is faster by the margin."""
    return kernel.high < _MARGIN * stock.low


def _is_sure(kernel: Sample, stock: Sample) -> bool:
    return _is_faster(kernel, stock) or kernel.low > _MARGIN * stock.high


def _of_process(problems: Sequence[Problem], deadline: float) -> Iterator[Result]:
    """What another process measures until the deadline."""
    paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
    environment = os.environ | IN_ORDER | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    job = io.BytesIO()
    _Pickler(job).dump((problems, deadline, sys.argv))
    with TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        _left_behind.append(process)
        given, told = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
        try:
            with given:
                given.write(job.getvalue())
            for line in _lines(told, deadline):
                key, entry, note, lost = json.loads(line)
                yield Result(key, cast(Entry, parsed(entry)) if entry else None, note, lost)
            if time.monotonic() < deadline and process.wait(_PATIENCE):
                errors.seek(0)
                why = errors.read()[-500:].decode(errors="replace").strip()
                yield Result("", None, ("ended", f"exit status {process.returncode}: {why}"))
        except BrokenPipeError as error:
            yield Result("", None, ("ended", str(error)))
        except BaseException:
            process.kill()
            raise
        finally:
            told.close()


def _lines(pipe: BinaryIO, deadline: float) -> Iterator[bytes]:
    """Lines as they come, until the deadline or the end."""
    begun = b""
    while (left := deadline - time.monotonic()) > 0 and wait([pipe.fileno()], left):
        if not (more := os.read(pipe.fileno(), 1 << 16)):
            return
        *lines, begun = (begun + more).split(b"\n")
        yield from lines


class _Pickler(pickle.Pickler):
    """Knows dtypes, which MLX does not pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, mx.Dtype):
            return _dtype, (str(value).removeprefix("mlx.core."),)
        return NotImplemented


def _dtype(name: str) -> mx.Dtype:
    return cast(mx.Dtype, getattr(mx, name))


def main() -> None:
    """Measure what standard input says; a line of JSON for each result."""
    signal.alarm(_PATIENCE)
    problems, deadline, sys.argv = pickle.load(sys.stdin.buffer)
    targets = [Target(FAMILIES[problem.family], problem) for problem in problems]
    try:
        for key, entry, note, lost in _measured(targets, deadline):
            print(json.dumps((key, asdict(entry) if entry else None, note, lost)), flush=True)
    except BrokenPipeError:  # nobody waits any more
        os._exit(0)


if __name__ == "__main__":
    main()
