"""What the tests of commands share."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized checkpoint in float32, in which greedy choices do not depend on rounding."""
    path = tmp_path_factory.mktemp("exact") / "model"
    return save_tiny_model(path, dtype=mx.float32, torch_dtype="float32", seed=3)
