"""Results of a test's own."""

import pytest
from machine import own_cache

from mlx_qlayers import explain
from mlx_qlayers.measurements import entries
from mlx_qlayers.runtime.backend import advance_epoch


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where they are stored."""
    own_cache(tmp_path, monkeypatch)
    advance_epoch()
    explain(reset=True)
    yield tmp_path / "tuning"
    entries.unsaved.clear()
    monkeypatch.undo()
    advance_epoch()
