"""Quantized products beside stock MLX.

    python benchmarks/bench_quantized_matmul.py              # one layer of Qwen2-7B, then all rows
    python benchmarks/bench_quantized_matmul.py --crossover  # packed against dense, by format
    python benchmarks/bench_quantized_matmul.py --host       # kernel against reference, by format
    python benchmarks/bench_quantized_matmul.py --many       # many rows on a GPU, and dx
    python benchmarks/bench_quantized_matmul.py --few        # few rows on a GPU, in GB/s

Every result is held against float64 before it is timed. On a CPU the stock half-precision loops are
so slow that each is timed once or twice only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
from common import Sample, Table, add_output, measure, output, print_facts
from quantized_many import (
    HEAD,
    LAYER,
    LONG,
    WIDE,
    Case,
    arguments,
    compile_stock,
    many_rows,
)

from mlx_qlayers import backend, quantized_matmul, use_backend
from mlx_qlayers.formats import MODES, Format
from mlx_qlayers.metal.quantized_matmul.qmv_config import MAX_QMV_ROWS
from mlx_qlayers.reference import quantized_matmul as reference

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
Packed = tuple[mx.array, mx.array, mx.array | None]


def problem(rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format) -> tuple[mx.array, Packed]:
    """Random rows and a packed random matrix."""
    mx.random.seed(rows)
    x = mx.random.normal((rows, k)).astype(dtype)
    dense = (mx.random.normal((n, k)) * k**-0.5).astype(dtype)
    # MLX quantizes to one bit on the CPU alone.
    with mx.stream(mx.cpu if fmt.bits == 1 else mx.default_device()):
        w, scales, *biases = mx.quantize(dense, *fmt)
    packed = (w, scales, biases[0] if biases else None)
    mx.eval(x, packed)
    return x, packed


def error(y: mx.array, x: mx.array, packed: Packed, fmt: Format) -> float:
    """The largest error against float64, over the largest number; on rows and columns apart."""
    rows, columns = (mx.array(np.linspace(0, n - 1, min(n, 64)).astype(int)) for n in y.shape)
    part = tuple(None if a is None else a[columns] for a in packed)
    # On a GPU MLX unpacks one bit wrongly.
    with mx.stream(mx.cpu):
        dense = np.array(reference.dequantize(*part, fmt), np.float64)
    truth = np.array(x[rows].astype(mx.float32), np.float64) @ dense.T
    found = np.array(y[rows][:, columns].astype(mx.float32), np.float64)
    return float(np.abs(found - truth).max() / np.abs(truth).max())


def on(
    path: str, x: mx.array, packed: Packed, fmt: Format, transpose: bool = True
) -> Callable[[], mx.array]:
    """Our product on a backend."""

    def run() -> mx.array:
        with use_backend(path):
            return quantized_matmul(x, *packed, transpose=transpose, **fmt._asdict())

    return run


def compare(table: Table, rows: int, n: int, k: int, dtype: str, fmt: Format, repeats: int) -> None:
    """Verify and time one product, stock, reference and kernel, and add it to the table."""
    x, packed = problem(rows, n, k, DTYPES[dtype], fmt)
    contenders: dict[str, Callable[[], mx.array]] = {
        "stock": lambda: mx.quantized_matmul(x, *packed, True, *fmt),
        "reference": on("reference", x, packed, fmt),
    }
    if backend() == "host" or (rows <= MAX_QMV_ROWS and backend() != "reference"):
        contenders["kernel"] = on(backend(), x, packed, fmt)
    allowed = 2 * mx.finfo(DTYPES[dtype]).eps + 1e-5
    errors = {name: error(f(), x, packed, fmt) for name, f in contenders.items() if name != "stock"}
    for name, found in errors.items():
        assert found <= allowed, f"{dtype}, {rows} rows, {name}: {found:.2e}, allowed {allowed:.2e}"
    times = measure(contenders, repeats=repeats, warmup=0)
    ours = min(times[name].median for name in errors)
    table.add(
        shape=f"{n} x {k}",
        dtype=dtype,
        rows=rows,
        **{name: time.scaled(1e3) for name, time in times.items()},
        **({} if "kernel" in times else {"kernel": ""}),
        ratio=times["stock"].median / ours,
        error=max(errors.values()),
    )


def layer_and_rows(repeats: int) -> list[Table]:
    """One matrix of Qwen2-7B at a few rows, and a smaller one at every power of two up to 512."""
    names = ("stock", "reference", "kernel")
    columns = {"shape": 12, "dtype": 9, "rows": 5} | dict.fromkeys(names, 14)
    columns |= {"ratio": 8, "error": 8}
    tables = []
    for n, k, counts in ((3584, 3584, (1, 8, 64)), (1024, 1024, [2**i for i in range(10)])):
        table = Table(columns)
        print(f"milliseconds, 4 bits in groups of 64; kernel on backend {backend()}")
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
    """The rows from which the dense product is faster, by format: ``reference_dense_rows``."""
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
    for rows in (2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64):
        x, packed = problem(rows, 2048, 2048, mx.float32, fmt)
        products = {
            name: partial(reference.quantized_matmul, x, *packed, transpose, fmt, dense_rows)
            for name, dense_rows in (("packed", None), ("dense", 1))
        }
        times: dict[str, Sample] = measure(products, repeats=repeats, warmup=0)
        if times["dense"].median < times["packed"].median:
            return str(rows)
    return "> 64"


def host_gain(repeats: int) -> list[Table]:
    """How many times as fast as the reference the kernel is on a CPU, which the operation holds."""
    counts, tables = (1, 2, 4, 8, 16), []
    for transpose in (True, False):
        table = Table(
            {"transposed" if transpose else "plain": 12} | {f"rows {m}": 8 for m in counts}
        )
        table.print_header()
        for mode, (sizes, widths) in MODES.items():
            for bits in widths:
                fmt, row = Format(sizes[len(sizes) // 2], bits, mode), {}
                for m in counts:
                    x, packed = problem(m, 2048, 2048, mx.bfloat16, fmt)
                    contenders = {
                        p: on(p, x, packed, fmt, transpose) for p in ("reference", "host")
                    }
                    times = measure(contenders, repeats=repeats)
                    row[f"rows {m}"] = times["reference"].median / times["host"].median
                table.add(**{next(iter(table.columns)): f"{mode} {bits}"}, **row)
        tables.append(table)
    return tables


GPU_SHAPES = (WIDE, HEAD, LONG, LAYER)
# Products in one graph of mx.compile. Graphs are queued one behind the other: neither Python nor
# the submission of a graph hides a kernel.
QUEUED = 16


def in_turn(
    product: Callable[..., mx.array],
    x: mx.array,
    copies: list[Packed],
    compiled: bool,
    dependent: bool = False,
) -> Callable[[], list[mx.array]]:
    """Products with the copies by turns, from Python or as one compiled graph.

    Where each depends on the one before, its x is taken from there; if that is too small, x stays,
    by a small launch that waits for it.
    """
    stays = mx.array([True])

    def run(x: mx.array) -> list[mx.array]:
        found: list[mx.array] = []
        for i in range(QUEUED):
            if found and dependent:
                flat = found[-1].flatten()
                if flat.size < x.size:
                    x = mx.where(stays, x, flat[:1])
                else:
                    x = flat[: x.size].reshape(x.shape)
            found.append(product(x, *copies[i % len(copies)]))
        return found

    graph = mx.compile(run) if compiled else run
    return lambda: graph(x)


def qmv_on_gpu(repeats: int) -> list[Table]:
    """Few rows of bfloat16 beside stock: 4 bits at every size, then every format at one row.

    MLX compiles its products where they are first met, for seconds; processes do that side by side
    while ours are verified, and by that compiled.
    """
    formats = [
        Format(sizes[len(sizes) // 2], bits, mode)
        for mode, (sizes, widths) in MODES.items()
        for bits in reversed(widths)
    ]
    four = [Case(shape, rows) for shape in GPU_SHAPES for rows in (1, 2, 4, 8, 16)]
    others = [Case(GPU_SHAPES[0], 1, fmt=fmt) for fmt in formats if fmt != Format(64, 4)]
    others.sort(key=lambda case: (case.fmt.bits in (1, 5), case.fmt.bits))
    compiled = compile_stock(case.of_stock for case in (*four, *others))
    errors: dict[Case, float] = {}
    single: dict[bool, float] = {}
    waiting = iter((*four, *others))

    def timed(table: Table, cases: list[Case]) -> None:
        table.print_header()
        for case in cases:
            while case not in errors or not compiled[case.of_stock].done():
                if (following := next(waiting, None)) is None:
                    break
                errors[following] = qmv_error(following)
            compiled[case.of_stock].result()
            for dependent in (True, False):
                seconds = qmv_row(
                    table, case, dependent, errors[case], repeats, single.get(dependent, 0.0)
                )
                if case.rows == 1:
                    single[dependent] = seconds

    print(f"milliseconds of a product in compiled graphs of {QUEUED}, each with its own matrix;")
    print("apart: which do not depend on each other, and may run side by side")
    columns = {"shape": 14, "format": 15, "rows": 4, "stock": 14, "kernel": 14, "ratio": 6}
    columns |= {"of one row": 10, "GB/s": 14, "error": 8, "calls": 12}
    tables = [Table(columns), Table(columns)]
    timed(tables[0], four)
    print("\nthe other formats, as the first")
    timed(tables[1], others)
    return tables


def ours_of(fmt: Format) -> Callable[..., mx.array]:
    """Our product in a format."""
    return lambda x, *packed: quantized_matmul(x, *packed, **fmt._asdict())


def qmv_error(case: Case) -> float:
    """The error of our product, which must not be too large."""
    x, (packed, *_) = arguments(case)
    with use_backend(backend()):
        found = error(ours_of(case.fmt)(x, *packed), x, packed, case.fmt)
    assert found <= 2 * mx.finfo(mx.bfloat16).eps, f"{case}: {found:.2e}"
    return found


def qmv_row(
    table: Table, case: Case, dependent: bool, found: float, repeats: int, single: float
) -> float:
    """Time one size; ``single`` are our seconds of one row, if this is not."""
    fmt, (x, copies) = case.fmt, arguments(case)

    def stock(x: mx.array, *packed: mx.array | None) -> mx.array:
        return mx.quantized_matmul(x, *packed, True, *fmt)

    products = {"stock": stock, "kernel": ours_of(fmt)}
    if fmt.bits == 1:
        del products["stock"]  # MLX has no such kernel on CUDA
    with use_backend(backend()):
        contenders = {name: in_turn(f, x, copies, True, dependent) for name, f in products.items()}
        times = measure(contenders, repeats=repeats)
    times = {name: time.scaled(1 / QUEUED) for name, time in times.items()}
    kernel = times["kernel"].median
    table.add(
        shape=f"{case.shape[0]} x {case.shape[1]}",
        format=f"{fmt.mode} {fmt.bits}" + ("" if dependent else ", apart"),
        rows=case.rows,
        **{name: time.scaled(1e3) for name, time in times.items()},
        **({"ratio": times["stock"].median / kernel} if "stock" in times else {}),
        **({"of one row": kernel / single} if case.rows > 1 else {}),
        **{"GB/s": times["kernel"].per(sum(a.nbytes for a in copies[0] if a is not None) / 1e9)},
        error=found,
        calls="dependent" if dependent else "side by side",
    )
    return kernel


TABLES = {
    "crossover": (crossover, "the rows from which the dense product is faster, by format,"),
    "host": (host_gain, "the gain of the kernel on a CPU, by format,"),
    "many": (many_rows, "many rows on a GPU"),
    "few": (qmv_on_gpu, "few rows on a GPU"),
}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, (_, what) in TABLES.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"measure {what} instead")
    parser.add_argument("--repeats", type=int, default=8, help="measurements of each (default: 8)")
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    asked = [table for name, (table, _) in TABLES.items() if getattr(args, name)]
    names = [f"quantized_{name}" for name in ("few", "many") if getattr(args, name)]
    with output(args, names[0] if names else "quantized_matmul"):
        for measured in asked or [layer_and_rows]:
            measured(args.repeats)


if __name__ == "__main__":
    main()
