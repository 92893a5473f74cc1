"""A fuzz target from a check of one case: bounded in the suite, longer by ``make fuzz``.

In the suite a target's examples are the same in each run. With ``FUZZ_SECONDS`` they are random,
and go on for as long; the one that is running is kept in the file ``FUZZ_STATE``, since what ends
the process, or hangs, leaves nothing else behind.
"""

import faulthandler
import functools
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

_BATCH = 400  # examples between two looks at the clock
_SHRINKING = 60.0  # seconds for making an example smaller
SIZE = 1 << 16
# Seconds in which a case has to end: some compile several kernels; and what is said where not.
HANG, HUNG = 240, "Timeout (0:04:00)!"

_options = settings(
    deadline=None,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def fuzz(cases: SearchStrategy[Any], *, examples: int = 20, seconds: float = 1.2) -> Callable:
    """A test of one function for many cases.

    Args:
        cases: what the function is called with; its ``repr`` is all that tells a case.
        examples: how many the suite takes.
        seconds: after which it takes no more.
    """

    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        @functools.wraps(check)
        def run() -> None:
            if "FUZZ_SECONDS" in os.environ:
                _long(check, cases, float(os.environ["FUZZ_SECONDS"]))
            else:
                watched = _Watched(check, time.monotonic() + seconds)
                _options_of(watched, cases, settings(_options, max_examples=examples))()

        del run.__wrapped__  # pytest takes the signature of what is wrapped
        return run

    return decorate


def _options_of(
    check: Callable, cases: SearchStrategy[Any], chosen: settings
) -> Callable[[], None]:
    def run(case: Any) -> None:
        check(case)

    chosen = settings(chosen, derandomize="FUZZ_SECONDS" not in os.environ)
    return chosen(given(case=cases)(run))


def _long(check: Callable[[Any], None], cases: SearchStrategy[Any], seconds: float) -> None:
    watched = _Watched(check, time.monotonic() + seconds)
    while time.monotonic() < watched.end:
        number = int.from_bytes(os.urandom(8), "little")
        run = _options_of(watched, cases, settings(_options, max_examples=_BATCH))
        try:
            seed(number)(run)()
        except Exception:
            print(f"\nFINDING {watched.last}\n")
            raise


class _Watched:
    """A check that stops at a time, and says which case it is at."""

    def __init__(self, check: Callable[[Any], None], end: float) -> None:
        self.check, self.end, self.count = check, end, 0
        self.failed: set[str] = set()
        self.last = ""
        self.state = os.environ.get("FUZZ_STATE")
        if self.state:
            self.file = os.open(self.state, os.O_WRONLY | os.O_CREAT)
            faulthandler.dump_traceback_later(HANG, exit=True)  # where it does not begin

    def __call__(self, case: Any) -> None:
        # A case that failed must fail again, or it is called flaky.
        if time.monotonic() > self.end and repr(case) not in self.failed:
            return
        self.count += 1
        if self.state:
            text = f"{self.count}\n{case!r}\n\0".encode("utf-8", "backslashreplace")
            os.pwrite(self.file, text[:SIZE], 0)
            faulthandler.dump_traceback_later(HANG, exit=True)
        try:
            self.check(case)
        except Exception as error:
            if not self.failed:
                self.end = time.monotonic() + _SHRINKING
            self.failed.add(repr(case))
            self.last = _told(error, case)
            raise


def _told(error: Exception, case: Any) -> str:
    """The error, its place, and its case."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f[0]]
    where = f"{os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}"
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__} at {where}: {first}\n  case: {case!r}"
