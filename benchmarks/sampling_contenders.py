"""What the benchmarks of grid sampling and deformable attention share: who runs, and who is right.

Contenders are pairs of functions: forward, and forward with all gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
from common import add_output, print_facts

from mlx_qlayers.runtime.backend import BackendError, use_backend

Run = Callable[[], list[mx.array]]
TASKS = "forward", "with gradients"


def arguments(description: str) -> tuple[argparse.ArgumentParser, bool]:
    """The options that both have, and whether a GPU computes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=5)
    gpu = mx.default_device() == mx.Device(mx.gpu)
    usual = list(filter(_can_run, ["metal", "cuda"] if gpu else ["ops", "host"]))
    help = f"of ops, metal, cuda and host; by default {' and '.join(usual)}"
    parser.add_argument("--paths", nargs="*", default=usual, help=help)
    add_output(parser)
    print_facts()
    return parser, gpu


def contenders(
    operators: Callable[..., mx.array],
    ours: Callable[..., mx.array],
    inputs: Sequence[mx.array],
    paths: Sequence[str],
) -> dict[str, list[Run]]:
    """By path, both tasks; the last of the inputs is the cotangent."""
    runs = {"operators": _tasks(operators, inputs)}
    for path in paths:
        tasks = [_on_backend(path, run) for run in _tasks(ours, inputs)]
        runs["reference" if path == "ops" else path] = tasks
    return runs


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
