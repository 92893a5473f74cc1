"""Many rows times a quantized matrix on a GPU: the ways to compute it, side by side.

Part of ``bench_quantized_matmul.py``. A time is that of one product in a chain of some that
``mx.compile`` traced, on a new matrix each time, with a second chain queued behind the first: the
cost of Python and of launches is hidden, as in a model. ``calls`` is what plain calls take, which
Python holds up where the product is small.

On CUDA MLX compiles its own products of many rows where they are first met, which takes up to half
a minute each, and keeps them on disk. Processes do that side by side while ours are checked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from common import Table, measure

from mlx_qlayers import backend, explain, quantized_matmul
from mlx_qlayers.dispatch import Choice
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.quantized_route import DENSE, QMM, SKINNY, Route, is_skinny, product
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime.spec import Spec

Packed = tuple[mx.array, mx.array, mx.array | None]
Product = Callable[[mx.array, Packed], mx.array]

# Outputs and inputs: gate and up of Qwen2-7B, its attention's and its last projection, its head.
WIDE, LAYER, LONG, HEAD = (37888, 3584), (3584, 3584), (3584, 18944), (152064, 3584)
# Above so many rows no tile of ours keeps up with a dense product.
_TILES_UNTIL = 256
# Copies of a matrix hold so many elements, which no cache does.
_ROTATED_ELEMENTS = 1 << 28
# Rows of x and columns of the matrix, as it is multiplied, that are held against float64.
_CHECKED_ROWS, _CHECKED_COLUMNS = 16, 128


class Case(NamedTuple):
    """One product.

    Attributes:
        shape: rows and columns of the packed matrix, unpacked.
        rows: of x.
        transpose: False for the gradient of x, which multiplies with the same matrix as it is.
        fmt: of the matrix.
        dtype: of x, and of the numbers of an affine matrix.
    """

    shape: tuple[int, int]
    rows: int
    transpose: bool = True
    fmt: Format = Format(64, 4)
    dtype: mx.Dtype = mx.bfloat16

    @property
    def row(self) -> dict[str, Any]:
        """The columns of a table that name it."""
        name = f"{self.shape[0]} x {self.shape[1]}"
        return {
            "product": name if self.transpose else f"gradient {name}",
            "format": f"{self.fmt.mode} {self.fmt.bits}",
            "group": self.fmt.group_size,
            "dtype": str(self.dtype).removeprefix("mlx.core."),
            "rows": self.rows,
        }

    @property
    def of_stock(self) -> Case:
        """A small product that takes the same kernel of MLX."""
        rows = min(64, 1 << (self.rows - 1).bit_length())
        return self._replace(shape=(512, 512), rows=rows)


def many_rows(repeats: int) -> list[Table]:
    """4 bits in groups of 64 at every size, and the gradient of x; what decides comes first."""
    cases = [Case(WIDE, rows) for rows in (64, 128, 512, 2048)]
    cases += [Case(WIDE, rows, transpose=False) for rows in (2048, 512, 64)]
    counts = {LAYER: (64, 512, 2048), LONG: (64, 128, 512, 2048), HEAD: (64, 128, 512)}
    cases += [Case(shape, rows) for shape, all_rows in counts.items() for rows in all_rows]
    return _compare([*cases, *(Case(shape, 17) for shape in (WIDE, *counts))], repeats)


def _compare(cases: list[Case], repeats: int) -> list[Table]:
    """Verify all, then time one after the other."""
    print(f"milliseconds on backend {backend()}; dense: mx.dequantize and a product; unpacked: the")
    print(
        "same by our kernel; ours: what `auto` takes; ratio: the better of stock and dense over it;"
    )
    print("calls: plain calls of `auto`; MB: the most memory one takes beside arguments and result")
    table = Table(
        {"product": 21, "format": 8, "group": 5, "dtype": 8, "rows": 4}
        | dict.fromkeys(("stock", "dense", "ours", "tiles", "skinny", "unpacked"), 11)
        | {"by": 8, "ratio": 5, "TFLOP/s": 7, "stock calls": 11, "calls": 11, "MB": 5, "error": 7}
    )
    table.print_header()
    compiled = compile_stock(case.of_stock for case in cases)
    errors = [_errors(case) for case in cases]
    for case, found in zip(cases, errors, strict=True):
        compiled[case.of_stock].result()
        _time(table, case, found, repeats)
    return [table]


def compile_stock(cases: Iterable[Case]) -> dict[Case, Future[None]]:
    """Let MLX compile what these take, each in a process, the first ones first."""
    pool = ThreadPoolExecutor(os.cpu_count())
    return {case: pool.submit(_run_stock, case) for case in dict.fromkeys(cases)}


def _run_stock(case: Case) -> None:
    if backend() != "cuda":
        return
    (n, k), (group, bits, mode) = case.shape, case.fmt
    affine, dtype = mode == "affine", str(case.dtype).removeprefix("mlx.core.")
    code = f"""
