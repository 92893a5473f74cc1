"""The gradients of scales and biases: with the tiles of GPUs, and a group for each thread."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_qlayers.formats import Format
from mlx_qlayers.runtime.backend import backend
from tests.metal.quantized_matmul.test_gradients import AFFINE, DTYPES, SHAPES, check_all

from . import Cases


def cases() -> Cases:
    for i, fmt in enumerate({fmt.bits: fmt for fmt in AFFINE}.values()):
        dtype = DTYPES[i % 3]
        yield f"tiles {fmt} {dtype}", partial(run, fmt, dtype, "cuda", i % 2 == 0)
    yield f"groups {fmt} {dtype}", partial(run, fmt, dtype, "host", True)


def run(fmt: Format, dtype: mx.Dtype, device: str, transpose: bool) -> None:
    check_all(fmt, dtype, SHAPES[:3], device=device, transpose=transpose, backend=backend())
