"""Processes that work side by side, and may each be ended by what they try.

NVIDIA's compiler takes a second for a kernel, and MLX compiles one at a time in a process. And what
a broken candidate does stays in its process: one that hangs or reads outside is ended with it, and
the others go on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any
from unittest import mock

from .judge import IN_ORDER

# Seconds for the start of a process, and from one message to the next.
_START, _PATIENCE = 90.0, 40.0
# Seconds that they may wait for each other, or for MLX to compile a kernel of its own.
_LONG = 300.0
# Seconds in which processes may finish what they do when they are no longer wanted.
_GRACE = 15.0


@dataclass(frozen=True)
class Place:
    """What a process has for its work.

    Attributes:
        send: sends a message.
        turn: gives the GPU to this process alone, in a ``with`` block.
        building: gives it a thing of some name to build, in a ``with`` block; others wait for that.
        stopping: whether it should begin nothing any more.
    """

    send: Callable[[Any], None]
    turn: Callable[[], AbstractContextManager[Any]]
    building: Callable[[str], AbstractContextManager[Any]]
    stopping: Callable[[], bool]


Work = Callable[[Any, Place], None]


@dataclass(frozen=True)
class Ended:
    """The message of a process that did not get to the end of its job.

    Attributes:
        why: what became of it.
    """

    why: str


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    # What it is doing, and until when it has to send something.
    job: Any = None
    deadline: float = 0.0


class Workers:
    """So many processes at most, each started when there is a job for it.

    Args:
        count: how many.
        work: a function of a module, which does a job and sends messages.
        measures: whether they take times on the GPU.

    Example:
        >>> with Workers(2, print) as workers:
        ...     list(workers.messages([]))
        []
    """

    def __init__(self, count: int, work: Work, measures: bool = False) -> None:
        self._count, self._work, self._measures = count, work, measures
        self._context = get_context("spawn")
        self._folder = TemporaryDirectory(prefix="mlx-qlayers-tune-")
        self._workers: list[_Worker] = []
        self._jobs: deque[Any] = deque()
        self._stop = self._context.Value("b", 0)

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

    def add(self, job: Any) -> None:
        """Have another job done, before those that wait."""
        self._jobs.appendleft(job)

    def stop(self) -> None:
        """Let nobody begin anything any more; for some seconds they may finish what they do."""
        self._stop.value = 1
        self._jobs.clear()
        for worker in self._workers:
            worker.deadline = min(worker.deadline, time.monotonic() + _GRACE)

    def messages(self, jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Each job with each message about it, until all of them are done."""
        self._jobs.extend(jobs)
        while True:
            self._hand_out()
            busy = [worker for worker in self._workers if worker.job is not None]
            if not busy:
                return
            ready = connection.wait([worker.pipe for worker in busy], timeout=0.5)
            for worker in busy:
                if worker.pipe in ready:
                    yield from self._received(worker)
                elif time.monotonic() > worker.deadline:
                    yield worker.job, self._ended(worker, "hangs")

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.job is None]
        while self._jobs and (idle or len(self._workers) < self._count):
            worker, patience = (idle.pop(), _PATIENCE) if idle else (self._start(), _START)
            worker.job, worker.deadline = self._jobs.popleft(), time.monotonic() + patience
            worker.pipe.send(worker.job)

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._work, Path(self._folder.name), self._stop)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        with mock.patch.dict(os.environ, IN_ORDER if self._measures else {}):
            process.start()
        self._workers.append(_Worker(process, ours))
        return self._workers[-1]

    def _received(self, worker: _Worker) -> Iterator[tuple[Any, Any]]:
        try:
            message = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            why = f"its process ended with {worker.process.exitcode}"
            yield worker.job, self._ended(worker, why)
            return
        job, worker.deadline = worker.job, time.monotonic() + _PATIENCE
        if isinstance(message, _Patience):
            worker.deadline = time.monotonic() + message.seconds
        elif isinstance(message, _Done):
            worker.job = None
            if message.why:
                yield job, Ended(message.why)
        else:
            yield job, message

    def _ended(self, worker: _Worker, why: str) -> Ended:
        worker.process.kill()
        self._workers.remove(worker)
        return Ended(why)


@dataclass(frozen=True)
class _Done:
    why: str = ""


@dataclass(frozen=True)
class _Patience:
    """The message of a process that will be silent for so many seconds at most."""

    seconds: float


def _serve(pipe: Connection, work: Work, folder: Path, stop: Any) -> None:
    """Do the jobs that come through a pipe, until its other end closes."""
    # Who interrupts the parent interrupts its processes too: what they do then is up to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = Place(
        pipe.send,
        partial(_alone, pipe, folder / "turn", _PATIENCE),
        lambda name: _alone(pipe, folder / name, _LONG),
        lambda: bool(stop.value),
    )
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            job = pipe.recv()
            try:
                work(job, place)
                done = _Done()
            except BrokenPipeError:
                raise
            except Exception as error:  # the other jobs go on
                done = _Done(f"{type(error).__name__}: {error}")
            pipe.send(done)


@contextlib.contextmanager
def _alone(pipe: Connection, path: Path, seconds: float) -> Iterator[None]:
    """Let one process at a time do something; the system ends the turn of one that is killed."""
    pipe.send(_Patience(_LONG))
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pipe.send(_Patience(seconds))
        yield
    pipe.send(_Patience(_PATIENCE))
