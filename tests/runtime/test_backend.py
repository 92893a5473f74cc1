"""Which backend runs: forced, by the environment, or what the machine has; for each thread."""

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from machine import ALL

import mlx_qlayers.runtime.backend as module
from mlx_qlayers.runtime.backend import (
    BackendError,
    backend,
    debug_mode,
    default_backend,
    epoch,
    requested,
    set_backend,
    use_backend,
)

from .kernels import HISTOGRAM


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Set ``MLX_QLAYERS_BACKEND``, which is not set at first, as if the process began with it."""

    def put(name):
        monkeypatch.setenv("MLX_QLAYERS_BACKEND", name)
        module._from_environment.cache_clear()

    put("")
    yield put
    module._from_environment.cache_clear()


def launch_histogram(x):
    sizes = {"grid": (16, 1, 1), "threadgroup": (16, 1, 1), "output_shapes": [(16,)]}
    return HISTOGRAM([x], init_value=0, **sizes)[0]


@pytest.mark.parametrize(
    ("names", "expected"),
    [(ALL, "metal"), (("cuda", "host"), "cuda"), (("host",), "host"), ((), "reference")],
)
def test_auto_prefers_metal_then_cuda_then_host(machine, names, expected):
    machine(*names)
    assert backend() == expected


def test_a_block_forces_a_backend_and_ends(machine):
    machine("host")
    with use_backend("reference"):
        assert backend() == "reference"
        with use_backend("auto"):
            assert backend() == "host"
        assert backend() == "reference"
    assert backend() == "host"
    forced = use_backend("reference")
    for _ in range(2):  # a block can be entered again
        with forced:
            assert backend() == "reference"
        assert backend() == "host"


@pytest.mark.parametrize("name", ["reference", "ops"])
def test_forcing_for_good(machine, name):
    """Also by the name that the reference had before."""
    machine("host")

    def forced():
        set_backend(name)
        assert backend() == "reference"
        with use_backend("host"):
            set_backend("auto")
            assert backend() == "host"
        assert backend() == "reference"
        set_backend("auto")
        assert backend() == "host"

    contextvars.copy_context().run(forced)  # other tests run in this one


def test_the_environment_forces_one(machine, environment):
    machine("host")
    environment("reference")
    assert backend() == "reference"
    with use_backend("host"):
        assert backend() == "host"


@pytest.mark.parametrize("name", ALL)
def test_a_forced_backend_that_cannot_run_raises(machine, environment, name):
    machine()
    with pytest.raises(BackendError, match=f"the {name} backend .* no {name} here"):
        use_backend(name)
    with pytest.raises(BackendError, match=f"the {name} backend .* no {name} here"):
        set_backend(name)
    assert backend() == "reference"
    environment(name)
    with pytest.raises(BackendError, match=f"no {name} here"):
        backend()


def test_an_unknown_name_is_an_error(environment):
    with pytest.raises(ValueError, match=r"backend must be one of .* not 'vulkan'"):
        use_backend("vulkan")
    with pytest.raises(ValueError, match=r"backend must be one of .* not 'vulkan'"):
        set_backend("vulkan")
    environment("vulkan")
    with pytest.raises(ValueError, match="not 'vulkan'"):
        backend()


def test_a_default_for_threads_that_force_none():
    number = epoch.number
    with default_backend("reference"), ThreadPoolExecutor(1) as pool:
        assert epoch.number > number
        assert pool.submit(backend).result() == requested() == "reference"
        with use_backend("host"):
            assert backend() == "host"
            assert pool.submit(backend).result() == "reference"
    assert requested() == "auto" and epoch.number > number + 1
    with pytest.raises(ValueError, match="not 'vulkan'"), default_backend("vulkan"):
        pass


def test_a_choice_goes_to_another_thread_by_its_context():
    with use_backend("reference"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(requested).result() == "auto"
        assert pool.submit(contextvars.copy_context().run, requested).result() == "reference"


def test_debug_modes_of_threads_end_with_the_last():
    entered, over = threading.Event(), threading.Event()

    def work():
        with debug_mode("one"):
            entered.set()
            over.wait(20)

    thread = threading.Thread(target=work)
    with debug_mode("one"), debug_mode("other"):
        thread.start()
        entered.wait(20)
        assert epoch.debug == {"one", "other"}
    assert epoch.debug == {"one"}
    over.set()
    thread.join()
    assert epoch.debug == frozenset()


def test_the_ops_backend_runs_no_kernel():
    with (
        use_backend("reference"),
        pytest.raises(BackendError, match="kernel histogram was called, but the reference backend"),
    ):
        launch_histogram(mx.zeros(16, mx.uint8))


def test_the_host_backend_says_why_it_cannot_run_a_compiled_kernel(machine):
    machine("host")
    with pytest.raises(BackendError, match=r"kernel histogram: mx.compile or mx.vmap is tracing"):
        mx.compile(launch_histogram)(mx.zeros(16, mx.uint8))
