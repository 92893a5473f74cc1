"""Products and prompts in 8-bit integers beside those of 4 bits, on CUDA.

``python benchmarks/bench_int8.py [--no-model]``: products of a 7B model's shapes with 2,048 rows,
verified first, beside the product of 4 bits and a dense one; then prompts of a model of that shape.
"""

from __future__ import annotations

import argparse
from functools import partial

import mlx.core as mx
import numpy as np
from common import Sample, Table, add_output, measure, output, print_facts
from decoding_model import QWEN2_7B, build, prefill

from mlx_qlayers import convert_model, quantized_matmul, revert_model
from mlx_qlayers.ops.int8_matmul import int8_matmul

ROWS = 2048
SHAPES = ((3584, 3584), (512, 3584), (18944, 3584), (3584, 18944))
PROMPTS = (512, 2048)


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


def products(table: Table) -> None:
    """Time single products."""
    for m, n, k in ((3, 41, 64), (130, 300, 272), (257, 513, 3584)):
        error = verify(m, n, k)
        assert error < 0.01, f"{m} x {n} x {k} is off by {error:.1e}"
    for n, k in SHAPES:
        mx.random.seed(n)
        x = mx.random.normal((ROWS, k)).astype(mx.bfloat16)
        w = mx.random.randint(-127, 128, (n, k)).astype(mx.int8)
        dense = mx.random.normal((n, k)).astype(mx.bfloat16)
        packed, scales = mx.quantize(dense), mx.ones((n,))
        mx.eval(x, w, dense, packed)
        paths = {
            "int8 ms": partial(int8_matmul, x, w, scales),
            "4 bits ms": partial(quantized_matmul, x, *packed),
            "dense ms": partial(mx.matmul, x, dense.T),
        }
        times = {name: time.scaled(1e3) for name, time in measure(paths, repeats=7).items()}
        table.add(task=f"{n} x {k}, {ROWS} rows", **times)


def prompts(table: Table) -> None:
    """Time prompts, without and with 8-bit integers."""
    model = build(QWEN2_7B, 64, 4)
    tokens = mx.random.randint(0, 1000, (max(PROMPTS),))
    found: dict[int, dict[str, Sample]] = {length: {} for length in PROMPTS}
    for activations in (None, "int8"):
        convert_model(model, verify=False, calibrate=False, activations=activations)
        for length, times in found.items():
            prefill(model, tokens[:length])
            taken = Sample.of(prefill(model, tokens[:length]) for _ in range(7))
            times[f"{activations or '4 bits'} ms"] = taken.scaled(1e3)
        revert_model(model)
    for length, times in found.items():
        table.add(task=f"prompt of {length}", **times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-model", action="store_true", help="products only")
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    table = Table({"task": 28} | dict.fromkeys(("int8 ms", "4 bits ms", "dense ms"), 14))
    table.print_header()
    with output(args, "int8"):
        products(table)
        if not args.no_model:
            prompts(table)


if __name__ == "__main__":
    main()
