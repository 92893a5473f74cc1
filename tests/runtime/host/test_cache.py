"""The cache of compiled kernels: complete entries of this user or none, whoever builds them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_qlayers.runtime.backend import ToolchainError
from mlx_qlayers.runtime.host import cache
from tests.machine import no_home

pytestmark = pytest.mark.usefixtures("folder")


def build(folder: Path) -> None:
    (folder / "one").write_bytes(bytes(range(256)) * 40)
    (folder / "two").write_text("content")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_entry_is_built_once():
    built = []

    def counted(folder: Path) -> None:
        built.append(folder)
        build(folder)

    first, second = (cache.entry("aa11", counted) for _ in range(2))
    assert first == second and len(built) == 1 and (first / "two").read_text() == "content"


def test_a_cache_that_is_deleted_meanwhile(folder):
    cache.entry("aa22", build)
    shutil.rmtree(folder / "host")
    assert content(cache.entry("aa22", build))["two"] == b"content"
    assert not os.listdir(folder / "scratch")


def test_a_build_that_fails_leaves_nothing(folder):
    def fail(folder: Path) -> None:
        (folder / "file").write_text("half of it")
        raise RuntimeError("the compiler stopped")

    with pytest.raises(RuntimeError, match="the compiler stopped"):
        cache.entry("bb22", fail)
    assert [p for p in folder.rglob("*") if p.is_file()] == []


def flip(at: int) -> Callable[[Path], object]:
    def change(entry: Path) -> None:
        data = bytearray((entry / "one").read_bytes())
        data[at] ^= 4
        (entry / "one").write_bytes(data)

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first bit": flip(0),
    "a bit amid": flip(5000),
    "last bit": flip(-1),
    "cut off": lambda entry: os.truncate(entry / "one", 4096),
    "empty": lambda entry: os.truncate(entry / "one", 0),
    "longer": lambda entry: os.truncate(entry / "one", 20000),
    "missing": lambda entry: (entry / "one").unlink(),
    "one more": lambda entry: (entry / "three").touch(),
    "another's": lambda entry: shutil.copy(entry / "two", entry / "one"),
    "a folder": lambda entry: ((entry / "two").unlink(), (entry / "two").mkdir()),
    "no checksums": lambda entry: (entry / "checksums").unlink(),
    "binary checksums": lambda entry: (entry / "checksums").write_bytes(bytes(range(256))),
    "no folder": lambda entry: (shutil.rmtree(entry), entry.write_text("file")),
    "another entry": lambda entry: (
        shutil.rmtree(entry),
        shutil.copytree(cache.entry("cc34", build), entry),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_built_anew(damage, folder, capsys):
    entry = cache.entry("cc33", build)
    good = content(entry)
    DAMAGES[damage](entry)
    assert cache.entry("cc33", build) == entry and content(entry) == good
    said = capsys.readouterr().err
    assert said.startswith("mlx-qlayers: ") and said.endswith("; it is built anew\n")
    assert str(entry) in said and not os.listdir(folder / "scratch")
    cache.entry("cc33", lambda _: pytest.fail("built again"))


_USE = """
import sys
from mlx_qlayers.runtime.host import compile_source
y = bytearray(16)
text = "kernel void f(device float* y, uint i [[thread_position_in_grid]]) { y[i] = VALUE; }"
for value in sys.argv[1:]:
    compile_source(text.replace("VALUE", value), "f", checked=False).run(
        {0: y}, (4, 1, 1), (4, 1, 1), writes=[0]
    )
    print(memoryview(y).cast("f")[3])
"""


def use(*values: str, **environment: str) -> tuple[list[str], str]:
    """Compile and run kernels in another process; what they wrote, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", _USE, *values],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.split(), done.stderr


