"""PyTorch's golden values of grid sampling, made by ``golden/make_grid_sample.py``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from mlx_qlayers.ops.grid_sample import MODES, PADDING_MODES
from mlx_qlayers.reference.grid_sample import Sampling

GROUPS = [f"{ndim}d_{size}" for ndim in (2, 3) for size in ("odd", "even", "thin")]


@cache
def golden(group: str) -> dict[str, np.ndarray]:
    """The arrays of one group of inputs."""
    with np.load(Path(__file__).parent / "data" / "grid_sample.npz") as file:
        return {k.split("/")[1]: file[k] for k in file.files if k.startswith(group + "/")}


def options_of(values: dict[str, np.ndarray]) -> Iterator[tuple[tuple[int, ...], Sampling]]:
    """Every mode, padding and alignment with its place in the golden arrays."""
    for index in np.ndindex(values["out"].shape[:3]):
        yield index, Sampling(MODES[index[0]], PADDING_MODES[index[1]], bool(index[2]))


def same_side(truth: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """The truth, but PyTorch's float32 where rounding put a point on the other side of a kink."""
    return np.where(np.abs(truth - rounded) > 1e-3 * (1 + np.abs(truth)), rounded, truth)
