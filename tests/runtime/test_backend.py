"""Which backend runs, and why."""

from __future__ import annotations

import mlx.core as mx
import pytest

import mlx_qlayers.runtime.backend as module
from mlx_qlayers.runtime.backend import BackendError, backend, use_backend
from mlx_qlayers.runtime.explain import Decision, explain, note
from mlx_qlayers.runtime.legacy import being_traced, choose

from .kernels import HISTOGRAM

ALL = ("metal", "cuda", "host")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Set ``MLX_QLAYERS_BACKEND``, which is not set at first, as if the process began with it."""

    def put(name):
        monkeypatch.setenv("MLX_QLAYERS_BACKEND", name)
        module._from_environment.cache_clear()

    put("")
    yield put
    module._from_environment.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """Pretend that exactly these backends can run."""

    def pretend(*names):
        for name in ALL:
            why = None if name in names else f"no {name} here"
            monkeypatch.setitem(module._missing, name, lambda why=why: why)

    return pretend


@pytest.mark.parametrize(
    ("names", "expected"),
    [(ALL, "metal"), (("cuda", "host"), "cuda"), (("host",), "host"), ((), "ops")],
)
def test_auto_prefers_metal_then_cuda_then_host(machine, names, expected):
    machine(*names)
    assert backend() == expected


def test_a_block_forces_a_backend_and_ends(machine):
    machine("host")
    with use_backend("ops"):
        assert backend() == "ops"
        with use_backend("auto"):
            assert backend() == "host"
        assert backend() == "ops"
    assert backend() == "host"


def test_forcing_for_good(machine):
    machine("host")
    before = use_backend("ops")
    assert backend() == "ops"
    before.__exit__(None, None, None)
    assert backend() == "host"


def test_the_environment_forces_one(machine, environment):
    machine("host")
    environment("ops")
    assert backend() == "ops"
    with use_backend("host"):
        assert backend() == "host"


@pytest.mark.parametrize("name", ALL)
def test_a_forced_backend_that_cannot_run_raises(machine, environment, name):
    machine()
    with pytest.raises(BackendError, match=f"the {name} backend .* no {name} here"):
        use_backend(name)
    assert backend() == "ops"
    environment(name)
    with pytest.raises(BackendError, match=f"no {name} here"):
        backend()


def test_an_unknown_name_is_an_error(environment):
    with pytest.raises(ValueError, match=r"backend must be one of .* not 'vulkan'"):
        use_backend("vulkan")
    environment("vulkan")
    with pytest.raises(ValueError, match="not 'vulkan'"):
        backend()


def test_choices_can_be_explained(machine):
    machine("metal")
    assert choose("a", ALL) == "metal"
    assert choose("a", ALL) == "metal"
    assert choose("b", ("cuda",)) == "ops"
    assert choose("c", ALL, unless="K is not a multiple of 64") == "ops"
    with use_backend("ops"):
        assert choose("d", ALL) == "ops"
    with use_backend("metal"):
        # Asked for: what auto would avoid is done.
        assert choose("e", ALL, unless="K is not a multiple of 64") == "metal"
        with pytest.raises(BackendError, match="f has no metal kernel for these arguments"):
            choose("f", ("cuda",))
    assert explain(reset=True) == [
        Decision("a", "metal", "auto", calls=2),
        Decision("b", "ops", "no metal kernel for these arguments"),
        Decision("c", "ops", "K is not a multiple of 64"),
        Decision("d", "ops", "asked for"),
        Decision("e", "metal", "asked for"),
    ]
    assert explain() == []


def test_the_reason_names_a_missing_compiler(machine):
    machine()
    assert choose("a", ALL) == choose("b", ("metal",)) == "ops"
    assert [d.reason for d in explain()] == [
        "no GPU, and no host backend: no host here",
        "no ops kernel for these arguments",
    ]


@pytest.mark.parametrize(
    ("gain", "expected", "reason"),
    [
        (None, "ops", "the kernel was not measured on a CPU"),
        (0.5, "ops", "on a CPU the kernel has 0.5 times the speed of MLX's operators"),
        (36.1, "host", "auto: 36 times the speed of MLX's operators on a CPU"),
    ],
)
def test_auto_runs_on_a_cpu_only_what_is_faster_there(machine, gain, expected, reason):
    machine("host")
    assert choose("op", ALL, host_gain=gain) == expected
    assert explain() == [Decision("op", expected, reason)]
    with use_backend("host"):
        assert choose("op", ALL, host_gain=gain) == "host"


def test_on_metal_the_gain_on_a_cpu_does_not_matter(machine):
    machine("metal", "host")
    assert choose("op", ALL, host_gain=0.5) == "metal"


def test_auto_steps_aside_from_host_while_mlx_traces(machine):
    machine("host")
    taken = []

    @mx.compile
    def function(x):
        taken.append(choose("op", ALL, host_gain=2, arrays=[x]))
        return x + 1

    function(mx.zeros(3))
    assert taken == ["ops"]
    (decision,) = explain()
    assert "mx.compile or mx.vmap is tracing" in decision.reason
    assert str(decision).startswith("op: ops (mx.compile")


def test_arrays_have_values_except_under_compile_and_vmap():
    seen = {}

    @mx.custom_function
    def function(x):
        seen["forward"] = being_traced([x])
        return x * 1

    @function.vjp
    def vjp(x, dy, y):
        seen["vjp"] = being_traced([x, dy, y])
        return dy

    loss = mx.grad(lambda x: function(x * 2).sum())
    x = mx.ones(3)
    loss(x)
    assert seen == {"forward": False, "vjp": False}
    mx.grad(mx.checkpoint(lambda x: function(x).sum()))(x)
    assert seen == {"forward": False, "vjp": False}
    mx.compile(loss)(x)
    assert seen == {"forward": True, "vjp": True}
    mx.vmap(function)(mx.ones((2, 3)))
    assert seen["forward"]


def test_other_errors_of_an_evaluation_are_not_taken_for_tracing(monkeypatch):
    def fail(*arrays):
        raise ValueError("out of paper")

    monkeypatch.setattr(mx, "eval", fail)
    monkeypatch.setattr(mx, "async_eval", fail)
    with pytest.raises(ValueError, match="out of paper"):
        being_traced([])


def launch_histogram(x):
    sizes = {"grid": (16, 1, 1), "threadgroup": (16, 1, 1), "output_shapes": [(16,)]}
    return HISTOGRAM([x], init_value=0, **sizes)[0]


def test_the_ops_backend_runs_no_kernel():
    with (
        use_backend("ops"),
        pytest.raises(BackendError, match="kernel histogram was called, but the ops backend"),
    ):
        launch_histogram(mx.zeros(16, mx.uint8))


def test_the_host_backend_says_why_it_cannot_run_a_traced_kernel(machine):
    machine("host")
    with pytest.raises(BackendError, match=r"kernel histogram: mx.compile or mx.vmap is tracing"):
        mx.compile(launch_histogram)(mx.zeros(16, mx.uint8))


def test_launches_are_explained_too(metal):
    launch_histogram(mx.zeros(16, mx.uint8))
    launch_histogram(mx.zeros(16, mx.uint8))
    assert explain() == [Decision("kernel histogram", "metal", "launched", calls=2)]


def test_notes_of_ones_own():
    note("op", "ops", "why not")
    assert str(explain()[0]) == "op: ops (why not), 1 calls"
