"""Products and prompts in 8-bit integers beside those of 4 bits, on CUDA.

``python benchmarks/bench_int8.py [--no-model]``: products of a 7B model's shapes with 2,048 rows,
verified first, beside the product of 4 bits and a dense one; then prompts of a model of that shape.
"""

from __future__ import annotations

import copy
from functools import partial

import mlx.core as mx
from common import Table, arguments, output
from decoding_model import QWEN2_7B, build, prefill
from harness import Run, case, held, in_turns

from mlx_qlayers import convert_model, quantized_matmul
from mlx_qlayers.commands.example import Example
from mlx_qlayers.ops.int8_matmul import int8_matmul

ROWS = 2048
SHAPES = ((3584, 3584), (512, 3584), (18944, 3584), (3584, 18944))
PROMPTS = (512, 2048)
Shape = tuple[int, int]


def error(shape: Shape) -> float:
    """The largest error, over the largest result, in some small sizes."""
    return max(_error(*size) for size in ((3, 41, 64), (130, 300, 272), (257, 513, shape[1])))


def _error(m: int, n: int, k: int) -> float:
    x, w = mx.random.normal((m, k)).astype(mx.bfloat16), mx.random.randint(-127, 128, (n, k))
    given = {"x": x, "w": w.astype(mx.int8), "scales": mx.random.uniform(0.01, 0.02, (n,))}
    call = Example(f"{m} x {n} x {k}", int8_matmul, given, terms=k, steps=1)
    return held(call, lambda: call.run(*call.arrays))


def others(shape: Shape) -> dict[str, Run]:
    """The product of 4 bits, and a dense one."""
    mx.random.seed(shape[0])
    x = mx.random.normal((ROWS, shape[1])).astype(mx.bfloat16)
    dense = mx.random.normal(shape).astype(mx.bfloat16)
    packed = mx.quantize(dense)
    mx.eval(x, dense, packed)
    return {
        "4 bits ms": partial(quantized_matmul, x, *packed),
        "dense ms": partial(mx.matmul, x, dense.T),
    }


def ours(shape: Shape) -> dict[str, Run]:
    """The product of integers."""
    x = mx.random.normal((ROWS, shape[1])).astype(mx.bfloat16)
    w = mx.random.randint(-127, 128, shape).astype(mx.int8)
    scales = mx.ones((shape[0],))
    mx.eval(x, w, scales)
    return {"int8 ms": partial(int8_matmul, x, w, scales)}


def prompts(repeats: int) -> None:
    """Time prompts, without and with 8-bit integers."""
    models = {"4 bits": build(QWEN2_7B, 64, 4)}
    models["int8"] = copy.deepcopy(models["4 bits"])  # the arrays are shared
    convert_model(models["4 bits"], verify=False, calibrate=False)
    convert_model(models["int8"], verify=False, calibrate=False, activations="int8")
    table, tokens = Table(), mx.random.randint(0, 1000, (max(PROMPTS),))
    for length in PROMPTS:
        times = in_turns(models, repeats, lambda m, n=length: prefill(m, tokens[:n]))
        row = {f"{name} ms": taken.scaled(1e3) for name, taken in times.items()}
        table.add(task=f"prompt of {length}", **row)


def main() -> None:
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--no-model", action="store_true", help="products only")
    args = parser.parse_args()
    with output(args, "int8"):
        case(
            others,
            ours,
            SHAPES,
            repeats=args.repeats,
            check=error,
            row=lambda shape: {"task": f"{shape[0]} x {shape[1]}, {ROWS} rows"},
        )
        if not args.no_model:
            prompts(args.repeats)


if __name__ == "__main__":
    main()
