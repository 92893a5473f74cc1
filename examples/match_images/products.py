"""The products of both models, with the kernels of ``products.metal``.

MLX's wheel for Linux computes products with the reference BLAS, at a twentieth of what a core can
do. The host backend runs Metal kernels there instead; everywhere else MLX's own operators do.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_qlayers import DeformConv2d, backend, deformable_attention
from mlx_qlayers import attention as fused_attention
from mlx_qlayers.runtime.kernel import Kernel


def _kernel(name: str, inputs: str, template: str) -> Kernel:
    return Kernel(
        f"match_images_{name}",
        Path("products.metal"),
        inputs=tuple(inputs.split()),
        outputs=("y",),
        template=tuple(template.split()),
        function=name,
        large=name == "product",
    )


_PRODUCT = _kernel("product", "x weight bias rest zeros sizes", "P V")
_ATTENTION = _kernel("attention", "q keys values sizes", "P V D")
_SELU = _kernel("selu", "x rest bias sizes", "COUNT")
_GELU = _kernel("gelu", "x size", "COUNT")
_NORMALIZED = _kernel("normalized", "a b c d rows", "COUNT C")
_PEAKS = _kernel("peaks", "x scores found sizes", "COUNT RADIUS REST")
# Pixels and channels that a thread computes, in sixteen registers of AVX-512.
PIXELS, STRIP = 8, 32


def packed(weight: mx.array) -> mx.array:
    """Strips of the last axis, (..., kh, kw, C, O) to (..., strips, kh, kw, C, V)."""
    strip = _strip(weight.shape[-1])
    weight = mx.pad(weight, [(0, 0)] * (weight.ndim - 1) + [(0, -weight.shape[-1] % strip)])
    return mx.contiguous(mx.moveaxis(mx.unflatten(weight, -1, (-1, strip)), -2, -5))


def _strip(outputs: int) -> int:
    return min(STRIP, 1 << (outputs - 1).bit_length())


def product(
    x: mx.array,
    weight: mx.array,
    outputs: int,
    bias: mx.array | None = None,
    padding: tuple[int, int] = (0, 0),
    rest: mx.array | None = None,
    selu: bool = False,
) -> mx.array:
    """Convolve.

    Args:
        x: (B, H, W, C) of float32.
        weight: (1 or B, strips, kh, kw, C, V) as ``packed`` has it, for all images or each.
        outputs: O, the channels of the result.
        bias: (O,), or None.
        padding: zeros above and below, left and right.
        rest: what is added, as the result, or None.
        selu: whether the result is the SELU of that.

    Returns:
        (B, H - kh + 1, W - kw + 1, O), and the padding more.
    """
    (images, height, width, channels), (each, strips, kh, kw, depth, strip) = x.shape, weight.shape
    if depth != channels or each not in (1, images):
        raise ValueError(f"weight {weight.shape} does not fit x {x.shape}")
    above, left = padding
    down, across = height + 2 * above - kh + 1, width + 2 * left - kw + 1
    sizes = [height, width, down, across, channels, outputs, kh, kw, above, left]
    sizes += each > 1, rest is not None, selu
    zeros = _zeros(max(channels, strips * strip))
    bias = zeros if bias is None else mx.pad(bias, (0, strips * strip - outputs))
    (y,) = _PRODUCT(
        [x, weight, bias, zeros if rest is None else rest, zeros, _numbers(*map(int, sizes))],
        template={"P": PIXELS, "V": strip},
        grid=(-(-across // PIXELS) * strips, images * down, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(images, down, across, outputs)],
    )
    return y


class Linear(nn.Linear):
    """``nn.Linear``, faster on CPUs."""

    def __call__(self, x: mx.array) -> mx.array:
        if backend() != "host":
            return super().__call__(x)
        weight = _packed(self, lambda w: w.T[None, None, None])
        rows = x.reshape(1, 1, -1, x.shape[-1])
        return product(rows, weight, len(self.weight), self.get("bias")).reshape(*x.shape[:-1], -1)


class Conv2d(nn.Conv2d):
    """``nn.Conv2d`` without strides, to which it may add a rest and apply SELU."""

    def __call__(self, x: mx.array, rest: mx.array | None = None, selu: bool = False) -> mx.array:
        y_x = (self.padding, self.padding) if isinstance(self.padding, int) else self.padding
        (outputs, *kernel, _), bias = self.weight.shape, self.get("bias")
        # Over single pixels, and where it gives single ones, it is a matrix product.
        rows = y_x == (0, 0) and kernel in ([1, 1], list(x.shape[1:3]))
        shape = *x.shape[:3], outputs
        if rows:
            x = x.reshape(1, 1, -1, self.weight[0].size)
            shape = shape if kernel == [1, 1] else (x.shape[2], 1, 1, outputs)
            rest = None if rest is None else rest.reshape(1, 1, -1, outputs)
        if backend() == "host":
            weight = _packed(self, _turned)
            if rows:
                weight = weight.reshape(1, -1, 1, 1, x.shape[3], weight.shape[-1])
            y = product(x, weight, outputs, bias, y_x, rest, selu)
        elif rows:
            y = added(x @ self.weight.reshape(outputs, -1).T, rest, bias, selu)
        else:
            y = added(mx.conv2d(x, self.weight, padding=y_x), rest, bias, selu)
        return y.reshape(shape) if rows else y


def pointwise(
    x: mx.array, weight: mx.array, rest: mx.array | None = None, selu: bool = False
) -> mx.array:
    """A convolution of 1 x 1 with a weight (O, 1, 1, C)."""
    if backend() != "host":
        return added(x @ weight[:, 0, 0].T, rest, None, selu)
    return product(x, packed(_turned(weight)), len(weight), rest=rest, selu=selu)


def deform_conv2d(
    layer: DeformConv2d, x: mx.array, offset: mx.array, rest: mx.array | None, selu: bool
) -> mx.array:
    """A deformable convolution of 3 x 3, to which a rest may be added and SELU applied.

    On CPUs a product here follows the samples, each of one query with one point of one level.
    """
    if backend() != "host":
        return added(layer(x, offset), rest, None, selu)
    images, height, width, _ = x.shape
    steps = mx.arange(3) - 1
    rows = mx.broadcast_to(
        (mx.arange(height)[:, None] + steps)[:, None, :, None], (height, width, 3, 3)
    )
    columns = mx.broadcast_to((mx.arange(width)[:, None] + steps)[None, :, None], rows.shape)
    taps = mx.stack([columns, rows], -1) + offset.reshape(images, *rows.shape, 2)[..., ::-1]
    taps = ((taps + 0.5) / mx.array([width, height])).reshape(images, -1, 1, 1, 1, 2)
    values, shares = x.reshape(images, -1, 1, x.shape[-1]), mx.ones(taps.shape[:-1])
    found = deformable_attention(values, [(height, width)], taps, shares)
    weight = _packed(layer, lambda w: _turned(w).reshape(1, 1, 1, -1, len(w)))
    outputs = len(layer.weight)
    rest = None if rest is None else rest.reshape(1, 1, -1, outputs)
    y = product(
        found.reshape(1, 1, images * height * width, -1),
        weight,
        outputs,
        layer.get("bias"),
        rest=rest,
        selu=selu,
    )
    return y.reshape(images, height, width, outputs)


def matmul(a: mx.array, b: mx.array) -> mx.array:
    """(B, M, K) times (B, K, N)."""
    if backend() != "host":
        return a @ b
    return product(a[:, None], packed(b[:, None, None]), b.shape[-1])[:, 0]


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Attention of heads, (B, heads, N, D) each."""
    if backend() != "host":
        return fused_attention(q, k, v, scale=scale)
    (*_, queries, width), count = q.shape, k.shape[2]
    keys, values = (
        mx.pad(x, [(0, 0), (0, 0), (0, -count % STRIP), (0, 0)]).reshape(-1, STRIP, width)
        for x in (k, v)
    )
    (y,) = _ATTENTION(
        [scale * q, keys.swapaxes(1, 2), values, _numbers(queries, count)],
        template={"P": PIXELS, "V": STRIP, "D": width},
        grid=(-(-queries // PIXELS), q.shape[0] * q.shape[1], 1),
        threadgroup=(1, 1, 1),
        output_shapes=[q.shape],
    )
    return y


def added(
    x: mx.array, rest: mx.array | None, bias: mx.array | None = None, selu: bool = False
) -> mx.array:
    """x (..., C) and what there is of a rest and a bias (C,), and SELU of their sum."""
    if selu and backend() != "reference":
        count, threads = _threads(4096)
        sizes = x.size, x.shape[-1], int(rest is not None), int(bias is not None)
        (y,) = _SELU(
            [x, x if rest is None else rest, x if bias is None else bias, _numbers(*sizes)],
            template={"COUNT": count},
            grid=(-(-x.size // count), 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[x.shape],
        )
        return y
    for other in (bias, rest):
        x = x if other is None else x + other
    if not selu:
        return x
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return scale * mx.where(x > 0, x, alpha * (mx.exp(mx.minimum(x, 0)) - 1))


def gelu(x: mx.array) -> mx.array:
    """GELU by the error function."""
    if backend() == "reference":
        return nn.gelu(x)
    count, threads = _threads(4096)
    (y,) = _GELU(
        [x, _number(x.size)],
        template={"COUNT": count},
        grid=(-(-x.size // count), 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape],
    )
    return y


def normalized(x: mx.array) -> mx.array:
    """The last axis at length one."""
    return mx.fast.rms_norm(x, mx.full(x.shape[-1], x.shape[-1] ** -0.5), 1e-24)


def joined(parts: list[mx.array]) -> mx.array:
    """Four arrays (..., C) side by side, (..., 4 C) at length one."""
    if backend() != "host":
        return normalized(mx.concatenate(parts, axis=-1))
    *shape, channels = parts[0].shape
    rows = parts[0].size // channels
    (y,) = _NORMALIZED(
        [*parts, _number(rows)],
        template={"COUNT": 64, "C": channels},
        grid=(-(-rows // 64), 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(*shape, 4 * channels)],
    )
    return y


def maxima(scores: mx.array, radius: int) -> mx.array:
    """Positive scores (B, H, W) where they are the largest around, else zeros, as at the borders.

    Around is a square of ``radius`` pixels to either side. Those that are near the largest are left
    out, and among the rest the same is done twice more.
    """
    if backend() == "reference":
        found = scores == _largest(scores, radius)
        for _ in range(2):
            near = _largest(found.astype(mx.float32), radius) > 0
            rest = mx.where(near, 0, scores)
            found = found | ((rest == _largest(rest, radius)) & ~near)
    else:
        found = _peaks(scores, scores, _zeros(*scores.shape), radius, False)
        for _ in range(2):
            rest = _peaks(found, scores, found, radius, True)
            found = _peaks(rest, scores, found, radius, False)
    inner = (slice(None), *[slice(radius, -radius)] * 2)
    return mx.pad((found * scores)[inner], [(0, 0), (radius, radius), (radius, radius)])


def _peaks(x: mx.array, scores: mx.array, found: mx.array, radius: int, rest: bool) -> mx.array:
    images, height, width = x.shape
    count, threads = _threads(64)
    (y,) = _PEAKS(
        [x, scores, found, _numbers(height, width)],
        template={"COUNT": count, "RADIUS": radius, "REST": rest},
        grid=(-(-width // count), images * height, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape],
    )
    return y


def pooled(x: mx.array, size: int) -> mx.array:
    """Means of squares of pixels, of images (B, H, W, C); faster than ``nn.AvgPool2d``."""
    rows = reduce(mx.add, (x[:, i::size] for i in range(size)))
    return reduce(mx.add, (rows[:, :, i::size] for i in range(size))) / size**2


def _largest(x: mx.array, radius: int) -> mx.array:
    """The largest around each pixel; nothing is negative."""
    for axis in (1, 2):
        pads = [(0, 0)] * 3
        pads[axis] = (radius, radius)
        padded, size = mx.pad(x, pads), x.shape[axis]
        shifted = [
            padded[(slice(None),) * axis + (slice(k, k + size),)] for k in range(2 * radius + 1)
        ]
        x = reduce(mx.maximum, shifted)
    return x


@cache
def _numbers(*numbers: int) -> mx.array:
    return mx.array(numbers, mx.int32)


@cache
def _number(number: int) -> mx.array:
    return mx.array(number, mx.int32)


@cache
def _zeros(*shape: int) -> mx.array:
    return mx.zeros(shape)


def _threads(count: int) -> tuple[int, int]:
    """Elements of a thread and threads of a threadgroup; a CPU's thread takes ``count``."""
    return (count, 1) if backend() == "host" else (1, 256)


def keep_memory() -> None:
    """Let this process keep what it frees, where MLX allocates with glibc, as on CPUs.

    Large arrays go back to the system otherwise, and half of the time is spent on getting new ones.
    """
    if backend() == "host" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
            libc.mallopt(option, 2**30)


def _turned(weight: mx.array) -> mx.array:
    """A convolution's, with its outputs last."""
    return weight.transpose(1, 2, 3, 0)[None]


def _packed(layer: nn.Module, turn: Callable[[mx.array], mx.array]) -> mx.array:
    """The weight in the kernel's layout, kept as long as it is the same."""
    kept = layer.get("_kept")
    if kept is None or kept[0] is not layer.weight:
        layer._kept = kept = layer.weight, packed(turn(layer.weight))
    return kept[1]
