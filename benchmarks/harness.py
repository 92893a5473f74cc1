"""Every comparison of stock functions with ours: verified, timed in turns, and put into a table.

A measurement verifies before it times. Its contenders take turns, in an order that is reversed
in every other round, so that a machine that warms up or is shared favours nobody.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from common import Sample, Table, turns
from mlx.utils import tree_flatten

from mlx_qlayers.commands.example import Example
from mlx_qlayers.runtime.backend import backend, unavailable, use_backend

Run = Callable[[], Any]
Ways = Mapping[str, Run]
TASKS = "forward", "with gradients"


class Task(NamedTuple):
    """A shape, and whether gradients are computed too."""

    shape: Any
    gradients: bool

    def __str__(self) -> str:
        return f"{self.shape}, {TASKS[self.gradients]}"


def tasks(shapes: Iterable[Any]) -> list[Task]:
    """Each shape forward, and with all gradients."""
    return [Task(shape, gradients) for shape in shapes for gradients in (False, True)]


def case(
    stock: Callable[[Any], Ways],
    ours: Callable[[Any], Ways],
    shapes: Iterable[Any],
    *,
    repeats: int,
    table: Table | None = None,
    tolerance: Callable[[Any], float] | None = None,
    check: Callable[[Any], float] | None = None,
    wrong: float = 0.0,
    row: Callable[[Any], Mapping[str, Any]] | None = None,
    unit: str = "ms",
    calls: Callable[[Any], int] = lambda shape: 1,
    more: Callable[..., Mapping[str, Any]] = lambda *_: {},
) -> None:
    """Verify what is ours, time all contenders in turns, and add them to a table, shape by shape.

    Args:
        stock: of a shape, functions without arguments by name; ratios are to the first.
        ours: the same; their results are verified.
        shapes: whatever these functions take.
        repeats: measurements of each.
        table: where rows are added; a new one by default.
        tolerance: of a shape: how far results may be from the first contender's, as a part of the
            largest number. Or
        check: of a shape, the error of ours against something better; raises where it is too large.
        wrong: the share of numbers that may be off by more than the tolerance.
        row: of a shape, the columns that name it: then it has one row, a column for each contender
            and the ratio of the best of stock to the best of ours. Else each contender has a row.
        unit: of the times: ``"ms"`` or ``"us"``.
        calls: the operations in one call of a contender.
        more: further columns, of a shape and all times; where each contender has a row, also of
            its name and function.
    """
    scale, table = {"ms": 1e3, "us": 1e6}[unit], table or Table()
    for shape in shapes:
        theirs, mine = stock(shape), ours(shape)
        ways = {**theirs, **mine}
        if check is not None:
            error = check(shape)
        else:
            assert theirs and tolerance is not None, "nothing to compare with"
            right = next(iter(theirs.values()))()
            error = verified(str(shape), mine, right, tolerance(shape), wrong)
        found = measure(ways, repeats=repeats)
        times = {name: time.scaled(scale / calls(shape)) for name, time in found.items()}
        if row is not None:
            best = [min((times[n].median for n in each), default=0.0) for each in (theirs, mine)]
            ratio = {"ratio": best[0] / best[1]} if all(best) else {}
            table.add(**{**row(shape), **times, **ratio, "error": error, **more(shape, times)})
            continue
        first = next(iter(times.values())).median
        for name, taken in times.items():
            found = {"task": str(shape), "path": name, unit: taken}
            found["ratio"] = f"{first / taken.median:.2f}x"
            table.add(**found, **more(shape, times, name, ways[name]))


def verified(label: str, runs: Ways, truth: Any, tolerance: float, wrong: float = 0.0) -> float:
    """The largest error of what functions give, over the largest number; it is held to a bound."""
    expected, worst = [a.astype(mx.float32) for a in arrays(truth)], 0.0
    for name, run in runs.items():
        for mine, right in zip(arrays(run()), expected, strict=True):
            error = mx.abs(mine.astype(mx.float32) - right) / mx.abs(right).max()
            worst = max(worst, error.max().item())
            # Counted: a sum in float32 ends at 2**24.
            share = mx.logical_not(error <= tolerance).sum().item() / error.size
            assert share <= wrong, f"{label}: {name}: {share:.1%} differ, by up to {worst:.2e}"
    return worst


def held(example: Example, *ways: Run) -> float:
    """The largest error of the results of an example's call, over the largest number.

    Raises:
        AssertionError: it is more than doctor and tests allow of such a call.
    """
    worst = 0.0
    for run in ways:
        found = arrays(run())
        error, allowed = example.error(found)
        assert error <= allowed, f"{example.name}: off by {error:.2e}, not {allowed:.2e}"
        worst = max(worst, error / max(mx.abs(a).max().item() for a in found))
    return worst


def with_gradients(function: Callable[..., mx.array], inputs: Sequence[mx.array]) -> Run:
    """A call, and the gradients of all inputs but the last, which is the cotangent."""
    *primals, cotangent = inputs

    def run() -> list[mx.array]:
        outputs, gradients = mx.vjp(lambda *given: [function(*given)], primals, [cotangent])
        return [*outputs, *gradients]

    return run


def either(
    task: Task, function: Callable[..., mx.array], inputs: Sequence[mx.array] | None = None
) -> Run:
    """The results that a task asks of a function; inputs are those of its shape by default."""
    inputs = inputs or task.shape.inputs()
    return with_gradients(function, inputs) if task.gradients else lambda: [function(*inputs[:-1])]


def on_paths(task: Task, function: Callable[..., mx.array]) -> dict[str, Run]:
    """The same on each backend to compare."""
    run = either(task, function)
    return {path: on(path, run) for path in paths()}


def as_torch(array: mx.array) -> Any:
    """A copy of the same dtype, for PyTorch."""
    import torch

    dtype = getattr(torch, str(array.dtype).removeprefix("mlx.core."))
    copy = torch.from_numpy(np.array(array.astype(mx.float32)))
    return copy.to("cuda" if GPU else "cpu", dtype)


def torch_run(task: Task, function: Callable[..., Any], inputs: Sequence[Any]) -> Run:
    """As :func:`either` of a function of PyTorch and its tensors."""
    from torch.autograd import grad

    *primals, cotangent = (each.requires_grad_(task.gradients) for each in inputs)

    def run() -> list[Any]:
        out = function(*primals)
        return [out, *(grad(out, primals, cotangent) if task.gradients else ())]

    return run


def on(path: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a backend forced."""

    def forced(*given: Any) -> Any:
        with use_backend(path):
            return run(*given)

    return forced


