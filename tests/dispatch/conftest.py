"""A machine with a GPU of which nothing is known."""

import pytest

from mlx_qlayers import explain
from mlx_qlayers.dispatch import measurements
from mlx_qlayers.measurements import entries, thresholds
from mlx_qlayers.runtime.backend import advance_epoch


@pytest.fixture
def some_gpu(tmp_path, monkeypatch):
    """It is one of NVIDIA's, and the store is empty."""
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(entries, "device_name", lambda: "some_gpu")
    monkeypatch.setattr(entries, "device_kind", lambda: "cuda")
    for module in (measurements, thresholds):
        monkeypatch.setattr(module, "backend", lambda: "cuda")
    advance_epoch()
    yield
    monkeypatch.undo()
    advance_epoch()


@pytest.fixture
def forgetful_gpu(some_gpu):
    """Whose results are gone behind a test."""
    explain(reset=True)
    yield
    entries.unsaved.clear()
