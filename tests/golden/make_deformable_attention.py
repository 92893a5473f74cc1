"""Make the golden values of the deformable attention tests with transformers on a CPU.

Needs ``pip install torch==2.13.0 transformers numpy``; ``python
tests/golden/make_deformable_attention.py`` writes ``tests/data/deformable_attention.npz``. For
every group of inputs it holds them in float32, and the output and the gradients of values,
locations and weights that transformers' ``MultiScaleDeformableAttention`` gives in float64
(``out``, ``d_values``, ...) and in float32 (``out32``, ...). ``border`` is the same function with
the other padding of ``grid_sample``. ``layer`` is the whole module of Deformable DETR, with its
parameters.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional as F
from transformers.models.deformable_detr import modeling_deformable_detr as detr

LEVELS = {"levels": ((7, 5), (4, 3), (1, 2)), "level": ((8, 4),)}
OUT = Path(__file__).parents[1] / "data" / "deformable_attention.npz"


def inputs(rng, levels, batch, queries, heads, width, points):
    """Values, locations inside and outside, weights that sum to one, and a cotangent."""
    values = rng.normal(size=(batch, sum(h * w for h, w in levels), heads, width))
    shape = (batch, queries, heads, len(levels), points)
    locations = rng.uniform(-0.3, 1.3, (*shape, 2))
    locations[:, :1] *= 20
    weights = rng.exponential(size=shape)
    weights /= weights.sum((-1, -2), keepdims=True)
    cotangent = rng.normal(size=(batch, queries, heads * width))
    return [a.astype(np.float32) for a in (values, locations, weights, cotangent)]


def run(levels, arrays, dtype, padding="zeros"):
    """The output and the gradients of values, locations and weights."""
    *primals, cotangent = (torch.tensor(a, dtype=dtype) for a in arrays)
    for primal in primals:
        primal.requires_grad_()
    sample = partial(F.grid_sample, mode="bilinear", align_corners=False)
    given = lambda *a, **options: sample(*a, padding_mode=padding)  # noqa: E731
    with patch.object(F, "grid_sample", given):
        out = detr.MultiScaleDeformableAttention()(
            primals[0], None, levels, None, primals[1], primals[2], 64
        )
    out.backward(cotangent)
    return [out.detach().numpy(), *(primal.grad.numpy() for primal in primals)]


def group(levels, arrays, padding="zeros"):
    """The inputs, and the results in both precisions."""
    found = dict(zip(("values", "locations", "weights", "cotangent"), arrays, strict=True))
    found["shapes"] = np.array(levels)
    for suffix, dtype in (("", torch.float64), ("32", torch.float32)):
        names = (name + suffix for name in ("out", "d_values", "d_locations", "d_weights"))
        found |= dict(zip(names, run(levels, arrays, dtype, padding), strict=True))
    return found


def special():
    """NaN, infinite and huge coordinates, one a query."""
    values = (np.nan, np.inf, -np.inf, 1e6, -1e6)
    arrays = inputs(np.random.default_rng(2), LEVELS["level"], 1, 2 * len(values), 1, 2, 1)
    arrays[1][:] = 0.3
    for i, value in enumerate(values):
        arrays[1][0, i, ..., 0] = arrays[1][0, len(values) + i, ..., 1] = value
    return group(LEVELS["level"], arrays)


def layer(boxes):
    """Deformable DETR's module on reference points or boxes, with a mask."""
    torch.manual_seed(0)
    config = SimpleNamespace(d_model=12, num_feature_levels=3, disable_custom_kernels=True)
    module = detr.DeformableDetrMultiscaleDeformableAttention(config, 2, 2).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    levels, queries = LEVELS["levels"], torch.randn(2, 4, 12).double()
    features = torch.randn(2, sum(h * w for h, w in levels), 12).double()
    points = torch.rand(2, 4, 3, 4 if boxes else 2).double()
    mask = torch.rand(2, features.shape[1]) > 0.2
    arrays = {"queries": queries, "features": features, "points": points}
    for module_name, parameter in module.named_parameters():
        arrays["parameters." + module_name] = parameter
    for name, a in arrays.items():  # what float32 holds
        a.data = a.data.float().double()
        arrays[name] = a.detach().float().numpy()

    def result(dtype):
        out, _ = module.to(dtype)(
            queries.to(dtype),
            mask,
            features.to(dtype),
            reference_points=points.to(dtype),
            spatial_shapes=torch.tensor(levels),
            spatial_shapes_list=levels,
        )
        return out.detach().numpy()

    found = {"out": result(torch.float64), "out32": result(torch.float32)}
    return arrays | found | {"mask": mask.numpy(), "shapes": np.array(levels)}


def main() -> None:
    rng = np.random.default_rng(1)
    several = inputs(rng, LEVELS["levels"], 2, 5, 3, 8, 3)
    groups = {
        "levels": group(LEVELS["levels"], several),
        "level": group(LEVELS["level"], inputs(rng, LEVELS["level"], 1, 7, 1, 5, 1)),
        "border": group(LEVELS["levels"], several, "border"),
        "special": special(),
        "layer": layer(False),
        "layer_boxes": layer(True),
    }
    arrays = {f"{name}/{key}": a for name, found in groups.items() for key, a in found.items()}
    np.savez_compressed(OUT, **arrays)
    kilobytes = OUT.stat().st_size / 1e3
    print(f"{OUT}: {len(arrays)} arrays, {kilobytes:.0f} kB, PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
