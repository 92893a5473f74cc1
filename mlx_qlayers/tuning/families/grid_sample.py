"""Grid sampling, forward, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx

from ...dispatch.tunable import GridSampleProblem as Problem
from ...metal.grid_sample import launch as metal
from ...metal.grid_sample.launch import GridSampleConfig
from ...options import Sampling
from ...reference import grid_sample as reference
from ..family import Family, Inputs, Path, normal
from ..moves import Axis, Local, Unroll, Upcast
from .packed import specs

_IMAGES, _PIXELS = 4, 1 << 16
_OPTIONS = Sampling()


class GridSampleFamily(Family[Problem, GridSampleConfig]):
    """Samples of four images at points without order, as many as the images have pixels."""

    problem = Problem
    axes = (
        Axis(Local, "lanes", (1, 2, 4, 8, 16, 32)),
        Axis(Unroll, "pack", (1, 2, 4, 8)),
        Axis(Upcast, "run", (1, 2, 4)),
        Axis(Local, "threads", (64, 128, 256, 512)),
    )

    def completed(self, config: GridSampleConfig, problem: Problem) -> GridSampleConfig:
        if config.threads == 1:  # where threads run one by one
            return config
        return replace(config, align=problem.dtype.size * (config.pack & -config.pack))

    def why_not(self, config: GridSampleConfig, problem: Problem) -> str | None:
        channels = problem.channels
        if channels % config.pack or config.align > 16:
            return f"packs of {config.pack} of {channels} channels"
        if config.lanes > max(1, channels // config.pack):
            return f"{config.lanes} threads for {channels // config.pack} packs"
        return None

    def inputs(self, problem: Problem) -> Inputs:
        side = round(_PIXELS ** (1 / problem.dims))
        shape = (_IMAGES, *[side] * problem.dims)
        images = normal(problem.dtype, (*shape, problem.channels))
        return [*images, mx.random.uniform(-1, 1, (*shape, problem.dims))]

    def bind(self, inputs: Inputs, problem: Problem, config: GridSampleConfig) -> Path:
        x, grid = specs(inputs)
        launch = metal.grid_sample(x, grid, _OPTIONS, config)
        return lambda inputs: launch(*inputs)

    def paths(self, inputs: Inputs, problem: Problem) -> Mapping[str, Path]:
        return {"stock": lambda inputs: reference.grid_sample(inputs[0], inputs[1], _OPTIONS)}
