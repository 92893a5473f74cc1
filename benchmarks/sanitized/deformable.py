"""Deformable attention and its gradients: each dtype, padding and kind of location."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_qlayers.metal.deformable.launch import DeformableConfig, heuristic
from mlx_qlayers.options import Deformable
from tests.deformable import inputs
from tests.metal import test_deformable as tests

from . import Cases

# Dtypes of values, locations and weights, width, padding, and whether locations count pixels.
CASES = (
    ((mx.float32, mx.float32, mx.float32), 8, "zeros", False),
    ((mx.float16, mx.float32, mx.float16), 40, "border", False),
    ((mx.bfloat16, mx.bfloat16, mx.float32), 5, "zeros", True),
)


def cases() -> Cases:
    for dtypes, width, padding, pixels in CASES:
        config = heuristic(width, 2, dtypes[0], "cuda")
        options = Deformable(tests.SHAPES, padding, pixels)
        yield f"{dtypes} {width} {padding} {pixels}", partial(run, dtypes, width, options, config)
    for config in tests.CONFIGS:
        dtypes = CASES[0][0]
        yield str(config), partial(run, dtypes, 8, Deformable(tests.SHAPES), config)


def run(
    dtypes: tuple[mx.Dtype, ...], width: int, options: Deformable, config: DeformableConfig
) -> None:
    arrays = inputs(width, tests.SHAPES, width=width, dtypes=dtypes)
    found = tests.run(arrays, options, config)
    mx.eval(found)
    with mx.stream(mx.cpu):
        tests.check(found, arrays, options)
