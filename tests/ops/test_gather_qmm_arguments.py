"""What gather_qmm refuses, with a ValueError that names the argument."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_qlayers.ops.gather_qmm import gather_qmm

GOOD = dict(
    zip(("w", "scales", "biases"), mx.quantize(mx.ones((4, 16, 128))), strict=True),
    rhs_indices=mx.array([0, 3]),
)
FP4 = dict(zip(("w", "scales"), mx.quantize(mx.ones((4, 16, 128)), mode="nvfp4"), strict=True))
FP4 |= {"biases": None, "mode": "nvfp4"}
BAD = {
    "x int": ({"x": mx.ones((2, 1, 128), mx.int32)}, "x must be"),
    "x 1-d": ({"x": mx.ones((128,))}, r"x must be \(\.\.\., M, K\), but its shape is \(128,\)"),
    "x width": ({"x": mx.ones((2, 1, 64))}, "x of shape"),
    "w dtype": ({"w": mx.ones((4, 16, 16), mx.int32)}, "w must be uint32"),
    "w 1-d": ({"w": GOOD["w"][0, 0]}, r"w must be \(\.\.\., N, W\), but its shape is \(16,\)"),
    "w width": ({"w": GOOD["w"][..., :8]}, "w of shape"),
    "scales rows": ({"scales": GOOD["scales"][:2]}, "scales of shape"),
    "scales dtype": ({"scales": GOOD["scales"].astype(mx.uint8)}, "scales must be"),
    "biases missing": ({"biases": None}, "biases is missing"),
    "biases shape": ({"biases": GOOD["biases"][..., :1]}, "biases of shape"),
    "lhs_indices float": ({"lhs_indices": mx.array([0.0, 1.0])}, "lhs_indices must be integers"),
    "rhs_indices bool": ({"rhs_indices": mx.array([True, False])}, "rhs_indices must be integers"),
    "indices shapes": ({"lhs_indices": mx.array([0, 1, 1])}, "do not broadcast"),
    "rhs_indices shape": ({"rhs_indices": mx.array([0, 1, 2])}, "rhs_indices do not broadcast"),
    "no matrices": (
        {name: GOOD[name][:0] for name in ("w", "scales", "biases")},
        r"w of shape \(0, 16, 16\) has nothing to choose",
    ),
    "no blocks": (
        {"x": mx.ones((0, 1, 128)), "lhs_indices": mx.array([0, 1])},
        "x of shape .* has nothing to choose",
    ),
    "scales 0-d": ({"scales": mx.array(1.0)}, "scales of shape"),
    "group_size": ({"group_size": 48}, "group_size must be 32, 64, 128"),
    "group_size wrong": ({"group_size": 32}, "group_size=32"),
    "bits": ({"bits": 7}, "bits must be 1, 2, 3, 4, 5, 6, 8"),
    "bits wrong": ({"bits": 8}, "bits=8"),
    "mode": ({"mode": "int4"}, "mode must be one of"),
    "transpose": ({"transpose": False}, "transpose=False"),
    "global_scale affine": ({"global_scale": mx.ones((4,))}, "global_scale must be None"),
    "global_scale shape": (FP4 | {"global_scale": mx.ones((3,))}, "global_scale must hold"),
    "global_scale dtype": (FP4 | {"global_scale": mx.ones((4,), mx.int32)}, "global_scale must"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    changes, message = BAD[case]
    arguments = {"x": mx.ones((2, 1, 128))} | GOOD | changes
    with pytest.raises(ValueError, match=message):
        gather_qmm(arguments.pop("x"), arguments.pop("w"), **arguments)
