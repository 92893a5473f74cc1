"""Sampling and both gradients: every mode and rank, each way to add up the gradient of x."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
from numerics import assert_accurate, random, round_to, to64

from mlx_qlayers.metal import grid_sample as kernels
from mlx_qlayers.metal.grid_sample import GridSampleConfig, heuristic
from mlx_qlayers.reference import grid_sample as reference
from mlx_qlayers.reference.grid_sample import Sampling

from . import Cases

IMAGE, VOLUME = (2, 5, 7, 12), (1, 3, 2, 4, 5)
# Mode, shape, dtype of x, dtype of the grid.
INPUTS = (
    ("nearest", IMAGE, mx.float16, mx.float32),
    ("bilinear", IMAGE, mx.float32, mx.float32),
    ("bicubic", IMAGE, mx.bfloat16, mx.bfloat16),
    ("nearest", VOLUME, mx.float32, mx.float16),
    ("bilinear", VOLUME, mx.bfloat16, mx.float32),
)
PADDINGS = ("zeros", "border", "reflection")


def cases() -> Cases:
    for mode, shape, dtype, grid_dtype in INPUTS:
        given = (shape, dtype, grid_dtype)
        configs = {
            "atomics": heuristic(shape[-1], dtype, "cuda"),
            "sorted": heuristic(shape[-1], dtype, "cuda", True),
        }
        for name, config in configs.items():
            yield f"grid sample {mode} {given} {name}", partial(run, mode, *given, config)
    bands = GridSampleConfig(4, 4, scatter="bands", bands=5)
    yield "grid sample in bands", partial(run, "bilinear", IMAGE, mx.float32, mx.float32, bands)


def run(
    mode: str,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    grid_dtype: mx.Dtype,
    config: GridSampleConfig,
) -> None:
    """Each padding and alignment is an option of one and the same code."""
    rng = np.random.default_rng(len(mode))
    out = (3, 5, 2)[: len(shape) - 2]
    points = rng.uniform(-1.4, 1.4, (shape[0], *out, len(out)))
    grid = round_to(points, grid_dtype)
    x, dy = random(rng, shape, dtype), random(rng, (*grid.shape[:-1], shape[-1]), dtype)
    for padding in PADDINGS:
        for align in (False, True):
            options = Sampling(mode, padding, align)
            found = [
                kernels.grid_sample(x, grid, options, config),
                kernels.gradient_x(x, grid, dy, options, config),
                kernels.gradient_grid(x, grid, dy, options, config),
            ]
            mx.eval(found)
            check(found, x, grid, dy, options)


def check(
    found: list[mx.array], x: mx.array, grid: mx.array, dy: mx.array, options: Sampling
) -> None:
    """Compare with plain operators on the CPU; sums may be taken in another order."""
    taps = {"nearest": 1, "bilinear": 2, "bicubic": 4}[options.mode] ** grid.shape[-1]
    share, largest = np.abs(to64(dy)).reshape(-1, dy.shape[-1]), np.abs(to64(x)).max()
    scale = taps * max(x.shape[1:-1]) * share.sum(1).max() * largest
    with mx.stream(mx.cpu):
        single = [a.astype(mx.float32) for a in (x, grid, dy)]
        truths = [
            reference.grid_sample(*single[:2], options),
            *reference.grid_sample_vjp(*single, options),
        ]
        mx.eval(truths)
    sums = taps * largest, taps * share.sum(0).max(), scale
    for actual, truth, terms in zip(found, truths, sums, strict=True):
        exact = to64(truth)
        assert_accurate(
            actual, exact, round_to(exact, actual.dtype), terms=terms, what=str(options)
        )
