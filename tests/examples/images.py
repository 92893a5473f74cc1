"""Calls of what samples images and volumes, sound and invalid ones."""

import mlx.core as mx

from mlx_qlayers import affine_grid
from mlx_qlayers.ops.deform_conv2d import deform_conv2d
from mlx_qlayers.ops.deformable_attention import deformable_attention
from mlx_qlayers.ops.grid_sample import grid_sample
from tests.examples.calls import Calls

_ones, _zeros = mx.ones, mx.zeros
_VOLUME, _POINTS = _zeros((2, 3, 5, 7, 3)), _zeros((2, 1, 4, 6, 3))
_SAMPLE = Calls(
    grid_sample,
    [
        ({"x": _zeros((5, 7, 3))}, r"x must be \(N, H, W, C\).*\(5, 7, 3\)"),
        ({"grid": _zeros((5, 6, 2))}, r"grid must be \(2, Ho, Wo, 2\), but its shape is \(5, 6, 2"),
        ({"x": _VOLUME}, r"grid must be \(2, Do, Ho, Wo, 3\), but its shape is \(2, 5, 6, 2\)"),
        ({"grid": _zeros((1, 5, 6, 2))}, r"grid must be \(2, Ho, Wo, 2\), .* is \(1, 5, 6, 2\)"),
        (
            {"x": _zeros((2, 0, 5, 3))},
            r"x must be \(N, H, W, C\) or \(N, D, H, W, C\) with 0 not in",
        ),
        ({"mode": "cubic"}, "mode must be bilinear, nearest or bicubic, not 'cubic'"),
        ({"x": _VOLUME, "grid": _POINTS, "mode": "bicubic"}, "mode 'bicubic' is for images only"),
        ({"padding_mode": "wrap"}, "padding_mode must be zeros, border or reflection, not 'wrap'"),
    ],
    [{"x": _VOLUME, "grid": _POINTS}],
)
_AFFINE = Calls(
    affine_grid,
    [
        ({"size": (1, 4, 5)}, r"size must be .*\(1, 4, 5\)"),
        ({"size": (1, 4, 5.0, 3)}, r"size must be .*5.0"),
        ({"size": (1, 0, 5, 3)}, "size must have at least one pixel"),
        ({"theta": _zeros((1, 3, 3))}, r"theta must be \(1, 2, 3\).*\(1, 3, 3\)"),
        ({"size": (2, 4, 5, 3)}, r"theta must be \(2, 2, 3\)"),
    ],
    [{"theta": _zeros((1, 2, 3)), "size": (1, 4, 5, 3)}],
)
_DEFORMABLE = Calls(
    deformable_attention,
    [
        ({"shapes": [(5, 12)]}, r"locations must be \(1, L, 2, 1, P, 2\).* \(1, 5, 2, 2, 4, 2\)"),
        ({"shapes": [5, 7]}, "shapes must be pairs of height and width"),
        ({"shapes": [(5, 7, 3), (2,)]}, "shapes must be pairs of height and width"),
        ({"shapes": [(5, 7), (3.0, 2)]}, "shapes must be positive"),
        ({"shapes": [(5, 7), (-3, -2)]}, "shapes must be positive"),
        ({"locations": _ones((3, 5, 2, 2, 4, 2))}, r"locations must be .*\(3, 5, 2, 2, 4, 2\)"),
        (
            {"weights": _ones((1, 3, 2, 2, 4))},
            r"weights must be \(1, 5, 2, 2, 4\).*\(1, 3, 2, 2, 4\)",
        ),
        ({"padding_mode": "reflection"}, "padding_mode must be zeros or border"),
    ],
)
_CONVOLUTION = Calls(
    deform_conv2d,
    [
        ({"x": _zeros((6, 5, 8))}, r"x must be \(N, H, W, C\), but its shape is \(6, 5, 8\)"),
        (
            {"offset": _zeros((1, 2, 5, 18))},
            r"offset must be \(1, 6, 5, F\), .* is \(1, 2, 5, 18\)",
        ),
        ({"offset": _zeros((1, 6, 5, 17))}, "offset must be"),
        (
            {"x": _zeros((1, 6, 5, 0), mx.float16)},
            r"weight must be .* with 0 not in \(\*shape, 0\).* is \(3,",
        ),
        ({"weight": _zeros((3, 9, 3, 8), mx.float16)}, "x .* is too small for weight"),
        ({"weight": _zeros((3, 3, 3, 8))}, "weight must be float16 as x, not .*float32"),
        ({"mask": _zeros((1, 6, 5, 36))}, r"mask must be \(1, 6, 5, 9\)"),
        ({"stride": 0}, "stride must be one or two integers of at least 1 and below 16777216"),
        ({"padding": (1, 2, 3)}, "padding must be one or two integers"),
        ({"dilation": 2**70}, "dilation must be one or two integers"),
        ({"dilation": 1.5}, "dilation must be one or two integers"),
    ],
)
IMAGES = [_SAMPLE, _AFFINE, _DEFORMABLE, _CONVOLUTION]
