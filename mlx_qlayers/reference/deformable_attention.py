"""Multi-scale deformable attention in plain MLX operators: a sum of weighted pixels a head."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, product
from typing import Any, cast

import mlx.core as mx

from ..options import Deformable
from .weighted_rows import Taps, blend, dots, scatter


def deformable_attention(
    values: mx.array, locations: mx.array, weights: mx.array, options: Deformable
) -> mx.array:
    """The sums of :func:`mlx_qlayers.deformable_attention`, in float32 and rounded once."""
    batch, queries = locations.shape[:2]
    pixels = values.reshape(-1, values.shape[-1])
    return blend(pixels, _taps(values, locations, weights, options)).reshape(batch, queries, -1)


def attender(options: Deformable) -> Callable[..., mx.array]:
    """The same with its gradient, a function of values, locations and weights."""
    function: Any = mx.custom_function(lambda v, x, w: deformable_attention(v, x, w, options))
    function.vjp(lambda given, dy, _: _gradients(given[0], given[1], given[2], dy, options))
    return cast(Callable[..., mx.array], function)


def _gradients(
    values: mx.array,
    locations: mx.array,
    weights: mx.array,
    cotangent: mx.array,
    options: Deformable,
) -> tuple[mx.array, mx.array, mx.array]:
    pixels = values.reshape(-1, values.shape[-1])
    cotangent = cotangent.reshape(-1, values.shape[-1])
    taps = _taps(values, locations, weights, options)
    # From the shares of the pixels, the rest of the way is autodiff of cheap arithmetic.
    _, (d_locations, d_weights) = mx.vjp(
        lambda x, w: [_taps(values, x, w, options)[1]],
        [locations, weights],
        [dots(pixels, taps, cotangent)],
    )
    d_values = scatter(pixels.shape, taps, cotangent).astype(values.dtype)
    return d_values.reshape(values.shape), d_locations, d_weights


def _taps(values: mx.array, locations: mx.array, weights: mx.array, options: Deformable) -> Taps:
    """Of every head of a query, rows of values seen as (B * S * H, D), and their shares."""
    batch, pixels, heads, _ = values.shape
    queries = locations.shape[1]
    sizes = mx.array(options.shapes).reshape(-1, 1, 2)
    height, width = sizes[..., 0], sizes[..., 1]
    areas = (h * w for h, w in options.shapes[:-1])
    start = mx.array(list(accumulate(areas, initial=0)))[:, None]
    low, part = _split(locations.astype(mx.float32), sizes[..., ::-1], options)
    dtype = mx.int64 if batch * pixels * heads >= 2**31 else mx.int32
    image = mx.arange(batch, dtype=dtype).reshape(-1, 1, 1, 1, 1) * pixels
    head = mx.arange(heads).reshape(-1, 1, 1)
    found = []
    for down, right in product((0, 1), (0, 1)):
        x, y = low[..., 0] + right, low[..., 1] + down
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        row = image + mx.where(inside, start + y * width + x, 0)
        share = (part if right else 1 - part)[..., 0] * (part if down else 1 - part)[..., 1]
        found.append((row * heads + head, share * weights.astype(mx.float32), inside))
    index, shares, inside = (
        mx.stack(list(each), -1).reshape(batch * queries * heads, -1)
        for each in zip(*found, strict=True)
    )
    return index, shares, inside


def _split(locations: mx.array, sizes: mx.array, options: Deformable) -> tuple[mx.array, mx.array]:
    """The first of two pixels along each axis, -2 where both are outside; the other's share."""
    pixel = locations if options.pixels else locations * sizes - 0.5
    last = (sizes - 1).astype(mx.float32)
    if options.padding_mode == "border":
        border = mx.stop_gradient(mx.where(pixel > 0, last, 0.0))
        pixel = mx.where((pixel > 0) & (pixel < last), pixel, border)
    low = mx.floor(mx.stop_gradient(pixel))
    near = (low >= -1) & (low <= last)
    first = mx.minimum(mx.where(near, low, -2).astype(mx.int32), sizes - 1)
    return first, pixel - low
