"""Sampling of images and volumes at arbitrary points, with gradients for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from ..dispatch import Gradient, Operation, Plan, choose, dispatch
from ..dispatch.measurements import configure
from ..measurements.thresholds import threshold
from ..metal.grid_sample import launch as kernels
from ..options import Sampling
from ..reference import grid_sample as reference
from ..runtime.devices import device_of
from .signature import Signature

MODES = ("bilinear", "nearest", "bicubic")
PADDING_MODES = ("zeros", "border", "reflection")


def grid_sample(
    x: mx.array,
    grid: mx.array,
    *,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
    deterministic: bool = False,
) -> mx.array:
    """Sample an image or a volume at the points of a grid.

    Coordinates and sums are computed in float32 whatever the dtypes. Infinite and NaN coordinates
    do what PyTorch does on a CPU: they read as outside (zeros; NaN for bilinear and bicubic images)
    or land on a border.

    Args:
        x: images (N, H, W, C) or volumes (N, D, H, W, C); float32, float16 or bfloat16.
        grid: points (N, Ho, Wo, 2) as (x, y), or (N, Do, Ho, Wo, 3) as (x, y, z), in [-1, 1] from
            the first to the last pixel of each axis; float32, float16 or bfloat16.
        mode: ``"bilinear"`` (trilinear for volumes), ``"nearest"`` (ties to the even pixel) or
            ``"bicubic"`` (images only, a = -0.75).
        padding_mode: what lies outside: ``"zeros"``, ``"border"`` (the nearest border pixel; no
            gradient for the grid there) or ``"reflection"``.
        align_corners: whether -1 and 1 are the centres of the corner pixels or their outer edges.
        deterministic: make the gradient of ``x`` bit-identical from run to run. A CPU gives that
            always; on a GPU the kernels then sort, and without a kernel the CPU adds up.

    Returns:
        (N, Ho, Wo, C) or (N, Do, Ho, Wo, C), in the dtype of ``x``.

    Raises:
        ValueError: an argument has the wrong rank, shape, dtype or value; it says which.

    Example:
        >>> x = mx.arange(4.0).reshape(1, 2, 2, 1)
        >>> grid_sample(x, mx.zeros((1, 1, 1, 2))).item()
        1.5

        From PyTorch's layout, (N, C, H, W), and back to it:

        >>> x = mx.ones((2, 3, 4, 6))
        >>> y = grid_sample(x.transpose(0, 2, 3, 1), mx.zeros((2, 5, 5, 2)))
        >>> y.transpose(0, 3, 1, 2).shape
        (2, 3, 5, 5)

    Source:
        ``torch.nn.functional.grid_sample``, with channels last.
    """
    static = mode, padding_mode, align_corners, deterministic
    return dispatch(_GRID_SAMPLE, (x, grid), static)


def _plan(
    arrays: Sequence[Any], mode: str, padding_mode: str, align_corners: bool, deterministic: bool
) -> Plan:
    x, grid = arrays
    options = Sampling(mode, padding_mode, bool(align_corners), bool(deterministic))
    _check(x, grid, options)
    composed = reference.sampler(options)
    empty = "there is nothing to sample" if 0 in (x.size, grid.size) else None
    work = grid.size // grid.shape[-1] * (x.shape[-1] + 8)
    is_little = mode == "nearest" and work < threshold("grid_sample_small", device="host")
    choice = choose(
        "grid_sample",
        kernels.covers(grid, options),
        empty=empty,
        host_gain=threshold("grid_sample_gain", "small " * is_little + mode, device="host"),
    )
    if empty:
        shape = *grid.shape[:-1], x.shape[-1]
        return Plan(choice, lambda *_: mx.zeros(shape, x.dtype))
    if choice.path == "reference":
        return Plan(choice, composed)
    key = x.shape[-1], x.dtype, options.deterministic, grid.shape[-1]
    config = configure("grid_sample", choice.path, *key)
    device = device_of(choice.path)
    if device.gpu and not device.spills:
        config = kernels.within_registers(config, x, grid, options)
    given = x, grid, options, config

    def gradient(of: int, bind: Callable[..., kernels.Sampled]) -> Gradient:
        launch = cache(lambda: bind(*given))  # where it is asked for
        return Gradient((of,), lambda arrays, dy, _: [launch()(*arrays, dy[0].astype(x.dtype))])

    gradients = gradient(0, kernels.gradient_x), gradient(1, kernels.gradient_grid)
    return Plan(choice, kernels.grid_sample(*given), gradients, composed)


_TAKES = Signature("x: float (N, H, W, C) or (N, D, H, W, C); 0 not in shape[1:-1]")
_THETA = Signature("theta: float (N, A, A + 1)")
_GRID_SAMPLE = Operation("grid_sample", _plan, compiled=True)


def _check(x: Any, grid: Any, options: Sampling) -> None:
    sizes = _TAKES.check(x)
    _GRIDS[x.ndim].check(grid, **sizes)
    check_modes(options.mode, options.padding_mode)
    if options.mode == "bicubic" and x.ndim == 5:
        raise ValueError(f"mode 'bicubic' is for images only, but x is a volume {x.shape}")


_GRIDS = {
    4: Signature("grid: float (N, Ho, Wo, 2)"),
    5: Signature("grid: float (N, Do, Ho, Wo, 3)"),
}
_NAMES = [
    f"{name}: {str(of)[1:-1]}" for name, of in (("mode", MODES), ("padding_mode", PADDING_MODES))
]
# Raises a ValueError unless both are names of modes.
check_modes = Signature("\n".join(_NAMES)).check


def affine_grid(theta: mx.array, size: tuple[int, ...], align_corners: bool = False) -> mx.array:
    """The grid with which :func:`grid_sample` applies an affine map.

    Args:
        theta: maps from output to input coordinates, (N, 2, 3) for images or (N, 3, 4) for volumes,
            rows and columns in x, y(, z) order; float32, float16 or bfloat16.
        size: the shape of the output, (N, H, W, C) or (N, D, H, W, C); C is not used.
        align_corners: as in :func:`grid_sample`.

    Returns:
        (N, H, W, 2) or (N, D, H, W, 3) in the dtype of ``theta``, computed in float32.

    Raises:
        ValueError: an argument has the wrong rank, shape, dtype or value; it says which.

    Example:
        >>> theta = mx.array([[[1.0, 0, 0], [0, 1.0, 0]]])
        >>> affine_grid(theta, (1, 1, 2, 3), align_corners=True).tolist()
        [[[[-1.0, 0.0], [1.0, 0.0]]]]

    Source:
        ``torch.nn.functional.affine_grid``, with channels last.
    """
    size = tuple(size)
    if len(size) not in (4, 5) or not all(isinstance(n, int) and n >= 0 for n in size):
        raise ValueError(f"size must be (N, H, W, C) or (N, D, H, W, C), not {size}")
    if 0 in size[1:-1]:
        raise ValueError(f"size must have at least one pixel, not {size}")
    _THETA.check(theta, N=size[0], A=len(size) - 2)
    return reference.affine_grid(theta, size, bool(align_corners))
