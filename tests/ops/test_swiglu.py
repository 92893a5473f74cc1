"""Which kernels compute gates and their gradients, and where MLX's own function does."""

import mlx.core as mx
import pytest

from mlx_qlayers.ops.swiglu import swiglu
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.explain import explain
from mlx_qlayers.runtime.tracing import trace
from tests.gpus import GPUS


@pytest.mark.parametrize("backend", ["host", *GPUS])
def test_launches(backend):
    gate, x = mx.ones((2, 5, 9))
    with use_backend(backend), trace() as launches:
        mx.eval(mx.grad(lambda *given: swiglu(*given).sum(), (0, 1))(gate, x))
    found = [(run.kernel, run.backend, run.grid) for run in launches]
    assert found == [(f"swiglu_{name}", backend, (45, 1, 1)) for name in ("forward", "gradient")]


@pytest.mark.parametrize("kind", ["metal", "cuda"])
def test_a_gpu_has_a_kernel_of_mlx_for_it(machine, kind):
    """A launch there would be one more to prove, and no faster."""
    machine(kind)
    explain(reset=True)
    with use_backend("auto"), trace() as launches:
        swiglu(mx.ones((2, 3)), mx.ones((2, 3)))
    ((path, reason),) = [(d.path, d.reason) for d in explain() if d.op == "swiglu"]
    assert (path, reason) == ("reference", "MLX makes one kernel of it on a GPU") and not launches
