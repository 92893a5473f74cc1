"""Grid sampling as a module."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..ops.grid_sample import check_modes, grid_sample


class GridSample(nn.Module):
    """Samples its first input at the points of its second; it has no parameters.

    Args:
        mode: ``"bilinear"``, ``"nearest"`` or ``"bicubic"``.
        padding_mode: ``"zeros"``, ``"border"`` or ``"reflection"``.
        align_corners: whether -1 and 1 are the centres of the corner pixels or their outer edges.
        deterministic: make the gradient of ``x`` bit-identical from run to run.

    Raises:
        ValueError: no mode or padding mode has that name.

    Example:
        >>> layer = GridSample(padding_mode="border")
        >>> layer(mx.ones((1, 4, 6, 3)), mx.zeros((1, 2, 2, 2))).shape
        (1, 2, 2, 3)

    Source:
        :func:`mlx_qlayers.grid_sample`, where shapes and dtypes are described.
    """

    def __init__(
        self,
        mode: str = "bilinear",
        padding_mode: str = "zeros",
        align_corners: bool = False,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        check_modes(mode, padding_mode)
        self.mode, self.padding_mode = mode, padding_mode
        self.align_corners, self.deterministic = align_corners, deterministic

    def _extra_repr(self) -> str:
        names = ("mode", "padding_mode", "align_corners", "deterministic")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def __call__(self, x: mx.array, grid: mx.array) -> mx.array:
        return grid_sample(
            x,
            grid,
            mode=self.mode,
            padding_mode=self.padding_mode,
            align_corners=self.align_corners,
            deterministic=self.deterministic,
        )
