"""Ctrl-C while the command is imported, or ends: the process exits with code 130, quietly."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130


def _exit(*_: Any) -> None:
    os._exit(INTERRUPTED)


def exit_quietly() -> None:
    """Let an interrupt end the process, if it is the command's: others keep Python's handler.

    Called before anything else of the package is imported, which takes a second or more.
    """
    script = os.path.basename(sys.argv[0]) if sys.argv else ""  # of a module, at this time, "-m"
    command = script.startswith("mlx-qlayers") or (script == "-m" and __package__ in sys.orig_argv)
    # Where interrupts are ignored, as in a shell's background jobs, they stay so.
    if command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


@contextmanager
def raising() -> Iterator[None]:
    """Let an interrupt raise ``KeyboardInterrupt`` again, for as long as this lasts."""
    quiet = signal.getsignal(signal.SIGINT) is _exit
    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if quiet:
            signal.signal(signal.SIGINT, _exit)


exit_quietly()