import mlx.core as mx
x, w = mx.zeros(({case.rows}, {k}), mx.{dtype}), mx.zeros(({n}, {k * bits // 32}), mx.uint32)
scales = mx.zeros(({n}, {k // group}), mx.{dtype if affine else "uint8"})
biases = scales if {affine} else None
mx.eval(mx.quantized_matmul(x, w, scales, biases, {case.transpose}, {group}, {bits}, "{mode}"))
"""
    # Where MLX has no such product it says so again when it is timed.
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)


@cache
def _copies(shape: tuple[int, int], fmt: Format, dtype: mx.Dtype) -> list[Packed]:
    """Random matrices of about unit products, as many as no cache holds."""
    n, k = shape
    mx.random.seed(n)
    copies: list[Packed] = []
    for _ in range(max(2, min(16, _ROTATED_ELEMENTS // (n * k)))):
        w = mx.random.randint(0, 2**32 - 1, (n, k * fmt.bits // 32), mx.uint32)
        groups = (n, k // fmt.group_size)
        if fmt.mode != "affine":
            # Exponents around 2^-6, in NVFP4 numbers around 2^-4; no codes that are not numbers.
            low, high = (16, 32) if fmt.mode == "nvfp4" else (119, 123)
            w = w & 0xBFBFBFBF if fmt.bits == 8 else w
            copies.append((w, mx.random.randint(low, high, groups, mx.uint8), None))
            continue
        scales = (mx.random.uniform(0.5, 1, groups) * 2**-fmt.bits * k**-0.5).astype(dtype)
        copies.append((w, scales, -(2 ** (fmt.bits - 1)) * scales))
    mx.eval(copies)
    return copies


@cache
def _x(rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    x = mx.random.normal((rows, columns), key=mx.random.key(rows)).astype(dtype)
    mx.eval(x)
    return x


def arguments(case: Case) -> tuple[mx.array, list[Packed]]:
    x = _x(case.rows, case.shape[1 if case.transpose else 0], case.dtype)
    return x, _copies(case.shape, case.fmt, case.dtype)


def _auto(case: Case) -> Product:
    options = case.fmt._asdict()
    return lambda x, packed: quantized_matmul(x, *packed, transpose=case.transpose, **options)


def _ours(case: Case) -> dict[str, Product]:
    """Our routes that come into question."""
    x, (packed, *_) = arguments(case)
    matrix = PackedMatrix(*(None if a is None else Spec.of(a) for a in (*packed, None)))

    def by(kernel: str) -> Product:
        route = Route(Choice("benchmark", backend(), "asked for"), kernel)
        launch = product(route, MatmulCall(Spec.of(x), matrix, case.transpose, case.fmt))
        return lambda x, packed: launch(x, *packed, None)

    # A dense product of float32 is one of TF32 in MLX.
    ways = {} if case.dtype == mx.float32 else {"unpacked": by(DENSE)}
    if ways and case.rows > _TILES_UNTIL:
        return ways
    if ways and case.transpose and is_skinny(Spec.of(x), [matrix]):
        ways["skinny"] = by(SKINNY)
    return ways | {"tiles": by(QMM)}


def _theirs(case: Case) -> dict[str, Product]:
    """Ways of stock MLX that run here."""

    def dense(x: mx.array, packed: Packed) -> mx.array:
        matrix = mx.dequantize(*packed, *case.fmt, dtype=case.dtype)
        return x @ (matrix.T if case.transpose else matrix)

    def stock(x: mx.array, packed: Packed) -> mx.array:
        return mx.quantized_matmul(x, *packed, case.transpose, *case.fmt)

    ways: dict[str, Product] = {"stock": stock, "dense": dense}
    x, (packed, *_) = arguments(case)
    for name, way in list(ways.items()):
        try:
            mx.eval(way(x, packed))
        except (RuntimeError, ValueError) as error:  # not every format has every operator
            print(f"{case}: {name}: {error}")
            del ways[name]
    return ways


def _errors(case: Case) -> dict[str, float]:
    """The largest error of each of our ways against float64, over the largest number.

    Of rows and columns from all over the result. They are held against what two roundings to the
    dtype and twice the error of float32 sums allow.
    """
    x, (packed, *_) = arguments(case)
    step, rows = _Step(case), slice(None, None, max(1, case.rows // _CHECKED_ROWS))
    with mx.stream(mx.cpu):  # on CUDA there is no operator for one bit
        w, *numbers = (a if a is None else step.of_matrix(a) for a in packed)
        if case.fmt.mode == "affine":
            numbers = [a.astype(mx.float32) for a in numbers if a is not None]
        matrix = np.array(mx.dequantize(w, *numbers, *case.fmt, dtype=mx.float32))
        left = np.array(x[rows].astype(mx.float32))
    matrix = matrix.T if case.transpose else matrix
    truth = left.astype(np.float64) @ matrix.astype(np.float64)
    largest = np.abs(truth).max()
    allowed = 2 * mx.finfo(case.dtype).eps
    if case.dtype == mx.float32:  # as far as sums of one term after the other may be away
        sums = np.cumsum(left[:2, :, None] * matrix, axis=1, dtype=np.float32)[:, -1]
        allowed += 2 * np.abs(sums - truth[:2]).max() / largest
    found = {}
    for name, way in _ours(case).items():
        y = np.array(step.of_result(way(x, packed)[rows]).astype(mx.float32))
        found[name] = float(np.abs(y - truth).max() / largest)
        assert found[name] <= allowed, f"{case}, {name}: {found[name]:.2e}, not {allowed:.2e}"
    return found


class _Step:
    """Every so many columns of a product; whole groups of them where they lie in groups."""

    def __init__(self, case: Case) -> None:
        (n, k), self.transpose = case.shape, case.transpose
        self.lines = n if case.transpose else k // case.fmt.group_size
        wide = 1 if case.transpose else case.fmt.group_size
        step = max(1, self.lines * wide // _CHECKED_COLUMNS)
        self.slice = slice(step // 2, None, step)

    def of_matrix(self, a: mx.array) -> mx.array:
        return a[self.slice] if self.transpose else self.of_result(a)

    def of_result(self, a: mx.array) -> mx.array:
        return a.reshape(len(a), self.lines, -1)[:, self.slice].reshape(len(a), -1)


def _time(table: Table, case: Case, errors: dict[str, float], repeats: int) -> None:
    """Time the ways of one product in turns."""
    x, copies = arguments(case)
    theirs, auto = _theirs(case), _auto(case)
    ways = theirs | _ours(case)
    taken, peak = _taken(auto, x, copies[0])
    contenders = {name: _chain(way, x, copies, traced=True) for name, way in ways.items()}
    if "stock" in ways:
        contenders["stock calls"] = _chain(ways["stock"], x, copies, traced=False)
    contenders["calls"] = _chain(auto, x, copies, traced=False)
    times = {
        name: t.scaled(1 / len(copies))
        for name, t in measure(contenders, repeats=repeats, least=0.01).items()
    }
    times["ours"] = times[taken]
    ours, (n, k) = times["ours"].median, case.shape
    table.add(
        **case.row,
        **{name: time.scaled(1e3) for name, time in times.items()},
        by=taken,
        **({"ratio": min(times[name].median for name in theirs) / ours} if theirs else {}),
        **{"TFLOP/s": 2e-12 * case.rows * n * k / ours},
        MB=peak / 1e6,
        error=max(errors.values()),
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
    mx.clear_cache()  # what comes from there is in no peak
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y = auto(x, packed)
    mx.eval(y)
    peak = mx.get_peak_memory() - before - y.nbytes
    decision = next(d for d in explain() if d.op == "quantized_matmul")
    if decision.path == "reference":
        return "stock", peak
    names = {DENSE: "unpacked", SKINNY: "skinny"}
    taken = (name for kernel, name in names.items() if kernel in decision.reason)
    return next(taken, "tiles"), peak
