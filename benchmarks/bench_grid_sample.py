"""Grid sampling by kernel and by reference, beside plain MLX operators as in MLX's documentation.

Run ``python benchmarks/bench_grid_sample.py``. Every result is first compared with the operators'
own, which are right for even sizes only. ``MB`` is the peak above inputs and results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import mlx.core as mx
from common import arguments, output
from harness import GPU as ON_GPU
from harness import case, either, on_paths, peak, tasks

from mlx_qlayers.ops.grid_sample import affine_grid, grid_sample


def operators(x: mx.array, grid: mx.array, mode: str) -> mx.array:
    """Zeros outside: gather neighbours, mask, weigh and add.

    Indices are clipped here: gathering outside and masking afterwards, as the documentation does,
    reads beyond the array and in the gradient writes beyond it.
    """
    batch, height, width, _ = x.shape
    image = mx.arange(batch)[:, None, None]
    total = mx.zeros((*grid.shape[:-1], x.shape[-1]), mx.float32)
    columns = _axis(((grid[..., 0] + 1) * width - 1) / 2, mode)
    for row, row_weight in _axis(((grid[..., 1] + 1) * height - 1) / 2, mode):
        for column, column_weight in columns:
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = row_weight * column_weight
            pixel = x[image, mx.clip(row, 0, height - 1), mx.clip(column, 0, width - 1)]
            total = total + weight[..., None] * (pixel * inside[..., None])
    return total.astype(x.dtype)


def _axis(pixel: mx.array, mode: str) -> list[tuple[mx.array, mx.array]]:
    low = mx.floor(mx.stop_gradient(pixel)).astype(mx.int32)
    part = pixel - low
    if mode == "bilinear":
        return [(low, 1 - part), (low + 1, part)]

    def inner(t: mx.array) -> mx.array:
        return (1.25 * t - 2.25) * t * t + 1

    def outer(t: mx.array) -> mx.array:
        return ((-0.75 * t + 3.75) * t - 6) * t + 3

    weights = outer(1 + part), inner(part), inner(1 - part), outer(2 - part)
    return [(low + k - 1, weight) for k, weight in enumerate(weights)]


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison."""

    shape: tuple[int, int, int, int]
    out: tuple[int, int]
    dtype: mx.Dtype = mx.float32
    mode: str = "bilinear"
    grid: str = "random"

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        kind = str(self.dtype).removeprefix("mlx.core.")
        return f"{size} {kind} {self.mode} {self.grid}"

    @lru_cache(1)  # noqa: B019
    def inputs(self) -> tuple[mx.array, mx.array, mx.array]:
        """x, grid and cotangent."""
        batch, *_, channels = self.shape
        mx.random.seed(0)
        x = mx.random.normal(self.shape).astype(self.dtype)
        grid = mx.random.uniform(-1, 1, (batch, *self.out, 2))
        if self.grid == "rotation":
            turn = mx.array([[[0.88, -0.48, 0.0], [0.48, 0.88, 0.0]]] * batch)
            grid = affine_grid(turn, (batch, *self.out, channels))
        cotangent = mx.random.normal((batch, *self.out, channels)).astype(self.dtype)
        mx.eval(x, grid, cotangent)
        return x, grid, cotangent


GPU = [
    Case((8, 1024, 1024, 64), (256, 256)),
    Case((16, 512, 512, 3), (512, 512), mx.float16, grid="rotation"),
    Case((16, 512, 512, 3), (512, 512), mx.float16, "bicubic", "rotation"),
]
CPU = [
    Case((1, 512, 512, 64), (512, 512), grid="rotation"),
    Case((1, 512, 512, 64), (512, 512)),
    Case((1, 512, 512, 3), (512, 512), mx.float16, "bicubic", "rotation"),
]


def main() -> None:
    args = arguments(__doc__, repeats=5).parse_args()
    with output(args, "grid_sample"):
        case(
            lambda task: {"operators": either(task, partial(operators, mode=task.shape.mode))},
            lambda task: on_paths(task, partial(grid_sample, mode=task.shape.mode)),
            tasks(GPU if ON_GPU else CPU),
            repeats=args.repeats,
            tolerance=lambda task: 1e-4 if task.shape.dtype == mx.float32 else 2e-2,
            more=lambda *given: {"MB": peak(given[-1], results=False)},
        )


if __name__ == "__main__":
    main()
