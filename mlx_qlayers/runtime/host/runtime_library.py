"""The runtime library: built once from the shims, loaded once, and the structs it shares."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

from . import cache, toolchain

_SOURCES = ("fiber", "scheduler", "thread_pool", "checks", "accesses", "matrix", "half_conversions")


_KINDS: dict[str, Any] = {
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "char": ctypes.c_char,
}


def _fields(struct: str) -> list[tuple[str, Any]]:
    """The members of a struct of ``launch.h``, so that it is written in one place."""
    text = re.sub(r"//.*", "", (toolchain.SHIMS / "launch.h").read_text())
    body = re.findall(rf"struct {struct} {{(.*?)}};", text, re.S)[0]
    found = []
    for kind, names in re.findall(r"(?:const )?(\w+\*?) ([^;]+);", body):
        for name, length in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            member = _KINDS.get(kind, ctypes.c_void_p)
            found.append((name, member * int(length) if length else member))
    return found


class Region(ctypes.Structure):
    """A buffer of a checked launch."""

    _fields_ = _fields("Region")


class RawCounters(ctypes.Structure):
    """The counters of a checked launch."""

    _fields_ = _fields("Counters")


class RawLaunch(ctypes.Structure):
    """A launch as the runtime library takes it."""

    _fields_ = _fields("Launch")


def objects(folder: Path) -> list[Path]:
    """Compile the runtime's sources into a folder."""
    tls = [] if sys.platform == "darwin" else ["-ftls-model=initial-exec"]
    flags = ["-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]
    made = []
    for name in _SOURCES:
        made.append(folder / f"{name}.o")
        files = ["-c", str(toolchain.SHIMS / f"{name}.cpp"), "-o", str(made[-1])]
        toolchain.run(["c++", *toolchain.target(), *flags, *tls, *files])
    return made


def _build(folder: Path) -> None:
    made = objects(folder)
    toolchain.link(made, folder / "runtime.so")
    for path in made:
        path.unlink()


@functools.cache
def library() -> ctypes.CDLL:
    """The runtime, visible to the kernels that are loaded after it."""
    if sys.platform != "darwin":
        ctypes.CDLL("libm.so.6", ctypes.RTLD_GLOBAL)
    folder = cache.entry(cache.key("runtime"), _build)
    lib = ctypes.CDLL(str(folder / "runtime.so"), ctypes.RTLD_GLOBAL)
    lib.qk_place.restype = ctypes.c_uint64
    lib.qk_place.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint32]
    lib.qk_unplace.argtypes = [ctypes.c_uint32, ctypes.c_uint64]
    lib.qk_launch.argtypes = [ctypes.c_void_p]
    os.register_at_fork(after_in_child=lib.qk_after_fork)
    return lib


def entry(path: Path) -> tuple[ctypes.CDLL, int]:
    """Load a kernel's library; the library (to keep) and the address of its entry point."""
    library()
    lib = ctypes.CDLL(str(path))
    address = ctypes.cast(lib.qk_entry, ctypes.c_void_p).value
    assert address is not None
    return lib, address
