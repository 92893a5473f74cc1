"""Factorisations and triangular solves beside stock MLX, and PyTorch where it is installed.

    python benchmarks/bench_linalg.py           # the sizes of models on a GPU, small ones on a CPU
    python benchmarks/bench_linalg.py --host    # kernel against MLX's LAPACK, which a CPU goes by
    python benchmarks/bench_linalg.py --tasks qr --sizes 3584 --without-stock --repeats 3

Every result is compared with float64 before it is timed: the column error is the backward error in
units of n eps ||A||. Stock MLX has these on the CPU only, and is left out where it takes seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from common import Table, add_output, measure, print_facts, write_output

from mlx_qlayers import backend, linalg, use_backend

try:
    import torch
except ImportError:
    torch = None

EPS = 2.0**-23
# Batch and size; stock MLX up to this many elements.
GPU = [(1, 1024), (1, 3584), (1, 8192), (512, 64), (64, 256)]
CPU = [(1, 256), (1, 1024), (512, 64), (64, 256)]
STOCK_LIMIT = 2**23


class Task(NamedTuple):
    """One computation: by us, by stock MLX, by PyTorch, and the error of a result."""

    name: str
    ours: Callable[[mx.array], Any]
    stock: Callable[[mx.array], Any]
    torch: Callable[[Any], Any]
    error: Callable[[np.ndarray, Any], np.ndarray]
    most: int


def definite(batch: int, n: int) -> mx.array:
    """Symmetric positive definite matrices."""
    half = mx.random.normal((batch, n, 2 * n), key=mx.random.key(n)) / n**0.5
    a = half @ half.swapaxes(1, 2) + 0.01 * mx.eye(n)
    mx.eval(a)
    return a


def of_factor(a: np.ndarray, factor: Any) -> np.ndarray:
    return factor @ factor.swapaxes(-1, -2) - a


def of_solution(a: np.ndarray, x: Any) -> np.ndarray:
    return np.tril(a) @ x - a


def of_qr(a: np.ndarray, found: Any) -> np.ndarray:
    q, r = found
    return q @ r - a


def lower(a: Any) -> Any:
    return torch.linalg.solve_triangular(a.tril(), a, upper=False)


TASKS = [
    Task(
        "cholesky",
        lambda a: linalg.cholesky(a, check=False),
        lambda a: mx.linalg.cholesky(a, stream=mx.cpu),
        lambda a: torch.linalg.cholesky_ex(a).L,
        of_factor,
        8192,
    ),
    Task(
        "solve_triangular",
        lambda a: linalg.solve_triangular(a, a),
        lambda a: mx.linalg.solve_triangular(a, a, stream=mx.cpu),
        lower,
        of_solution,
        3584,
    ),
    Task(
        "qr",
        linalg.qr,
        lambda a: mx.linalg.qr(a, stream=mx.cpu),
        lambda a: torch.linalg.qr(a),
        of_qr,
        3584,
    ),
]


def backward_error(task: Task, a: mx.array, result: Any) -> float:
    """Of the first matrix, in units of n eps ||A||; the Frobenius norm is quick."""
    found = result if isinstance(result, tuple) else (result,)
    wide = [np.array(x[0], np.float64) for x in found]
    truth = np.array(a[0], np.float64)
    difference = task.error(truth, wide[0] if len(wide) == 1 else wide)
    return float(np.linalg.norm(difference) / (np.linalg.norm(truth) * len(truth) * EPS))


def torch_seconds(function: Callable[[Any], Any], a: mx.array, repeats: int) -> float:
    """The median of PyTorch on the same GPU, calls queued as those of MLX are."""
    given = torch.tensor(np.array(a), device="cuda" if torch.cuda.is_available() else "cpu")

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    function(given)
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(3):
            function(given)
        synchronize()
        times.append((time.perf_counter() - start) / 3)
    return float(np.median(times))


def compare(tasks: list[Task], cases: list[tuple[int, int]], repeats: int, stock: bool) -> Table:
    table = Table(
        {"task": 18, "batch x n": 12, "ms": 14, "stock ms": 14, "torch ms": 10}
        | {"x stock": 8, "x torch": 8, "error": 8}
    )
    table.print_header()
    for task in tasks:
        for batch, n in cases:
            if n > task.most:
                continue
            a = definite(batch, n)
            result = task.ours(a)
            mx.eval(result)
            error = backward_error(task, a, result)
            assert error <= 1 or task.name == "solve_triangular", f"{task.name}: error {error}"
            contenders = {"ms": lambda task=task, a=a: task.ours(a)}
            # Beside a GPU MLX's solve ends the process now and then: two of its CPU threads move an
            # array that is read twice (MLX 0.32.4). The others get an array that lies on the host.
            safe = mx.default_device().type == mx.cpu or task.name != "solve_triangular"
            if stock and safe and batch * n * n <= STOCK_LIMIT and n <= 1024:
                on_host = mx.array(np.array(a))
                contenders["stock ms"] = lambda task=task, a=on_host: task.stock(a)
            times = measure(contenders, repeats=repeats)
            row: dict[str, Any] = {key: time.scaled(1e3) for key, time in times.items()}
            if "stock ms" in times:
                row["x stock"] = times["stock ms"].median / times["ms"].median
            if torch is not None:
                seconds = torch_seconds(task.torch, a, repeats)
                row |= {"torch ms": 1e3 * seconds, "x torch": seconds / times["ms"].median}
            table.add(**{"task": task.name, "batch x n": f"{batch} x {n}", "error": error}, **row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", action="store_true", help="the kernels on the CPU")
    parser.add_argument("--tasks", nargs="*", default=[task.name for task in TASKS])
    parser.add_argument("--sizes", type=int, nargs="*", help="only these")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-stock", action="store_true", help="MLX takes seconds")
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    on_cpu = args.host or backend() in ("host", "reference")
    with use_backend("host" if args.host else "auto"):
        cases = [
            case for case in (CPU if on_cpu else GPU) if not args.sizes or case[1] in args.sizes
        ]
        tasks = [task for task in TASKS if task.name in args.tasks]
        table = compare(tasks, cases, args.repeats, not args.without_stock)
    write_output(args, "linalg", [table])


if __name__ == "__main__":
    main()
