"""Products with a quantized matrix: qmv, qmm, and the matrix dequantized."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from mlx_qlayers import quantized_matmul
from mlx_qlayers.formats import Format
from tests.metal.quantized_matmul import test_deferred_norm as deferred
from tests.metal.quantized_matmul import test_dequantize as dequantize
from tests.metal.quantized_matmul import test_qmm, test_qmv
from tests.numerics import random
from tests.packed import FORMATS

from . import Cases

ROWS = (1, 3, 7, 16, 2)
# Formats whose code differs: one for each mode and width.
WIDTHS = list({(fmt.mode, fmt.bits): fmt for fmt in FORMATS}.values())


def cases() -> Cases:
    for i, fmt in enumerate(FORMATS):
        dtype, rows = test_qmv.DTYPES[i % 3], ROWS[i % len(ROWS)]
        yield f"{rows} rows {fmt} {dtype}", partial(qmv, fmt, dtype, rows, i % 2 == 0)
    for i, fmt in enumerate(WIDTHS):
        dtype, transpose = test_qmv.DTYPES[i % 3], i % 2 == 0
        run = partial(test_qmm.check_all, fmt, dtype, transpose, test_qmm.SHAPES[:2], device="cuda")
        yield f"qmm {fmt} {dtype} transpose={transpose}", run
        yield f"unpack {fmt}", partial(dequantize.check, fmt, dtype, (5, 3), path="cuda")
    for rows in (1, 7):
        for given in deferred.GIVEN:
            yield (
                f"squares of a deferred norm, {rows} rows, {given}",
                partial(deferred.gives_squares, rows, *given),
            )
        for taken in deferred.TAKEN:
            yield (
                f"products of a deferred norm, {rows} rows, {taken}",
                partial(deferred.takes_squares, rows, *taken),
            )
    yield "qmm, split-K", partial(test_qmm.test_parts_share_the_depth, 2, True)


def qmv(fmt: Format, dtype: mx.Dtype, rows: int, biased: bool) -> None:
    rng = np.random.default_rng(rows + fmt.bits)
    for n, groups in ((41, 3), (1, 1)):
        x, packed = test_qmv.sample(rng, rows, n, groups, fmt, dtype)
        bias = random(rng, (n,), dtype) if biased else None
        y = quantized_matmul(x, *packed, **fmt._asdict(), bias=bias)
        test_qmv.check(y, x, packed, fmt, bias)
