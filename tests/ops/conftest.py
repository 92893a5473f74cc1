"""What ``auto`` chooses on GPUs that are not there."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.reference import attention as reference
from mlx_qlayers.runtime import backend as backends
from mlx_qlayers.runtime.proof import trial
from tests.examples.arrays import running
from tests.gpus import GPUS


@pytest.fixture
def on(monkeypatch):
    """Let ``auto`` choose as on a GPU of a kind; what is computed is on this machine."""

    def on(device):
        monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
        for name in ("metal", "cuda"):
            why = None if name == device else "not in this test"
            monkeypatch.setitem(backends.missing, name, lambda why=why: why)

    reference._window_mask.cache_clear()
    with use_backend("auto"), trial():
        yield on
    reference._window_mask.cache_clear()


@pytest.fixture(params=["reference", "checked", *GPUS])
def backend(request):
    """The reference, the checked build of the host backend, and GPUs."""
    with running(request.param):
        yield "host" if request.param == "checked" else request.param
