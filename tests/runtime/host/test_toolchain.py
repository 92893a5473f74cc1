"""A toolchain that fails: ``auto`` goes on without kernels, and a forced backend says why."""

import ctypes
import os
import re
import tempfile
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numerics import assert_function

from mlx_qlayers import explain, quantized_matmul, use_backend
from mlx_qlayers.dispatch import Gradient, Operation, Plan, choose, dispatch
from mlx_qlayers.ops.exp import FORWARD, GRADIENT, bind
from mlx_qlayers.runtime import BackendError, backend
from mlx_qlayers.runtime.host import bound_launch, cache, runtime_library, toolchain

PACKED = mx.quantize(mx.random.normal((512, 512)).astype(mx.bfloat16), 64, 4)
X = mx.random.normal((1, 512)).astype(mx.bfloat16)


def forget() -> None:
    backend._failures.clear()
    backend.advance_epoch()
    cache._made_scratch.cache_clear()
    bound_launch._compiled.cache_clear()
    toolchain.zig.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, machine):
    """A CPU where nothing is compiled yet."""
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    machine("host")
    forget()
    explain(reset=True)
    yield tmp_path
    monkeypatch.undo()
    forget()


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, mode: int = 0o755) -> None:
    path = folder / "ziglang" / "zig"
    path.parent.mkdir()
    path.with_name("__init__.py").touch()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(mode)
    monkeypatch.syspath_prepend(folder)
    toolchain.zig.cache_clear()


FULL = "error: unable to open 'x': 'No space left'"


def killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(folder, monkeypatch, "kill -9 $$")


def nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", os.devnull + "/cache")
    monkeypatch.setattr(tempfile, "tempdir", os.devnull)


def not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: object) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    runtime_library.library()
    monkeypatch.setattr(ctypes, "CDLL", refuse)


CAUSES = {
    "ended by SIGKILL": killed,
    "Permission denied": partial(compiler, script="exit 0", mode=0o644),
    "No space left": partial(compiler, script=f'echo "{FULL}" >&2; exit 1'),
    "Not a directory": nowhere,
    "failed to map segment": not_loaded,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_auto_falls_back_and_says_so_once_and_a_forced_backend_raises(
    cause, folder, monkeypatch, capsys
):
    CAUSES[cause](folder, monkeypatch)
    with use_backend("reference"):
        expected = quantized_matmul(X, *PACKED)
    explain(reset=True)
    found = [quantized_matmul(X, *PACKED) for _ in range(2)]
    assert all(mx.array_equal(y, expected) for y in found)
    said = [x for x in capsys.readouterr().err.splitlines() if "no kernels run" in x]
    assert len(said) == 1 and cause in said[0]
    (decision,) = [d for d in explain() if d.op == "quantized_matmul" and d.path == "reference"]
    assert decision.reason.startswith("no GPU, and no host backend: ") and decision.calls == 2
    assert cause in decision.reason and backend.backend() == "reference"
    assert not [d for d in explain() if d.op.startswith("kernel ")]
    for _ in range(2):
        with use_backend("host"), pytest.raises(BackendError, match=cause):
            quantized_matmul(X, *PACKED)


def test_a_forced_backend_runs_once_the_cause_is_gone(folder, monkeypatch):
    killed(folder, monkeypatch)
    with use_backend("host"), pytest.raises(BackendError, match="SIGKILL"):
        bind(FORWARD, X)([X])
    monkeypatch.undo()
    toolchain.zig.cache_clear()
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(folder / "cache"))
    with use_backend("host"):
        assert bind(FORWARD, X)([X])[0].shape == (1, 512)


