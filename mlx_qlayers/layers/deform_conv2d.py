"""Deformable convolution as a module."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from ..ops.deform_conv2d import Pair, deform_conv2d


class DeformConv2d(nn.Module):
    """A convolution whose taps its second input moves, and its third weighs.

    Args:
        in_channels: C.
        out_channels: Cout.
        kernel_size: extents of the kernel, one number or (height, width).
        stride: of the outputs; likewise, as are the next two.
        padding: zeros on either side.
        dilation: from tap to tap.
        groups: of channels, each with weights of its own.
        bias: whether there is one.
        allow_tf32: let GPUs round the product's float32 inputs to TF32.

    Raises:
        ValueError: ``groups`` does not divide the channels.

    Example:
        >>> layer = DeformConv2d(4, 6, 3, padding=1)
        >>> layer(mx.ones((1, 8, 8, 4)), mx.zeros((1, 8, 8, 18))).shape
        (1, 8, 8, 6)

    Source:
        ``torchvision.ops.DeformConv2d``, with channels last; see
        :func:`mlx_qlayers.deform_conv2d`, where shapes and dtypes are described.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        allow_tf32: bool = False,
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups {groups} must divide {in_channels} and {out_channels}")
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        depth = in_channels // groups
        bound = 1 / math.sqrt(depth * math.prod(kernel))
        self.weight = mx.random.uniform(-bound, bound, (out_channels, *kernel, depth))
        if bias:
            self.bias = mx.zeros((out_channels,))
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.allow_tf32 = allow_tf32

    def _extra_repr(self) -> str:
        outputs, *kernel, depth = self.weight.shape
        options = (f"{name}={getattr(self, name)}" for name in ("stride", "padding", "dilation"))
        return f"{depth} a group, {outputs}, kernel_size={tuple(kernel)}, {', '.join(options)}"

    def __call__(self, x: mx.array, offset: mx.array, mask: mx.array | None = None) -> mx.array:
        return deform_conv2d(
            x,
            offset,
            self.weight,
            self.get("bias"),
            mask,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            allow_tf32=self.allow_tf32,
        )
