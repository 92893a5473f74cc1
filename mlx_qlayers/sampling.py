"""How an image is sampled: what the operation, its reference and its kernels all go by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """The options of :func:`mlx_qlayers.grid_sample`, checked there."""

    mode: str = "bilinear"
    padding_mode: str = "zeros"
    align_corners: bool = False
    deterministic: bool = False