def chain(
    function: Callable[[mx.array, Any], Any],
    x: mx.array,
    given: Sequence[Any],
    compiled: bool = True,
) -> Run:
    """Calls with x and each of these, traced once where the backend can be traced."""

    def run(x: mx.array) -> list[Any]:
        return [function(x, each) for each in given]

    traced = mx.compile(run) if compiled and backend() != "host" else run
    return lambda: traced(x)


def paths() -> list[str]:
    """The backends to compare: on a GPU its own, else both of a CPU."""
    names = ["metal", "cuda"] if GPU else ["reference", "host"]
    return [name for name in names if unavailable(name) is None]


GPU = mx.default_device() == mx.Device(mx.gpu)


def measure(contenders: Ways, *, repeats: int = 10, least: float = 0.02) -> dict[str, Sample]:
    """Time functions against each other.

    The results of a function are evaluated. A fast one is called several times a measurement, one
    call queued behind the other as in a running model, so that each measurement takes at least
    ``least`` seconds and neither the clock nor the wait for the device matters. One that takes
    more than a second is measured twice. Functions of PyTorch are waited for as well.

    Args:
        contenders: the functions by name.
        repeats: measurements of each.
        least: the shortest measurement in seconds.

    Returns:
        Seconds a call by name.
    """
    paces = {name: _seconds(function, 1) for name, function in contenders.items()}
    paces = {n: p if p > SLOW else min(p, _seconds(contenders[n], 1)) for n, p in paces.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name in turns(contenders, repeats):
        if len(times[name]) < 2 or paces[name] <= SLOW:
            calls = max(1, round(least / paces[name]))
            times[name].append(_seconds(contenders[name], calls))
    return {name: Sample.of(values) for name, values in times.items()}


# Seconds of a call from which it is measured twice only.
SLOW = 1.0


def in_turns(
    contenders: Mapping[str, Any], repeats: int, run: Callable[[Any], Any]
) -> dict[str, Any]:
    """A number or a tuple of them of each contender, in turns after one run that is left out.

    Returns:
        By name, a sample of what a function gave, or a tuple of samples.
    """
    for each in contenders.values():
        run(each)
    found: dict[str, list[Any]] = {name: [] for name in contenders}
    for name in turns(contenders, repeats):
        found[name].append(run(contenders[name]))
    return {
        name: tuple(map(Sample.of, zip(*runs, strict=True)))
        if isinstance(runs[0], tuple)
        else Sample.of(runs)
        for name, runs in found.items()
    }


def seconds(run: Run) -> float:
    """Of one call, evaluated, with nothing in flight before it."""
    _wait()
    return _seconds(run, 1)


def _seconds(function: Run, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls - 1):
        mx.async_eval(*arrays(function()))
    mx.eval(*arrays(function()))
    _wait()
    return (time.perf_counter() - start) / calls


def _wait() -> None:
    mx.synchronize()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def arrays(result: Any) -> list[mx.array]:
    """The arrays of whatever a function returned."""
    flat: Any = tree_flatten(result)
    return [array for _, array in flat if isinstance(array, mx.array)]


def emptied() -> int:
    """The bytes of arrays, without those that nobody needs any more."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def peak(run: Run, results: bool = True) -> float:
    """Megabytes alive at the worst moment besides what was there before, and maybe the results."""
    before = emptied()
    mx.reset_peak_memory()
    found = arrays(run())
    mx.eval(found)
    mx.synchronize()
    own = 0 if results else sum(a.nbytes for a in found)
    return (mx.get_peak_memory() - before - own) / 1e6
