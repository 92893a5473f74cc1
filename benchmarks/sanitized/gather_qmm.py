"""Gathered products with quantized matrices: by rows and by columns, sorted and not."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_qlayers.formats import Format
from mlx_qlayers.runtime.backend import backend
from tests.metal.test_gather_qmm import DTYPES, SHAPES, check_all
from tests.packed import FORMATS

from . import Cases


def cases() -> Cases:
    for i, fmt in enumerate({(fmt.mode, fmt.bits): fmt for fmt in FORMATS}.values()):
        for transpose in (True, False):
            dtype = DTYPES[(i + transpose) % 3]
            yield f"{fmt} {dtype} transpose={transpose}", partial(run, fmt, dtype, transpose)


def run(fmt: Format, dtype: mx.Dtype, transpose: bool) -> None:
    check_all(fmt, dtype, transpose, SHAPES[:2], device="cuda", backend=backend())
