"""Launches on the host: what kernels get, what comes back, and what the checks count."""

import io
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from threading import Event, Thread, Timer
from types import FrameType
from weakref import ref

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime import generated_source, use_backend
from mlx_qlayers.runtime.host import HostError, Race, bind, checks, output_buffers
from mlx_qlayers.runtime.host.array_memory import locate
from mlx_qlayers.runtime.host.compiled_kernel import workers
from mlx_qlayers.runtime.launch import Launch
from mlx_qlayers.runtime.program import Program
from mlx_qlayers.runtime.spec import Spec

from ..kernels import GATHER

# Complex numbers are not in the dialect.
TYPES = [t for t in generated_source.TYPES if t != mx.complex64]
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
) -> list[mx.array]:
    program = Program(
        name=name,
        header="",
        source=INDEX + source,
        input_names=tuple("abcd"[: len(inputs)]),
        output_names=tuple("xyz"[: len(shapes)]),
        atomic_outputs=init_value is not None,
    )
    grid = (threads or int(np.prod(shapes[0])), 1, 1)
    group = (min(threadgroup, grid[0]), 1, 1)
    specs = [Spec.of(x) for x in inputs]
    launch = Launch(program, specs, [], grid, group, shapes, dtypes, init_value)
    return bind(launch)(list(inputs))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_outputs_hold_what_was_written(dtype):
    """Small and large ones of every rank; two of a kind have memory of their own."""
    shapes = [(1,), (7,), (2, 3, 5), (1,) * 9, (300, 41), (7, 300, 251), (1, 700, *(1,) * 9, 800)]
    for shape in shapes:
        numbers = [np.random.default_rng(seed).integers(0, 2, shape) for seed in range(2)]
        inputs = [mx.array(each).astype(dtype) for each in numbers]
        found = [run("x[i] = a[i];", [a], [shape], [dtype])[0] for a in inputs]
        for a, x in zip(inputs, found, strict=True):
            assert x.shape == shape and x.dtype == dtype and mx.array_equal(x, a)


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this system has no large pages")
def test_large_outputs_are_mapped_in_large_pages():
    with checks(False):
        (x,) = run("x[i] = 1;", [], [(1 << 24,)], [mx.float32])
    middle, maps = locate(x) + x.nbytes // 2, Path("/proc/self/smaps").read_text()
    for region in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", maps, flags=re.M)[1:]:
        begin, end = (int(a, 16) for a in region.split(" ")[0].split("-"))
        if begin <= middle < end:
            assert "hg" in re.findall("^VmFlags:.*", region, re.M)[0].split()
            return
    raise AssertionError("the output lies nowhere")


def test_threads_that_end_give_back_what_they_took():
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


def test_the_number_of_cores_is_a_number(monkeypatch):
    monkeypatch.setenv("MLX_QLAYERS_HOST_THREADS", "3")
    assert workers() == 3
    monkeypatch.setenv("MLX_QLAYERS_HOST_THREADS", "-1")
    with pytest.raises(HostError, match="HOST_THREADS must be a number of cores, not '-1'"):
        workers()


def test_counters():
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


def test_counters_of_matrices():
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


def test_faults_name_the_package_s_kernel():
    with checks(), pytest.raises(Race, match=r"buffer \d \(x\).*kernel probe, threadgroup"):
        run("x[0] = i;", [], [(1,)], [mx.float32], threads=64)


def test_the_first_use_is_noted(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path))
    for dtype in (mx.int32, mx.int32, mx.float32):  # two compilations, one kernel to the reader
        run("x[i] = 42;", [], [(8,)], [dtype], name="noted")
    note = "mlx-qlayers: compiling kernel noted for this CPU, once\n"
    assert capfd.readouterr().err == note


@pytest.mark.parametrize("size", [37, 40_000])
def test_what_repeated_launches_share_is_not_their_data(size):
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


def test_checks_are_those_of_a_thread():
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


@pytest.mark.parametrize(("size", "calls"), [(64, ["run"]), (1 << 18, ["run", "large_output"])])
def test_a_launch_takes_few_calls_of_python_functions(size, calls):
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


def test_a_process_that_ends_waits_for_files_that_mlx_holds():
    """A thread that frees one later would wait for an interpreter that has ended, and abort."""
    held = [io.BufferedReader(io.BytesIO())]
    output_buffers._files.append(seen := ref(held[0]))
    Timer(0.1, held.clear).start()
    output_buffers._wait_for_files()
    assert seen() is None
