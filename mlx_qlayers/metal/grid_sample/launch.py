"""Launches the kernels of ``grid_sample.metal`` and ``sorted_gradient.metal``; their record."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx

from ...measurements.thresholds import tabled
from ...options import Sampling
from ...reference import grid_sample as reference
from ...runtime.devices import device_of
from ...runtime.devices.record import most_threads
from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ...runtime.program import CONSTANT_BELOW
from ...runtime.spec import Spec
from ..common.kernels import bind_groups, lanes_for, large_kernel, strided_kernel
from ..record import Inputs, Path, Record, normal

_TAPS = {"nearest": 1, "bilinear": 2, "bicubic": 4}
_PADDING = {"zeros": 0, "border": 1, "reflection": 2}
# Sorted terms that one group of lanes adds up.
_BLOCK = 256
# Pixels that a group of threads writes: PIXELS in atomic_gradient.metal.
_SPREAD = 4


def _forward_registers(*, T: mx.Dtype, NDIM: int, TAPS: int, V: int, RUN: int, **_: object) -> int:
    """Words of the arrays of a thread: pixels with their addresses and weights, and sums."""
    pixels, words = TAPS**NDIM, -(-V * T.size // 4)
    return pixels * (3 + words) + V + (RUN - 1) * 2 * NDIM * TAPS


def _gradient_registers(*, T: mx.Dtype, NDIM: int, TAPS: int, V: int, RUN: int, **_: object) -> int:
    """The same of the gradient of the grid: for weights what they and slopes are made of."""
    pixels, words = TAPS**NDIM, -(-V * T.size // 4)
    return pixels * (2 + words) + words + (NDIM + 1) * V + RUN * 3 * NDIM * TAPS


def _scatter_registers(*, NDIM: int, TAPS: int, **_: object) -> int:
    """Those of places of 64 bits, and weights."""
    return 3 * TAPS**NDIM


# Of x and grid, or of these and the cotangent.
Sampled = Callable[..., mx.array]

_sampling: Callable[..., Kernel] = partial(strided_kernel, file="grid_sample/grid_sample.metal")
_FORWARD = _sampling("grid_sample_forward", registers=_forward_registers)
_GRADIENT_GRID = _sampling("grid_sample_gradient_grid", registers=_gradient_registers)
_by_atomics: Callable[..., Kernel] = partial(
    large_kernel, file="grid_sample/atomic_gradient.metal", atomic_outputs=True
)
_FIND_ROWS = _by_atomics("grid_sample_find_rows")
_GRADIENT_ROWS = _by_atomics("grid_sample_gradient_x_rows")
_SPREAD_ROWS = _by_atomics(
    "grid_sample_gradient_x_spread",
    atomic_outputs=False,
    registers=lambda T, V, **_: _SPREAD * (2 + -(-V * T.size // 4)) + V,
)
_GRADIENT_X = _by_atomics("grid_sample_gradient_x", registers=_scatter_registers)
_by_terms: Callable[..., Kernel] = partial(large_kernel, file="grid_sample/sorted_gradient.metal")
_LIST_TERMS = _by_terms("grid_sample_list_terms", registers=_scatter_registers)
_BANDS = _by_terms("grid_sample_gradient_x_bands")
_CARRIES = _by_terms("grid_sample_carries")
_SORTED = _by_terms("grid_sample_gradient_x_sorted")


@dataclass(frozen=True)
class GridSampleConfig:
    """How the work is spread."""

    pack: int = 1  # channels that are read at once; it divides their number
    align: int = 4  # the bytes that a pack's address is a multiple of
    lanes: int = 1  # threads that share a point, a power of two up to 32
    run: int = 1  # points that each of these groups of threads takes, one after the other
    scatter_lanes: int = 1  # as `lanes`, in the gradient of `x`, where each takes single channels
    scatter: str = "atomics"  # the gradient of `x`: by `"atomics"`, `"sorted"`, or in `"bands"`
    bands: int = 1  # how many, for `"bands"`
    threads: int = 256  # of a threadgroup
    near: bool = False  # whether both pixels of a row around a point are read together


def heuristic(
    channels: int, dtype: mx.Dtype, backend: str, deterministic: bool = False
) -> GridSampleConfig:
    """A GPU loads 16 bytes a thread, in neighbouring channels; a CPU cannot afford atomics."""
    if not device_of(backend).gpu:
        pack = math.gcd(channels, 64 // dtype.size)
        cores = os.cpu_count() or 1
        return GridSampleConfig(pack, dtype.size, run=16, scatter="bands", bands=cores, threads=1)
    pack = channels if channels <= 4 else math.gcd(channels, 16 // dtype.size)
    align = dtype.size * (pack & -pack)
    scatter = "sorted" if deterministic else "atomics"
    lanes, scatter_lanes = lanes_for(channels // pack), lanes_for(channels)
    measured = tabled("grid_sample_near", device=backend)
    few = measured is not None and channels in measured["channels"]
    near = few and (channels == 3 or dtype.size == 4)
    threads = measured["threads"] if few else 256
    return GridSampleConfig(
        pack, align, lanes, 1, scatter_lanes, scatter, threads=threads, near=near
    )


def within_registers(
    config: GridSampleConfig, x: Spec, grid: Spec, options: Sampling
) -> GridSampleConfig:
    """The configuration with as large packs as M1 and M2 have registers for, forward and back."""
    shape: Any = {"T": x.dtype, "NDIM": grid.shape[-1], "TAPS": _TAPS[options.mode]}
    for pack in (n for n in (config.pack, 4, 2, 1) if config.pack % n == 0):
        shape |= {"V": pack, "RUN": config.run}
        held = max(_forward_registers(**shape), _gradient_registers(**shape))
        if config.threads <= most_threads(held):
            break
    if pack == config.pack:
        return config
    lanes = lanes_for(x.shape[-1] // pack)
    return replace(config, pack=pack, align=x.dtype.size * (pack & -pack), lanes=lanes)


def covers(grid: Spec, options: Sampling) -> bool:
    """Whether the kernels, which number points and sorted terms with 32 bits, can take it."""
    terms = _TAPS[options.mode] ** grid.shape[-1] if options.deterministic else 1
    return math.prod(grid.shape[:-1]) * terms < 2**31


class _Job:
    """The facts that the launches for some specs and options share."""

    def __init__(self, x: Spec, grid: Spec, options: Sampling, config: GridSampleConfig) -> None:
        self.config, self.grid = config, grid
        self.points, self.channels = math.prod(grid.shape[:-1]), x.shape[-1]
        self.pixels = x.size // self.channels
        self.cotangent = Spec((*grid.shape[:-1], self.channels), x.dtype)
        per_image, padding = math.prod(grid.shape[1:-1]), _PADDING[options.padding_mode]
        facts = padding, int(options.align_corners), self.points, per_image, self.channels
        self.constants = {
            "size": mx.array(x.shape[-2:0:-1], mx.int32),
            "options": mx.array(facts, mx.int32),
            "pixels": mx.array(self.pixels, mx.int64),
        }
        dims, taps = grid.shape[-1], _TAPS[options.mode]
        self.taps = taps**dims
        self.index = mx.int64 if self.pixels >= 2**31 else mx.int32
        self.values: dict[str, TemplateValue] = {"T": x.dtype, "G": grid.dtype, "I": self.index}
        self.values |= {"NDIM": dims, "TAPS": taps, "K": self.taps, "RUN": config.run}
        self.values |= {"V": config.pack, "ALIGN": config.align}
        near = config.near and (dims, taps) == (2, 2) and config.pack == self.channels
        self.values |= {"ONCE": config.pack * config.lanes >= self.channels, "NEAR": near}

    def touches_few(self) -> bool:
        """Whether half-precision sums of touched pixels take less memory than sums of all."""
        terms = self.points * self.taps
        return self.cotangent.dtype.size == 2 and 2 * terms <= self.pixels and terms < 2**30 - 1

    def bind(
        self,
        kernel: Kernel,
        specs: Sequence[Spec],
        *shapes: tuple[int, ...],
        lanes: int = 1,
        threads: int | None = None,
        **options: Any,
    ) -> Callable[..., list[mx.array]]:
        """As :func:`bind_groups`, with the constants that the kernel takes."""
        names = kernel.program.input_names
        constants = [self.constants[name] for name in names if name in self.constants]
        given = kernel, specs, constants, self.values, shapes
        return bind_groups(*given, lanes=lanes, threads=threads or self.config.threads, **options)


def grid_sample(x: Spec, grid: Spec, options: Sampling, config: GridSampleConfig) -> Sampled:
    """The launch of the samples, a function of x and grid; see the operation for shapes."""
    job = _Job(x, grid, options, config)
    return _reading_x(_FORWARD, x, [grid], job, job.cotangent.shape)


def gradient_grid(x: Spec, grid: Spec, options: Sampling, config: GridSampleConfig) -> Sampled:
    """The launch of the gradient for ``grid``, a function of x, grid and the cotangent."""
    if options.mode == "nearest":
        return lambda x, grid, cotangent: mx.zeros_like(grid)
    job = _Job(x, grid, options, config)
    return _reading_x(_GRADIENT_GRID, x, [grid, job.cotangent], job, grid.shape)


def _reading_x(
    kernel: Kernel, x: Spec, others: list[Spec], job: _Job, shape: tuple[int, ...]
) -> Sampled:
    """The launch of a kernel that reads x where it lies."""
    # Metal gets a smaller x in another address space; images beyond the batch are not read.
    copies = CONSTANT_BELOW if x.size < CONSTANT_BELOW else 1
    whole = Spec((copies * x.shape[0], *x.shape[1:]), x.dtype)
    runs = -(-job.points // job.config.run)
    launch = job.bind(kernel, [whole, *others], shape, count=runs, lanes=job.config.lanes)

    def run(x: mx.array, *others: mx.array) -> mx.array:
        x = mx.concatenate([x] * copies) if copies > 1 else x
        return launch(x, *map(mx.contiguous, others))[0]

    return run


def gradient_x(x: Spec, grid: Spec, options: Sampling, config: GridSampleConfig) -> Sampled:
    """The launches of the gradient for ``x``, whose values it does not read; likewise."""
    job, lanes = _Job(x, grid, options, config), config.scatter_lanes
    if config.scatter == "atomics" and job.touches_few():
        return _by_rows(job)
    if config.scatter == "atomics":
        given = [grid, job.cotangent]
        add = job.bind(_GRADIENT_X, given, x.shape, count=job.points, lanes=lanes, init_value=0)
        return lambda x, grid, cotangent: add(grid, cotangent)[0].astype(cotangent.dtype)
    # The pixels that each point adds to, and how much.
    one = (job.points * job.taps,)
    listed, order = [Spec(one, job.index), Spec(one, mx.float32)], Spec(one, mx.uint32)
    listing = job.bind(_LIST_TERMS, [grid], one, one, count=job.points)
    if config.scatter == "bands":
        given = [*listed, job.cotangent]
        bands = job.bind(_BANDS, given, x.shape, count=config.bands, threads=1)
        return lambda x, grid, cotangent: bands(*listing(grid), cotangent)[0].astype(
            cotangent.dtype
        )
    carry = Spec((-(-one[0] // _BLOCK), job.channels), mx.float32)
    given = [listed[0], order, listed[1], job.cotangent]
    carries = job.bind(_CARRIES, given, carry.shape, count=carry.shape[0], lanes=lanes)
    total = job.bind(_SORTED, [*given, carry], x.shape, count=one[0], lanes=lanes, init_value=0)

    def in_order(x: mx.array, grid: mx.array, cotangent: mx.array) -> mx.array:
        pixel, weight = listing(grid)
        order = mx.argsort(pixel)
        given = pixel[order], order, weight, cotangent
        return total(*given, *carries(*given))[0]

    return in_order


def _by_rows(job: _Job) -> Sampled:
    """The gradient for ``x`` by float32 sums of the pixels that some points share."""
    job.values["V"] = size = math.gcd(job.channels, 8)
    terms, lanes = job.points * job.taps, lanes_for(job.channels // size)
    pixel, weight = Spec((terms,), job.index), Spec((terms,), mx.float32)
    row, sums = Spec((job.pixels,), mx.int32), Spec((terms, job.channels), mx.float32)
    listing = job.bind(_LIST_TERMS, [job.grid], (terms,), (terms,), count=job.points)
    find = job.bind(_FIND_ROWS, [pixel], row.shape, count=terms, init_value=0)
    given = [row, pixel, weight, job.cotangent]
    add = job.bind(_GRADIENT_ROWS, given, sums.shape, count=terms, lanes=lanes, init_value=0)
    given, shape = [row, weight, job.cotangent, sums], (job.pixels, job.channels)
    spread = job.bind(_SPREAD_ROWS, given, shape, count=-(-job.pixels // _SPREAD), lanes=lanes)

    def run(x: mx.array, grid: mx.array, cotangent: mx.array) -> mx.array:
        pixel, weight = listing(grid)
        (row,) = find(pixel)
        (sums,) = add(row, pixel, weight, cotangent)
        return spread(row, weight, cotangent, sums)[0].reshape(x.shape)

    return run


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
