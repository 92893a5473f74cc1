"""What else a step of decoding launches: rotation alone, and with new rows of a cache."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_qlayers.runtime.backend import backend
from tests.ops import test_attention_step, test_rotary

from . import Cases

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def cases() -> Cases:
    for i, case in enumerate(test_attention_step.CASES):
        dtype = DTYPES[1 + i % 2]
        yield f"attention_step {case[:9]} {dtype}", partial(step, case, dtype)
    for i, (shape, offset, options) in enumerate(test_rotary.CASES):
        dtype = DTYPES[i % 3]
        run = partial(rotate, shape, offset, options, dtype)
        yield f"rotary {shape} {dtype}", run


def step(case: tuple[object, ...], dtype: mx.Dtype) -> None:
    test_attention_step.test_against_float64(case, dtype, backend())


def rotate(
    shape: tuple[int, ...], offset: object, options: dict[str, object], dtype: mx.Dtype
) -> None:
    test_rotary.test_against_float64(shape, offset, options, dtype, backend())
