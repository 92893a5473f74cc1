"""Has g++, which MLX runs on a CPU for each new compiled function, parse MLX's header once.

That is two thirds of its time. And a library gets its name when it is whole: another process loads
a library as soon as a file has that name, which the linker writes for a while.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import mlx.core as mx
import pytest

HEADER = "mlx/backend/cpu/compiled_preamble.h"
WHOLE = """#!/bin/sh
for library; do :; done
case $library in
  *.so) part=$(dirname "$library")/.$$; {gcc} "$@" -o "$part" && mv "$part" "$library" ;;
  *) exec {gcc} "$@" ;;
esac
"""


def precompiled() -> Path:
    """Where g++ looks for it first: beside the functions that MLX writes."""
    return Path(tempfile.gettempdir(), "mlx", mx.__version__, "cpu", f"{HEADER}.gch")


def precompile(include: Path, target: Path) -> None:
    """Parse the header with MLX's own flags; g++ leaves aside what other flags made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_suffix(f".{os.getpid()}")
    flags = ["-std=c++17", "-O3", "-Wall", "-fPIC", "-shared", "-I", str(include)]
    command = ["g++", *flags, "-x", "c++-header", str(include / HEADER), "-o", str(work)]
    if subprocess.run(command, capture_output=True).returncode == 0:
        work.rename(target)
    work.unlink(missing_ok=True)


def pytest_configure(config: pytest.Config) -> None:
    """Begin in the controller of pytest-xdist, while its workers start; gone when the tests end."""
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        return
    include, target = Path(mx.__file__).parent / "include", precompiled()
    gcc = shutil.which("g++")
    if sys.platform != "linux" or gcc is None or not (include / HEADER).exists():
        return
    folder = tempfile.mkdtemp(prefix="mlx-qlayers-gcc-")
    config.add_cleanup(lambda: shutil.rmtree(folder))
    Path(folder, "g++").write_text(WHOLE.format(gcc=gcc))
    Path(folder, "g++").chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
    thread = threading.Thread(target=precompile, args=(include, target))
    thread.start()

    def clean_up() -> None:
        thread.join()
        target.unlink(missing_ok=True)

    config.add_cleanup(clean_up)
