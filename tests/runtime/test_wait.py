"""A wait for a result ends, in a thread or in another process."""

import ctypes
import threading
import time

import mlx.core as mx
import pytest

from mlx_qlayers.runtime.backend import requested, use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.host.array_memory import locate
from mlx_qlayers.runtime.tracing import trace
from mlx_qlayers.runtime.wait import KernelTimeout, wait_for
from mlx_qlayers.runtime.worker import Worker

from .kernels import GATHER, SPIN


def test_a_function_is_called_with_inputs_that_are_not_evaluated_yet():
    x = mx.arange(4.0) + 1
    y = wait_for(lambda x, n: x * n, 5, x, 2)
    assert y.tolist() == [2, 4, 6, 8]
    assert (y + x).tolist() == [3, 6, 9, 12]


def test_the_function_runs_in_the_context_of_the_caller():
    for name in ("reference", "host"):
        with use_backend(name):
            assert wait_for(lambda: requested(), 5) == name
    assert wait_for(lambda: requested(), 5) == requested()


def test_waiting_again_and_again_takes_no_more_threads():
    wait_for(mx.exp, 5, mx.ones(3))
    before = threading.active_count()
    for _ in range(5):
        wait_for(mx.exp, 5, mx.ones(3))
    assert threading.active_count() == before


def test_an_error_of_the_work_is_raised_in_the_caller():
    with pytest.raises(ZeroDivisionError):
        wait_for(lambda: 1 / 0, 5)
    # Its own TimeoutError is no KernelTimeout.
    with pytest.raises(TimeoutError) as caught:
        wait_for(_time_out, 5)
    assert caught.type is TimeoutError


def _time_out():
    raise TimeoutError("of another kind")


def test_work_that_does_not_end_raises_in_the_caller_and_names_the_kernel(metal):
    over = threading.Event()
    sizes = {"grid": (8, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(8,)]}

    def work(x):
        y = GATHER([x], template={"T": mx.float32}, **sizes)
        over.wait(20)
        return y

    start = time.monotonic()
    with pytest.raises(KernelTimeout, match=r"no result within 0.2 s; .*: gather on metal"):
        wait_for(work, 0.2, mx.ones(8))
    assert time.monotonic() - start < 5
    # The caller goes on while the work still hangs, with another worker.
    assert wait_for(lambda x: x + 1, 5, mx.ones(2)).tolist() == [2, 2]
    over.set()


def test_a_kernel_that_hangs_on_the_host():
    x = mx.ones(8, mx.int32)
    mx.eval(x)
    sizes = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)]}
    with use_backend("host"), checks(False):
        # Compile it first: the time of that is not the kernel's.
        SPIN([x - 1], **sizes)
        with pytest.raises(KernelTimeout, match=r"no result within 0.3 s"):
            wait_for(lambda x: SPIN([x], **sizes), 0.3, x)
        assert wait_for(lambda x: SPIN([x], **sizes)[0], 5, x - 1).tolist() == [1] * 8
    # Let it end, so that it takes no more of the machine, and is in no other test's trace.
    with trace() as launches:
        ctypes.c_int.from_address(locate(x)).value = 0
        while not launches:
            time.sleep(0.01)


def work(seconds, tell):
    tell(seconds)
    time.sleep(seconds)


def test_messages_of_a_process_come_until_a_job_takes_too_long():
    worker = Worker(work)
    for seconds in (0, 0, 60):
        worker.jobs.send(seconds)
        assert worker.received() == seconds
    with pytest.raises(EOFError):
        worker.received(0.1)
    assert worker.ending() == "its process ended with SIGKILL"
