"""Fixtures that the tests share."""

import contextlib
import gc
import os
import shutil
import signal
import tempfile

# Workers of pytest-xdist have a core each: numpy's threads would only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The results of a test must not depend on what this machine measures.
os.environ.setdefault("MLX_QLAYERS_CALIBRATE", "0")

import gpus
import mlx.core as mx
import pytest

from mlx_qlayers.runtime.backend import current
from mlx_qlayers.runtime.cache_folder import own_folder

pytest_plugins = ["machine", "mlx_header", "tables"]


def pytest_configure(config: pytest.Config) -> None:
    """Nor on what was measured before: a cache that has this user's kernels, and nothing else."""
    # Commands that tests start inherit what a shell's background job has: it ignores SIGINT.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        if gpus.HERE != "host":
            # Workers share a GPU, of which MLX would keep all memory that was freed for itself.
            mx.set_cache_limit(1 << 30)
        return  # has the folder of pytest-xdist's controller
    folder = tempfile.mkdtemp(prefix="mlx-qlayers-tests-")
    with contextlib.suppress(OSError):
        for name in ("host", "cuda", "match_images"):
            os.symlink(own_folder(name), os.path.join(folder, name))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    os.environ["MLX_QLAYERS_CACHE_DIR"] = folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out sweeps, and what needs a GPU that is not here; slow files go first."""
    missing = [name for name in gpus.NAMES if not gpus.available(name)]
    asked = str(config.getoption("markexpr"))
    missing += [name for name in ("tensors", "faults", "caches") if name not in asked]
    left_out = {item for item in items if any(map(item.get_closest_marker, missing))}
    config.hook.pytest_deselected(items=left_out)
    # Files with slow tests come first: what runs last is short, and ends in all workers at once.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of later garbage collections, and have fewer."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def forced_backend():
    """A backend that a test or an example forces for good is forced no longer."""
    before = current.get()
    yield
    current.set(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A quantized Qwen2 checkpoint with random weights; not to be changed."""
    from tiny_model import save_tiny_model  # whose imports take seconds

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory):
    """The same without quantization."""
    from tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("plain") / "model", quantized=False)
