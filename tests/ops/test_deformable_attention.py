"""Deformable attention as users call it, on every path."""

import mlx.core as mx
import pytest
from deformable import NAMES, golden
from numerics import assert_accurate

from mlx_qlayers import deformable_attention


@pytest.mark.parametrize("group", ["levels", "level", "border", "special"])
def test_golden(group, backend):
    given = golden(group)
    *primals, cotangent = (mx.array(given[name]) for name in (*NAMES, "cotangent"))
    padding, shapes = "border" if group == "border" else "zeros", mx.array(given["shapes"])

    def run(values, *others):
        return [deformable_attention(values, shapes, *others, padding_mode=padding)]

    outputs, gradients = mx.vjp(run, primals, [cotangent])
    names = "out", *(f"d_{name}" for name in NAMES)
    for name, found in zip(names, [*outputs, *gradients], strict=True):
        assert_accurate(found, given[name], given[name + "32"], what=f"{group} {name}")
