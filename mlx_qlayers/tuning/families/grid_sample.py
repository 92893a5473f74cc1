"""Grid sampling, forward, as the tuner sees it."""

from __future__ import annotations

import mlx.core as mx

from ...dispatch.tunable import GridSampleProblem as Problem
from ...metal.grid_sample.launch import GridSampleConfig, grid_sample
from ...options import Sampling
from ...reference import grid_sample as reference
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, normal

_IMAGES, _PIXELS = 4, 1 << 16


class GridSampleFamily(Family[Problem, GridSampleConfig]):
    """Samples of four images at points without order, as many as the images have pixels."""

    problem = Problem

    def inputs(self, problem: Problem) -> Inputs:
        side = round(_PIXELS ** (1 / problem.dims))
        shape = (_IMAGES, *[side] * problem.dims)
        images = normal(problem.dtype, (*shape, problem.channels))
        return [*images, mx.random.uniform(-1, 1, (*shape, problem.dims))]

    def bind(self, inputs: Inputs, problem: Problem, config: GridSampleConfig) -> Path:
        x, grid = map(Spec.of, inputs)
        launch = grid_sample(x, grid, Sampling(), config)
        return lambda inputs: [launch(*inputs)]

    def stock(self, inputs: Inputs, problem: Problem) -> Inputs:
        return [reference.grid_sample(inputs[0], inputs[1], Sampling())]
