"""Grid sampling beside the version in plain MLX operators that MLX's documentation describes.

Run ``python benchmarks/bench_grid_sample.py``. Every line is checked first: results against the
operators' own, which are right for even sizes only. Peaks count everything that is alive,
inputs and outputs too.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import mlx.core as mx

from mlx_qlayers.ops.grid_sample import affine_grid, grid_sample
from mlx_qlayers.runtime.backend import backend


def operators(x: mx.array, grid: mx.array) -> mx.array:
    """Bilinear sampling with zeros outside: gather four neighbours, mask, weigh and add.

    Indices are clipped here: gathering outside and masking afterwards, as the documentation does,
    reads beyond the array and in the gradient writes beyond it.
    """
    batch, height, width, _ = x.shape
    px = ((grid[..., 0] + 1) * width - 1) / 2
    py = ((grid[..., 1] + 1) * height - 1) / 2
    left = mx.floor(mx.stop_gradient(px)).astype(mx.int32)
    top = mx.floor(mx.stop_gradient(py)).astype(mx.int32)
    image = mx.arange(batch)[:, None, None]
    total = mx.zeros((*grid.shape[:-1], x.shape[-1]), x.dtype)
    for row, row_weight in ((top, top + 1 - py), (top + 1, py - top)):
        for column, column_weight in ((left, left + 1 - px), (left + 1, px - left)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = row_weight * column_weight
            pixel = x[image, mx.clip(row, 0, height - 1), mx.clip(column, 0, width - 1)]
            total = total + weight[..., None] * (pixel * inside[..., None])
    return total


def with_gradients(sample: Callable[..., mx.array]) -> Callable[..., list[mx.array]]:
    def run(x: mx.array, grid: mx.array, cotangent: mx.array) -> list[mx.array]:
        outputs, gradients = mx.vjp(lambda *args: [sample(*args)], [x, grid], [cotangent])
        return [*outputs, *gradients]

    return run


def measure(run: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median and spread in milliseconds, and peak memory in MB."""
    mx.eval(run())
    mx.clear_cache()
    mx.reset_peak_memory()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(run())
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), max(times) - min(times), mx.get_peak_memory() / 2**20


def compare(
    task: str,
    theirs: Callable[..., object],
    ours: Callable[..., object],
    inputs: tuple[mx.array, ...],
    repeats: int,
) -> None:
    stock = measure(lambda: theirs(*inputs), repeats)
    plugin = measure(lambda: ours(*inputs), repeats)
    times = "".join(f"{t:12.1f} ms +-{s / 2:5.1f} " for t, s, _ in (stock, plugin))
    print(f"{task:28}{times}{stock[0] / plugin[0]:7.2f}x{stock[2]:8.0f}{plugin[2]:8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=512, help="side of the image and of the output")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(
        f"{mx.default_device()}, {platform.processor() or platform.machine()}, "
        f"mlx {version('mlx')}, backend {backend()}"
    )
    mx.random.seed(0)
    shape = (args.batch, args.size, args.size, args.channels)
    x, cotangent = mx.random.normal(shape), mx.random.normal(shape)
    turn = mx.array([[[0.88, -0.48, 0.0], [0.48, 0.88, 0.0]]] * args.batch)
    grids = {
        "rotation": affine_grid(turn, shape),
        "random": mx.random.uniform(-1, 1, (*shape[:-1], 2)),
    }
    floor = (2 * x.nbytes + grids["random"].nbytes) / 2**20
    print(f"x and output {shape}, float32, bilinear, zeros: inputs and output {floor:.0f} MB")
    print(f"{'':28}{'operators':>24}{'grid_sample':>24}{'ratio':>8}{'peak MB':>16}")
    for name, grid in grids.items():
        inputs = (x, grid, cotangent)
        theirs, ours = with_gradients(operators)(*inputs), with_gradients(grid_sample)(*inputs)
        for other, mine in zip(theirs, ours, strict=True):
            error = (mx.abs(mine - other).max() / mx.abs(other).max()).item()
            assert error < 1e-4, f"{name}: results differ by {error}"
        del theirs, ours, other, mine
        compare(f"{name}, forward", operators, grid_sample, inputs[:2], args.repeats)
        compare(
            f"{name}, with gradients",
            with_gradients(operators),
            with_gradients(grid_sample),
            inputs,
            args.repeats,
        )


if __name__ == "__main__":
    main()
