"""The sums of rows that the tuner is explained with, in layouts that use every option."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from mlx_qlayers.metal.common.row_sum import RowSum, row_sum
from mlx_qlayers.runtime.spec import Spec
from tests.numerics import assert_accurate, random, to64

from . import Cases

LAYOUTS = (
    ((5, 41), RowSum()),
    ((7, 300), RowSum(upcast=2, unroll=4, local=2)),
    ((3, 1000), RowSum(unroll=2, group=4, blocked=True)),
    ((4, 512), RowSum(upcast=4, unroll=4, group=2, padded=False)),
)


def cases() -> Cases:
    for i, (shape, config) in enumerate(LAYOUTS):
        dtype = (mx.float32, mx.float16, mx.bfloat16)[i % 3]
        yield f"row_sum {shape} {dtype} {config}", partial(run, shape, dtype, config)


def run(shape: tuple[int, int], dtype: mx.Dtype, config: RowSum) -> None:
    x = random(np.random.default_rng(shape[1]), shape, dtype)
    exact = to64(x).sum(1)
    rounded = np.array(to64(x).astype(np.float32).sum(1), np.float64)
    assert_accurate(row_sum(Spec.of(x), config)(x), exact, rounded, terms=np.abs(to64(x)).sum(1))