def test_a_gradient_falls_back_where_its_kernel_cannot_be_compiled(folder, monkeypatch):
    def plan(arrays: tuple[object, ...]) -> Plan:
        choice = choose("exp", host_gain=2.0)
        if choice.path == "reference":
            return Plan(choice, mx.exp)
        forward, backward = bind(FORWARD, *arrays), bind(GRADIENT, *arrays, *arrays)

        def gradient(_: object, cotangents: list[mx.array], outputs: list[mx.array]) -> object:
            return backward([cotangents[0], outputs[0]])

        return Plan(choice, lambda x: forward([x])[0], (Gradient((0,), gradient),), mx.exp)

    # The exponential of stock operators is exact to a few units, not for every number to one.
    operation, x = Operation("exp", plan), mx.random.uniform(-1, 1, (7, 41), key=mx.random.key(0))
    assert_function(dispatch(operation, (x,)), np.exp, x)
    killed(folder, monkeypatch)
    for _ in range(2):
        _, dx = mx.value_and_grad(lambda x: dispatch(operation, (x,)).sum())(x)
        assert_function(dx, np.exp, x)
        assert backend.backend() == "reference"
    forget()
    with use_backend("host"), pytest.raises(BackendError, match="SIGKILL"):
        mx.grad(lambda x: dispatch(operation, (x,)).sum())(x)


def test_a_compiler_that_was_killed_once_is_run_again(folder, monkeypatch):
    """As where several at once take more memory than there is."""
    real = toolchain.zig()
    once = folder / "once"
    compiler(
        folder, monkeypatch, f'[ -e {once} ] || {{ : > {once}; kill -9 $$; }}\nexec {real} "$@"'
    )
    toolchain.run(["clang", "-x", "c", "-c", "-"], "int f() { return 1; }", folder / "made.o")
    assert once.exists() and (folder / "made.o").stat().st_size > 0


def test_a_source_that_is_refused_is_no_failure_of_the_toolchain(folder):
    for text in ("int f( {", "float f() { float x; return x; }"):
        with pytest.raises(toolchain.CompileError, match="error: "):
            toolchain.run(
                ["clang", "-x", "c", "-Werror=uninitialized", "-c", "-"], text, folder / "o"
            )
    with pytest.raises(toolchain.ToolchainError, match="No such file"):
        toolchain.run(["clang", "-x", "c", "-c", "-"], "", folder / "missing" / "o")


def test_a_compiler_without_a_home(folder, monkeypatch):
    """It has a cache of its own below this one."""
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    output = folder / "host" / "entry" / "made.o"
    output.parent.mkdir(parents=True)
    arguments = ["c++", "-x", "c++", "-c", "-"]
    toolchain.run(arguments, "int f() { return 1; }", output)
    assert output.is_file() and any((folder / "host" / "zig").iterdir())
    monkeypatch.delenv("HOME")
    toolchain.run(arguments, "int f() { return 2; }", output)


def test_keys_differ_by_every_part():
    keys = {toolchain.key(*parts) for parts in ((1, 2), (12,), ("1", "2"), (1, 2, {}), (1, 2, []))}
    assert len(keys) == 5


def test_keys_depend_on_the_processor_and_not_on_its_clock(monkeypatch):
    remembered = toolchain._processor, toolchain._surroundings
    real = Path.read_text
    one, keys = "model\t: 85\nflags\t: avx2 fma\ncpu MHz\t: 2000\n", []
    changes = ("2000", "3000"), (" fma", ""), ("85", "143"), ("flags", "Features")
    for text in (one, *(one.replace(*change) for change in changes)):

        def read(path, *args, text=text, **options):
            return text if path.name == "cpuinfo" else real(path, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", read)
            for each in remembered:
                each.cache_clear()
            keys.append(toolchain.key("kernel"))
            for each in remembered:
                each.cache_clear()
    assert keys[0] == keys[1] and len({*keys}) == 4


def test_keys_depend_on_what_makes_objects_and_on_nothing_else():
    """So that an edit of a launch, or of a message, compiles nothing anew."""
    folder = Path(cache.__file__).parent
    imported = {
        name.split(".")[0]
        for module in toolchain._MAKERS
        for names in re.findall(
            r"^from \.(?: import (.+?)(?: as \w+)?|(\w+) import .*)$",
            (folder / f"{module}.py").read_text(),
            re.M,
        )
        for name in "".join(names).split(", ")
    }
    assert imported - {"cache", "errors"} <= set(toolchain._MAKERS)
    assert not {"bound_launch", "compiled_kernel", "errors", "cache"} & set(toolchain._MAKERS)
