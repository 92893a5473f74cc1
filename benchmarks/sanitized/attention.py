"""Attention and its gradients: every kind of mask, in a dtype each; narrow and wide heads."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_qlayers.ops.attention import attention
from tests.attention_cases import DTYPES, MASKS, check
from tests.metal.attention.test_forward import ALL, SHAPES

from . import Cases


def cases() -> Cases:
    for i, kind in enumerate(MASKS):
        yield f"{kind} {DTYPES[i % 3]}", partial(run, kind, DTYPES[i % 3], ALL if i % 2 else {})
    for width, dtype in ((128, mx.bfloat16), (256, mx.float32)):
        shape = (1, 2, 1, 21, 37, width, width)
        yield f"heads of {width} {dtype}", partial(check, attention, shape, dtype, "causal")


def run(kind: str, dtype: mx.Dtype, extra: dict[str, object]) -> None:
    for number, shape in enumerate(SHAPES[1:4]):
        check(attention, (*shape, 64, 64), dtype, kind, extra, seed=number)
