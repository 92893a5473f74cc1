"""Products with a quantized matrix: of few rows, in tiles, and the matrix unpacked."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from mlx_qlayers import quantized_matmul
from mlx_qlayers.formats import Format
from tests.metal import test_dequantize as unpacking
from tests.metal import test_norms_handed_on as handed
from tests.metal import test_quantized_matmul as few
from tests.metal import test_quantized_tiles as tiles
from tests.numerics import random
from tests.packed import FORMATS

from . import Cases

ROWS = (1, 3, 7, 16, 2)
# Formats whose code differs: one for each mode and width.
WIDTHS = list({(fmt.mode, fmt.bits): fmt for fmt in FORMATS}.values())


def cases() -> Cases:
    for i, fmt in enumerate(FORMATS):
        dtype, rows = few.DTYPES[i % 3], ROWS[i % len(ROWS)]
        yield f"{rows} rows {fmt} {dtype}", partial(qmv_config, fmt, dtype, rows, i % 2 == 0)
    for i, fmt in enumerate(WIDTHS):
        dtype, transpose = few.DTYPES[i % 3], i % 2 == 0
        run = partial(tiles.check_all, fmt, dtype, transpose, tiles.SHAPES[:2], device="cuda")
        yield f"tiles {fmt} {dtype} transpose={transpose}", run
        yield f"unpack {fmt}", partial(unpacking.check, fmt, dtype, (5, 3), path="cuda")
    for rows in (1, 7):
        for given in handed.GIVEN:
            yield f"norm handed on, {rows} rows, {given}", partial(handed.hand_on, rows, *given)
        for taken in handed.TAKEN:
            yield f"norm taken over, {rows} rows, {taken}", partial(handed.take_over, rows, *taken)
    yield "tiles in parts", partial(tiles.test_parts_share_the_depth, 2, True)


def qmv_config(fmt: Format, dtype: mx.Dtype, rows: int, biased: bool) -> None:
    rng = np.random.default_rng(rows + fmt.bits)
    for n, groups in ((41, 3), (1, 1)):
        x, packed = few.sample(rng, rows, n, groups, fmt, dtype)
        bias = random(rng, (n,), dtype) if biased else None
        y = quantized_matmul(x, *packed, **fmt._asdict(), bias=bias)
        few.check(y, x, packed, fmt, bias)
