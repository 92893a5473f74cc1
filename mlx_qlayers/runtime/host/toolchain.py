"""The compiler: clang and the linker of the ``ziglang`` wheel, called as one program."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .errors import CompileError, HostError

SHIMS = Path(__file__).parent.parent / "shims" / "host"

# C++ for OpenCL without its library: half, and address spaces that stay apart in the IR.
LANGUAGE = (
    "-x",
    "cl",
    "-cl-std=clc++2021",
    "-cl-no-stdinc",
    "-nostdinc",
    "-Xclang",
    "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space,+__cl_clang_function_pointers",
    "-cl-single-precision-constant",
)


@functools.cache
def zig() -> str:
    """The path of the compiler.

    Raises:
        HostError: the ``host`` extra is not installed.
    """
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise HostError("the host backend needs its compiler: pip install 'mlx-qlayers[host]'")
    return str(Path(spec.submodule_search_locations[0]) / "zig")


@functools.cache
def version() -> str:
    """The compiler's version, part of the key of everything cached."""
    return run(["version"]).strip()


@functools.cache
def target() -> tuple[str, ...]:
    """The flags that select this machine's platform and processor."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    system = "macos" if sys.platform == "darwin" else "linux-gnu"
    cpu = "-march=native" if machine == "x86_64" else "-mcpu=native"
    return ("-target", f"{machine}-{system}", cpu)


@functools.cache
def scratch() -> Path:
    """A folder of this process alone, which goes when it ends."""
    process, folder = os.getpid(), tempfile.mkdtemp(prefix="mlx-qlayers-")

    # A forked child ends too, and must leave the folder to its parent.
    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


@functools.cache
def mlx_include() -> str:
    """The folder of MLX's installed headers, where its Metal kernels are."""
    import mlx.core as mx

    return str(Path(mx.__file__).parent / "include")


def run(arguments: Sequence[str], source: str | None = None) -> str:
    """Run the compiler and return what it prints.

    Raises:
        CompileError: it failed; the message is its diagnostics.
    """
    return run_both(arguments, source)[0]


def run_both(arguments: Sequence[str], source: str | None = None) -> tuple[str, str]:
    """Run the compiler and return its output and its diagnostics, as :func:`run` does."""
    call = functools.partial(
        subprocess.run, [zig(), *arguments], input=source, capture_output=True, text=True
    )
    environment = {**os.environ, "LC_ALL": "C"}
    done = call(env=environment)
    if "unable to open global cache directory" in done.stderr:
        # Zig keeps files in the home folder, which is not there or not writable.
        done = call(env={**environment, "ZIG_GLOBAL_CACHE_DIR": str(scratch() / "zig")})
    if done.returncode != 0:
        raise CompileError(done.stderr.strip() or f"the compiler stopped: {done.returncode}")
    return done.stdout, done.stderr


def link(objects: Sequence[Path], output: Path) -> None:
    """Link objects into a library whose missing symbols the process provides when it is loaded."""
    names = [str(path) for path in objects]
    if sys.platform == "darwin":
        shared = ["cc", *target()[:2], "-dynamiclib", "-undefined", "dynamic_lookup"]
        run([*shared, "-o", str(output), *names])
    else:
        run(["ld.lld", "-shared", "-o", str(output), *names])
