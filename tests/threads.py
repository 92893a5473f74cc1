"""Work in several threads at once."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


def in_threads(work: Callable[[int], T], number: int, *, same_context: bool = False) -> list[T]:
    """The results of ``work(0)``, ``work(1)`` and so on in threads that start together.

    Args:
        work: called with a thread's number; what it raises is raised here.
        number: how many threads.
        same_context: whether the threads have the caller's context variables.
    """
    begin = threading.Barrier(number)

    def run(index: int) -> T:
        begin.wait()
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        jobs = [
            pool.submit(copy_context().run, run, i) if same_context else pool.submit(run, i)
            for i in range(number)
        ]
        return [job.result() for job in jobs]


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Python goes from one busy thread to another as often as that."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
