"""Few rows times a quantized matrix: every format, with dtypes, rows and biases in turn."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
from numerics import assert_accurate, random, round_to, to64
from oracles import product
from packed import FORMATS, dequantize64, random_packed, terms64

from mlx_qlayers import quantized_matmul
from mlx_qlayers.formats import Format

from . import Cases

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROWS = (1, 3, 7, 16, 2)
# No whole tiles, three groups; one column, one group.
SHAPES = ((41, 3), (1, 1))


def cases() -> Cases:
    for i, fmt in enumerate(FORMATS):
        dtype, rows = DTYPES[i % len(DTYPES)], ROWS[i % len(ROWS)]
        yield f"{rows} rows {fmt} {dtype}", partial(run, fmt, dtype, rows, i % 2 == 0)


def run(fmt: Format, dtype: mx.Dtype, rows: int, biased: bool) -> None:
    for n, groups in SHAPES:
        multiply(fmt, dtype, rows, n, groups, biased)


def multiply(fmt: Format, dtype: mx.Dtype, rows: int, n: int, groups: int, biased: bool) -> None:
    rng = np.random.default_rng(rows + fmt.bits)
    k = max(groups * fmt.group_size, 32)
    x, bias = random(rng, (rows, k), dtype), random(rng, (n,), dtype) if biased else None
    with mx.stream(mx.cpu):
        packed = random_packed(rng, n, k, fmt, dtype)
        mx.eval(packed)
    y = quantized_matmul(x, *packed, **fmt._asdict(), bias=bias)
    mx.eval(y)
    added = 0.0 if bias is None else to64(bias)
    dense, terms = dequantize64(*packed, fmt).T, terms64(*packed, fmt).T
    rounded = product(to64(x).astype(np.float32), dense.astype(np.float32)) + np.float32(added)
    terms = np.abs(to64(x)) @ terms + np.abs(added)
    truth = to64(x) @ dense + added
    assert_accurate(y, truth, round_to(rounded, dtype), terms=terms.max())
