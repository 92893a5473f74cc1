"""Compiles CUDA kernels before MLX does, and keeps them. For NVIDIA GPUs alone, frozen.

It does so side by side. MLX compiles at the first launch, one after the other, with headers
that take most of that time, and keeps no result. But before it compiles it looks into its folder of
compiled kernels, for the kernel's name and the hash of its whole text, and takes what is there.
Where nothing could be put there, for whatever reason, it compiles as ever.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from hashlib import sha256
from pathlib import Path

import mlx.core as mx

from ..runtime.devices import device_of
from .backend import within
from .cache_folder import check_owner, make_folder
from .explain import note
from .generated_source import TYPES
from .spec import Spec
from .staging import replace_file
from .versions import version_of

_WORKER = Path(__file__).with_name("nvrtc_worker.py")
# The text that MLX writes in front of a kernel, as far as kernels here need it.
_MLX = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
_OWN = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/cstdint>
namespace mlx::core::cu {
template <typename T>
struct Extents {
  T each[10];
  __host__ __device__ const T* data() const {
    return each;
  }
};
using Shape = Extents<int32_t>;
using Strides = Extents<int64_t>;
}
namespace cooperative_groups {}
"""
_TYPES = TYPES | {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
# Seconds after which a compiler that does not end is given up.
_PATIENCE = 60
# std::hash of a string begins with this in libstdc++.
_SEED = 0xC70F6907

_jobs: dict[str, Future[None]] = {}
# Compilations of a ``with`` block; None: each is waited for where it is bound.
_asked: ContextVar[list[Future[None]] | None] = ContextVar("asked", default=None)
_idle = False
# Seconds that compilers took, and the kernels that they compiled here.
seconds: dict[str, float] = {}


def mlx_text(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, Spec]],
    outputs: Sequence[tuple[str, mx.Dtype]],
) -> str:
    """The text that MLX 0.32 generates for a launch of a kernel without template arguments."""
    parameters = []
    for key, x in inputs:
        parameters.append(f"    const {type_name(x.dtype)}* {key}")
        for suffix, kind in (("_shape", "Shape"), ("_strides", "Strides"), ("_ndim", "int")):
            if x.ndim > 0 and key + suffix in source:
                parameters.append(f"    const __grid_constant__ {kind} {key}{suffix}")
    parameters += [f"    {type_name(dtype)}* {key}" for key, dtype in outputs]
    text = f"{_MLX}{header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
    text += f"__global__ void custom_kernel_{name}(\n" + ",\n".join(parameters) + ") {\n"
    return f"{text}{source}\n}}\n\n}} // namespace mlx::core::cu\n"


def type_name(dtype: mx.Dtype) -> str:
    """How MLX spells a dtype in CUDA C++."""
    return _TYPES[dtype]


def begin(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, Spec]],
    outputs: Sequence[tuple[str, mx.Dtype]],
) -> None:
    """Compile a kernel that will be launched; at once, or in a ``with`` block meanwhile."""
    complex_ones = any(x.dtype == mx.complex64 for _, x in inputs)
    if _idle or complex_ones or not mx.cuda.is_available() or (folder := _folder()) is None:
        return
    text = mlx_text(name, header, source, inputs, outputs)
    module = f"custom_kernel_{name}_{string_hash(text):x}"
    if module not in _jobs and (folder / f"{module}.ptx").exists():
        _jobs[module] = Future()
        _jobs[module].set_result(None)
    elif module not in _jobs:
        _jobs[module] = _pool().submit(_compile, folder / module, name, text)
    if (asked := _asked.get()) is None:
        _jobs[module].exception()
    else:
        asked.append(_jobs[module])


@contextmanager
def compiled_in_parallel(waits: bool = True) -> Iterator[None]:
    """Compile all kernels that are bound in a ``with`` block side by side.

    It waits for them at the end, if ``waits`` and not inside another such block; else whoever binds
    one of them again waits for that one.
    """
    jobs: list[Future[None]] = []
    if _asked.get() is not None:
        yield
        return
    try:
        with within(_asked, jobs):
            yield
    finally:
        if waits:
            wait(jobs)


