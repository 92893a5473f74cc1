"""Grid sampling, forward, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import mlx.core as mx

from ...metal.grid_sample import launch as metal
from ...metal.grid_sample.launch import GridSampleConfig, heuristic
from ...reference import grid_sample as reference
from ...reference.grid_sample import Sampling
from ..family import Family, Problem
from ..moves import Axis, Local, Unroll, Upcast
from .packed import Path

_IMAGES, _PIXELS = 4, 1 << 16
_OPTIONS = Sampling()


class GridSampleFamily(Family[GridSampleConfig]):
    """Samples of images at points without order, as many as the images have pixels.

    Its shape is (images, side, C, dimensions). Its form is ``any`` or ``deterministic``, which the
    gradient depends on. Channels, dtype and dimensions alone count for what was found.
    """

    name = "grid_sample"
    configs = (GridSampleConfig,)
    kernels = (metal._FORWARD, metal._GRADIENT_GRID)
    axes = (
        Axis(Local, "lanes", (1, 2, 4, 8, 16, 32)),
        Axis(Unroll, "pack", (1, 2, 4, 8)),
        Axis(Upcast, "run", (1, 2, 4)),
        Axis(Local, "threads", (64, 128, 256, 512)),
    )

    def heuristic(self, problem: Problem, device: str) -> GridSampleConfig:
        deterministic = problem.form == "deterministic"
        return heuristic(problem.shape[2], problem.dtype, device, deterministic)

    def completed(self, config: GridSampleConfig, problem: Problem) -> GridSampleConfig:
        return replace(config, align=problem.dtype.size * (config.pack & -config.pack))

    def why_not(self, config: GridSampleConfig, problem: Problem) -> str | None:
        channels = problem.shape[2]
        if channels % config.pack or config.align > 16:
            return f"packs of {config.pack} of {channels} channels"
        if config.lanes > max(1, channels // config.pack):
            return f"{config.lanes} threads for {channels // config.pack} packs"
        return None

    def inputs(self, problem: Problem) -> list[mx.array]:
        images, side, channels, dims = problem.shape
        x = mx.random.normal((images, *[side] * dims, channels)).astype(problem.dtype)
        return [x, mx.random.uniform(-1, 1, (images, *[side] * dims, dims))]

    def run(self, inputs: list[mx.array], problem: Problem, config: GridSampleConfig) -> mx.array:
        x, grid = inputs
        return metal.grid_sample(x, grid, _OPTIONS, config)

    def reference(self, inputs: list[mx.array], problem: Problem) -> mx.array:
        x, grid = inputs
        return reference.grid_sample(x.astype(mx.float32), grid, _OPTIONS)

    def paths(self, problem: Problem) -> Mapping[str, Path]:
        return {"stock": lambda inputs: reference.grid_sample(inputs[0], inputs[1], _OPTIONS)}

    def asked(self, channels: int, dtype: mx.Dtype, deterministic: bool, dims: int) -> Problem:
        shape = (_IMAGES, round(_PIXELS ** (1 / dims)), channels, dims)
        return Problem(shape, dtype, "deterministic" if deterministic else "any")

    def bucket(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[2:]

    def part(self, problem: Problem) -> tuple[Problem, float]:
        images, side, channels, dims = problem.shape
        least = min(side, 2 ** (12 // dims))
        whole, part = images * side**dims, prod([1, *[least] * dims])
        return replace(problem, shape=(1, least, channels, dims)), whole / part


GRID_SAMPLE = GridSampleFamily()
