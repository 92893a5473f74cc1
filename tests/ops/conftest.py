"""The choices of ``auto`` on GPUs that are not there."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.reference import attention as reference
from tests.examples.arrays import running
from tests.gpus import GPUS


@pytest.fixture
def on(machine, monkeypatch):
    """Let ``auto`` choose as on a GPU of a kind; what is computed is on this machine."""

    def on(device):
        monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
        machine(device, "host")

    reference._window_mask.cache_clear()
    with use_backend("auto"):
        yield on
    reference._window_mask.cache_clear()


@pytest.fixture(params=["reference", "checked", *GPUS])
def backend(request):
    """The reference, the checked build of the host backend, and GPUs."""
    with running(request.param):
        yield "host" if request.param == "checked" else request.param
