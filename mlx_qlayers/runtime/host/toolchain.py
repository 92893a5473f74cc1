"""The compiler: clang and the linker of the ``ziglang`` wheel, called as one program."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from ..backend import ToolchainError
from ..versions import version_of
from .errors import CompileError

SHIMS = Path(__file__).parent.parent / "shims" / "host"

# The modules that decide whether a kernel is taken, and which object is made of it.
_MAKERS = (
    *("access_checks", "alu_cycles", "compiler", "cpp_text", "lint", "llvm_ir"),
    *("opencl_spelling", "runtime_library", "toolchain", "translate"),
)
# Messages of the compiler about a source, and not about a file that it cannot write.
_DIAGNOSTIC = re.compile(r":\d+:\d+: (?:fatal )?error: |error: <unknown>:0:0: ")

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
    """The path of the compiler; a ToolchainError if the ``host`` extra is not installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError("the host backend needs its compiler: pip install 'mlx-qlayers[host]'")
    return str(Path(spec.submodule_search_locations[0]) / "zig")


@functools.cache
def target() -> tuple[str, ...]:
    """The flags that select this machine's platform and processor."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    system = "macos" if sys.platform == "darwin" else "linux-gnu"
    cpu = "-march=native" if machine == "x86_64" else "-mcpu=native"
    return ("-target", f"{machine}-{system}", cpu)


@functools.cache
def _processor() -> str:
    """The processor as the compiler sees it: objects are built for exactly this one."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = info.split("\n\n")[0].splitlines()
    return "\n".join(x for x in lines if x.split(":")[0].strip() in ("flags", "Features", "model"))


@functools.cache
def _surroundings() -> str:
    """Everything but the kernel that decides what the compiler makes of it."""
    digest = sha256()
    makers = [Path(__file__).with_name(f"{name}.py") for name in _MAKERS]
    for path in [*makers, *sorted(p for p in SHIMS.rglob("*") if p.is_file())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    versions = [version_of(name) for name in ("mlx", "ziglang")]
    return f"{versions} {target()} {_processor()} {digest.hexdigest()}"


def key(*parts: object) -> str:
    """The name under which the cache keeps what is compiled of ``parts``."""
    text = "\0".join([_surroundings(), *map(repr, parts)])
    return sha256(text.encode()).hexdigest()[:32]


@functools.cache
def mlx_include() -> str:
    """The folder of MLX's installed headers, where its Metal kernels are."""
    import mlx.core as mx

    return str(Path(mx.__file__).parent / "include")


_alone = threading.Lock()


def run(
    arguments: Sequence[str], source: str | None = None, output: Path | None = None
) -> tuple[str, str]:
    """Run the compiler on a standard input, and return what it prints and its diagnostics.

    Raises:
        CompileError: it refuses the source; the message is its diagnostics.
        ToolchainError: it fails for another reason.
    """
    command, environment = [zig(), *arguments], {**os.environ, "LC_ALL": "C"}
    if output:
        command += ["-o", str(output)]
        environment["ZIG_GLOBAL_CACHE_DIR"] = str(output.parent.with_name("zig"))

    def once() -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command, input=source, capture_output=True, text=True, env=environment
            )
        except OSError as error:
            raise ToolchainError(f"the compiler cannot be run: {error}") from error

    done = once()
    if done.returncode == -signal.SIGKILL:
        # Too little memory for several at once may be enough for one.
        with _alone:
            done = once()
    said = done.stderr.strip()
    if done.returncode < 0:
        killed = signal.Signals(-done.returncode).name
        raise ToolchainError(f"the compiler was ended by {killed}; is there too little memory?")
    if done.returncode and not _DIAGNOSTIC.search(said):
        raise ToolchainError(said or f"the compiler stopped: {done.returncode}")
    if done.returncode:
        raise CompileError(said)
    return done.stdout, done.stderr


def link(objects: Sequence[Path], output: Path) -> None:
    """Link objects into a library whose missing symbols the process provides when it is loaded."""
    shared = ["ld.lld", "-shared"]
    if sys.platform == "darwin":
        shared = ["cc", *target()[:2], "-dynamiclib", "-undefined", "dynamic_lookup"]
    run([*shared, *map(str, objects)], output=output)
