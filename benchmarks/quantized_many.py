"""Many rows times a quantized matrix on a GPU: the ways to compute it, side by side.

Part of ``bench_quantized_matmul.py``. A time is that of one product in a chain of some that
``mx.compile`` traced, on matrices that take turns, with a second chain queued behind the first: the
cost of Python and of launches is hidden, as in a model. ``calls`` is what plain calls take, which
Python holds up where the product is small.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from common import Table, measure

from mlx_qlayers import backend, explain, quantized_matmul
from mlx_qlayers.formats import MODES, Format
from mlx_qlayers.ops.quantized_paths import DENSE, TILES, Way, product
from mlx_qlayers.reference import quantized_matmul as reference

Packed = tuple[mx.array, mx.array, mx.array | None]
Product = Callable[[mx.array, Packed], mx.array]

# Outputs and inputs: gate and up of Qwen2-7B, its head, its attention's and its last projection.
SHAPES = ((37888, 3584), (152064, 3584), (3584, 3584), (3584, 18944))
FORMATS_SHAPE = (37888, 3584)
ROWS = (17, 64, 128, 512, 2048)
BACKWARD_ROWS = (64, 512, 2048)
# Above so many rows no tile of ours keeps up with a dense product.
_TILES_UNTIL = 256
_ROTATED_ELEMENTS, _MOST_OPERATIONS = 1 << 28, 1 << 39


def many_rows(repeats: int) -> list[Table]:
    """4 bits in groups of 64 at every size, and the gradient of x, which is untransposed."""
    table = _table({"product": 22})
    fmt = Format(64, 4)
    for n, k in SHAPES:
        copies = _copies(n, k, fmt, mx.bfloat16)
        for rows in ROWS:
            if rows * n * k <= _MOST_OPERATIONS:
                _compare(table, {"product": f"{n} x {k}"}, rows, copies, True, fmt, repeats)
    for n, k in SHAPES[:1]:
        copies = _copies(n, k, fmt, mx.bfloat16)
        for rows in BACKWARD_ROWS:
            _compare(table, {"product": f"gradient {n} x {k}"}, rows, copies, False, fmt, repeats)
    return [table]


def many_formats(repeats: int) -> list[Table]:
    """Every width and other group sizes in bfloat16, then 4 bits in float16; one matrix."""
    widths = [
        Format(sizes[len(sizes) // 2], bits, mode)
        for mode, (sizes, all_bits) in MODES.items()
        for bits in all_bits
    ]
    cases = [(fmt, mx.bfloat16) for fmt in (*widths, Format(32, 4), Format(128, 4))]
    cases = [*[case for case in cases if case[0] != Format(64, 4)], (Format(64, 4), mx.float16)]
    table = _table({"format": 12, "dtype": 9})
    for fmt, dtype in cases:
        copies = _copies(*FORMATS_SHAPE, fmt, dtype)
        name = f"{fmt.mode} {fmt.bits}/{fmt.group_size}"
        row = {"format": name, "dtype": str(dtype).removeprefix("mlx.core.")}
        for rows in (32, 128, 512):
            _compare(table, row, rows, copies, True, fmt, repeats)
    return [table]


def _table(columns: dict[str, int]) -> Table:
    columns |= {"rows": 5} | dict.fromkeys(("stock", "dense", "ours", "tiles", "unpacked"), 11)
    columns |= {"by": 10, "ratio": 6, "TFLOP/s": 8, "stock calls": 12, "calls": 11, "MB": 7}
    print(f"milliseconds on backend {backend()}; dense: mx.dequantize and a product; unpacked: the")
    print(
        "same by our kernel; ours: what `auto` takes; ratio: the better of stock and dense over it;"
    )
    print("calls: plain calls of `auto`; MB: the most memory one takes beside arguments and result")
    table = Table(columns | {"error": 8})
    table.print_header()
    return table


def _copies(n: int, k: int, fmt: Format, dtype: mx.Dtype) -> list[Packed]:
    """Random matrices of about unit products, as many as no cache holds."""
    mx.random.seed(n)
    copies: list[Packed] = []
    for _ in range(max(2, min(6, _ROTATED_ELEMENTS // (n * k)))):
        w = mx.random.randint(0, 2**32 - 1, (n, k * fmt.bits // 32), mx.uint32)
        shape = (n, k // fmt.group_size)
        if fmt.mode != "affine":
            # Exponents around 2^-6, in NVFP4 numbers around 2^-4; no codes that are not numbers.
            low, high = (16, 32) if fmt.mode == "nvfp4" else (119, 123)
            w = w & 0xBFBFBFBF if fmt.bits == 8 else w
            copies.append((w, mx.random.randint(low, high, shape, mx.uint8), None))
            continue
        scales = (mx.random.uniform(0.5, 1, shape) * 2**-fmt.bits * k**-0.5).astype(dtype)
        copies.append((w, scales, -(2 ** (fmt.bits - 1)) * scales))
    mx.eval(copies)
    return copies


def _compare(
    table: Table,
    row: dict[str, str],
    rows: int,
    copies: list[Packed],
    transpose: bool,
    fmt: Format,
    repeats: int,
) -> None:
    """Verify and time one size. Untransposed it is the gradient of x, the matrix still (n, k)."""
    n, k = copies[0][0].shape[0], fmt.dims(copies[0][0])
    dtype = mx.float16 if row.get("dtype") == "float16" else mx.bfloat16
    x = mx.random.normal((rows, k if transpose else n), key=mx.random.key(rows)).astype(dtype)
    mx.eval(x)
    options = fmt._asdict()

    def by(kernel: str) -> Product:
        way = Way(backend(), kernel)
        return lambda x, packed: product(way, x, *packed, None, transpose, fmt)

    def dense(x: mx.array, packed: Packed) -> mx.array:
        matrix = mx.dequantize(*packed, *fmt, dtype=dtype)
        return x @ (matrix.T if transpose else matrix)

    def auto(x: mx.array, packed: Packed) -> mx.array:
        return quantized_matmul(x, *packed, transpose=transpose, **options)

    def stock(x: mx.array, packed: Packed) -> mx.array:
        return mx.quantized_matmul(x, *packed, transpose, *fmt)

    ways: dict[str, Product] = {"stock": stock, "dense": dense, "unpacked": by(DENSE)}
    if rows <= _TILES_UNTIL:
        ways["tiles"] = by(TILES)
    found = {}
    for name in list(ways):
        try:
            found[name] = _error(ways[name], x, copies[0], transpose, fmt)
        except (RuntimeError, ValueError) as error:  # not every format has every stock operator
            print(f"{name}: {error}")
            del ways[name]
    for name in set(found) - {"stock", "dense"}:
        allowed = 2 * mx.finfo(dtype).eps
        assert found[name] <= allowed, f"{row}, {rows} rows, {name}: {found[name]:.2e}"
    taken, peak = _taken(auto, x, copies[0])
    contenders = {name: _chain(way, x, copies, traced=True) for name, way in ways.items()}
    if "stock" in ways:
        contenders["stock calls"] = _chain(stock, x, copies, traced=False)
    contenders["calls"] = _chain(auto, x, copies, traced=False)
    times = {
        name: t.scaled(1 / len(copies))
        for name, t in measure(contenders, repeats=repeats, least=0.01).items()
    }
    times["ours"] = times[taken]
    ours = times["ours"].median
    table.add(
        **row,
        rows=rows,
        **{name: time.scaled(1e3) for name, time in times.items()},
        by=taken,
        ratio=min(times[name].median for name in ("stock", "dense") if name in times) / ours,
        **{"TFLOP/s": 2e-12 * rows * n * k / ours},
        MB=peak / 1e6,
        error=found[taken],
    )


def _chain(
    product: Product, x: mx.array, copies: list[Packed], *, traced: bool
) -> Callable[[], list[mx.array]]:
    def run(x: mx.array) -> list[mx.array]:
        return [product(x, packed) for packed in copies]

    function = mx.compile(run) if traced and backend() != "host" else run
    return lambda: function(x)


def _taken(auto: Product, x: mx.array, packed: Packed) -> tuple[str, float]:
    """The way that ``auto`` takes, and the memory it needs beside arguments and result."""
    explain(reset=True)
    mx.eval(auto(x, packed))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y = auto(x, packed)
    mx.eval(y)
    peak = mx.get_peak_memory() - before - y.nbytes
    decision = next(d for d in explain() if d.op == "quantized_matmul")
    names = {TILES: "tiles", DENSE: "unpacked"}
    return next((n for kernel, n in names.items() if kernel in decision.reason), "stock"), peak


def _error(product: Product, x: mx.array, packed: Packed, transpose: bool, fmt: Format) -> float:
    """The largest error against float64, over the largest number; on the first rows and columns."""
    w, *numbers = packed
    if transpose:
        part = tuple(None if a is None else a[:64] for a in packed)
    else:
        words = fmt.group_size * fmt.bits // 32
        part = w[:, :words], *(None if a is None else a[:, :1] for a in numbers)
    with mx.stream(mx.cpu):  # on CUDA there is no operator for one bit
        dense = np.array(reference.dequantize(*part, fmt), np.float64)
    truth = np.array(x[:8].astype(mx.float32), np.float64) @ (dense.T if transpose else dense)
    found = np.array(product(x, packed)[:8, : truth.shape[1]].astype(mx.float32), np.float64)
    return float(np.abs(found - truth).max() / np.abs(truth).max())
