"""GPTQ of single matrices, with the time of each part.

    python benchmarks/bench_gptq.py           # the projections of a 7B model on a GPU
    python benchmarks/bench_gptq.py --host    # kernel against reference, which a CPU goes by

The result is compared with rounding to the nearest. Stock mlx-lm factorises on the CPU, and its
loop launches operators for each column: one column is timed, and the loop extrapolated from it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import mlx.core as mx
from common import Table, add_output, print_facts, write_output

from mlx_qlayers import backend, linalg, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.gptq import gptq
from mlx_qlayers.ops.linalg import subtract_product

FMT = Format(64, 4)
# Rows and columns.
GPU = [(3584, 3584), (18944, 3584), (3584, 18944)]
CPU = [(384, 384), (1024, 384), (384, 1024)]
TOKENS = 4096


def seconds(function: Callable[[], object]) -> float:
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(function())
    mx.synchronize()
    return time.perf_counter() - start


def inputs(n: int, k: int) -> tuple[mx.array, mx.array]:
    mx.random.seed(n)
    x = mx.random.normal((TOKENS, k)) * mx.exp(mx.random.normal((k,)))
    w = (mx.random.normal((n, k)) * k**-0.5).astype(mx.bfloat16)
    mx.eval(x, w)
    return w, x


def hessian(x: mx.array) -> mx.array:
    return subtract_product(mx.zeros((x.shape[1], x.shape[1])), -x.T, x)


def loss(w: mx.array, h: mx.array, packed: tuple[mx.array, mx.array, mx.array]) -> float:
    wrong = (mx.dequantize(*packed, *FMT) - w).astype(mx.float32)
    return ((wrong @ h) * wrong).sum().item()


def column(w: mx.array, h: mx.array) -> float:
    """Seconds of mlx-lm's operators for one column of a group."""
    group, factor = w[:, :64].astype(mx.float32), h[:64, :64]
    mx.eval(group, factor)

    def step() -> mx.array:
        error = (group[:, :1] - mx.round(group[:, :1])) / factor[0, 0]
        return group - error @ factor[:1]

    step()
    return min(seconds(step) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", action="store_true", help="the kernel on the CPU")
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    on_cpu = args.host or backend() in ("host", "ops")
    table = Table(
        {"N x K": 14, "path": 6, "hessian s": 10, "inverse s": 10, "gptq s": 10}
        | {"mlx-lm loop s": 14, "of rounding": 12}
    )
    table.print_header()
    for n, k in CPU if on_cpu else GPU:
        w, x = inputs(n, k)
        for path in ("ops", "host") if args.host else ("auto",):
            with use_backend(path):
                gptq(w[:, :256], hessian(x[:, :256]), FMT)  # compiles
                h = hessian(x)
                of_hessian = seconds(lambda x=x: hessian(x))
                damped = h + 0.01 * mx.diagonal(h).mean() * mx.eye(k)
                inverse = seconds(
                    lambda a=damped, k=k: linalg.solve_triangular(linalg.cholesky(a), mx.eye(k))
                )
                found: list[tuple[mx.array, mx.array, mx.array]] = []
                whole = seconds(
                    lambda w=w, h=h, found=found: found.append(gptq(w, h, FMT)) or found
                )
                share = loss(w, h, found[0]) / loss(w, h, mx.quantize(w, *FMT))
            assert share < 0.9, f"GPTQ loses {share} of what rounding does"
            table.add(
                **{"N x K": f"{n} x {k}", "path": path, "hessian s": of_hessian},
                **{"inverse s": inverse, "gptq s": whole},
                **{"mlx-lm loop s": k * column(w, h), "of rounding": share},
            )
    write_output(args, "gptq", [table])


if __name__ == "__main__":
    main()
