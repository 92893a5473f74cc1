"""The cache of compiled kernels between processes: leftovers, locks, and who builds."""

import os
import subprocess
import sys
import time

from mlx_qlayers.runtime.host import cache

from .test_cache import build


def test_leftovers_go_at_the_next_start_and_work_in_progress_stays(folder):
    entry = cache.entry("ee11", build)
    dead = entry.with_name(".ee22.mlx-qlayers-0123abcd")
    dead.mkdir()
    (dead / "kernel.o").write_text("half")
    entry.with_name(".ee22.lock").touch()
    scratch = folder / "scratch" / "mlx-qlayers-kernels-0123abcd"
    scratch.mkdir()
    wait = "import time; from mlx_qlayers.runtime.host import cache\n"
    wait += "cache.entry('ee33', lambda _: (print('building', flush=True), time.sleep(60)))"
    alive = subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE, text=True)
    try:
        assert alive.stdout and alive.stdout.readline() == "building\n"
        assert not dead.exists() and not entry.with_name(".ee22.lock").exists()
        dead.mkdir()
        cache._opened.cache_clear()
        assert cache.entry("ee11", build) == entry and not dead.exists()
        names = sorted(name[:9] for name in os.listdir(entry.parent))
        assert names == [".ee33.loc", ".ee33.mlx", "ee11"]
        alive.kill()
        alive.wait()
        cache._opened.cache_clear()
        cache.entry("ee11", build)
        assert os.listdir(entry.parent) == ["ee11"]
    finally:
        alive.kill()
        alive.communicate()
    cache._scratch("no reason")
    assert not scratch.exists() and len(os.listdir(folder / "scratch")) == 1


def test_without_locks_leftovers_go_after_a_day(folder, monkeypatch):
    def none(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", none)
    entry = cache.entry("ee44", build)
    old, new = (entry.with_name(f".ee55.mlx-qlayers-{n}") for n in ("01234567", "76543210"))
    for path in (old, new):
        path.mkdir()
    os.utime(old, (time.time() - 90_000,) * 2)
    cache._opened.cache_clear()
    assert cache.entry("ee44", build) == entry
    assert new.exists() and not old.exists()


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


def test_one_of_many_processes_builds(folder):
    running = [
        subprocess.Popen([sys.executable, "-c", _RACE], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [p.communicate(timeout=60)[0].split() for p in running]
    assert sorted(map(len, said)) == [2, 2, 3], said
    assert all(words[-2:] == ["100000", "100000"] for words in said)
    assert os.listdir(folder / "host") == ["cc33"]
