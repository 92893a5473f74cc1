"""Quantized products beside stock MLX.

    python benchmarks/bench_quantized_matmul.py              # one layer of Qwen2-7B, then all rows
    python benchmarks/bench_quantized_matmul.py --many       # many rows on a GPU, and dx
    python benchmarks/bench_quantized_matmul.py --few        # few rows on a GPU

Every result is held against float64 before it is timed. On a CPU a time is that of a call, and
MLX's half-precision loops are so slow that each is timed twice only. On a GPU it is that of one
product in a chain which ``mx.compile`` traced, each with a matrix that no cache holds, with a
second chain queued behind the first: neither Python nor launches hide a kernel. Few rows depend on
those before, as in a model, and their kernel is forced; many rows are what ``auto`` takes. On CUDA
MLX compiles each of its own products of several rows for up to half a minute, and keeps it on disk.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from common import arguments, output
from harness import Run, case, chain, on
from quantized_products import Case, Packed, Product, error

from mlx_qlayers import backend, quantized_matmul
from mlx_qlayers.formats import MODES, Format
from mlx_qlayers.metal.quantized_matmul.qmv_config import MAX_QMV_ROWS

DTYPES = mx.bfloat16, mx.float32, mx.float16
# Outputs and inputs: gate and up of Qwen2-7B, its attention's and its last projection, its head.
WIDE, LAYER, LONG, HEAD = (37888, 3584), (3584, 3584), (3584, 18944), (152064, 3584)
GPU_SHAPES = (WIDE, HEAD, LONG, LAYER)
# Elements that float16 may have on a CPU: more take 23 s a call.
_FLOAT16 = 1 << 29
# Products of a chain of few rows.
QUEUED = 16


def stock(shape: Case) -> Product:
    """MLX's product."""
    return lambda x, packed: mx.quantized_matmul(x, *packed, shape.transpose, *shape.fmt)


def dense(shape: Case) -> Product:
    """The matrix, unpacked, and a dense product."""

    def run(x: mx.array, packed: Packed) -> mx.array:
        matrix = mx.dequantize(*packed, *shape.fmt, dtype=shape.dtype)
        return x @ (matrix.T if shape.transpose else matrix)

    return run


def ours(shape: Case) -> Product:
    """Our product, as ``auto`` takes it."""
    options = shape.fmt._asdict()
    return lambda x, packed: quantized_matmul(x, *packed, transpose=shape.transpose, **options)


def layer_and_rows(repeats: int) -> None:
    """One matrix of Qwen2-7B at a few rows, and a smaller one at every power of two up to 512."""

    def ways(shape: Case) -> dict[str, Product]:
        found = {"reference": on("reference", ours(shape))}
        if backend() == "host" or (shape.rows <= MAX_QMV_ROWS and backend() != "reference"):
            found["kernel"] = on(backend(), ours(shape))
        return found

    def call(product: Product, shape: Case) -> Run:
        return partial(product, shape.x(), shape.copies()[0])

    print(f"milliseconds, 4 bits in groups of 64; kernel on backend {backend()}")
    sizes = ((LAYER, (1, 8, 64)), ((1024, 1024), [2**i for i in range(10)]))
    shapes = [Case(n, m, dtype=d) for n, rows in sizes for d in DTYPES for m in rows]
    case(
        lambda shape: {"stock": call(stock(shape), shape)},
        lambda shape: {name: call(way, shape) for name, way in ways(shape).items()},
        [s for s in shapes if s.kind != "float16" or s.rows * s.shape[0] * s.shape[1] <= _FLOAT16],
        repeats=repeats,
        check=lambda shape: error(shape, ways(shape).values()),
        row=lambda shape: {"shape": shape.name, "dtype": shape.kind, "rows": shape.rows},
    )


