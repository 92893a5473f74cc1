"""Launches the kernels of ``deformable.metal``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ...options import Deformable
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ...runtime.spec import Spec
from ..common.kernels import bind_groups, lanes_for, large_kernel

_FILE = "deformable/deformable.metal"
_FORWARD = large_kernel(
    "deformable_forward",
    _FILE,
    # Of samples under way, where and how much each of four pixels is, and their channels; sums.
    registers=lambda T, V, STEP, **index: STEP * (4 + index["I"].size + V * T.size) + V,
)
_GRADIENT = large_kernel(
    "deformable_gradient", _FILE, registers=lambda V, **index: 8 + index["I"].size + V
)


@dataclass(frozen=True)
class DeformableConfig:
    """How the work is spread."""

    pack: int = 1  # channels that are read at once; it divides their number
    align: int = 4  # the bytes that a pack's address is a multiple of
    lanes: int = 1  # threads that share a head of a query, a power of two up to 32
    step: int = 1  # samples whose pixels are loaded together; it divides the points of a level
    run: int = 1  # queries that these threads take, one after the other
    scatter_pack: int = 1  # as `pack`, in the gradient
    scatter_lanes: int = 1  # as `lanes`, in the gradient
    atomic: bool = True  # one query for each group of threads, d_values by atomics; else all
    threads: int = 256  # of a threadgroup


def heuristic(width: int, points: int, dtype: mx.Dtype, backend: str) -> DeformableConfig:
    """A GPU loads 16 bytes a thread, four samples at a time; a CPU cannot afford atomics."""
    if not device_of(backend).gpu:
        pack, step = math.gcd(width, 128 // dtype.size), math.gcd(points, 2)
        scatter = math.gcd(width, 16)
        return DeformableConfig(
            pack, dtype.size, 1, step, 16, scatter_pack=scatter, atomic=False, threads=1
        )
    pack = math.gcd(width, 16 // dtype.size)
    # M1 and M2 lack the registers for four.
    steps = (4, 3, 2, 1) if device_of(backend).spills else (2, 1)
    step = next(step for step in steps if points % step == 0)
    lanes, scatter_lanes = lanes_for(width // pack), lanes_for(width)
    return DeformableConfig(pack, dtype.size * pack, lanes, step, 1, scatter_lanes=scatter_lanes)


def covers(values: Spec, locations: Spec) -> bool:
    """Whether the kernels, which number pixels and the heads of queries with 32 bits, can."""
    return math.prod(locations.shape[:3]) < 2**31 and math.prod(values.shape[:3]) < 2**31


class _Job:
    """The facts that both launches share."""

    def __init__(
        self, arrays: Sequence[Spec], options: Deformable, config: DeformableConfig
    ) -> None:
        values, locations, weights = self.arrays = tuple(arrays)
        _, pixels, self.heads, self.width = values.shape
        self.batch, self.queries, _, self.levels, self.points, _ = locations.shape
        self.config, self.pixels = config, pixels
        self.out = Spec((self.batch, self.queries, self.heads * self.width), values.dtype)
        areas = [height * width for height, width in options.shapes]
        starts = accumulate(areas[:-1], initial=0)
        rows = [(*shape, start) for shape, start in zip(options.shapes, starts, strict=True)]
        self.sizes = mx.array(rows, mx.int32)
        large = pixels * self.heads * self.width >= 2**31
        self.values: dict[str, TemplateValue] = {
            "T": values.dtype,
            "G": locations.dtype,
            "W": weights.dtype,
            "I": mx.int64 if large else mx.int32,
            "ALIGN": config.align,
            "POINTS": self.points,
            "STEP": config.step,
            "BORDER": options.padding_mode == "border",
            "PIXELS": options.pixels,
            "ATOMIC": config.atomic,
        }

    def bind(
        self,
        kernel: Kernel,
        specs: Sequence[Spec],
        shapes: Any,
        run: int,
        pack: int,
        **options: Any,
    ) -> Callable[..., list[mx.array]]:
        """As :func:`bind_groups`: a group for each head of ``run`` queries."""
        groups = self.batch * self.heads * -(-self.queries // run)
        facts = groups, run, self.queries, self.heads, self.width, self.levels, self.pixels
        constants, values = [self.sizes, mx.array(facts, mx.int32)], self.values | {"V": pack}
        options |= {"count": groups, "threads": self.config.threads}
        return bind_groups(kernel, specs, constants, values, shapes, **options)


def forward(
    arrays: Sequence[Spec], options: Deformable, config: DeformableConfig
) -> Callable[..., mx.array]:
    """The launch of the sums, a function of values, locations and weights."""
    job, run = _Job(arrays, options, config), min(config.run, arrays[1].shape[1])
    shapes, lanes = [job.out.shape], config.lanes
    launch = job.bind(_FORWARD, job.arrays, shapes, run, config.pack, lanes=lanes)
    return lambda *arrays: launch(*arrays)[0]


def gradient(
    arrays: Sequence[Spec], options: Deformable, config: DeformableConfig
) -> Callable[..., list[mx.array]]:
    """The launch of all three gradients, a function of the arrays and the cotangent."""
    job = _Job(arrays, options, config)
    launch = job.bind(
        _GRADIENT,
        [*arrays, job.out],
        [a.shape for a in arrays],
        1 if config.atomic else job.queries,
        config.scatter_pack,
        lanes=config.scatter_lanes,
        init_value=0,
    )

    def run(*arrays: mx.array) -> list[mx.array]:
        return [d.astype(a.dtype) for d, a in zip(launch(*arrays), arrays[:3], strict=True)]

    return run
