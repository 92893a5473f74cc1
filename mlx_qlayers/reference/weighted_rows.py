"""Sums of a few weighted rows each, and their gradients, in plain MLX operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import mlx.core as mx

from .cores import on_core, parts

# Rows of pixels, weights, and whether there is such a pixel: (P, K) of P points with K taps each.
Taps = tuple[mx.array, mx.array, mx.array]

# Elements gathered at a time: few enough for a CPU's cache, enough to hide what a call costs.
_CHUNK = {mx.cpu: 1 << 19, mx.gpu: 1 << 28}


def blend(pixels: mx.array, taps: Taps, weighted: bool = True) -> mx.array:
    """Sum the taps of each point, rows of ``pixels``, in float32; one tap without weights."""
    index, weight, inside = taps
    # Points outside count as zero, whatever pixel stands in for them: they are a row of
    # zeros behind all pixels, or masked where points are so few that this costs less.
    dtype, padded = pixels.dtype, index.size > pixels.shape[0]
    if padded:
        index = mx.where(inside, index, pixels.shape[0])
        pixels = mx.concatenate([pixels, mx.zeros((1, pixels.shape[1]), dtype)])

    def sums(rows: slice) -> mx.array:
        picked = mx.take(pixels, index[rows], axis=0)
        if not padded:
            picked = mx.where(inside[rows, :, None], picked, 0)
        if not weighted:
            return picked[:, 0]
        picked = picked * weight[rows, :, None]
        if _device() == mx.cpu:
            return picked.sum(axis=1).astype(dtype)
        # A GPU is slow to reduce an axis in the middle where few channels follow it.
        return reduce(mx.add, (picked[:, k] for k in range(index.shape[1]))).astype(dtype)

    shape = (index.shape[0], pixels.shape[1])
    return _by_chunks(sums, mx.zeros(shape, dtype), index.shape[1] * shape[1])


def dots(pixels: mx.array, taps: Taps, cotangent: mx.array) -> mx.array:
    """The gradient of :func:`blend` for weights, (P, K) float32."""
    index, _, inside = taps

    def products(rows: slice) -> mx.array:
        picked = mx.take(pixels, index[rows], axis=0)
        dot = (picked * cotangent[rows, None, :].astype(mx.float32)).sum(axis=-1)
        return mx.where(inside[rows], dot, 0)

    return _by_chunks(products, mx.zeros(index.shape), index.shape[1] * pixels.shape[1])


def scatter(shape: tuple[int, ...], taps: Taps, cotangent: mx.array) -> mx.array:
    """The gradient of :func:`blend` for pixels, rows of a float32 array of that shape."""
    index, weight, inside = taps
    index = mx.where(inside, index, shape[0])  # a row more takes what is outside
    # MLX's CPU scatter steps element by element: two channels seen as one complex number save one.
    pair = _device() == mx.cpu and shape[1] % 2 == 0
    dtype = mx.complex64 if pair else mx.float32
    d_pixels = mx.zeros((shape[0] + 1, shape[1])).view(dtype)
    chunks, cores = _chunks(index.shape[0], index.shape[1] * shape[1])
    for rows in chunks:
        with on_core(cores - 1):
            update = weight[rows, :, None] * cotangent[rows, None, :].astype(mx.float32)
        d_pixels = d_pixels.at[index[rows]].add(update.view(dtype))
    return d_pixels.view(mx.float32)[:-1]


def _device() -> mx.DeviceType:
    return mx.default_device().type


def _chunks(rows: int, elements: int) -> tuple[list[slice], int]:
    """Rows of ``elements`` each, as many at a time as the cache holds, and the cores to use."""
    step = max(1, _CHUNK[_device()] // max(1, elements))
    chunks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    return chunks, len(parts(len(chunks), step * elements)) if _device() == mx.cpu else 1


def _by_chunks(function: Callable[[slice], mx.array], out: mx.array, elements: int) -> mx.array:
    """Fill ``out`` in place from rows computed on all cores; each takes ``elements`` on the way."""
    chunks, cores = _chunks(out.shape[0], elements)
    for number, rows in enumerate(chunks):
        with on_core(number % cores):
            part = function(rows)
        out[rows] = part
    return out
