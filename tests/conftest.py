"""What the tests share."""

from pathlib import Path

import pytest
from tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized Qwen2 checkpoint with random weights; not to be changed."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without quantization."""
    return save_tiny_model(tmp_path_factory.mktemp("plain") / "model", quantized=False)
