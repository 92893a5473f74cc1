"""In the debug mode a kernel's report becomes an exception, or leads to the reference."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime.backend import BackendError, use_backend
from mlx_qlayers.runtime.explain import explain
from mlx_qlayers.runtime.health import Health, HealthError, checked, health_checks
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.tracing import trace
from tests.gpus import GPUS
from tests.numerics import assert_function

from .kernels import HISTOGRAM, ROOTS

X = mx.array([[1.0, 4.0, 0.0, 2.0], [9.0, 16.0, 25.0, 36.0]])


def roots(x=X, **changes):
    sizes = {"grid": (4, 2, 1), "threadgroup": (4, 2, 1), "output_shapes": [x.shape, x.shape]}
    return ROOTS([x], **sizes | changes)


def report(finished=8, failed=0, code=0):
    """The contents of a kernel's health buffer."""
    return [8, *(4, 2, 1), finished, failed, code, 0, 0]


@pytest.fixture
def kernel(metal):
    """A stand-in that computes the roots and reports what it is told to."""

    def pretend(**fields):
        def compute(call):
            x = call["inputs"][0].reshape(-1)[:8].reshape(2, 4)
            outputs = [mx.sqrt(x), x == x]
            return [*outputs, mx.array(report(**fields), mx.uint32)][: len(call["output_shapes"])]

        metal.compute = compute
        return metal

    return pretend


def test_a_healthy_kernel_gives_its_outputs_and_nothing_more(kernel):
    stand_in = kernel()
    with health_checks(), trace() as launches:
        root, exact = roots()
    assert root.tolist() == mx.sqrt(X).tolist()
    assert exact.shape == X.shape
    (call,) = stand_in.called
    assert call["output_shapes"] == [(2, 4), (2, 4), (9,)]
    assert call["output_dtypes"] == [mx.float32, mx.bool_, mx.uint32]
    assert call["init_value"] == 0
    assert launches[0].kernel == "roots_health"
    roots()  # outside of the mode
    assert len(stand_in.called[1]["output_shapes"]) == 2
    assert stand_in.called[1]["init_value"] is None


def test_a_code_without_a_meaning(kernel):
    kernel(failed=1, code=9)
    with health_checks(), pytest.raises(HealthError, match=r"error 9 \(no meaning declared\)"):
        roots()


def test_threads_that_do_not_finish_become_an_exception(kernel):
    kernel(finished=5)
    message = "kernel roots: 8 of 8 threads started, 5 finished"
    with health_checks(), pytest.raises(HealthError, match=message):
        roots()


def test_an_error_outside_is_not_turned_into_the_reference(kernel):
    kernel()
    with pytest.raises(ValueError, match="kernel roots"):
        checked("sqrt", lambda x: roots(x, grid=(0, 1, 1)), lambda x: [x], X)


def test_while_mlx_traces_nothing_can_be_read(metal):
    metal.compute = lambda call: [call["inputs"][0][0] for _ in call["output_shapes"]]
    message = "kernel roots: health checks cannot run while MLX traces"
    with health_checks(), pytest.raises(BackendError, match=message):
        mx.compile(lambda x: roots(x)[0])(X)


def test_outputs_that_start_from_another_value_are_not_checked(metal):
    sizes = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(16,)]}
    with health_checks():
        HISTOGRAM([mx.zeros(8, mx.uint8)], init_value=1, **sizes)
    assert len(metal.called[0]["output_shapes"]) == 1
    (decision,) = [d for d in explain() if d.path == "unchecked"]
    assert str(decision) == "kernel histogram: unchecked (init_value 1 is not 0), 1 calls"


@pytest.fixture(params=["fast", "checked", *GPUS])
def machine(request):
    """Both builds of the host backend, and a GPU."""
    name = "host" if request.param in ("fast", "checked") else request.param
    with use_backend(name), checks(request.param == "checked"):
        yield


def test_a_watched_kernel_computes_as_ever(machine):
    plain = roots()
    with health_checks(), trace() as launches:
        watched = roots()
    assert [record.kernel for record in launches] == ["roots_health"]
    for one, other in zip(plain, watched, strict=True):
        assert one.tolist() == other.tolist()
    assert_function(watched[0], np.sqrt, X)


def test_a_failed_check_names_code_value_and_thread(machine):
    x = mx.array([[1.0, 4.0, 0.0, 2.0], [9.0, -16.0, 25.0, 36.0]])
    roots(x)
    message = r"error 1 \(negative radicand\), value -16, at thread \(1, 1, 0\) of \(4, 2, 1\)"
    with health_checks(), pytest.raises(HealthError, match=message) as caught:
        roots(x)
    assert caught.value.health == Health(8, (4, 2, 1), 8, 1, 1, -16.0, (1, 1, 0))


def test_the_reference_takes_over_on_a_machine(machine):
    x = mx.array([[1.0, 4e6, 0.0, 2e7], [9.0, 16.0, 25.0, 36.0]])
    assert checked("sqrt", lambda x: roots(x)[0], lambda x: x, x).tolist() == x.tolist()
    (decision,) = [d for d in explain() if d.op == "sqrt"]
    assert "(radicand too large)" in decision.reason
    assert decision.reason.endswith("2 checks failed")


def test_atomic_outputs_are_watched_too(machine):
    x = mx.array([3, 3, 5, 0, 15, 3, 5, 1], mx.uint8)
    sizes = {"grid": (8, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(16,)]}
    with health_checks():
        (counts,) = HISTOGRAM([x], init_value=0, **sizes)
    assert counts.tolist() == [1, 1, 0, 3, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
