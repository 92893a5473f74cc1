"""The path of a GPU, as far as it runs without one."""

import pytest
from machine import on_a_gpu
from step_models import as_graphs

from mlx_qlayers import explain, use_backend
from mlx_qlayers.decode import engine
from mlx_qlayers.runtime.transformed import uncompiled


@pytest.fixture(autouse=True)
def forgotten():
    """The steps of a test's models are not there in the next one."""
    yield
    engine._steps.clear()


@pytest.fixture(params=["compiled", "kernels"])
def gpu_path(request):
    """Compute as on a GPU, in the two halves that can be had on a CPU.

    ``compiled`` runs the graphs that ``mx.compile`` makes, of MLX's operators. ``kernels`` calls
    the same functions with the same arguments, but each time, so that every launch in them is a
    kernel of the host build: that one needs the values of its inputs, which a graph has not.
    """
    backend = {"compiled": "reference", "kernels": "host"}[request.param]
    explain(reset=True)
    with on_a_gpu(), use_backend(backend), uncompiled(backend == "host"):
        yield request.param
    ours = [d for d in explain() if d.op in ("fused_products", "attention_step")]
    assert {d.path for d in ours} <= {backend}
    kernels = {d.op for d in explain() if d.op.startswith("kernel ")}
    assert not kernels if backend == "reference" else kernels or not ours


@pytest.fixture
def graphs():
    """Steps are graphs as on a GPU, but that MLX compiles nothing, which takes minutes."""
    with as_graphs():
        yield


@pytest.fixture
def compiled_steps():
    """Steps of decoding are graphs that MLX compiles, as on a GPU, of its own operators."""
    with on_a_gpu(), use_backend("reference"):
        yield
