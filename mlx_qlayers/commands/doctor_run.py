"""Runs the checks of ``doctor``, in a process of their own, since a kernel may end its process."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..runtime.worker import Worker

if TYPE_CHECKING:
    from .example import Example

# Longer than any check takes to compile; one that is not back by then hangs.
_PATIENCE = 60.0
_REPEATS = 3
# After the checks.
MODEL = "model"


class Outcome(NamedTuple):
    """The outcome of a check: a row of the page, and an error message."""

    row: tuple[str, ...]
    wrong: str = ""


# Family, check and what came of it: None when it begins, text of the model.
_Message = tuple[str, str, Outcome | str | None]


def outcomes(
    families: Sequence[str], path: str, end: float, one_process: bool = False
) -> Iterator[Outcome | str]:
    """The outcomes of the checks of some families until ``end``, and lines about the model.

    A check that ends its process is an outcome, and the next one runs in another process.
    """
    if one_process:
        yield from (got for *_, got in _messages(families, 0, path, end) if got is not None)
        return
    left, done = [*families], 0
    while left:
        doing, crash = "", ""
        for message in _received(left, done, path, end):
            if isinstance(message, str):
                crash = message
                break
            family, doing, got = message
            if family != left[0]:
                left, done = left[left.index(family) :], 0
            if got is not None:
                yield got
                doing, done = "", done + 1
                end = 0.0 if _hangs(got) else end
        if not crash:
            return
        yield _without_result(doing or left[0], "crashes", crash)
        # Without the check that did, or without the family where none had begun.
        left, done = (left, done + 1) if doing else (left[1:], 0)


def _received(families: list[str], skip: int, path: str, end: float) -> Iterator[_Message | str]:
    """The messages of another process, and how it ended where it did so before it was done."""
    worker = Worker(work, quiet=False)
    try:
        worker.jobs.send((families, skip, path, end))
        while (message := worker.received()) is not None:
            yield message
    except (EOFError, OSError):
        yield worker.ending()
    finally:
        worker.process.kill()  # a kernel that hangs keeps it from ending


def work(job: Any, tell: Callable[[Any], None]) -> None:
    """Tell the messages of the checks, and None behind them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked ends this one
    faulthandler.enable()
    for message in chain(_messages(*job), [None]):
        tell(message)


def _messages(families: Sequence[str], skip: int, path: str, end: float) -> Iterator[_Message]:
    from .examples import examples

    hangs = False
    for family in families:
        yield family, "", None
        if family == MODEL:
            if not hangs:
                yield family, MODEL, None
                yield family, MODEL, _model()
            continue
        for check in islice(examples(family), skip, None):
            yield family, check.name, None
            outcome = _outcome(check, path, 0.0 if hangs else end)
            hangs = hangs or _hangs(outcome)
            yield family, check.name, outcome
        skip = 0


def _hangs(outcome: Outcome | str) -> bool:
    return isinstance(outcome, Outcome) and outcome.row[2] == "hangs"


def _without_result(name: str, what: str, wrong: str = "") -> Outcome:
    return Outcome((name, "", what, "", "", "", ""), wrong)


def _outcome(check: Example, path: str, end: float) -> Outcome:
    """Run a check as asked for, beside the reference on the CPU, and see what auto would take.

    Its arrays are once buffers of their own and once views that begin one element into a buffer.
    """
    import mlx.core as mx

    from ..reference.rounding import behind_one
    from ..runtime.backend import use_backend
    from ..runtime.wait import KernelTimeout, wait_for

    if time.monotonic() > end:
        return _without_result(check.name, "not run")
    try:
        with use_backend(path):
            start = time.perf_counter()
            actual: list[Any] = wait_for(check.run, _PATIENCE, *check.arrays)
            first, times = time.perf_counter() - start, list[float]()
            for _ in range(_REPEATS):
                start = time.perf_counter()
                mx.eval(check.run(*check.arrays))
                times.append(time.perf_counter() - start)
            of_views: list[Any] = wait_for(check.run, _PATIENCE, *map(behind_one, check.arrays))
        error, allowed = check.error(actual, of_views)
        taken = _taken(check)
    except Exception as failure:  # whatever is wrong with one kernel, the others are checked
        what = "hangs" if isinstance(failure, KernelTimeout) else "fails"
        return _without_result(check.name, what, f"{type(failure).__name__}: {failure}")
    is_right = error <= allowed
    shown = f"{first:.2f} s", "right" if is_right else "WRONG", f"{error:.1e}", f"{allowed:.1e}"
    wrong = "" if is_right else f"wrong by {error:.3g}, where rounding explains {allowed:.3g}"
    return Outcome((check.name, *shown, f"{1e6 * min(times):.0f} us", taken), wrong)


def _taken(check: Example) -> str:
    """The path that ``auto`` takes for such arrays, and the reason."""
    from ..runtime.backend import use_backend
    from ..runtime.explain import recording

    with use_backend("auto"), recording() as rows:
        check.run(*check.arrays)
    keys = [row.key for row in rows if not row.key[0].startswith(("kernel ", "tuning"))]
    return f"{keys[0][1]}: {keys[0][2]}" if keys else ""


def _model() -> str:
    """Convert the model that ships, which measures its shapes here, and say what is taken."""
    from ..conversion.loading import load_stock
    from ..convert import convert_model
    from .demo import shipped_model

    loaded = load_stock(shipped_model())
    start = time.perf_counter()
    report = convert_model(loaded.model, config=loaded.quantization)
    return f"{report.summary()}\nconverted in {time.perf_counter() - start:.1f} s"
