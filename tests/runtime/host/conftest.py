"""A cache of compiled kernels that a test has for itself."""

import tempfile

import pytest

from mlx_qlayers.runtime.host import cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that holds it; temporary files go to ``scratch`` below."""
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    cache._made_scratch.cache_clear()
    yield tmp_path
    cache._made_scratch.cache_clear()
