"""What the tests share."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Workers of pytest-xdist have a core each: numpy's threads would only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What a test finds must not depend on what this machine measures.
os.environ.setdefault("MLX_QLAYERS_CALIBRATE", "0")

import gpus
import pytest
from tiny_model import save_tiny_model

pytest_plugins = ["machine", "tables"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked for a GPU that is not here or as a sweep; slow files go first."""
    missing = [name for name in gpus.NAMES if not gpus.available(name)]
    if "tensors" not in str(config.getoption("markexpr")):
        missing.append("tensors")
    without = [item for item in items if any(map(item.get_closest_marker, missing))]
    config.hook.pytest_deselected(items=without)
    # Files with slow tests come first: what runs last is short, and ends in all workers at once.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items[:] = [item for item in items if item not in without]
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of every later garbage collection."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized Qwen2 checkpoint with random weights; not to be changed."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without quantization."""
    return save_tiny_model(tmp_path_factory.mktemp("plain") / "model", quantized=False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Commands take SIGINT also where this process ignores it, as shells' background jobs do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
