"""Which kernels compute gates and their gradients, and where MLX's own function does."""

import mlx.core as mx
import pytest

from mlx_qlayers.ops.swiglu import swiglu
from mlx_qlayers.runtime.backend import advance_epoch, current, use_backend, within
from mlx_qlayers.runtime.explain import explain
from mlx_qlayers.runtime.tracing import trace
from tests.devices import has_device
from tests.gpus import GPUS


@pytest.mark.parametrize("backend", ["host", *GPUS])
def test_launches(backend):
    gate, x = mx.ones((2, 5, 9))
    with use_backend(backend), trace() as launches:
        mx.eval(mx.grad(lambda *given: swiglu(*given).sum(), (0, 1))(gate, x))
    found = [(run.kernel, run.backend, run.grid) for run in launches]
    assert found == [(f"swiglu_{name}", backend, (45, 1, 1)) for name in ("forward", "gradient")]


@pytest.mark.parametrize("shape", [(2, 44), (3, 5)])
def test_a_thread_of_a_gpu_has_eight_elements_where_that_leaves_none(shape, monkeypatch):
    """Executed on the CPU, where it computes the same as with one element each."""
    gate, x = mx.random.normal((2, *shape)).astype(mx.bfloat16)
    dy = mx.random.normal(shape).astype(mx.bfloat16)
    with use_backend("host"):
        right = [swiglu(gate, x), *mx.vjp(swiglu, [gate, x], [dy])[1]]
        has_device(monkeypatch, "host", gpu=True)
        advance_epoch()
        with within(current, current.get()._replace(sparing=True)), trace() as launches:
            found = [swiglu(gate, x), *mx.vjp(swiglu, [gate, x], [dy])[1]]
            mx.eval(found)
    assert all(map(mx.array_equal, found, right))
    count = 8 if gate.size % 8 == 0 else 1
    assert {run.grid for run in launches} == {(gate.size // count, 1, 1)}


@pytest.mark.parametrize("kind", ["metal", "cuda"])
def test_a_gpu_has_a_kernel_of_mlx_for_it(machine, kind):
    """A launch there would be one more to prove, and no faster."""
    machine(kind)
    explain(reset=True)
    with use_backend("auto"), trace() as launches:
        swiglu(mx.ones((2, 3)), mx.ones((2, 3)))
    ((path, reason),) = [(d.path, d.reason) for d in explain() if d.op == "swiglu"]
    assert (path, reason) == ("reference", "MLX makes one kernel of it on a GPU") and not launches
