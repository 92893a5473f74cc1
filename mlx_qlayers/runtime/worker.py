"""Another process for work that may end its process, or never be done, as kernels do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryFile
from typing import Any

# Seconds without a job after which the process ends.
_IDLE = 20.0
# From a job and a function that sends a message.
Work = Callable[[Any, Callable[[Any], None]], None]


class Worker:
    """A process that does jobs, which ``jobs`` takes, and sends messages.

    Args:
        work: a function of a module, which is called with each job.
        environment: changes of this process' variables.
        quiet: keep the standard error stream for :meth:`ending`.
    """

    def __init__(
        self, work: Work, environment: Mapping[str, str] | None = None, quiet: bool = True
    ) -> None:
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        names = f"from {__name__} import serve; from {work.__module__} import {work.__name__} as f"
        self._errors = TemporaryFile() if quiet else None  # noqa: SIM115
        jobs, self.jobs = Pipe(duplex=False)
        self.messages, messages = Pipe(duplex=False)
        with jobs, messages:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{names}; serve(f)"],
                stdin=jobs.fileno(),
                stdout=messages.fileno(),
                stderr=self._errors,
                env={**os.environ, **paths, **(environment or {})},
            )

    def received(self, patience: float | None = None) -> Any:
        """The next message; an EOFError if it ended, as it does after so many seconds without."""
        if not wait([self.messages], patience):
            self.process.kill()
        return self.messages.recv()

    def ending(self) -> str:
        """How it ended, and the end of its error messages."""
        code, said = self.process.wait(), ""
        if self._errors is not None:
            self._errors.seek(0)
            said = self._errors.read()[-500:].decode(errors="replace").strip()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"its process ended with {how}" + (f": {said}" if said else "")


def serve(work: Work) -> None:
    """Do the jobs that come by standard input, and send messages by standard output."""
    jobs, messages = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever prints meanwhile is no message
    with suppress(EOFError, BrokenPipeError):
        while jobs.poll(_IDLE):
            work(jobs.recv(), messages.send)
    os._exit(0)  # an end that waits for no kernel
