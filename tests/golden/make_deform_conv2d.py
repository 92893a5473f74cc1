"""Make the golden values of the deformable convolution tests with torchvision on a CPU.

Needs ``pip install torch==2.13.0 torchvision==0.28.0 numpy``; ``python
tests/golden/make_deform_conv2d.py`` writes ``tests/data/deform_conv2d.npz``. For every case it
holds the inputs in float32 in MLX's layouts (channels last), and the output and the gradients that
torchvision gives in float64 (``out``, ``d_x``, ...) and in float32 (``out32``, ...).
"""

from pathlib import Path

import numpy as np
import torch
from torchvision.ops import deform_conv2d

OUT = Path(__file__).parents[1] / "data" / "deform_conv2d.npz"
# Kernel, channels in and out, groups, groups of offsets, and the options.
CASES = {
    "v1": ((3, 3), 4, 5, 1, 1, {"padding": 1}),
    "groups": ((3, 2), 4, 6, 2, 2, {"stride": (2, 1), "padding": (2, 1), "dilation": (1, 2)}),
    "pointwise": ((1, 1), 3, 2, 1, 3, {"stride": 2}),
}


def nhwc(array):
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def run(arrays, options, dtype):
    """The output and the gradients of all that is there."""
    given = {name: torch.tensor(a, dtype=dtype, requires_grad=True) for name, a in arrays.items()}
    cotangent = given.pop("cotangent").detach()
    out = deform_conv2d(given["x"], **{n: a for n, a in given.items() if n != "x"}, **options)
    out.backward(cotangent)
    found = {"out": out.detach()} | {f"d_{name}": a.grad for name, a in given.items()}
    return {name: a.numpy() for name, a in found.items()}


def case(rng, kernel, channels, outputs, groups, offset_groups, options):
    taps, x = kernel[0] * kernel[1], rng.normal(size=(2, channels, 7, 6))
    weight = rng.normal(size=(outputs, channels // groups, *kernel))
    stride, padding, dilation = pairs = [
        np.broadcast_to(options.get(name, default), 2).tolist()
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    shape = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    arrays = {
        "x": x,
        "offset": rng.normal(size=(2, 2 * offset_groups * taps, *shape), scale=1.5),
        "weight": weight,
        "cotangent": rng.normal(size=(2, outputs, *shape)),
    }
    if options != {"padding": 1}:
        arrays["bias"] = rng.normal(size=outputs)
        arrays["mask"] = rng.uniform(size=(2, offset_groups * taps, *shape))
    arrays = {name: a.astype(np.float32) for name, a in arrays.items()}
    found = dict(arrays)
    for suffix, dtype in (("", torch.float64), ("32", torch.float32)):
        found |= {k + suffix: a for k, a in run(arrays, options, dtype).items()}
    found = {name: nhwc(a) if a.ndim == 4 else a for name, a in found.items()}
    return found | {"options": np.array(pairs)}


def main() -> None:
    rng = np.random.default_rng(3)
    arrays = {f"{name}/{k}": a for name, c in CASES.items() for k, a in case(rng, *c).items()}
    np.savez_compressed(OUT, **arrays)
    kilobytes = OUT.stat().st_size / 1e3
    print(f"{OUT}: {len(arrays)} arrays, {kilobytes:.0f} kB, PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
