"""Launches on the host: what kernels get, what comes back, and what the checks count."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Event, Thread
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.ops.exp import exp
from mlx_qlayers.runtime import use_backend
from mlx_qlayers.runtime.host import CompileError, HostError, Race, bind, checks, compile_source
from mlx_qlayers.runtime.host.array_memory import locate
from mlx_qlayers.runtime.host.compiled_kernel import workers
from mlx_qlayers.runtime.launch import Launch
from mlx_qlayers.runtime.program import Program
from mlx_qlayers.runtime.spec import Spec
from tests.numerics import assert_accurate
from tests.stress import interrupts

from ..kernels import GATHER

INDEX = "uint i = thread_position_in_grid.x; "


def run(
    source: str,
    inputs: list[mx.array],
    shapes: list[tuple[int, ...]],
    dtypes: list[mx.Dtype],
    *,
    threads: int | None = None,
    threadgroup: int = 64,
    init_value: float | None = None,
    name: str = "probe",
    contiguous: bool = True,
) -> list[mx.array]:
    program = Program(
        name=name,
        header="",
        source=INDEX + source,
        input_names=tuple("abcd"[: len(inputs)]),
        output_names=tuple("xyz"[: len(shapes)]),
        atomic_outputs=init_value is not None,
        ensure_row_contiguous=contiguous,
    )
    grid = (threads or int(np.prod(shapes[0])), 1, 1)
    group = (min(threadgroup, grid[0]), 1, 1)
    specs = [Spec.of(x) for x in inputs]
    launch = Launch(program, specs, [], grid, group, shapes, dtypes, init_value)
    return bind(launch)(list(inputs))


@pytest.fixture(params=[True, False], ids=["checked", "fast"])
def build(request: pytest.FixtureRequest):
    with checks(request.param) as report:
        yield report if request.param else None


DTYPES = (mx.bool_, mx.uint8, mx.int16, mx.uint32, mx.int64, mx.float16, mx.bfloat16, mx.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: mx.Dtype) -> None:
    a = (mx.arange(3 * 11) % 2).reshape(3, 11).astype(dtype)
    (x,) = run("x[i] = a[i];", [a], [a.shape], [dtype])
    assert x.dtype == dtype and x.shape == a.shape and mx.array_equal(x, a)


@pytest.mark.parametrize("size", [5, 40_000])
def test_small_and_large_outputs(build: Any, size: int) -> None:
    a = mx.arange(size, dtype=mx.float32)
    x, y = run(
        "x[i] = a[i] + 1; if (i < 2) y[i] = a_shape[0];",
        [a],
        [(size,), (2, 1)],
        [mx.float32, mx.int32],
    )
    assert mx.array_equal(x, a + 1) and y.tolist() == [[size], [size]]


def test_what_inputs_become(build: Any) -> None:
    """A scalar is a reference, a short array constant; a view is copied to whole rows."""
    scalar, short = mx.array(2.5), mx.array([1.0, 2.0, 3.0])
    view = mx.arange(48, dtype=mx.float32).reshape(6, 8)[1:5, ::-2]
    (x,) = run("x[i] = a * b[i % 3] + c[i];", [scalar, short, view], [(16,)], [mx.float32])
    wanted = 2.5 * np.array([1, 2, 3])[np.arange(16) % 3] + np.array(view).ravel()
    assert_accurate(x, wanted, wanted.astype(np.float32))


def test_views_that_are_not_copied(build: Any) -> None:
    view = mx.arange(48, dtype=mx.float32).reshape(6, 8)[::-1, 1::3]
    body = (
        "int r = i / a_shape[1], q = i % a_shape[1]; x[i] = a[r * a_strides[0] + q * a_strides[1]];"
    )
    (x,) = run(body, [view], [(18,)], [mx.float32], contiguous=False)
    assert np.array_equal(np.array(x), np.array(view).ravel())


def test_atomic_outputs_start_from_a_value(build: Any) -> None:
    a = mx.arange(1000, dtype=mx.float32)
    add = "atomic_fetch_add_explicit(&x[i % 3], a[i], memory_order_relaxed);"
    (x,) = run(add, [a], [(3,)], [mx.float32], threads=1000, init_value=10.0)
    assert x.tolist() == [10 + sum(range(k, 1000, 3)) for k in range(3)]
    if build:
        assert build.total("atomics") == 1000


def test_a_grid_that_no_threadgroup_divides(build: Any) -> None:
    (x,) = run("x[i] = threads_per_threadgroup.x;", [], [(150,)], [mx.uint32], threadgroup=64)
    assert x.tolist() == [64] * 128 + [22] * 22


def test_from_many_threads() -> None:
    def one(k: int) -> float:
        a = mx.full((4096,), float(k))
        return run("x[i] = simd_sum(a[i]);", [a], [(4096,)], [mx.float32])[0].max().item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(24))) == [32.0 * k for k in range(24)]


def test_threads_that_end_give_back_what_they_took() -> None:
    """1,024 stacks each; a process has 65,530 mappings."""
    a = mx.arange(1024, dtype=mx.float32)
    mx.eval(a)
    found: list[list[mx.array]] = []

    def launch() -> None:
        found.append(run("x[i] = simd_sum(a[i]);", [a], [(1024,)], [mx.float32], threadgroup=1024))

    for _ in range(40):
        thread = Thread(target=launch)
        thread.start()
        thread.join()
    assert len(found) == 40 and all(x[0].item() == 496 for (x,) in found)


def test_the_number_of_cores_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_QLAYERS_HOST_THREADS", "3")
    assert workers() == 3
    monkeypatch.setenv("MLX_QLAYERS_HOST_THREADS", "-1")
    with pytest.raises(HostError, match="HOST_THREADS must be a number of cores, not '-1'"):
        workers()


def test_counters() -> None:
    source = """
    threadgroup float s[1024];
    uint t = thread_position_in_threadgroup.x;
    s[t * 32 % 1024 + t / 32] = a[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    x[i] = simd_sum(s[t % 32 * 32 + t / 32]) + a[0];
    """
    a = mx.ones((128,))
    with checks() as report:
        run(source, [a], [(128,)], [mx.float32], threadgroup=64)
    ((name, n),) = report.launches
    assert name == "probe" and (n.threads, n.threadgroups) == (128, 2)
    assert (n.bytes_read, n.distinct_read) == (2 * 512, 512)
    assert (n.bytes_written, n.distinct_written) == (512, 512)
    assert (n.threadgroup_written, n.threadgroup_read) == (512, 512)
    # Each of four SIMD groups writes 32 words of one bank, and reads them.
    assert n.bank_conflicts == 2 * 4 * 31
    assert (n.threadgroup_barriers, n.simd_operations) == (2, 4)
    assert report.total("loads", "probe") == 256 and report.total("loads", "other") == 0


def test_counters_of_matrices() -> None:
    source = """
    simdgroup_matrix<float, 8, 8> m, n, p(2.0f);
    simdgroup_load(m, a);
    simdgroup_multiply(n, m, p);
    simdgroup_store(n, x);
    """
    a = mx.random.normal((8, 8))
    with checks() as report:
        (x,) = run(source, [a], [(8, 8)], [mx.float32], threads=32)
    assert mx.array_equal(x, 2 * a) and report.total("matrix_operations") == 3
    assert report.total("bytes_read") == report.total("bytes_written") == 256


def test_faults_name_the_package_s_kernel() -> None:
    with checks(), pytest.raises(Race, match=r"buffer \d \(x\).*kernel probe, threadgroup"):
        run("x[0] = i;", [], [(1,)], [mx.float32], threads=64)


def test_source_is_linted() -> None:
    with pytest.raises(
        CompileError, match=r"kernel probe: not Metal for every version\nsource.metal:\d: lambdas"
    ):
        run("auto f = [&](int k) { return k; }; x[i] = f(1);", [], [(8,)], [mx.int32])


def test_the_first_use_is_noted(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path))
    for dtype in (mx.int32, mx.int32, mx.float32):  # two compilations, one kernel to the reader
        run("x[i] = 42;", [], [(8,)], [dtype], name="noted")
    note = "mlx-qlayers: compiling kernel noted for this CPU, once\n"
    assert capfd.readouterr().err == note


@pytest.mark.parametrize("size", [37, 40_000])
def test_what_repeated_launches_share_is_not_their_data(size: int) -> None:
    """Views and new values, in threads at once, results kept; small and large outputs."""

    def one(k: int) -> tuple[mx.array, mx.array]:
        x = mx.arange(k, k + 2 * size, dtype=mx.float32)[:: 2 if k % 2 else 1][:size]
        sizes = {"grid": (size, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(size,)]}
        (y,) = GATHER([x], template={"T": mx.float32}, **sizes)
        return x, y

    with use_backend("host"), checks(False), ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(copy_context().run, one, k) for k in range(40)]
        for task in tasks:
            assert mx.array_equal(*task.result())


def test_checks_are_those_of_a_thread() -> None:
    """Blocks that overlap take nothing from each other, and leave nothing checked."""
    begun, over = Event(), Event()

    def other() -> int:
        with checks() as report:
            begun.set()
            over.wait(20)
            run("x[i] = 1;", [], [(8,)], [mx.int32])
        run("x[i] = 1;", [], [(8,)], [mx.int32])
        return len(report.launches)

    with ThreadPoolExecutor(2) as pool:
        with checks() as report:
            task = pool.submit(other)
            begun.wait(20)
            run("x[i] = 1;", [], [(8,)], [mx.int32])
            pool.submit(run, "x[i] = 1;", [], [(8,)], [mx.int32]).result()
            pool.submit(copy_context().run, run, "x[i] = 1;", [], [(8,)], [mx.int32]).result()
        run("x[i] = 1;", [], [(8,)], [mx.int32])
        over.set()
        assert (task.result(), len(report.launches)) == (1, 2)


def test_the_work_of_a_launch_is_measured() -> None:
    """The next one of its kind wakes other threads only where that pays."""
    source = """
    kernel void sines(device float* x [[buffer(0)]], constant int& turns [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
      for (int k = 0; k < turns; k++) x[i] = metal::sin(x[i]);
    }"""
    kernel = compile_source(source, "sines", checked=False)
    x, work = mx.ones((64,)), []
    for turns in (1, 1000):
        raw, count = kernel.raw((64, 1, 1), (8, 1, 1)), ctypes.c_int(turns)
        addresses = (ctypes.c_uint64 * 2)(locate(x), ctypes.addressof(count))
        raw.buffers = ctypes.addressof(addresses)
        for _ in range(3):
            assert not kernel.launch(ctypes.addressof(raw))
        work.append(raw.work)
    assert 0 < work[0] < work[1]


@pytest.mark.parametrize(("size", "calls"), [(64, ["run"]), (1 << 18, ["run", "large_output"])])
def test_a_launch_takes_few_calls_of_python_functions(size: int, calls: list[str]) -> None:
    x, found = mx.zeros((size,)), list[str]()
    mx.eval(x)
    sizes = {"grid": (size, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(size,)]}
    with use_backend("host"), checks(False):
        launch = GATHER.bind([x], template={"T": mx.float32}, **sizes)
        launch([x])
        sys.setprofile(lambda frame, event, _: event == "call" and found.append(_name(frame)))
        launch([x])
        sys.setprofile(None)
    assert found == calls


def _name(frame: FrameType) -> str:
    return frame.f_code.co_name


@pytest.mark.parametrize("size", [64, 1 << 18])
def test_interrupts_of_launches(size: int) -> None:
    """Ctrl-C at any moment is a KeyboardInterrupt, and the next launch computes."""
    x = mx.arange(size, dtype=mx.float32)
    mx.eval(x)
    with use_backend("host"), checks(False), interrupts() as run:
        for turn in range(1000):
            run(lambda: exp(x), 1e-5 + turn % 50 * 1e-5)
        assert mx.array_equal(exp(x * 0), mx.ones_like(x))
