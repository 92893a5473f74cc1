"""Make the golden values of the grid sampling tests with PyTorch on a CPU.

Needs ``pip install torch==2.13.0 numpy``; ``python tests/golden/make_grid_sample.py`` writes
``tests/data/grid_sample.npz``. For every group of inputs it holds them, channels last in float32,
and with leading axes (mode, padding_mode, align_corners) the output and both gradients, computed by
PyTorch in float64 (``out``, ``d_x``, ``d_grid``) and in float32 (``out32``, ...).
"""

from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

MODES = {2: ("bilinear", "nearest", "bicubic"), 3: ("bilinear", "nearest")}
PADDING = ("zeros", "border", "reflection")
SIZES = {"odd": (5, 7, 3), "even": (8, 4, 2), "thin": (1, 3, 1)}
OUT = Path(__file__).parents[1] / "data" / "grid_sample.npz"


def points(rng: np.random.Generator, size: tuple[int, ...], batch: int) -> np.ndarray:
    """Points inside, around and far outside, then pixel centres, edges, borders and ties."""
    ndim = len(size)
    inside = rng.uniform(-1, 1, (batch, 10, ndim))
    around = rng.uniform(-1.7, 1.7, (batch, 10, ndim))
    far = rng.uniform(-30, 30, (batch, 4, ndim))
    extent = np.array(size[::-1])
    centres = 2 * rng.integers(-1, extent + 1, (batch, 6, ndim)) / np.maximum(extent - 1, 1) - 1
    edges = (rng.integers(-2, 2 * extent + 2, (batch, 10, ndim)) + 0.0) / extent - 1
    return np.concatenate([inside, around, far, centres, edges], axis=1).astype(np.float32)


def run(x, grid, cotangent, dtype, backward=True, **options):
    """The output and the gradients, channels last; zeros where they are not asked for."""
    x = torch.tensor(np.moveaxis(x, -1, 1), dtype=dtype, requires_grad=True)
    grid = torch.tensor(grid, dtype=dtype, requires_grad=True)
    out = F.grid_sample(x, grid, **options)
    if not backward:
        return out.detach().numpy(), np.zeros(x.shape), np.zeros(grid.shape)
    out.backward(torch.tensor(np.moveaxis(cotangent, -1, 1), dtype=dtype))
    return out.detach().numpy(), x.grad.numpy(), grid.grad.numpy()


def group(x, grid, cotangent, without=()):
    """Every mode, padding and alignment on one set of inputs; no gradients ``without`` some."""
    ndim = grid.shape[-1]
    arrays = {"x": x, "grid": grid, "cotangent": cotangent}
    cases = list(product(MODES[ndim], PADDING, (False, True)))
    shape = (len(MODES[ndim]), len(PADDING), 2)
    names = ("out", "d_x", "d_grid")
    for suffix, dtype in (("", torch.float64), ("32", torch.float32)):
        found = [
            run(
                *(x, grid, cotangent, dtype, (ndim, m, p) not in without),
                mode=m,
                padding_mode=p,
                align_corners=a,
            )
            for m, p, a in cases
        ]
        for name, values in zip(names, zip(*found, strict=True), strict=True):
            values = np.stack(values)
            values = values if name == "d_grid" else np.moveaxis(values, 2, -1)
            arrays[name + suffix] = values.reshape(*shape, *values.shape[1:])
    return arrays


def special(ndim: int) -> dict[str, np.ndarray]:
    """NaN, infinite and huge coordinates.

    PyTorch's own backward reads and writes outside its arrays for bilinear images that are padded
    with other than zeros: those have no gradients here.
    """
    values = (np.nan, np.inf, -np.inf, 1e6, -1e6, 3e38)
    grid = np.full((1, *[1] * (ndim - 1), len(values) * ndim, ndim), -0.25, np.float32)
    for i, (value, axis) in enumerate(product(values, range(ndim))):
        grid[..., i, axis] = value
    x = np.arange(1, 4**ndim + 1, dtype=np.float32).reshape(1, *[4] * ndim, 1)
    cotangent = np.arange(2, 2 + grid[..., :1].size, dtype=np.float32).reshape(*grid.shape[:-1], 1)
    return group(x, grid, cotangent, {(2, "bilinear", "border"), (2, "bilinear", "reflection")})


def affine(rng: np.random.Generator, ndim: int) -> dict[str, np.ndarray]:
    """Affine grids at both alignments, as leading axis, with one side of length one."""
    size = (2, 1, 4, 5)[: ndim + 1] if ndim == 3 else (2, 1, 4)
    theta = rng.normal(size=(2, ndim, ndim + 1)).astype(np.float32)
    arrays = {"theta": theta, "size": np.array([*size, 3])}
    for suffix, dtype in (("", torch.float64), ("32", torch.float32)):
        tensor = torch.tensor(theta, dtype=dtype)
        shape = (size[0], 3, *size[1:])
        found = [F.affine_grid(tensor, shape, align_corners=a).numpy() for a in (False, True)]
        arrays["out" + suffix] = np.stack(found)
    return arrays


def main() -> None:
    rng = np.random.default_rng(5)
    arrays: dict[str, np.ndarray] = {}
    for ndim, (name, sizes) in product((2, 3), SIZES.items()):
        size, batch, channels = sizes[:ndim], 2, 2
        x = rng.normal(size=(batch, *size, channels)).astype(np.float32)
        grid = points(rng, size, batch).reshape(batch, *[1] * (ndim - 2), 5, 8, ndim)
        cotangent = rng.normal(size=(*grid.shape[:-1], channels)).astype(np.float32)
        made = group(x, grid, cotangent)
        arrays |= {f"{ndim}d_{name}/{key}": value for key, value in made.items()}
    for ndim in (2, 3):
        arrays |= {f"{ndim}d_special/{key}": value for key, value in special(ndim).items()}
        arrays |= {f"{ndim}d_affine/{key}": value for key, value in affine(rng, ndim).items()}
    np.savez_compressed(OUT, **arrays)
    kilobytes = OUT.stat().st_size / 1e3
    print(f"{OUT}: {len(arrays)} arrays, {kilobytes:.0f} kB, PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
