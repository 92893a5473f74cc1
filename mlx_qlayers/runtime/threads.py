"""Threads by number, and the end of a process after theirs.

MLX keeps what a thread compiled until the thread has ended, and takes Python's lock to free it.
``Thread.join`` returns before that (until Python 3.12), and where the interpreter has ended first,
glibc unwinds the thread through a destructor, which aborts the process.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_TASKS = "/proc/self/task"  # of Linux; elsewhere a thread ends without unwinding
_LONGEST = 5.0  # seconds to wait
_MANY = 64
_TURN = 1e-4  # seconds
_turns = threading.Lock()

_numbers = itertools.count()
_natives: set[int] = set()


class _Here(threading.local):
    """The thread that looks at it, by a number that no other thread has before or after."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        if len(_natives) >= _MANY:
            _natives.intersection_update(map(int, _there()))
        _natives.add(threading.get_native_id())


here = _Here()


@contextmanager
def short_turns() -> Iterator[None]:
    """Let other threads have Python's lock at once when they ask for it; one block at a time.

    A thread that waits for a GPU gives the lock away, and gets it back from a busy one after 5 ms.
    """
    with _turns:
        before = sys.getswitchinterval()
        try:
            sys.setswitchinterval(_TURN)
            yield
        finally:
            sys.setswitchinterval(before)


def _there() -> list[str]:
    """The threads that the system knows."""
    return os.listdir(_TASKS) if os.path.isdir(_TASKS) else []


@atexit.register
def _wait_for_ended_threads() -> None:
    alive, end = {thread.native_id for thread in threading.enumerate()}, time.monotonic() + _LONGEST
    ended = {str(number) for number in _natives - alive}
    while ended.intersection(_there()) and time.monotonic() < end:
        time.sleep(1e-3)  # without Python's lock
