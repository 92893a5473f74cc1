"""Processes that build and verify configurations side by side, and time them one by one.

NVIDIA's compiler takes a second for a kernel, and MLX compiles one at a time in a process. And what
a broken candidate does stays in its process: one that hangs or reads outside is ended with it, and
the search goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, TypeVar

import mlx.core as mx

from .family import Family, Problem
from .judge import Judge, judge_of
from .search import Trial
from .store import device_kind

C = TypeVar("C")
# Processes at most: each holds the inputs of a problem in the GPU's memory.
_MOST = 14
# Seconds for the start of a process with its inputs, and for one candidate after that.
_START, _PATIENCE = 90.0, 40.0


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    # What it is doing, for which round, and until when; what it has built.
    config: Any = None
    round: int = 0
    deadline: float = 0.0
    served: set[Any] = field(default_factory=set)


class Workers:
    """So many processes, all started when one is first needed.

    Args:
        count: how many.
        machine: compute costs for this machine instead of measuring; see :func:`tune.tune`.

    Example:
        >>> from mlx_qlayers.metal.row_sum import RowSum
        >>> from mlx_qlayers.tuning.families import ROW_SUM
        >>> problem, configs = Problem((64, 256), mx.float32), [RowSum(), RowSum(unroll=4)]
        >>> with Workers(1, "applegpu_g13s") as workers:
        ...     [trial.problem for trial in workers.attempts(ROW_SUM, problem, configs)]
        ['', '']
    """

    def __init__(self, count: int, machine: str | None = None) -> None:
        self._count, self._machine = count, machine
        self._context = get_context("spawn")
        self._folder = TemporaryDirectory(prefix="mlx-qlayers-tune-")
        self._workers: list[_Worker] = []
        self._round = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._folder.cleanup()

    def attempts(
        self, family: Family[C], problem: Problem, configs: Sequence[C]
    ) -> Iterator[Trial[C]]:
        """The trials of configurations, in the order in which they are done.

        A process that has built a configuration before is asked for it again.
        """
        waiting, left = list(configs), len(configs)
        self._round += 1
        while len(self._workers) < self._count:
            self._workers.append(self._start())
        while left:
            for worker in self._workers:
                if worker.config is None and (config := self._next(worker, waiting)) is not None:
                    self._send(worker, family, problem, config)
            busy = [worker for worker in self._workers if worker.config is not None]
            ready = connection.wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                late = time.monotonic() > worker.deadline
                if worker.pipe not in ready and not late:
                    continue
                # A search that was stopped leaves its last trials under way.
                counts = worker.round == self._round
                trial = self._ended(worker, "hangs") if late else self._received(worker)
                if counts:
                    left -= 1
                    yield trial

    def _next(self, worker: _Worker, waiting: list[Any]) -> Any:
        """What a process should do now: what it has built, else what none has."""
        for config in waiting:
            if config in worker.served or not any(config in w.served for w in self._workers):
                waiting.remove(config)
                return config
        return None

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, Path(self._folder.name) / "turn", self._machine)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _send(self, worker: _Worker, family: Any, problem: Problem, config: Any) -> None:
        patience = _PATIENCE if worker.served else _START
        worker.deadline = time.monotonic() + patience
        worker.config, worker.round = config, self._round
        worker.served.add(config)
        worker.pipe.send((family, problem, config))

    def _received(self, worker: _Worker) -> Trial[Any]:
        try:
            found: tuple[Trial[Any], bool] = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            return self._ended(worker, f"its process ended with {worker.process.exitcode}")
        trial, alive = found
        if not alive:
            return self._ended(worker, trial.problem)
        worker.config = None
        return trial

    def _ended(self, worker: _Worker, why: str) -> Trial[Any]:
        """Put another process in the place of one that a candidate has brought down."""
        worker.process.kill()
        self._workers[self._workers.index(worker)] = self._start()
        return Trial(worker.config, problem=why)


@contextlib.contextmanager
def processes(machine: str | None) -> Iterator[Workers | None]:
    """As many as this machine can use; None where a process of its own gains nothing.

    Metal's compiler takes a fraction of NVIDIA's time, and memory is shared with the system.
    """
    cores = os.cpu_count() or 1
    if (machine is None and device_kind() == "metal") or cores < 4:
        yield None
        return
    with Workers(min(cores - 2, _MOST), machine) as workers:
        yield workers


def _serve(pipe: Connection, turn: Path, machine: str | None) -> None:
    """Try what comes through a pipe, until its other end closes or nothing works any more."""
    judge: Judge[Any] | None = None
    asked: Problem | None = None
    alive = True
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while alive:
            family, problem, config = pipe.recv()
            if judge is None or (judge.family.name, asked) != (family.name, problem):
                judge, asked = None, problem
                with _turn(turn):
                    judge = judge_of(family, problem, machine)
            trial = judge.attempt(config, _turn(turn))
            alive = not trial.problem or (not judge.hung and _works())
            pipe.send((trial, alive))


def _works() -> bool:
    """Whether the GPU still takes work: after a kernel that reads outside CUDA refuses all."""
    try:
        mx.eval(mx.zeros(8) + 1)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Let one process at a time use the GPU; the system ends the turn of one that is killed."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
