"""Deformable attention by kernel and by reference, beside stock MLX operators and PyTorch.

Run ``python benchmarks/bench_deformable.py``. Every result is first compared with the operators'
own. ``operators`` is what users write: of each level four neighbours are gathered, masked and
weighted. ``torch`` is the reference function of Hugging Face transformers, ``grid_sample`` for each
level, where PyTorch is installed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
from common import arguments, output
from harness import GPU as ON_GPU
from harness import Run, Task, as_torch, case, either, on_paths, tasks, torch_run

from mlx_qlayers.ops.deformable_attention import deformable_attention

SHAPES = ((80, 80), (40, 40), (20, 20))
HEADS, WIDTH, POINTS = 8, 32, 4


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison, with RT-DETR's levels and heads."""

    name: str
    batch: int
    queries: int
    dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        return f"{self.name} {self.batch}x{self.queries} {kind}"

    @lru_cache(1)  # noqa: B019
    def inputs(self) -> list[mx.array]:
        """Values, locations, weights and cotangent."""
        mx.random.seed(0)
        pixels = sum(height * width for height, width in SHAPES)
        shape = self.batch, self.queries, HEADS, len(SHAPES), POINTS
        # Samples are near one another, as a trained model's.
        centres = mx.random.uniform(0, 1, (*shape[:2], 1, 1, 1, 2))
        locations = centres + 0.05 * mx.random.normal((*shape, 2))
        scores = mx.random.normal((*shape[:3], len(SHAPES) * POINTS))
        weights = mx.softmax(scores, axis=-1).reshape(shape)
        values = mx.random.normal((self.batch, pixels, HEADS, WIDTH))
        cotangent = mx.random.normal((self.batch, self.queries, HEADS * WIDTH))
        arrays = [a.astype(self.dtype) for a in (values, locations, weights, cotangent)]
        mx.eval(arrays)
        return arrays


GPU = [
    Case("RT-DETR", 8, 300),
    Case("RT-DETR", 8, 300, mx.float16),
    Case("encoder", 8, 8400),
    Case("encoder", 8, 8400, mx.float16),
]
CPU = [Case("RT-DETR", 8, 300), Case("encoder", 1, 8400)]


def operators(values: mx.array, locations: mx.array, weights: mx.array) -> mx.array:
    """Stock operators, level by level; indices are clipped, since MLX does not check them."""
    batch, queries, heads, _, _ = weights.shape
    image = mx.arange(batch).reshape(-1, 1, 1, 1)
    head = mx.arange(heads).reshape(-1, 1)
    total, start = mx.zeros((batch, queries, heads, WIDTH)), 0
    for level, (height, width) in enumerate(SHAPES):
        pixels = values[:, start : start + height * width]
        x = locations[:, :, :, level, :, 0].astype(mx.float32) * width - 0.5
        y = locations[:, :, :, level, :, 1].astype(mx.float32) * height - 0.5
        left, top = (mx.floor(mx.stop_gradient(a)).astype(mx.int32) for a in (x, y))
        right, below = x - left, y - top
        for column, row in ((0, 0), (1, 0), (0, 1), (1, 1)):
            at_x, at_y = left + column, top + row
            inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
            at = mx.clip(at_y, 0, height - 1) * width + mx.clip(at_x, 0, width - 1)
            share = (right if column else 1 - right) * (below if row else 1 - below)
            share = share * inside * weights[:, :, :, level]
            total = total + (pixels[image, at, head] * share[..., None]).sum(axis=3)
        start += height * width
    return total.reshape(batch, queries, -1).astype(values.dtype)


def torch_forward(values: Any, locations: Any, weights: Any) -> Any:
    """``MultiScaleDeformableAttention.forward`` without its unused arguments."""
    import torch

    batch, queries, heads, levels, points = weights.shape
    grids, sampled = 2 * locations - 1, []
    parts = values.split([height * width for height, width in SHAPES], dim=1)
    for level, (height, width) in enumerate(SHAPES):
        image = parts[level].flatten(2).transpose(1, 2)
        image = image.reshape(batch * heads, WIDTH, height, width)
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        sampled.append(torch.nn.functional.grid_sample(image, grid, align_corners=False))
    shares = weights.transpose(1, 2).reshape(batch * heads, 1, queries, levels * points)
    out = (torch.stack(sampled, dim=-2).flatten(-2) * shares).sum(-1)
    return out.view(batch, heads * WIDTH, queries).transpose(1, 2).contiguous()


def main() -> None:
    args = arguments(__doc__, repeats=5).parse_args()

    def stock(task: Task) -> dict[str, Run]:
        found = {"operators": either(task, operators)}
        if importlib.util.find_spec("torch"):
            inputs = [as_torch(a) for a in task.shape.inputs()]
            found["torch"] = torch_run(task, torch_forward, inputs)
        return found

    def ours(values: mx.array, *more: mx.array) -> mx.array:
        return deformable_attention(values, SHAPES, *more)

    with output(args, "deformable"):
        case(
            stock,
            lambda task: on_paths(task, ours),
            tasks(GPU if ON_GPU else CPU),
            repeats=args.repeats,
            tolerance=lambda task: 1e-4 if task.shape.dtype == mx.float32 else 3e-2,
            wrong=1e-4,  # the gradient at a pixel's centre is either side's, by its last bit
        )


if __name__ == "__main__":
    main()
