"""Products and prompts in 8-bit integers beside the present paths, on CUDA.

``python benchmarks/bench_int8.py [--no-model]``: products of a 7B model's shapes with 2,048 rows,
verified first, beside the present path and a dense product; then prompts of a model of that shape.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
from common import print_facts
from decoding_model import QWEN2_7B, build, prefill

from mlx_qlayers import convert_model, quantized_matmul, revert_model
from mlx_qlayers.ops.int8_matmul import int8_matmul

ROWS = 2048
SHAPES = ((3584, 3584), (512, 3584), (18944, 3584), (3584, 18944))
PROMPTS = (512, 2048)


def seconds(
    run: Callable[[], mx.array | list[mx.array]], repeats: int = 7, inner: int = 10
) -> float:
    """The median time of a call, of several that are evaluated together."""
    mx.eval(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        mx.eval([run() for _ in range(inner)])
        times.append((time.perf_counter() - begin) / inner)
    return statistics.median(times)


def verify(m: int, n: int, k: int) -> float:
    """The largest error against exact integers, over the largest result."""
    rng = np.random.default_rng(m)
    x = mx.array(rng.normal(size=(m, k)).astype(np.float32)).astype(mx.bfloat16)
    w = mx.array(rng.integers(-127, 128, (n, k)).astype(np.int8))
    scales = mx.array(rng.uniform(0.01, 0.02, n).astype(np.float32))
    y = int8_matmul(x, w, scales)
    exact = np.array(x.astype(mx.float32)).astype(np.float64)
    own = np.abs(exact).max(1, keepdims=True) / 127
    truth = np.rint(exact / own) @ np.array(w).astype(np.float64).T * own * np.array(scales)
    return float(np.abs(np.array(y.astype(mx.float32)) - truth).max() / np.abs(truth).max())


def products() -> None:
    """Times of single products."""
    for m, n, k in ((3, 41, 64), (130, 300, 272), (257, 513, 3584)):
        print(f"{m} x {n} x {k}: off by {verify(m, n, k):.1e} of the largest", flush=True)
    for n, k in SHAPES:
        mx.random.seed(n)
        x = mx.random.normal((ROWS, k)).astype(mx.bfloat16)
        w = mx.random.randint(-127, 128, (n, k)).astype(mx.int8)
        dense = mx.random.normal((n, k)).astype(mx.bfloat16)
        packed, scales = mx.quantize(dense), mx.ones((n,))
        mx.eval(x, w, dense, packed)
        paths = {
            "int8": partial(int8_matmul, x, w, scales),
            "present": partial(quantized_matmul, x, *packed),
            "dense": partial(mx.matmul, x, dense.T),
        }
        found = {name: seconds(run) for name, run in paths.items()}
        told = ", ".join(
            f"{name} {1e6 * s:.0f} us {2e-12 * ROWS * n * k / s:.0f} T/s"
            for name, s in found.items()
        )
        print(f"{n} x {k}: {told}", flush=True)


def prompts() -> None:
    """Times of prompts, without and with 8-bit integers."""
    model = build(QWEN2_7B, 64, 4)
    tokens = mx.random.randint(0, 1000, (max(PROMPTS),))
    for activations in (None, "int8"):
        convert_model(model, verify=False, calibrate=False, activations=activations)
        for length in PROMPTS:
            prefill(model, tokens[:length])
            found = statistics.median(prefill(model, tokens[:length]) for _ in range(7))
            name = activations or "present"
            print(f"prompt of {length}, {name}: {1e3 * found:.1f} ms", flush=True)
        revert_model(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-model", action="store_true", help="products only")
    arguments = parser.parse_args()
    print_facts()
    products()
    if not arguments.no_model:
        prompts()
