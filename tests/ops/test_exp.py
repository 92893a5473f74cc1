"""Which of the tutorial kernels compute exp and its gradient; its layer."""

import mlx.core as mx
import pytest

from mlx_qlayers.ops.exp import Exp, exp
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.explain import explain
from mlx_qlayers.runtime.tracing import trace
from tests.gpus import GPUS


@pytest.mark.parametrize("backend", ["host", *GPUS])
@pytest.mark.parametrize("strided", [False, True])
def test_launches(backend, strided):
    x = mx.ones((5, 9))
    with use_backend(backend), trace() as launches:
        mx.eval(mx.grad(lambda x: exp(x, strided=strided).sum())(x))
    names = "exp_strided" if strided else "exp_forward", "exp_gradient"
    found = [(run.kernel, run.backend, run.grid) for run in launches]
    assert found == [(name, backend, (45, 1, 1)) for name in names]


def test_what_it_does_without_a_kernel():
    x, layer = mx.arange(12.0), Exp()
    explain(reset=True)
    with use_backend("reference"), trace() as launches:
        assert mx.array_equal(layer(x), mx.exp(x))
    assert not launches and [(d.op, d.path) for d in explain()] == [("exp", "reference")]
    assert layer.parameters() == {}
