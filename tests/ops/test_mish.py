"""mish and its gradient against float64, on every backend that is here."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.ops.mish import Mish
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.tracing import trace
from tests.gpus import GPUS


def share(x):
    return np.tanh(np.logaddexp(0, x))


def terms(x):
    """Of the gradient, which cancel where it is zero."""
    return share(x), x * (1 - share(x) ** 2) / (1 + np.exp(-x))


@pytest.mark.parametrize("backend", ["host", "checked", *GPUS])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (257,), (3, 41)], ids=str)
def test_against_float64(backend, dtype, shape):
    x = mx.array(np.random.default_rng(0).uniform(-30, 30, shape)).astype(dtype)
    name = "host" if backend == "checked" else backend
    with use_backend(name), checks(backend == "checked"), trace() as launches:
        y, (dx,) = mx.vjp(lambda x: [Mish()(x)], [x], [mx.ones_like(x)])
        mx.eval(y, dx)
    exact = np.array(x.astype(mx.float32), np.float64)
    for found, parts in ((y[0], [exact * share(exact)]), (dx, terms(exact))):
        assert found.dtype == dtype
        wanted = sum(parts)
        bound = 3 * float(mx.finfo(dtype).eps) * np.maximum(sum(map(np.abs, parts)), 1e-3)
        assert (np.abs(np.array(found.astype(mx.float32), np.float64) - wanted) <= bound).all()
    assert [(run.kernel, run.backend) for run in launches] == [
        ("mish_forward", name),
        ("mish_gradient", name),
    ]
