"""Deformable attention as users call it, on every path."""

import mlx.core as mx
import pytest
from deformable import NAMES, golden, inputs
from numerics import assert_accurate, assert_same_sums

from mlx_qlayers import deformable_attention
from tests.examples.arrays import running
from tests.gpus import GPUS

SHAPES = ((5, 7), (3, 2))


@pytest.fixture(autouse=True, params=["reference", "host", "checked", *GPUS])
def backend(request):
    with running(request.param):
        yield "host" if request.param == "checked" else request.param


def attend(values, locations, weights):
    return deformable_attention(values, SHAPES, locations, weights)


@pytest.mark.parametrize("group", ["levels", "level", "border", "special"])
def test_golden(group):
    given = golden(group)
    *primals, cotangent = (mx.array(given[name]) for name in (*NAMES, "cotangent"))
    padding, shapes = "border" if group == "border" else "zeros", mx.array(given["shapes"])

    def run(values, *others):
        return [deformable_attention(values, shapes, *others, padding_mode=padding)]

    outputs, gradients = mx.vjp(run, primals, [cotangent])
    names = "out", *(f"d_{name}" for name in NAMES)
    for name, found in zip(names, [*outputs, *gradients], strict=True):
        assert_accurate(found, given[name], given[name + "32"], what=f"{group} {name}")


@pytest.mark.parametrize("backend", ["reference", *GPUS], indirect=True)
def test_compiled(backend):
    arrays = inputs(3)[:3]

    def gradients(*arrays):
        return mx.grad(lambda *a: (attend(*a) ** 2).sum(), (0, 1, 2))(*arrays)

    # On a CPU MLX compiles a C++ program for each handful of operators.
    function = (lambda *a: [attend(*a)]) if backend == "reference" else gradients
    for one, two in zip(function(*arrays), mx.compile(function)(*arrays), strict=True):
        assert_same_sums(one, two)
