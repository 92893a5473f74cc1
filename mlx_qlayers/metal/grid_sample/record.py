"""The record of grid sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx

from ...options import Sampling
from ...reference import grid_sample as reference
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from ..record import Inputs, Path, Record, normal
from .launch import _FORWARD, _GRADIENT_GRID, GridSampleConfig, grid_sample, heuristic

# The images of a measurement, and the pixels of each.
_IMAGES, _PIXELS = 4, 1 << 16


@dataclass(frozen=True)
class GridSampleRecord(Record):
    """Samples of images of so many channels and dimensions at points without order."""

    channels: int
    dtype: mx.Dtype
    deterministic: bool
    dims: int
    family, configs = "grid_sample", (GridSampleConfig,)
    values: ClassVar = {
        "lanes": (1, 2, 4, 8, 16, 32),
        "pack": (1, 2, 4, 8),
        "run": (1, 2, 4),
        "threads": (64, 128, 256, 512),
    }

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return (self.channels, self.dims), "deterministic" if self.deterministic else "any"

    def kernels(self) -> tuple[Kernel, ...]:
        return _FORWARD, _GRADIENT_GRID

    def heuristic(self, device: str) -> GridSampleConfig:
        return heuristic(self.channels, self.dtype, device, self.deterministic)

    def completed(self, config: GridSampleConfig) -> GridSampleConfig:
        if config.threads == 1:  # where threads run one by one
            return config
        return replace(config, align=self.dtype.size * (config.pack & -config.pack))

    def why_not(self, config: GridSampleConfig) -> str | None:
        if self.channels % config.pack or config.align > 16:
            return f"packs of {config.pack} of {self.channels} channels"
        packs = self.channels // config.pack
        return f"{config.lanes} threads for {packs} packs" if config.lanes > max(1, packs) else None

    def inputs(self) -> Inputs:
        side = round(_PIXELS ** (1 / self.dims))
        shape = (_IMAGES, *[side] * self.dims)
        images = normal(self.dtype, (*shape, self.channels))
        return [*images, mx.random.uniform(-1, 1, (*shape, self.dims))]

    def bind(self, inputs: Inputs, config: GridSampleConfig) -> Path:
        launch = grid_sample(Spec.of(inputs[0]), Spec.of(inputs[1]), Sampling(), config)
        return lambda inputs: [launch(*inputs)]

    def stock(self, inputs: Inputs) -> Inputs:
        return [reference.grid_sample(inputs[0], inputs[1], Sampling())]
