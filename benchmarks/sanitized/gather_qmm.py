"""Gathered products with quantized matrices: by rows, by columns and in tiles."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_qlayers.formats import Format
from mlx_qlayers.runtime.backend import backend
from tests.metal.gather_qmm import test_gather_qmm as tiles
from tests.metal.gather_qmm.test_gather_qmv import CASES, DTYPES, SHAPES, check_all
from tests.packed import FORMATS

from . import Cases


def cases() -> Cases:
    for i, fmt in enumerate({(fmt.mode, fmt.bits): fmt for fmt in FORMATS}.values()):
        dtype, transpose = DTYPES[i % 3], i % 2 == 0
        yield f"{fmt} {dtype} transpose={transpose}", partial(run, fmt, dtype, transpose)
        if i % 3 == 0:
            yield f"tiles {fmt} {dtype}", partial(in_tiles, fmt, dtype, transpose)


def run(fmt: Format, dtype: mx.Dtype, transpose: bool) -> None:
    check_all(fmt, dtype, transpose, SHAPES[:2], tuple(CASES)[1:], device="cuda", backend=backend())


def in_tiles(fmt: Format, dtype: mx.Dtype, transpose: bool) -> None:
    tiles.check_all(fmt, dtype, transpose, backend=backend())
