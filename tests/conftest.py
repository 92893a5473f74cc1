"""What the tests share."""

from pathlib import Path

import mlx.core as mx
import pytest
from tiny_model import save_tiny_model

pytest_plugins = ["tables"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``cuda`` on machines that cannot run it."""
    if mx.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("cuda")]
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if item not in without]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized Qwen2 checkpoint with random weights; not to be changed."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without quantization."""
    return save_tiny_model(tmp_path_factory.mktemp("plain") / "model", quantized=False)
