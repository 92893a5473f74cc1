"""A machine with a GPU of which nothing is known."""

import pytest

from mlx_qlayers import explain
from mlx_qlayers.measurements import entries


@pytest.fixture
def some_gpu(machine):
    """It is one of NVIDIA's, and the store is empty."""
    machine.nvidia("some_gpu")


@pytest.fixture
def forgetful_gpu(some_gpu):
    """A GPU whose results are gone behind a test."""
    explain(reset=True)
    yield
    entries.unsaved.clear()
