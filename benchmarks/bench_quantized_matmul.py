"""Quantized products beside stock MLX.

    python benchmarks/bench_quantized_matmul.py              # one layer of Qwen2-7B, then all rows
    python benchmarks/bench_quantized_matmul.py --crossover  # packed against dense, by format

Every result is held against float64 before it is timed. On a CPU the stock half-precision loops are
so slow that each is timed once or twice only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from common import Sample, Table, add_output, measure, print_facts, write_output

from mlx_qlayers import quantized_matmul
from mlx_qlayers.formats import MODES, Format
from mlx_qlayers.reference import quantized_matmul as reference

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
Packed = tuple[mx.array, mx.array, mx.array | None]


def problem(rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format) -> tuple[mx.array, Packed]:
    """Random rows and a packed random matrix."""
    mx.random.seed(rows)
    x = mx.random.normal((rows, k)).astype(dtype)
    w, scales, *biases = mx.quantize((mx.random.normal((n, k)) * k**-0.5).astype(dtype), *fmt)
    packed = (w, scales, biases[0] if biases else None)
    mx.eval(x, packed)
    return x, packed


def error(y: mx.array, x: mx.array, packed: Packed, fmt: Format) -> float:
    """The largest error against float64, over the largest number; on the first rows and columns."""
    part = tuple(None if a is None else a[:64] for a in packed)
    dense = np.array(reference.dequantize(*part, fmt), np.float64)
    truth = np.array(x[:8].astype(mx.float32), np.float64) @ dense.T
    found = np.array(y[:8, :64].astype(mx.float32), np.float64)
    return float(np.abs(found - truth).max() / np.abs(truth).max())


def compare(table: Table, rows: int, n: int, k: int, dtype: str, fmt: Format, repeats: int) -> None:
    """Verify and time one product, stock and ours, and add it to the table."""
    x, packed = problem(rows, n, k, DTYPES[dtype], fmt)
    contenders: dict[str, Callable[[], mx.array]] = {
        "stock": lambda: mx.quantized_matmul(x, *packed, True, *fmt),
        "ours": lambda: quantized_matmul(x, *packed, **fmt._asdict()),
    }
    ours = error(contenders["ours"](), x, packed, fmt)
    allowed = 2 * mx.finfo(DTYPES[dtype]).eps + 1e-5
    assert ours <= allowed, f"{dtype}, {rows} rows: error {ours:.2e}, allowed {allowed:.2e}"
    times = measure(contenders, repeats=repeats, warmup=0)
    table.add(
        shape=f"{n} x {k}",
        dtype=dtype,
        rows=rows,
        stock=times["stock"].scaled(1e3),
        ours=times["ours"].scaled(1e3),
        ratio=times["stock"].median / times["ours"].median,
        error=ours,
    )


def layer_and_rows(repeats: int) -> list[Table]:
    """One matrix of Qwen2-7B at a few rows, and a smaller one at every power of two up to 512."""
    columns = {"shape": 12, "dtype": 9, "rows": 5, "stock": 14, "ours": 14, "ratio": 8, "error": 8}
    tables = []
    for n, k, counts in ((3584, 3584, (1, 8, 64)), (1024, 1024, [2**i for i in range(10)])):
        table = Table(columns)
        print("milliseconds, 4 bits in groups of 64")
        table.print_header()
        for dtype in DTYPES:
            for rows in counts:
                if dtype == "float16" and rows * n * k > 1 << 29:
                    continue  # 23 s a call
                compare(table, rows, n, k, dtype, Format(64, 4), max(2, repeats // rows))
        print()
        tables.append(table)
    return tables


def crossover(repeats: int) -> list[Table]:
    """The rows from which the dense product is faster, by format, which the reference holds."""
    table = Table({"format": 12, "transposed": 12, "plain": 12})
    table.print_header()
    for mode, (sizes, widths) in MODES.items():
        for bits in widths:
            fmt = Format(sizes[len(sizes) // 2], bits, mode)
            row = {
                name: _first_dense(fmt, name == "transposed", repeats)
                for name in ("transposed", "plain")
            }
            table.add(format=f"{mode} {bits}", **row)
    return [table]


def _first_dense(fmt: Format, transpose: bool, repeats: int) -> str:
    limits = reference._DENSE_FROM_ROWS if transpose else reference._DENSE_FROM_ROWS_UNTRANSPOSED
    key, kept = (fmt.mode, fmt.bits), dict(limits)
    try:
        for rows in (2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64):
            x, packed = problem(rows, 2048, 2048, mx.float32, fmt)

            def run(limit: int, x: mx.array = x, packed: Packed = packed) -> Callable[[], mx.array]:
                def product() -> mx.array:
                    limits[key] = limit
                    return reference.quantized_matmul(x, *packed, transpose, fmt)

                return product

            times: dict[str, Sample] = measure(
                {"packed": run(1 << 30), "dense": run(1)}, repeats=repeats, warmup=0
            )
            if times["dense"].median < times["packed"].median:
                return str(rows)
        return "> 64"
    finally:
        limits.clear()
        limits.update(kept)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crossover", action="store_true", help="measure the crossovers instead")
    parser.add_argument("--repeats", type=int, default=8, help="measurements of each (default: 8)")
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    tables = crossover(args.repeats) if args.crossover else layer_and_rows(args.repeats)
    write_output(args, "quantized_matmul", tables)


if __name__ == "__main__":
    main()
