"""Sampling and both gradients: every mode and rank, each way to add up the gradient of x."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_qlayers.metal.grid_sample.launch import GridSampleConfig, heuristic
from mlx_qlayers.options import Sampling
from tests.metal import test_grid_sample as tests

from . import Cases

IMAGE, VOLUME, LARGE = (2, 5, 7, 12), (1, 3, 2, 4, 5), (2, 16, 16, 3)
# Mode, shape, dtype of x, dtype of the grid.
INPUTS = (
    ("nearest", IMAGE, mx.float16, mx.float32),
    ("bilinear", IMAGE, mx.float32, mx.float32),
    ("bilinear", LARGE, mx.float16, mx.float32),
    ("bicubic", IMAGE, mx.bfloat16, mx.bfloat16),
    ("nearest", VOLUME, mx.float32, mx.float16),
    ("bilinear", VOLUME, mx.bfloat16, mx.float32),
)
PADDINGS = ("zeros", "border", "reflection")


def cases() -> Cases:
    for mode, shape, *dtypes in INPUTS:
        configs = {
            "atomics": heuristic(shape[-1], dtypes[0], "cuda"),
            "sorted": heuristic(shape[-1], dtypes[0], "cuda", True),
            "neighbours": replace(heuristic(shape[-1], dtypes[0], "cuda"), near=True),
        }
        for name, config in configs.items():
            yield f"{mode} {shape} {dtypes} {name}", partial(run, mode, shape, *dtypes, config)
    bands = GridSampleConfig(4, 4, scatter="bands", bands=5)
    yield "in bands", partial(run, "bilinear", IMAGE, mx.float32, mx.float32, bands)


def run(
    mode: str,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    grid_dtype: mx.Dtype,
    config: GridSampleConfig,
) -> None:
    """Each padding and alignment is an option of one and the same code."""
    arrays = tests.inputs(len(mode), shape, (3, 5, 2)[: len(shape) - 2], dtype, grid_dtype)
    for padding in PADDINGS:
        for align in (False, True):
            options = Sampling(mode, padding, align)
            found = tests.run(*arrays, options, config)
            mx.eval(found)
            with mx.stream(mx.cpu):
                tests.check(found, *arrays, options)
