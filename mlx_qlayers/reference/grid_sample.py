"""Grid sampling in plain MLX operators: an output is a weighted sum of a few pixels, its taps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any, cast

import mlx.core as mx

from ..options import Sampling
from .weighted_rows import Taps, blend, dots, scatter


def grid_sample(x: mx.array, grid: mx.array, options: Sampling) -> mx.array:
    """Sample ``x`` (N, *size, C) at ``grid`` (N, *out, len(size)); differentiable by autodiff.

    Products are summed in float32 and rounded once, to the dtype of ``x``.
    """
    found = taps(grid, x.shape[1:-1], options)
    out = blend(x.reshape(-1, x.shape[-1]), found, weighted=options.mode != "nearest")
    return out.reshape(*grid.shape[:-1], x.shape[-1])


def sampler(options: Sampling) -> Callable[[mx.array, mx.array], mx.array]:
    """:func:`grid_sample` with :func:`grid_sample_vjp` for its gradient."""
    function: Any = mx.custom_function(lambda x, grid: grid_sample(x, grid, options))
    function.vjp(
        lambda given, cotangent, _: grid_sample_vjp(given[0], given[1], cotangent, options)
    )
    return cast(Callable[[mx.array, mx.array], mx.array], function)


def grid_sample_vjp(
    x: mx.array, grid: mx.array, cotangent: mx.array, options: Sampling
) -> tuple[mx.array, mx.array]:
    """Gradients of :func:`grid_sample` for ``x`` and ``grid``; being lazy, only those used cost."""
    size = x.shape[1:-1]
    found = taps(grid, size, options, gradient=True)
    cotangent = cotangent.reshape(-1, x.shape[-1])
    pixels = x.reshape(-1, x.shape[-1])
    d_weight = dots(pixels, found, cotangent)
    # From the taps' weights, the rest of the way to the grid is autodiff of cheap arithmetic.
    _, (d_grid,) = mx.vjp(lambda g: [taps(g, size, options, gradient=True)[1]], [grid], [d_weight])
    # Only a CPU adds to one destination in a fixed order.
    with mx.stream(mx.cpu) if options.deterministic else contextlib.nullcontext():
        d_x = scatter(pixels.shape, found, cotangent)
    return d_x.astype(x.dtype).reshape(x.shape), d_grid


def taps(
    grid: mx.array, size: tuple[int, ...], options: Sampling, *, gradient: bool = False
) -> Taps:
    """The taps of P = N * prod(out) outputs, K each.

    Returns:
        ``index`` (P, K): rows of the input as (N * prod(size), C), in range; ``weight`` (P, K),
        float32, differentiable in ``grid``; ``inside`` (P, K): whether there is such a pixel.
    """
    rows = grid.shape[0] * math.prod(size)
    dtype = mx.int64 if rows > 2**31 - 1 else mx.int32
    images = mx.arange(grid.shape[0], dtype=dtype) * math.prod(size)
    base = mx.repeat(images, math.prod(grid.shape[1:-1]))
    axes, stride = [], 1
    for i, extent in enumerate(reversed(size)):
        found = _axis_taps(grid[..., i].reshape(-1), extent, options, len(size), gradient)
        axes.append([(at.astype(dtype) * stride, *rest) for at, *rest in found])
        stride *= extent
    corners = [tuple(zip(*corner, strict=True)) for corner in product(*axes)]
    index = [reduce(mx.add, at, base) for at, _, _ in corners]
    weight = [reduce(mx.multiply, shares) for _, shares, _ in corners]
    inside = [reduce(mx.logical_and, each) for _, _, each in corners]
    return mx.stack(index, axis=-1), mx.stack(weight, axis=-1), mx.stack(inside, axis=-1)


def _axis_taps(
    coordinate: mx.array, size: int, options: Sampling, ndim: int, gradient: bool
) -> list[Taps]:
    """The taps along one axis: positions in [0, size), weights, and whether they are inside."""
    align, padded = options.align_corners, options.padding_mode != "zeros"
    pixel = (coordinate.astype(mx.float32) + 1) * ((size - 1 if align else size) / 2)
    if not align:  # pixel - 0.5, but no compiler may round this and the product in one
        pixel = 0.5 * (2 * pixel - 1)
    if options.mode != "bicubic":
        pixel = _pad(pixel, size, options, ndim, gradient)
    if ndim == 3:  # PyTorch moves what no integer can hold out of the volume; in images NaN stays.
        pixel = mx.where(mx.abs(pixel) < 2.0**31, pixel, -100.0)
    if options.mode == "nearest":
        low = mx.round(mx.stop_gradient(pixel))
        weights = {0: mx.ones_like(pixel)}
    else:
        low = mx.floor(mx.stop_gradient(pixel))
        part = pixel - low
        weights = {0: 1 - part, 1: part}
        if options.mode == "bicubic":
            weights = {k: _cubic(part, k) for k in (-1, 0, 1, 2)}
    # Beyond 2^24 a float steps over pixels: from here on positions are integers. -100 is outside.
    first = mx.where(mx.abs(low) < 2.0**31, low, -100).astype(mx.int32)
    if padded and options.mode != "bicubic":
        first = mx.minimum(first, size - 1)
    found = []
    for k, weight in weights.items():
        at = first + k
        inside = (at >= 0) & (at < size)
        if padded and options.mode == "bicubic":
            back = _pad(low + k, size, options, ndim, gradient).astype(mx.int32)
            at, inside = mx.where(inside, at, back), mx.ones_like(inside)
        found.append((mx.clip(at, 0, size - 1), weight, inside))
    return found


def _pad(pixel: mx.array, size: int, options: Sampling, ndim: int, gradient: bool) -> mx.array:
    """Bring positions outside back in, as ``padding_mode`` says; borders have a zero gradient."""
    if options.padding_mode == "zeros":
        return pixel
    if options.padding_mode == "reflection":
        pixel = _reflect(pixel, size, options.align_corners)
    # PyTorch sends NaN to the first pixel of an image and to the last of a volume.
    clipped = mx.stop_gradient(_clip(pixel, size, 0 if ndim == 2 else size - 1))
    if ndim == 3 and gradient:
        clipped = mx.where(mx.isnan(pixel), pixel, clipped)
    return mx.where((pixel > 0) & (pixel < size - 1), pixel, clipped)


def _reflect(pixel: mx.array, size: int, align_corners: bool) -> mx.array:
    """Reflect about the centres of the border pixels, or about their outer edges."""
    low, period = (0.0, 2 * (size - 1)) if align_corners else (-0.5, 2 * size)
    if period == 0:
        return mx.zeros_like(pixel)
    distance = mx.abs(pixel - low)
    turns = mx.floor(mx.stop_gradient(distance) / period)
    distance = distance - turns * period
    return mx.where(distance > period - distance, period - distance, distance) + low


def _clip(pixel: mx.array, size: int, nan: int) -> mx.array:
    """Clip to [0, size - 1]; comparisons with NaN are false, which sends it to ``nan``."""
    if nan == 0:
        return mx.where(pixel > 0, mx.minimum(pixel, size - 1), 0.0)
    return mx.where(pixel < size - 1, mx.maximum(pixel, 0), float(size - 1))


def _cubic(part: mx.array, tap: int) -> mx.array:
    """Keys' cubic convolution with a = -0.75, at the distance from ``part`` to ``tap``."""
    a = -0.75
    if tap in (0, 1):
        t = part if tap == 0 else 1 - part
        return ((a + 2) * t - (a + 3)) * t * t + 1
    t = part + 1 if tap == -1 else 2 - part
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a


def affine_grid(theta: mx.array, size: tuple[int, ...], align_corners: bool) -> mx.array:
    """The grid that samples the affine image of ``theta`` (N, n, n + 1); see the op for shapes."""
    spatial = size[1:-1]
    grid = theta[:, :, -1].astype(mx.float32).reshape(-1, *[1] * len(spatial), len(spatial))
    for i, extent in enumerate(reversed(spatial)):
        steps = mx.linspace(-1, 1, extent) if extent > 1 else mx.zeros(1)
        steps = steps if align_corners else steps * ((extent - 1) / extent)
        column = theta[:, :, i].astype(mx.float32).reshape(-1, *[1] * len(spatial), len(spatial))
        grid = grid + column * steps.reshape(-1, *[1] * (i + 1))
    return grid.astype(theta.dtype)
