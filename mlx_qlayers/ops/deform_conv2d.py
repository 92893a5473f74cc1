"""Deformable convolution: sampling at moved taps, then a product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..dispatch import Operation, Plan, dispatch
from .deformable_attention import DEFORMABLE_ATTENTION
from .matmul import matmul
from .signature import Signature

Pair = int | tuple[int, int]
# Float32 holds every whole position below.
_MOST = 2**24


def deform_conv2d(
    x: mx.array,
    offset: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    allow_tf32: bool = False,
) -> mx.array:
    """Convolve an image at taps that an offset moves, each for itself at each output.

    Taps are bilinear samples, zeros outside of the image; positions are computed in float32. The
    offsets of each of G groups move C / G channels; kh and kw are the kernel's extents. The
    product of samples and weight is exact in float32, also on GPUs where ``mx.conv2d`` rounds to
    TF32.

    Args:
        x: (N, H, W, C); float32, float16 or bfloat16.
        offset: (N, Ho, Wo, G * kh * kw * 2), the last axis as (dy, dx) pairs in pixels.
        weight: (Cout, kh, kw, C / groups) in the dtype of ``x``, as ``mx.conv2d`` takes it.
        bias: (Cout,) in the dtype of ``x``, or None.
        mask: (N, Ho, Wo, G * kh * kw), a factor for each tap, or None.
        stride: of the outputs, along both axes or (height, width).
        padding: zeros on either side; likewise.
        dilation: from tap to tap; likewise.
        allow_tf32: let GPUs round the product's float32 inputs to TF32, which is faster.

    Returns:
        (N, Ho, Wo, Cout) in the dtype of ``x``.

    Raises:
        ValueError: an argument has the wrong rank, shape, dtype or value; it says which.

    Example:
        >>> x, weight = mx.random.normal((1, 8, 8, 4)), mx.random.normal((6, 3, 3, 4))
        >>> y = deform_conv2d(x, mx.zeros((1, 8, 8, 18)), weight, padding=1)
        >>> mx.allclose(y, mx.conv2d(x, weight, padding=1), atol=1e-5).item()
        True

    Source:
        ``torchvision.ops.deform_conv2d``, with channels last; Deformable ConvNets v1 and v2
        (https://arxiv.org/abs/1811.11168).
    """
    return dispatch(
        _DEFORM_CONV2D, (x, offset, weight, bias, mask), (stride, padding, dilation, allow_tf32)
    )


def _plan(
    arrays: Sequence[Any], stride: Any, padding: Any, dilation: Any, allow_tf32: bool
) -> Plan:
    steps, gaps = _pair("stride", stride), _pair("dilation", dilation)
    margin = _pair("padding", padding, least=0)
    _check(arrays, steps, gaps, margin)
    x, offset, weight, *_ = arrays
    (batch, height, width, channels), (outputs, kh, kw, depth) = x.shape, weight.shape
    _, down, across, _ = offset.shape
    taps, parts = kh * kw, channels // depth
    groups = offset.shape[3] // (2 * taps)
    samples = batch, down * across * taps, groups, 1, 1
    split = batch, down, across, groups, taps
    # Values, not operations, which a graph would fuse to kernels that MLX compiles at run time.
    rows, columns = (
        mx.array([[i * s - p + j * d for j in range(k)] for i in range(n)], mx.float32)
        for n, k, s, p, d in zip((down, across), (kh, kw), steps, margin, gaps, strict=True)
    )

    # A CPU's own product is exact, and takes any view; forced operators run where MLX runs.
    on_cpu = mx.default_device().type == mx.cpu
    multiply = mx.matmul if on_cpu else partial(matmul, allow_tf32=allow_tf32)

    def run(x: mx.array, offset: mx.array, weight: mx.array, bias: Any, mask: Any) -> mx.array:
        x_y = mx.broadcast_arrays(columns[:, None], rows[:, None, :, None])
        fixed = mx.stack(list(x_y), -1).reshape(down, across, taps, 1, 2)
        moved = offset.reshape(*split, 2).swapaxes(3, 4)[..., ::-1]
        locations = (moved.astype(mx.float32) + fixed).reshape(*samples, 2)
        if mask is None:
            weights = mx.ones(samples, x.dtype)
        else:
            weights = mask.reshape(split).swapaxes(3, 4).reshape(samples)
        values = x.reshape(batch, height * width, groups, channels // groups)
        # One level, whose locations count pixels.
        options = "zeros", True, height, width
        sampled = dispatch(DEFORMABLE_ATTENTION, (values, locations, weights), options)
        # A product for each group of channels: (groups, N * Ho * Wo, taps * C / groups).
        sampled = sampled.reshape(-1, taps, parts, depth).transpose(2, 0, 1, 3)
        kernels = weight.reshape(parts, outputs // parts, taps * depth).swapaxes(1, 2)
        sampled = sampled.reshape(parts, -1, taps * depth)
        product = multiply(sampled, kernels)
        y = product.swapaxes(0, 1).reshape(batch, down, across, outputs)
        return y if bias is None else y + bias

    # Which path samples take is said by deformable_attention.
    return Plan(None, run)


_PRODUCT = Signature("""
    x: float (N, H, W, C)
    weight: x (Cout, kh, kw, D); 0 not in (*shape, C) and C % D == 0 and Cout % (C // D) == 0
    bias: x (Cout,) or None
""")
_SAMPLES = Signature("""
    offset: float (N, Ho, Wo, F); F > 0 and F % taps == 0 and C % (F // taps) == 0
    mask: float (N, Ho, Wo, F // 2) or None
""")
_DEFORM_CONV2D = Operation("deform_conv2d", _plan, compiled=True)


def _pair(name: str, given: Any, least: int = 1) -> tuple[int, int]:
    pair = tuple(given) if isinstance(given, (list, tuple)) else (given, given)
    if len(pair) != 2 or not all(type(n) is int and least <= n < _MOST for n in pair):
        raise ValueError(
            f"{name} must be one or two integers of at least {least} and below {_MOST}, "
            f"not {given!r}"
        )
    return pair


def _check(
    arrays: Sequence[Any],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
) -> None:
    x, offset, weight, bias, mask = arrays
    found = _PRODUCT.check(x, weight, bias)
    extents = (found["H"], found["W"]), (found["kh"], found["kw"])
    down, across = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(*extents, stride, padding, dilation, strict=True)
    )
    if min(down, across) < 1:
        raise ValueError(f"x {x.shape} is too small for weight {weight.shape}")
    _SAMPLES.check(offset, mask, **found, Ho=down, Wo=across, taps=2 * found["kh"] * found["kw"])
