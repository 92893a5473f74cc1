"""Launches the kernels of ``grid_sample.metal`` and ``sorted_gradient.metal``."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ...reference.grid_sample import Sampling
from ...runtime.backend import backend
from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue

_TAPS = {"nearest": 1, "bilinear": 2, "bicubic": 4}
_PADDING = {"zeros": 0, "border": 1, "reflection": 2}
# Threads along x before they go on along y, and sorted shares added up by one group of lanes.
_ROW = 2**30
_BLOCK = 256

_PACKS = ("T", "G", "NDIM", "TAPS", "V", "ALIGN", "LANES", "RUN")
_FORWARD = Kernel(
    "grid_sample_forward",
    "grid_sample/grid_sample.metal",
    inputs=("x", "grid", "size", "options"),
    outputs=("out",),
    template=_PACKS,
    large=True,
    ensure_row_contiguous=False,
)
_GRADIENT_GRID = Kernel(
    "grid_sample_gradient_grid",
    "grid_sample/grid_sample.metal",
    inputs=("x", "grid", "cotangent", "size", "options"),
    outputs=("d_grid",),
    template=_PACKS,
    large=True,
    ensure_row_contiguous=False,
)
_GRADIENT_X = Kernel(
    "grid_sample_gradient_x",
    "grid_sample/grid_sample.metal",
    inputs=("grid", "cotangent", "size", "options"),
    outputs=("d_x",),
    template=("T", "G", "NDIM", "TAPS", "LANES"),
    atomic_outputs=True,
    large=True,
)
_LIST_SHARES = Kernel(
    "grid_sample_list_shares",
    "grid_sample/sorted_gradient.metal",
    inputs=("grid", "size", "options"),
    outputs=("pixel", "weight"),
    template=("G", "I", "NDIM", "TAPS"),
    large=True,
)
_BANDS = Kernel(
    "grid_sample_gradient_x_bands",
    "grid_sample/sorted_gradient.metal",
    inputs=("pixel", "weight", "cotangent", "options", "pixels"),
    outputs=("d_x",),
    template=("T", "I", "K"),
    large=True,
)
_CARRIES = Kernel(
    "grid_sample_carries",
    "grid_sample/sorted_gradient.metal",
    inputs=("pixel", "order", "weight", "cotangent", "options"),
    outputs=("carry",),
    template=("T", "I", "K", "LANES"),
    large=True,
)
_SORTED = Kernel(
    "grid_sample_gradient_x_sorted",
    "grid_sample/sorted_gradient.metal",
    inputs=("pixel", "order", "weight", "cotangent", "carry", "options"),
    outputs=("d_x",),
    template=("T", "I", "K", "LANES"),
    large=True,
)


@dataclass(frozen=True)
class GridSampleConfig:
    """How the work is spread.

    Attributes:
        pack: channels that are read at once; it divides their number.
        align: the bytes that a pack's address is a multiple of.
        lanes: threads that share a point, a power of two up to 32.
        run: points that each of these groups of threads takes, one after the other.
        scatter_lanes: as ``lanes``, in the gradient of ``x``, where each takes single channels.
        scatter: how the gradient of ``x`` is added up: by ``"atomics"``, ``"sorted"``, or in
            ``"bands"``.
        bands: how many, for ``"bands"``.
        threads: of a threadgroup.
    """

    pack: int = 1
    align: int = 4
    lanes: int = 1
    run: int = 1
    scatter_lanes: int = 1
    scatter: str = "atomics"
    bands: int = 1
    threads: int = 256


@lru_cache(maxsize=256)
def heuristic(
    channels: int, dtype: mx.Dtype, backend: str, deterministic: bool = False
) -> GridSampleConfig:
    """The configuration for a number of channels.

    A GPU reads 16 bytes a thread and lets neighbouring threads take neighbouring channels. A CPU
    takes whole points one after the other, and cannot afford atomics.
    """
    if backend == "host":
        pack = math.gcd(channels, 64 // dtype.size)
        cores = os.cpu_count() or 1
        return GridSampleConfig(pack, dtype.size, run=16, scatter="bands", bands=cores, threads=1)
    pack = channels if channels <= 4 else math.gcd(channels, 16 // dtype.size)
    align = dtype.size * (pack & -pack)
    scatter = "sorted" if deterministic else "atomics"
    lanes, scatter_lanes = _lanes(channels // pack), _lanes(channels)
    return GridSampleConfig(pack, align, lanes, 1, scatter_lanes, scatter)


def _lanes(parts: int) -> int:
    """The threads for so many parts: the power of two that covers them, at most a SIMD group."""
    return min(32, 1 << max(0, parts - 1).bit_length())


class _Job:
    """The arrays of one call as the kernels want them, and what launches have in common."""

    def __init__(
        self,
        x_shape: tuple[int, ...],
        grid: mx.array,
        options: Sampling,
        dtype: mx.Dtype,
        config: GridSampleConfig | None,
    ) -> None:
        *_, self.channels = x_shape
        self.config = config or heuristic(self.channels, dtype, backend(), options.deterministic)
        self.grid = mx.contiguous(grid)
        self.points = math.prod(grid.shape[:-1])
        self.size = _integers(*reversed(x_shape[1:-1]))
        self.options = _integers(
            _PADDING[options.padding_mode],
            int(options.align_corners),
            self.points,
            math.prod(grid.shape[1:-1]),
            self.channels,
        )
        self.taps = _TAPS[options.mode] ** grid.shape[-1]
        self.template: dict[str, TemplateValue] = {
            "T": dtype,
            "G": grid.dtype,
            "NDIM": grid.shape[-1],
            "TAPS": _TAPS[options.mode],
        }
        self.packs: dict[str, TemplateValue] = {
            "V": self.config.pack,
            "ALIGN": self.config.align,
            "LANES": self.config.lanes,
            "RUN": self.config.run,
        }
        self.runs = -(-self.points // self.config.run)

    def threads(self, count: int) -> dict[str, Any]:
        """The launch of so many threads: whole threadgroups, in rows."""
        group = self.config.threads
        width = min(_ROW, -(-count // group) * group)
        return {"grid": (width, -(-count // width), 1), "threadgroup": (group, 1, 1)}


def covers(grid: mx.array, options: Sampling) -> bool:
    """Whether the kernels, which number points and sorted shares with 32 bits, can take it."""
    shares = _TAPS[options.mode] ** grid.shape[-1] if options.deterministic else 1
    return math.prod(grid.shape[:-1]) * shares < 2**31


def grid_sample(
    x: mx.array, grid: mx.array, options: Sampling, config: GridSampleConfig | None = None
) -> mx.array:
    """Sample by kernel; see :func:`mlx_qlayers.ops.grid_sample.grid_sample`."""
    job = _Job(x.shape, grid, options, x.dtype, config)
    (out,) = _FORWARD(
        [_at_least_8(x), job.grid, job.size, job.options],
        template={**job.template, **job.packs},
        output_shapes=[(*grid.shape[:-1], job.channels)],
        **job.threads(job.runs * job.config.lanes),
    )
    return out


def grid_sample_vjp(
    x: mx.array,
    grid: mx.array,
    cotangent: mx.array,
    options: Sampling,
    config: GridSampleConfig | None = None,
) -> tuple[mx.array, mx.array]:
    """Gradients of :func:`grid_sample` for ``x`` and ``grid``, by launches of their own."""
    given = x, grid, cotangent, options, config
    return gradient_x(*given), gradient_grid(*given)


def gradient_grid(
    x: mx.array,
    grid: mx.array,
    cotangent: mx.array,
    options: Sampling,
    config: GridSampleConfig | None = None,
) -> mx.array:
    """The gradient of :func:`grid_sample` for ``grid``."""
    if options.mode == "nearest":
        return mx.zeros_like(grid)
    job = _Job(x.shape, grid, options, x.dtype, config)
    (d_grid,) = _GRADIENT_GRID(
        [_at_least_8(x), job.grid, mx.contiguous(cotangent), job.size, job.options],
        template={**job.template, **job.packs},
        output_shapes=[grid.shape],
        **job.threads(job.runs * job.config.lanes),
    )
    return d_grid


def gradient_x(
    x: mx.array,
    grid: mx.array,
    cotangent: mx.array,
    options: Sampling,
    config: GridSampleConfig | None = None,
) -> mx.array:
    """The gradient of :func:`grid_sample` for ``x``, whose values it does not read."""
    job = _Job(x.shape, grid, options, x.dtype, config)
    if job.config.scatter != "atomics":
        return _gradient_x_of_shares(x.shape, cotangent, job).astype(x.dtype)
    lanes = job.config.scatter_lanes
    (d_x,) = _GRADIENT_X(
        [job.grid, mx.contiguous(cotangent), job.size, job.options],
        template={**job.template, "LANES": lanes},
        output_shapes=[x.shape],
        init_value=0,
        **job.threads(job.points * lanes),
    )
    return d_x.astype(x.dtype)


def _gradient_x_of_shares(shape: tuple[int, ...], cotangent: mx.array, job: _Job) -> mx.array:
    """The same from a list of what each point adds to which pixel."""
    pixels = math.prod(shape[:-1])
    shares, lanes = job.points * job.taps, job.config.scatter_lanes
    index = mx.int64 if pixels >= 2**31 else mx.int32
    pixel, weight = _LIST_SHARES(
        [job.grid, job.size, job.options],
        template={name: job.template[name] for name in ("G", "NDIM", "TAPS")} | {"I": index},
        output_shapes=[(shares,), (shares,)],
        **job.threads(job.points),
    )
    template: dict[str, TemplateValue] = {"T": cotangent.dtype, "I": index, "K": job.taps}
    if job.config.scatter == "bands":
        (d_x,) = _BANDS(
            [pixel, weight, mx.contiguous(cotangent), job.options, mx.array(pixels, mx.int64)],
            template=template,
            output_shapes=[shape],
            grid=(job.config.bands, 1, 1),
            threadgroup=(1, 1, 1),
        )
        return d_x
    order = mx.argsort(pixel)
    inputs = [pixel[order], order, weight, mx.contiguous(cotangent)]
    blocks = -(-shares // _BLOCK)
    (carry,) = _CARRIES(
        [*inputs, job.options],
        template={**template, "LANES": lanes},
        output_shapes=[(blocks, job.channels)],
        **job.threads(blocks * lanes),
    )
    (d_x,) = _SORTED(
        [*inputs, carry, job.options],
        template={**template, "LANES": lanes},
        output_shapes=[shape],
        init_value=0,
        **job.threads(shares * lanes),
    )
    return d_x


def _at_least_8(x: mx.array) -> mx.array:
    """Metal gets a smaller x in another address space; images beyond the batch are not read."""
    return mx.concatenate([x] * 8) if x.size < 8 else x


@lru_cache(maxsize=1024)
def _integers(*values: int) -> mx.array:
    return mx.array(values, mx.int32)