def test_damaged_libraries_are_not_loaded(folder):
    """To load these ends a process with SIGSEGV or SIGBUS."""
    assert use("3") == (["3.0"], "")
    kernel, runtime, headers = (
        next((folder / "host").glob(f"*/{name}")) for name in ("kernel.so", "runtime.so", "*.pch")
    )
    os.truncate(kernel, 4096)
    data = bytearray(runtime.read_bytes())
    for at in range(64, len(data), 64):
        data[at] ^= 0x55
    runtime.write_bytes(data)
    headers.write_bytes(headers.read_bytes()[::-1])
    printed, said = use("3", "5")
    assert printed == ["3.0", "5.0"] and said.count("is damaged; it is built anew") == 3
    assert use("3", "5") == (["3.0", "5.0"], "")


@pytest.fixture(params=["writable", "foreign"])
def of_others(request, monkeypatch):
    """Lets others write a file, or pretends that it is another user's; and what is said of that."""
    if request.param == "writable":
        return lambda path: path.chmod(0o777), "can be written by other users"
    given: set[str] = set()
    stat = os.stat

    def pretend(path: str | Path, **options: object) -> os.stat_result:
        info = stat(path, **options)  # type: ignore[arg-type]
        return os.stat_result((*info[:4], 54321, *info[5:])) if str(path) in given else info

    monkeypatch.setattr(os, "stat", pretend)
    return lambda path: given.add(str(path)), "belongs to user 54321"


@pytest.mark.parametrize("member", ["", "one", "checksums"])
def test_an_entry_that_others_could_have_written_is_not_taken(
    member, of_others, monkeypatch, capsys
):
    entry, (give, why) = cache.entry("dd55", build), of_others
    give(entry / member)
    built = []

    def again(folder: Path) -> None:
        monkeypatch.undo()
        monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(folder.parent.parent))
        built.append(folder)
        build(folder)

    assert cache.entry("dd55", again) == entry and len(built) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("where", ["", "host"])
def test_a_cache_that_others_can_write_is_not_used(where, folder, of_others, capsys):
    cache.entry("dd66", build)
    cache._opened.cache_clear()
    give, why = of_others
    give(folder / where)
    for name in ("dd66", "dd67", "dd66"):
        assert cache.entry(name, build).is_relative_to(folder / "scratch")
    said = capsys.readouterr().err
    assert said.count("mlx-qlayers: kernels are not kept: ") == 1 and why in said
    folder.chmod(0o700)


def test_what_is_made_is_not_writable_by_a_group(folder):
    before = os.umask(0o002)
    try:
        os.environ["MLX_QLAYERS_CACHE_DIR"] = str(folder / "a" / "b")
        entry = cache.entry("dd77", build)
    finally:
        os.umask(before)
    made = [entry.parent.parent, entry.parent, entry, *entry.iterdir()]
    assert [path for path in made if path.stat().st_mode & 0o022] == []


def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage

    def little(path: Path) -> object:
        scratch = Path(path).is_relative_to(folder / "scratch")
        return usage(path) if scratch else SimpleNamespace(free=4096)

    monkeypatch.setattr(shutil, "disk_usage", little)


def noexec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = {"f_flag": os.ST_NOEXEC, "f_frsize": 1 << 30, "f_blocks": 1, "f_bfree": 1, "f_bavail": 1}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**room))


def a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "host").write_text("a file where the folder should be")


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (no_home, "MLX_QLAYERS_CACHE_DIR"),
        (full, "No space left on device"),
        (noexec, "noexec"),
        (a_file, "File exists"),
    ],
)
def test_a_cache_that_cannot_be_used(plant, why, folder, monkeypatch, capsys):
    plant(folder, monkeypatch)
    built = []

    def counted(folder: Path) -> None:
        built.append(folder)
        build(folder)

    first, second, other = (cache.entry(name, counted) for name in ("dd44", "dd44", "dd45"))
    assert first == second != other and first.is_dir() and len(built) == 2
    said = capsys.readouterr().err
    assert said.count("mlx-qlayers: kernels are not kept: ") == 1 and why in said


def test_no_folder_at_all(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(ToolchainError, match=r"no place for a compiled kernel: .*No space left"):
        cache.entry("dd46", build)