def finish() -> None:
    """Wait for the kernels of a ``with`` block, elsewhere for all; MLX would compile one by one."""
    asked = _asked.get()
    if asked is None:
        wait([*_jobs.values()])
    elif asked:
        wait(asked)
        asked.clear()  # a prompt asks before each of its layers


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Inside a ``with`` block, what is bound will not be launched, and is not compiled."""
    global _idle
    before, _idle = _idle, True
    try:
        yield
    finally:
        _idle = before


def _compile(target: Path, name: str, text: str) -> None:
    """Put a compiled kernel where MLX looks for it."""
    if not threading.main_thread().is_alive():  # the process ends, and waits for this
        return
    function = f"mlx::core::cu::custom_kernel_{name}"
    architecture = device_of("cuda").name
    suffix = "a" if int(architecture.removeprefix("sm_")) >= 90 else ""
    options = ["--device-as-default-execution-space", f"--gpu-architecture={architecture}{suffix}"]
    options += [f"--include-path={path}" for path in _includes()]
    own = _OWN + text.removeprefix(_MLX)
    job = {"library": _library(), "text": own, "name": function, "options": options}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_WORKER)],
            input=json.dumps(job).encode(),
            capture_output=True,
            timeout=_PATIENCE,
            check=True,
        )
        mangled, _, code = done.stdout.partition(b"\n")
        # MLX takes the code for whole as soon as it is there.
        names = function.encode() + b"\t" + mangled + b"\n"
        replace_file(target.with_name(target.name + ".txt"), names)
        replace_file(target.with_name(target.name + ".ptx"), code)
        seconds[name] = time.perf_counter() - start
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()[-500:]
        note(f"kernel {name}", "left to MLX", f"not compiled ahead: {why}")
    except (OSError, subprocess.TimeoutExpired) as error:
        note(f"kernel {name}", "left to MLX", f"not compiled ahead: {error}")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "nvrtc")


@cache
def _folder() -> Path | None:
    """Where MLX looks for compiled kernels, if kernels can be compiled and put there."""
    chosen = os.environ.get("MLX_PTX_CACHE_DIR")
    default = Path(tempfile.gettempdir()) / "mlx" / version_of("mlx") / "ptx"
    folder = Path(chosen) if chosen else default
    try:
        make_folder(folder)
        check_owner(folder)
        if _library() and _includes() and string_hash(""):
            return folder
    except (OSError, AttributeError) as error:
        note("kernels", "left to MLX", f"not compiled ahead: {error}")
    return None


def string_hash(text: str) -> int:
    """``std::hash`` of a string in libstdc++, with which MLX is built."""
    function = ctypes.CDLL("libstdc++.so.6")["_ZSt11_Hash_bytesPKvmm"]
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    content = text.encode()
    return int(function(content, len(content), _SEED))


def _packages() -> Path:
    """Where MLX is installed, and NVIDIA's packages beside it."""
    return Path(mx.__file__).parents[1]


@cache
def _library() -> str:
    """NVRTC, as MLX has loaded it."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "libnvrtc.so" in line}
    found = sorted(paths) or sorted(map(str, _packages().glob("nvidia/*/lib/libnvrtc.so.*")))
    if not found:
        raise OSError("there is no libnvrtc.so")
    return found[0]


@cache
def _includes() -> list[str]:
    """Folders of headers, as MLX finds them."""
    own = _packages() / "mlx" / "include"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    cuda = sorted(_packages().glob("nvidia/cu*/include")) or [Path(home) / "include"]
    cuda += sorted(_packages().glob("nvidia/cuda_runtime/include"))
    folders = [own, own / "cccl", *cuda, *(path / "cccl" for path in cuda)]
    return [str(path) for path in folders if path.is_dir()]


@cache
def shims_digest(folder: Path) -> str:
    """A digest of the headers that every kernel includes."""
    return sha256(b"\0".join(p.read_bytes() for p in sorted(folder.glob("*.h")))).hexdigest()
