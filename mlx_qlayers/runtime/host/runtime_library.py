"""The runtime library: built once from the shims, loaded once, and the structs it shares."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

from ..backend import ToolchainError
from . import cache, toolchain

_SOURCES = (
    *("fiber", "scheduler", "thread_pool", "checks", "accesses", "matrix", "tensor"),
    *("tensor_layout", "half_conversions", "addresses"),
)
# The structures that Python and the library share; without comments.
HEADER = re.sub(r"//.*", "", (toolchain.SHIMS / "launch.h").read_text())
_KINDS: dict[str, Any] = {
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "char": ctypes.c_char,
    "float": ctypes.c_float,
}


def _fields(struct: str) -> list[tuple[str, Any]]:
    """The members of a struct of ``launch.h``, so that it is written in one place."""
    body = re.findall(rf"struct {struct} {{(.*?)}};", HEADER, re.S)[0]
    found = []
    for kind, names in re.findall(r"(?:const )?(\w+\*?) ([^;]+);", body):
        for name, length in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            member = _KINDS.get(kind, ctypes.c_void_p)
            found.append((name, member * int(length) if length else member))
    return found


class Region(ctypes.Structure):
    """A buffer of a checked launch."""

    _fields_ = _fields("Region")


class Counters(ctypes.Structure):
    """The counters of one checked launch; bytes unless said otherwise.

    Attributes:
        bytes_read, bytes_written: device memory, counting every access.
        distinct_read, distinct_written: device memory, counting each byte once.
        constant_read: the constant address space.
        threadgroup_read, threadgroup_written: threadgroup memory.
        bank_conflicts: extra cycles of threadgroup accesses on 32 banks of 4 bytes.
        threadgroup_barriers, simdgroup_barriers: each once for all the threads that meet.
        simd_operations, quad_operations, matrix_operations: each once for a SIMD group.
        atomics, loads, stores: operations on device memory, each once for a thread.
        threads, threadgroups: how many ran.
        bank_ways: the most threads of a SIMD group that one bank served in one access.
        alu_cycles: arithmetic of all threads, by the costs of an Apple M1 (``alu_cycles.py``).
        turns: of all loops, in all threads.
        threadgroup_memory: bytes that a threadgroup takes.
        same_value_writes: stores in no order with another thread's, of the value that was there.
    """

    _fields_ = _fields("Counters")


class RawLaunch(ctypes.Structure):
    """A launch as the runtime library takes it."""

    _fields_ = _fields("Launch")


class Item(ctypes.Structure):
    """A step of a list of launches."""

    _fields_ = _fields("Item")


class Place(ctypes.Structure):
    """A word that gets the address of an array."""

    _fields_ = _fields("Place")


def objects(folder: Path) -> list[Path]:
    """Compile the runtime's sources into a folder."""
    tls = [] if sys.platform == "darwin" else ["-ftls-model=initial-exec"]
    flags = ["-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]
    made = []
    for name in _SOURCES:
        made.append(folder / f"{name}.o")
        arguments = [*toolchain.target(), *flags, *tls, "-c", str(toolchain.SHIMS / f"{name}.cpp")]
        toolchain.run(["c++", *arguments], output=made[-1])
    return made


def _build(folder: Path) -> None:
    made = objects(folder)
    toolchain.link(made, folder / "runtime.so")
    for path in made:
        path.unlink()


@functools.cache
def library() -> ctypes.CDLL:
    """The runtime, visible to the kernels that are loaded after it."""
    folder = cache.entry(toolchain.key("runtime"), _build)
    if sys.platform != "darwin":
        _load("libm.so.6", ctypes.RTLD_GLOBAL)
    lib = _load(str(folder / "runtime.so"), ctypes.RTLD_GLOBAL)
    lib.qk_place.restype = ctypes.c_uint64
    lib.qk_place.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint32]
    lib.qk_unplace.argtypes = [ctypes.c_uint32, ctypes.c_uint64]
    lib.qk_launch.argtypes = [ctypes.c_void_p]
    lib.qk_launch_list.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    os.register_at_fork(after_in_child=lib.qk_after_fork)
    return lib


@functools.cache
def place_arrays() -> Any:
    """A function of a list of arrays, :class:`Place` objects, their number, and numbers of rows."""
    names = "PyList_GetItem", "PyObject_GetBuffer", "PyBuffer_IsContiguous", "PyBuffer_Release"
    asked = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in names]
    pointer, size = ctypes.c_void_p, ctypes.c_uint32
    call = ctypes.PYFUNCTYPE(ctypes.c_int, pointer, ctypes.py_object, pointer, size, pointer)
    return functools.partial(call(("qk_place_arrays", library())), (pointer * len(asked))(*asked))


def _load(path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path, mode)
    except OSError as error:
        raise ToolchainError(f"a compiled kernel cannot be loaded: {error}") from error


def entry(path: Path) -> tuple[ctypes.CDLL, int]:
    """Load a kernel's library; the library (to keep) and the address of its entry point."""
    library()
    lib = _load(str(path))
    address = ctypes.cast(lib.qk_entry, ctypes.c_void_p).value
    assert address is not None
    return lib, address
