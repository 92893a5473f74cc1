"""The cache of compiled kernels: complete entries or none, whoever builds them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_qlayers.runtime.host import cache, toolchain


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_an_entry_is_built_once() -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "file").write_text("content")

    first, second = (cache.entry("aa11", build) for _ in range(2))
    assert first == second and len(built) == 1 and (first / "file").read_text() == "content"


def test_a_build_that_fails_leaves_nothing(folder: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "file").write_text("half of it")
        raise RuntimeError("the compiler stopped")

    with pytest.raises(RuntimeError, match="the compiler stopped"):
        cache.entry("bb22", build)
    assert [p for p in folder.rglob("*") if p.is_file()] == []


def test_a_cache_that_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = []
    (folder / "host").write_text("a file where the folder should be")
    first, second = (cache.entry("dd44", built.append) for _ in range(2))
    assert first == second and first.is_dir() and len(built) == 1
    assert f"kernels are not kept, {folder / 'host'} is unusable" in capsys.readouterr().err
    (folder / "host").unlink()
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(OSError, match="No space left"):
        cache._work(folder / "host" / "full")


def test_a_compiler_without_a_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    arguments = ["c++", "-x", "c++", "-c", "-o", str(folder / "made.o"), "-"]
    toolchain.run(arguments, "int f() { return 1; }")
    assert (folder / "made.o").is_file()


def test_keys_differ_by_every_part() -> None:
    keys = {cache.key(*parts) for parts in ((1, 2), (12,), ("1", "2"), (1, 2, {}), (1, 2, []))}
    assert len(keys) == 5


def test_keys_depend_on_what_makes_objects_and_on_nothing_else() -> None:
    """So that an edit of a launch, or of a message, compiles nothing anew."""
    folder = Path(cache.__file__).parent
    imported = {
        name.split(".")[0]
        for module in cache._MAKERS
        for names in re.findall(
            r"^from \.(?: import (.+?)(?: as \w+)?|(\w+) import .*)$",
            (folder / f"{module}.py").read_text(),
            re.M,
        )
        for name in "".join(names).split(", ")
    }
    assert imported - {"cache", "errors"} <= set(cache._MAKERS)
    assert not {"bound_launch", "compiled_kernel", "errors", "cache"} & set(cache._MAKERS)


_RACE = """
import sys, time
from pathlib import Path
from mlx_qlayers.runtime.host import cache, toolchain

def build(folder: Path) -> None:
    print("built")
    (folder / "one").write_text("x" * 100_000)
    time.sleep(0.3)
    (folder / "two").write_text("y" * 100_000)

found = cache.entry("cc33", build)
print(len((found / "one").read_text()), len((found / "two").read_text()))
"""


def test_one_of_many_processes_builds(folder: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", _RACE], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [p.communicate(timeout=60)[0].split() for p in running]
    assert sorted(map(len, said)) == [2, 2, 3], said
    assert all(words[-2:] == ["100000", "100000"] for words in said)
    assert len(list((folder / "host" / "cc").iterdir())) == 1
