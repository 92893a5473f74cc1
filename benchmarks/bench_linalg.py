"""Factorisations and triangular solves beside stock MLX, and PyTorch where it is installed.

    python benchmarks/bench_linalg.py           # the sizes of models on a GPU, small ones on a CPU
    python benchmarks/bench_linalg.py --without-stock --repeats 15

The column error is the backward error of the first matrix in float64, in units of n eps ||A||,
held to a bound before anything is timed. Stock MLX has these on the CPU only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from common import arguments, output
from harness import GPU as ON_GPU
from harness import Run, as_torch, case

from mlx_qlayers import linalg

try:
    import torch
except ImportError:
    torch = None

EPS = 2.0**-23
# Batch and size; stock MLX up to this many elements.
GPU = [(1, 1024), (1, 3584), (1, 8192), (512, 64), (64, 256)]
CPU = [(1, 256), (1, 1024), (512, 64), (64, 256)]
STOCK_LIMIT = 2**23


class Kind(NamedTuple):
    """One computation: by us, by stock MLX, by PyTorch; the difference that a result leaves."""

    ours: Callable[[mx.array], Any]
    stock: Callable[[mx.array], Any]
    torch: Callable[[Any], Any]
    rest: Callable[..., np.ndarray]
    most: int


KINDS = {
    "cholesky": Kind(
        lambda a: linalg.cholesky(a, check=False),
        lambda a: mx.linalg.cholesky(a, stream=mx.cpu),
        lambda a: torch.linalg.cholesky_ex(a).L,
        lambda a, factor: factor @ factor.T - a,
        8192,
    ),
    "solve_triangular": Kind(
        lambda a: linalg.solve_triangular(a, a),
        lambda a: mx.linalg.solve_triangular(a, a, stream=mx.cpu),
        lambda a: torch.linalg.solve_triangular(a.tril(), a, upper=False),
        lambda a, x: np.tril(a) @ x - a,
        3584,
    ),
    "qr": Kind(
        linalg.qr,
        lambda a: mx.linalg.qr(a, stream=mx.cpu),
        lambda a: torch.linalg.qr(a),
        lambda a, q, r: q @ r - a,
        3584,
    ),
}


class Case(NamedTuple):
    """So many matrices of one size, to compute something with."""

    kind: str
    batch: int
    n: int

    def matrices(self) -> mx.array:
        """Symmetric positive definite ones."""
        half = mx.random.normal((self.batch, self.n, 2 * self.n), key=mx.random.key(self.n))
        half = half / self.n**0.5
        a = half @ half.swapaxes(1, 2) + 0.01 * mx.eye(self.n)
        mx.eval(a)
        return a

    def contenders(self, with_stock: bool) -> dict[str, Run]:
        """Those that are not ours."""
        kind, a, found = KINDS[self.kind], self.matrices(), {}
        # Beside a GPU MLX's solve ends the process now and then: two of its CPU threads move an
        # array that is read twice (MLX 0.32.4). The others get an array that lies on the host.
        safe = not ON_GPU or self.kind != "solve_triangular"
        if with_stock and safe and a.size <= STOCK_LIMIT and self.n <= 1024:
            on_host = mx.array(np.array(a))
            found["stock ms"] = lambda: kind.stock(on_host)
        if torch is not None:
            given = as_torch(a)
            found["torch ms"] = lambda: kind.torch(given)
        return found

    def error(self) -> float:
        """Of our result for the first matrix; the Frobenius norm is quick."""
        a = self.matrices()
        result = KINDS[self.kind].ours(a)
        found = result if isinstance(result, tuple) else (result,)
        wide = [np.array(x[0], np.float64) for x in found]
        truth = np.array(a[0], np.float64)
        rest = np.linalg.norm(KINDS[self.kind].rest(truth, *wide))
        error = float(rest / (np.linalg.norm(truth) * self.n * EPS))
        assert error <= 1 or self.kind == "solve_triangular", f"{self}: error {error}"
        return error


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--without-stock", action="store_true", help="MLX takes seconds")
    args = parser.parse_args()
    sizes = GPU if ON_GPU else CPU
    cases = [Case(name, *size) for name in KINDS for size in sizes if size[1] <= KINDS[name].most]

    def ours(shape: Case) -> dict[str, Run]:
        a = shape.matrices()
        return {"ms": lambda: KINDS[shape.kind].ours(a)}

    with output(args, "linalg"):
        case(
            lambda shape: shape.contenders(not args.without_stock),
            ours,
            cases,
            repeats=args.repeats,
            check=Case.error,
            row=lambda shape: {"task": shape.kind, "batch x n": f"{shape.batch} x {shape.n}"},
        )


if __name__ == "__main__":
    main()
