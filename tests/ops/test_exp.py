"""The tutorial kernels compute exp and its gradient, on every backend that is here; its layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.ops.exp import Exp, exp
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.explain import explain
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.tracing import trace
from tests.gpus import GPUS

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SHAPES = [(1,), (7,), (8,), (3, 5), (257,), (2, 3, 41), ()]


@pytest.fixture(params=["host", "checked", *GPUS])
def backend(request):
    """The fast build of the host backend, the one with checks, and GPUs."""
    name = "host" if request.param == "checked" else request.param
    with use_backend(name), checks(request.param == "checked"):
        yield name


def sample(shape, dtype, seed=0):
    values = np.random.default_rng(seed).uniform(-6, 6, shape)
    return mx.array(values).astype(dtype)


def exact(x):
    return np.exp(np.array(x.astype(mx.float32), np.float64))


def check(found, x, factor=1.0):
    """At most twice the error of float32 arithmetic that is rounded once."""
    truth = exact(x) * factor
    rounded = (mx.exp(x.astype(mx.float32)) * factor).astype(x.dtype)
    bound, error = (
        np.abs(np.array(y.astype(mx.float32), np.float64) - truth) for y in (rounded, found)
    )
    # A single value may be rounded without any error by luck.
    least = np.abs(truth) * float(mx.finfo(x.dtype).eps) / 2
    assert (error <= 2 * np.maximum(bound, least)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_forward(backend, dtype, shape, strided):
    x = sample(shape, dtype)
    with trace() as launches:
        y = exp(x, strided=strided)
        mx.eval(y)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    check(y, x)
    name = "exp_strided" if strided else "exp_forward"
    assert [(run.kernel, run.backend, run.grid) for run in launches] == [
        (name, backend, (x.size, 1, 1))
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_gradient(backend, dtype, strided):
    x = sample((5, 9), dtype)
    with trace() as launches:
        dx = mx.grad(lambda x: (exp(x, strided=strided) * 2).sum())(x)
        mx.eval(dx)
    # dy * y: y is rounded before it is multiplied, and the product again.
    check(dx, x, factor=2.0)
    assert [run.kernel for run in launches][-1] == "exp_gradient"
    assert len(launches) == 2


def test_what_it_does_without_a_kernel():
    x = sample((3, 4), mx.float32)
    with use_backend("reference"), trace() as launches:
        y = exp(x)
    assert launches == []
    assert mx.array_equal(y, mx.exp(x))
    assert ("exp", "reference") in [(d.op, d.path) for d in explain()]


def test_an_empty_array(backend):
    assert exp(mx.zeros((0, 3))).shape == (0, 3)


def test_a_layer_calls_its_operation():
    x, layer = sample((2, 3), mx.float32), Exp()
    explain(reset=True)
    check(layer(x), x)
    assert [d.op for d in explain() if not d.op.startswith("kernel ")] == ["exp"]
    assert layer.parameters() == {}
