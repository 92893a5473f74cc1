"""Parses the header of MLX's compiled functions once for all of them.

On a CPU ``mx.compile`` runs g++ for each new function, and two thirds of that time is one header.
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
    if sys.platform != "linux" or not shutil.which("g++") or not (include / HEADER).exists():
        return
    thread = threading.Thread(target=precompile, args=(include, target))
    thread.start()

    def clean_up() -> None:
        thread.join()
        target.unlink(missing_ok=True)

    config.add_cleanup(clean_up)
