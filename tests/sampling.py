"""PyTorch's golden values, made by ``golden``; those of grid sampling, and their checks."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
from numerics import JUMP, assert_accurate, assert_same_sums

from mlx_qlayers.ops.grid_sample import MODES, PADDING_MODES
from mlx_qlayers.options import Sampling

GROUPS = [f"{ndim}d_{size}" for ndim in (2, 3) for size in ("odd", "even", "thin")]


@cache
def golden(group: str, of: str = "grid_sample") -> dict[str, np.ndarray]:
    """The arrays of one group of inputs."""
    with np.load(Path(__file__).parent / "data" / f"{of}.npz") as file:
        return {k.split("/")[1]: file[k] for k in file.files if k.startswith(group + "/")}


def options_of(values: dict[str, np.ndarray]) -> Iterator[tuple[tuple[int, ...], Sampling]]:
    """Every mode, padding and alignment with its place in the golden arrays."""
    for index in np.ndindex(values["out"].shape[:3]):
        yield index, Sampling(MODES[index[0]], PADDING_MODES[index[1]], bool(index[2]))


def same_side(truth: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """The truth, but PyTorch's float32 where rounding put a point on the other side of a kink."""
    return np.where(np.abs(truth - rounded) > JUMP * (1 + np.abs(truth)), rounded, truth)


def assert_as_special(
    found: Sequence[mx.array],
    values: dict[str, np.ndarray],
    index: tuple[int, ...],
    options: Sampling,
) -> None:
    """Assert that the output and both gradients are PyTorch's at NaN and infinite coordinates.

    Its float32 is the truth, since 3e38 overflows in float32 only. Bilinear images padded with
    other than zeros have finite gradients here; there PyTorch reads and writes outside its arrays.
    """
    ndim = values["grid"].shape[-1]
    unknown = ndim == 2 and options.mode == "bilinear" and options.padding_mode != "zeros"
    for name, actual in zip(("out", "d_x", "d_grid"), found, strict=True):
        if unknown and name != "out":
            assert np.isfinite(np.array(actual)).all(), f"{name} {options}"
            continue
        truth = values[name + "32"][index]
        assert_accurate(actual, truth.astype(np.float64), truth, what=f"{name} {options}")


# An axis so long that float32 rounds the position of its last pixel up to its size.
LONG = 2**24 + 4
LONG_CASES = [("nearest", "zeros"), ("bilinear", "zeros"), ("bilinear", "border")]
LONG_CASES += [("bicubic", "zeros"), ("bicubic", "reflection")]


def long_images() -> tuple[mx.array, mx.array, mx.array]:
    """Two images of one long axis, of ones and of sevens, with points at and beyond its ends."""
    ones = mx.ones((1, 1, LONG, 1), mx.float16)
    row = mx.array([-2, -1, 0.5, 1 - 2.0**-24, 1, 1 + 2.0**-23])
    grid = mx.broadcast_to(mx.stack([row, mx.zeros_like(row)], -1), (2, 1, 6, 2))
    return mx.concatenate([ones, 7 * ones]), grid, mx.ones((2, 1, 6, 1), mx.float16)


def check_long(found: Sequence[mx.array], mode: str, padding_mode: str) -> None:
    """Assert that no point reads, or adds to, the image beside its own."""
    out, d_x, d_grid = found
    edge = 1.0 if padding_mode != "zeros" else 0.0
    first = 0.5 if mode != "nearest" and padding_mode == "zeros" else 1.0
    expected = np.array([edge, first, 1, edge, edge, edge])
    np.testing.assert_array_equal(np.array(out)[:, 0, :, 0], [expected, 7 * expected])
    # The weights of the taps inside, which are those of the output: of a constant image.
    total = d_x.astype(mx.float32).sum((1, 2, 3))
    assert_same_sums(total, mx.full(2, expected.sum()))
    assert d_x[:, 0, -1, 0].tolist() == [3 * edge, 3 * edge]
    assert mx.isfinite(d_grid).all().item()
