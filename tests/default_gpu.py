"""Runs Python in a process whose default device is a GPU, also where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx

from tests.gpus import HERE

ROOT = Path(__file__).parents[1]
_SOURCE = Path(__file__).with_suffix(".c")


def run(code: str, folder: Path) -> str:
    """The output of the code.

    Without a GPU it may build graphs, and MLX refuses what it would refuse with one: float64, and
    the operations that have no GPU implementation, on a stream of the GPU. Nothing may be
    evaluated there but on a stream of the CPU.

    Args:
        code: Python code.
        folder: where the library that makes MLX believe in a GPU is compiled to.

    Raises:
        AssertionError: the code failed; the message is its standard error.
    """
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH')}"}
    if HERE == "host":
        library = folder / "libdefaultgpu.so"
        compiler = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O1"]
        subprocess.run([*compiler, "-o", str(library), str(_SOURCE)], check=True)
        environment["LD_PRELOAD"] = str(library)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def launch_nothing() -> None:
    """Let ``auto`` take CUDA, and launches give zeros: for code that :func:`run` runs."""
    from mlx_qlayers.runtime import backend, cuda

    def bind(launch):
        outputs = list(zip(launch.output_shapes, launch.output_dtypes, strict=True))
        return lambda arrays: [mx.zeros(shape, dtype) for shape, dtype in outputs]

    cuda.bind = bind
    backend.missing["cuda"] = lambda: None
