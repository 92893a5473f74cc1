"""One comparison of a stock function with ours, for a list of shapes: verified, then timed.

Contenders are pairs of functions: forward, and forward with all gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from common import Sample, Table, add_output, measure, print_facts

from mlx_qlayers.runtime.backend import BackendError, use_backend

Run = Callable[[], list[mx.array]]
Function = Callable[..., mx.array]
TASKS = "forward", "with gradients"


def case(
    stock: Callable[[Any], Function],
    ours: Callable[[Any], Function],
    shapes: Iterable[Any],
    *,
    table: Table,
    args: argparse.Namespace,
    tolerance: Callable[[Any], float],
    wrong: float = 0.0,
    more: Callable[[Any, int, str, Run | None, Sample], dict[str, Any]] = lambda *_: {},
    others: Callable[[Any, int], dict[str, Sample]] = lambda *_: {},
) -> None:
    """Compare on the inputs of each shape, and add a row for every path and task.

    Args:
        stock: the stock operators' function of a shape.
        ours: our function of a shape, which runs on every backend of ``args.paths``.
        shapes: each has ``inputs()``, the last of which is the cotangent, and a name.
        table: of columns task, path, ms, ratio and those of ``more``.
        args: of :func:`arguments`.
        tolerance: of the errors, as a part of the largest number.
        wrong: the share of numbers that may be off by more.
        more: further columns of a shape, task, path, function and time.
        others: times of contenders that are no MLX functions.
    """
    for shape in shapes:
        inputs = shape.inputs()
        runs = {"operators": _tasks(stock(shape), inputs)}
        for path in args.paths:
            forced = [_on_backend(path, run) for run in _tasks(ours(shape), inputs)]
            runs["reference" if path == "reference" else path] = forced
        for task, name in enumerate(TASKS):
            now = {path: both[task] for path, both in runs.items()}
            first = verified(now, tolerance(shape), wrong)
            times = measure(now, repeats=args.repeats) | others(shape, task)
            for path, taken in times.items():
                table.add(
                    task=f"{shape}, {name}" if path == "operators" else "",
                    path=path,
                    ms=taken.scaled(1e3),
                    ratio=f"{times['operators'].median / taken.median:.2f}x",
                    **({"first s": first[path]} if path in first else {}),
                    **more(shape, task, path, now.get(path), taken),
                )


def arguments(description: str) -> tuple[argparse.ArgumentParser, bool]:
    """The options that all have, and whether a GPU computes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=5)
    gpu = mx.default_device() == mx.Device(mx.gpu)
    usual = list(filter(_can_run, ["metal", "cuda"] if gpu else ["reference", "host"]))
    help = f"of ops, metal, cuda and host; by default {' and '.join(usual)}"
    parser.add_argument("--paths", nargs="*", default=usual, help=help)
    add_output(parser)
    print_facts()
    return parser, gpu


def verified(runs: Mapping[str, Run], tolerance: float, wrong: float = 0.0) -> dict[str, float]:
    """Seconds of each first call, with compilation; all must agree with the operators.

    Args:
        runs: by path; the operators first.
        tolerance: of errors, as a part of the largest number.
        wrong: the share of numbers that may be off by more.
    """
    first, expected = {}, None
    for path, run in runs.items():
        start = time.perf_counter()
        found = run()
        mx.eval(found)
        first[path] = time.perf_counter() - start
        print(f"{path}: {first[path]:.1f} s until its first result", file=sys.stderr, flush=True)
        expected = expected or [a.astype(mx.float32) for a in found]
        for mine, theirs in zip(found, expected, strict=True):
            error = mx.abs(mine.astype(mx.float32) - theirs) / mx.abs(theirs).max()
            share = (error > tolerance).mean().item()
            assert share <= wrong, f"{path}: {share:.1%} differ, by up to {error.max().item()}"
    return first


def _tasks(function: Callable[..., mx.array], inputs: Sequence[mx.array]) -> list[Run]:
    *primals, cotangent = inputs

    def with_gradients() -> list[mx.array]:
        outputs, gradients = mx.vjp(lambda *args: [function(*args)], primals, [cotangent])
        return [*outputs, *gradients]

    return [lambda: [function(*primals)], with_gradients]


def _can_run(name: str) -> bool:
    try:
        with use_backend(name):
            return True
    except BackendError:
        return False


def _on_backend(name: str, run: Run) -> Run:
    def forced() -> list[mx.array]:
        with use_backend(name):
            return run()

    return forced
