"""simdgroup_matrix and the fragments of metal/fragment.metal."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from .case import ROUND, Case, Rows, case, dtype_name, kernel

_FILE = "matrix.metal"


def cases() -> Iterator[Case]:
    """Layouts and products in each type, the products exact and in random numbers."""
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        yield _layouts(dtype)
        yield _loads(dtype)
        yield _products(dtype, exact=True)
        yield _products(dtype, exact=False)
        yield _special(dtype)


def _matrix(dtype: mx.Dtype, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Small integers, so that sums are exact in any order and type."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def _layouts(dtype: mx.Dtype) -> Case:
    a, b = _matrix(dtype, (8, 24), 30), _matrix(dtype, (24, 8), 31)
    first = a[:, :8] @ b[:8]
    rows = {
        "thread_elements": a[:, :8],
        "load from an origin, store": a[:, 8:16],
        "load transposed": a[:, 16:].T,
        "multiply_accumulate": a @ b + 1,
        "multiply": first,
        "diagonal, store transposed": 2 * first.T,
    }
    return _one("matrix_layouts", dtype, a, b, rows)


def _loads(dtype: mx.Dtype) -> Case:
    x = np.arange(16 * 24).reshape(16, 24).astype(np.float32) % 251
    rows = {}
    for name, square in (("", x[:, :16]), ("_transposed", x[:, :16].T)):
        for space in ("device", "threadgroup"):
            rows[f"load_left{name} {space}"] = square
    for name, part in (("", x[:, :8]), ("_transposed", x[:8, :16].T)):
        for space in ("device", "threadgroup"):
            rows[f"load_right{name} {space}"] = part
    return case(_FILE, "fragment_loads", "x", [mx.array(x).astype(dtype)], rows, 32, T=dtype)


def _products(dtype: mx.Dtype, *, exact: bool) -> Case:
    if exact:
        a, b, c = (
            _matrix(dtype, shape, 32 + i) for i, shape in enumerate([(16, 16), (16, 16), (8, 16)])
        )
        a = np.sign(a)
    else:
        rng = np.random.default_rng(33)
        a, b, c = (ROUND[dtype](rng.uniform(0.5, 1.5, s)) for s in [(16, 16), (16, 16), (8, 16)])
    product = a.astype(np.float64) @ b
    # The second product takes the sums rounded to T.
    last = ROUND[dtype](product).astype(np.float64) @ c.T + 1
    rows = {
        "multiply_accumulate": product,
        "left_from_sums": last,
        "fragment_row_sum": last.sum(1),
        "fragment_row_max": last.max(1),
        "fragment_column_sum": last.reshape(2, 8, 8).sum(1),
        "fragment_column_max": last.reshape(2, 8, 8).max(1),
    }
    # Sums of 16 positive products in float32, truncated at each step on some hardware.
    allowed = dict.fromkeys(rows, 0.0 if exact else 8.0)
    if not exact and dtype != mx.float32:
        # A sum that lies between two values of T may be rounded either way first.
        slack = 2.0 ** (23 - {mx.float16: 10, mx.bfloat16: 7}[dtype]) / 16
        allowed |= dict.fromkeys(list(rows)[1:], slack)
        rows_rounded = product
    else:
        rows_rounded = ROUND[dtype](product)
    return Case(
        f"fragment_products[{dtype_name(dtype)}, {'integers' if exact else 'random'}]",
        kernel(_FILE, "fragment_products", "a b c", "out rounded", template="T"),
        [mx.array(m).astype(dtype) for m in (a, b, c)],
        [rows, {"store_sum rounded": rows_rounded}],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        template={"T": dtype},
        ulp=allowed | {"store_sum rounded": 0.0 if exact else 8.0 if dtype == mx.float32 else 0.51},
    )


def _one(name: str, dtype: mx.Dtype, a: np.ndarray, b: np.ndarray, rows: Rows) -> Case:
    return case(_FILE, name, "a b", [mx.array(x).astype(dtype) for x in (a, b)], rows, 32, T=dtype)


def _special(dtype: mx.Dtype) -> Case:
    a, b = _matrix(dtype, (16, 16), 38), _matrix(dtype, (8, 16), 39)
    a[np.abs(a) < 1], b[np.abs(b) < 1] = 1, 2
    a[3, 5], a[7, 9], a[12, 2] = np.inf, np.nan, -np.inf
    b[4, 1] = np.inf
    with np.errstate(invalid="ignore"):
        product = (a[:, None] * b[None]).sum(-1)
    return _one("fragment_special", dtype, a, b, {"infinity and NaN": product})