def in_turn(product: Product, shape: Case, dependent: bool) -> Run:
    """A chain of products with the copies by turns.

    Where each depends on the one before, its x is taken from there; if that is too small, x stays,
    by a small launch that waits for it.
    """
    x, copies, stays = shape.x(), shape.copies(), mx.array([True])
    if not dependent:
        return chain(product, x, copies)
    before: list[mx.array] = []

    def following(x: mx.array, i: int) -> mx.array:
        if i and (flat := before.pop().flatten()).size < x.size:
            x = mx.where(stays, x, flat[:1])
        elif i:
            x = flat[: x.size].reshape(x.shape)
        before[:] = [product(x, copies[i % len(copies)])]
        return before[0]

    return chain(following, x, range(QUEUED))


def on_gpu(shapes: list[Case], name: str, repeats: int) -> None:
    """Chains of products beside stock; ``name`` is of our column."""
    few = name == "kernel"

    def mine(shape: Case) -> Product:
        return on(backend(), ours(shape)) if few else ours(shape)

    def theirs(shape: Case) -> dict[str, Run]:
        products = {"stock": stock(shape)} | ({} if few else {"dense": dense(shape)})
        for each, product in list(products.items()):
            try:
                mx.eval(product(shape.x(), shape.copies()[0]))
            except (RuntimeError, ValueError) as problem:  # not every format has every operator
                print(f"{shape}: {each}: {problem}")
                del products[each]
        return {each: in_turn(product, shape, few) for each, product in products.items()}

    def row(shape: Case) -> dict[str, Any]:
        fmt = f"{shape.fmt.mode} {shape.fmt.bits}"
        return {"shape" if few else "product": shape.name, "format": fmt, "rows": shape.rows}

    print("milliseconds of a product in compiled chains, each with its own matrix")
    case(
        theirs,
        lambda shape: {name: in_turn(mine(shape), shape, few)},
        shapes,
        repeats=repeats,
        check=lambda shape: error(shape, [mine(shape)]),
        row=row,
        calls=lambda shape: QUEUED if few else len(shape.copies()),
    )


def few_rows(repeats: int) -> None:
    """Few rows of bfloat16: 4 bits at every size, then every format at one row."""
    formats = [
        Format(sizes[len(sizes) // 2], bits, mode)
        for mode, (sizes, widths) in MODES.items()
        for bits in reversed(widths)
    ]
    shapes = [Case(shape, rows) for shape in GPU_SHAPES for rows in (1, 2, 4, 8, 16)]
    others = [Case(GPU_SHAPES[0], 1, fmt=fmt) for fmt in formats if fmt != Format(64, 4)]
    on_gpu([*shapes, *sorted(others, key=lambda shape: shape.fmt.bits)], "kernel", repeats)


def many_rows(repeats: int) -> None:
    """4 bits in groups of 64 at every size, and the gradient of x."""
    shapes = [Case(WIDE, rows) for rows in (64, 128, 512, 2048)]
    shapes += [Case(WIDE, rows, transpose=False) for rows in (2048, 512, 64)]
    counts = {LAYER: (64, 512, 2048), LONG: (64, 128, 512, 2048), HEAD: (64, 128, 512)}
    shapes += [Case(shape, rows) for shape, all_rows in counts.items() for rows in all_rows]
    on_gpu([*shapes, *(Case(shape, 17) for shape in (WIDE, *counts))], "ours", repeats)


TABLES = {"quantized_many": many_rows, "quantized_few": few_rows}


def main() -> None:
    parser = arguments(__doc__, repeats=8)
    parser.add_argument("--few", action="store_true", help="few rows on a GPU instead")
    parser.add_argument("--many", action="store_true", help="many rows on a GPU instead")
    args = parser.parse_args()
    name = "quantized_" + ("few" if args.few else "many" if args.many else "matmul")
    if name in TABLES and backend() == "reference":
        raise SystemExit("no backend runs kernels on this machine")
    with output(args, name):
        TABLES.get(name, layer_and_rows)(args.repeats)


if __name__ == "__main__":
    main()
