"""Calls of what samples images and volumes, sound and invalid ones."""

import mlx.core as mx

from mlx_qlayers import affine_grid
from mlx_qlayers.ops.deform_conv2d import deform_conv2d
from mlx_qlayers.ops.deformable_attention import deformable_attention
from mlx_qlayers.ops.grid_sample import grid_sample
from tests.examples.calls import Calls

_ones, _zeros = mx.ones, mx.zeros
_X, _GRID = _zeros((2, 5, 7, 3)), _zeros((2, 4, 6, 2))
_VOLUME, _POINTS = _zeros((2, 3, 5, 7, 3)), _zeros((2, 1, 4, 6, 3))
_SAMPLE = Calls(
    grid_sample,
    [{"x": _X, "grid": _GRID}, {"x": _VOLUME, "grid": _POINTS}],
    [
        ({"x": _X[0]}, r"x must be \(N, H, W, C\).*\(5, 7, 3\)"),
        ({"grid": _GRID[0]}, r"grid must be \(2, Ho, Wo, 2\), but its shape is \(4, 6, 2\)"),
        ({"x": _VOLUME}, r"grid must be \(2, Do, Ho, Wo, 3\), but its shape is \(2, 4, 6, 2\)"),
        ({"grid": _GRID[:1]}, r"grid must be \(2, Ho, Wo, 2\), but its shape is \(1, 4, 6, 2\)"),
        ({"x": _X[:, :0]}, r"x must be \(N, H, W, C\) or \(N, D, H, W, C\) with 0 not in"),
        ({"mode": "cubic"}, "mode must be bilinear, nearest or bicubic, not 'cubic'"),
        ({"x": _VOLUME, "grid": _POINTS, "mode": "bicubic"}, "mode 'bicubic' is for images only"),
        ({"padding_mode": "wrap"}, "padding_mode must be zeros, border or reflection, not 'wrap'"),
    ],
)
_AFFINE = Calls(
    affine_grid,
    [{"theta": _zeros((1, 2, 3)), "size": (1, 4, 5, 3)}],
    [
        ({"size": (1, 4, 5)}, r"size must be .*\(1, 4, 5\)"),
        ({"size": (1, 4, 5.0, 3)}, r"size must be .*5.0"),
        ({"size": (1, 0, 5, 3)}, "size must have at least one pixel"),
        ({"theta": _zeros((1, 3, 3))}, r"theta must be \(1, 2, 3\).*\(1, 3, 3\)"),
        ({"size": (2, 4, 5, 3)}, r"theta must be \(2, 2, 3\)"),
    ],
)
_LEVELS = ((4, 5), (2, 3))
_V, _L, _W = _ones((2, 26, 3, 4)), mx.full((2, 6, 3, 2, 2, 2), 0.5), _ones((2, 6, 3, 2, 2))
_DEFORMABLE = Calls(
    deformable_attention,
    [{"values": _V, "shapes": _LEVELS, "locations": _L, "weights": _W}],
    [
        ({"shapes": [(5, 7)]}, r"locations must be \(2, L, 3, 1, P, 2\).* \(2, 6, 3, 2, 2, 2\)"),
        ({"shapes": [5, 7]}, "shapes must be pairs of height and width"),
        ({"shapes": [(5, 7, 3), (2,)]}, "shapes must be pairs of height and width"),
        ({"shapes": [(5, 7), (3.0, 2)]}, "shapes must be positive"),
        ({"shapes": [(5, 7), (-3, -2)]}, "shapes must be positive"),
        ({"locations": _L[:1]}, r"locations must be .*\(1, 6, 3, 2, 2, 2\)"),
        ({"weights": _W[:, :3]}, r"weights must be \(2, 6, 3, 2, 2\).*\(2, 3, 3, 2, 2\)"),
        ({"padding_mode": "reflection"}, "padding_mode must be zeros or border"),
    ],
)
_IMAGE, _OFFSET, _KERNEL = _zeros((2, 5, 6, 4)), _zeros((2, 3, 4, 36)), _zeros((6, 3, 3, 4))
_CONVOLVED = {"x": _IMAGE, "offset": _OFFSET, "weight": _KERNEL, "bias": _ones(6)}
_CONVOLUTION = Calls(
    deform_conv2d,
    [_CONVOLVED | {"mask": _ones((2, 3, 4, 18))}],
    [
        ({"x": _IMAGE[0]}, r"x must be \(N, H, W, C\), but its shape is \(5, 6, 4\)"),
        ({"offset": _OFFSET[:, :2]}, r"offset must be \(2, 3, 4, F\), .* is \(2, 2, 4, 36\)"),
        ({"offset": _OFFSET[..., :17]}, "offset must be"),
        ({"x": _IMAGE[..., :0]}, r"weight must be .* with 0 not in \(\*shape, 0\).* is \(6,"),
        ({"weight": _zeros((6, 9, 3, 4))}, "x .* is too small for weight"),
        ({"weight": _KERNEL.astype(mx.float16)}, "weight must be float32 as x, not .*float16"),
        ({"mask": _zeros((2, 3, 4, 36))}, r"mask must be \(2, 3, 4, 18\)"),
        ({"stride": 0}, "stride must be one or two integers of at least 1 and below 16777216"),
        ({"padding": (1, 2, 3)}, "padding must be one or two integers"),
        ({"dilation": 2**70}, "dilation must be one or two integers"),
        ({"dilation": 1.5}, "dilation must be one or two integers"),
    ],
)
IMAGES = [_SAMPLE, _AFFINE, _DEFORMABLE, _CONVOLUTION]
