"""Kernels that are compiled before MLX asks: under its names, by a compiler of their own."""

import json
import subprocess
import sys
from threading import Event, Timer
from types import SimpleNamespace

import mlx.core as mx
import pytest
from machine import zeros

from mlx_qlayers import explain, quantized_matmul, use_backend
from mlx_qlayers.runtime import cuda_ahead
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.runtime.cuda_ahead import compiled_in_parallel, nothing_compiled, string_hash
from mlx_qlayers.runtime.nvrtc_worker import compiled

from . import nvrtc


def test_the_hash_is_that_of_libstdcxx():
    if sys.platform != "linux":  # MLX for CUDA is for Linux
        with pytest.raises(OSError):
            string_hash("")
        return
    assert string_hash("") == 0x553E93901E462A6E
    assert string_hash("hello world") == 0x4D6686D362067FF9


@pytest.fixture
def ahead(machine, tmp_path, monkeypatch):
    """A machine that says it has an NVIDIA GPU; what MLX would compile is in ``launched``."""
    launched, given = set(), []

    def run(declaration, launch):
        launched.add(nvrtc.text_of(declaration, launch))
        return zeros(**launch)

    def compile_one(command, *, input, **_):
        given.append(input)
        return SimpleNamespace(stdout=b"mangled\ncode")

    machine.nvidia()
    monkeypatch.setattr(mx.fast, "cuda_kernel", nvrtc.kernel_that(run))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "ptx"))
    cuda_ahead._folder.cache_clear()
    monkeypatch.setattr(cuda_ahead, "_library", lambda: "libnvrtc.so")
    cuda_ahead._jobs.clear()
    monkeypatch.setattr(cuda_ahead, "string_hash", lambda text: abs(hash(text)) | 1)
    monkeypatch.setattr(subprocess, "run", compile_one)
    explain(reset=True)
    yield SimpleNamespace(launched=launched, given=given, folder=tmp_path / "ptx")
    cuda_ahead._folder.cache_clear()


def product(rows):
    w = mx.quantize(mx.ones((128, 256), mx.bfloat16))
    with use_backend("cuda"):
        quantized_matmul(mx.ones((rows, 256), mx.bfloat16), *w)


def test_the_texts_are_those_that_mlx_generates(ahead):
    """By the hash of its text MLX finds a compiled kernel."""
    with compiled_in_parallel():
        for rows in (1, 7, 100):
            product(rows)
    wanted = {f"{name}_{cuda_ahead.string_hash(text):x}" for name, text in ahead.launched}
    found = {path.suffix: path for path in ahead.folder.iterdir()}
    stems = {path.stem for path in ahead.folder.iterdir()}
    assert stems == {name.removeprefix("mlx::core::cu::") for name in wanted}
    assert len(ahead.given) == len(wanted) > 2
    assert set(found) == {".txt", ".ptx"} and found[".ptx"].read_bytes() == b"code"
    function, mangled = found[".txt"].read_text().rstrip("\n").split("\t")
    assert function.startswith("mlx::core::cu::custom_kernel_") and mangled == "mangled"
    assert b"cooperative_groups.h" not in ahead.given[0] and b"sm_90a" in ahead.given[0]
    count = len(ahead.given)
    advance_epoch()
    product(1)
    assert len(ahead.given) == count


def test_what_is_being_compiled_is_waited_for_by_whoever_launches_it(ahead, monkeypatch):
    may_end, ended = Event(), []

    def compile_one(command, **_):
        may_end.wait()
        ended.append(command)
        return SimpleNamespace(stdout=b"mangled\ncode")

    monkeypatch.setattr(subprocess, "run", compile_one)
    with nothing_compiled():
        product(1)
    assert not cuda_ahead._jobs
    advance_epoch()
    with compiled_in_parallel(waits=False):
        product(1)
        with compiled_in_parallel():  # the block around it does not wait
            product(7)
    assert cuda_ahead._jobs and not ended
    with compiled_in_parallel():  # which asks for none of these
        cuda_ahead.finish()
    advance_epoch()
    Timer(0.1, may_end.set).start()
    product(1)
    cuda_ahead.finish()
    assert len(ended) == len(cuda_ahead._jobs) and len(cuda_ahead.seconds) >= len(ended)


def test_what_does_not_compile_is_left_to_mlx(ahead, monkeypatch):
    def fails(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr=b"error: no such header")

    monkeypatch.setattr(subprocess, "run", fails)
    product(1)
    assert ahead.launched and not [*ahead.folder.iterdir()]
    assert any("no such header" in d.reason for d in explain())


def test_a_compiler_that_is_missing_says_so_in_its_process():
    with pytest.raises(OSError):
        compiled("/no/libnvrtc.so", "", "f", [])
    job = json.dumps({"library": "/no/libnvrtc.so", "text": "", "name": "f", "options": []})
    command = [sys.executable, "-I", "-S", str(cuda_ahead._WORKER)]
    done = subprocess.run(command, input=job, capture_output=True, text=True, check=False)
    assert done.returncode and "/no/libnvrtc.so" in done.stderr and not done.stdout
