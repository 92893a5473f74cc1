"""The tutorial kernels: forward, strided and gradient; whole threadgroups and fewer threads."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_qlayers.ops.exp import exp
from mlx_qlayers.runtime import health_checks
from tests.metal.test_exp import DTYPES, check, sample

from . import Cases

SHAPES = ((1,), (2, 256), (2, 3, 41))


def cases() -> Cases:
    for dtype, shape in zip(DTYPES, SHAPES, strict=True):
        for strided in (False, True):
            yield f"exp {dtype} {shape} strided={strided}", partial(run, shape, dtype, strided)
    yield "exp with health checks", checked


def run(shape: tuple[int, ...], dtype: mx.Dtype, strided: bool) -> None:
    x = sample(shape, dtype).T
    (y,), (dx,) = mx.vjp(lambda x: exp(x, strided=strided), [x], [mx.ones_like(x)])
    check(y, x)
    check(dx, x)


def checked() -> None:
    with health_checks():
        run((5, 9), mx.float32, False)
