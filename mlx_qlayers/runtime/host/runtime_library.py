"""The runtime library: built once from the shims, loaded once, and the structs it shares."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

from . import cache, toolchain

_SOURCES = ("fiber", "scheduler", "thread_pool", "checks", "accesses", "matrix", "half_conversions")


class Region(ctypes.Structure):
    """A buffer of a checked launch (``launch.h``)."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
    )


COUNTERS = (
    "bytes_read",
    "bytes_written",
    "distinct_read",
    "distinct_written",
    "constant_read",
    "threadgroup_read",
    "threadgroup_written",
    "bank_conflicts",
    "threadgroup_barriers",
    "simdgroup_barriers",
    "simd_operations",
    "quad_operations",
    "matrix_operations",
    "atomics",
    "loads",
    "stores",
    "threads",
    "threadgroups",
    "bank_ways",
    "alu_cycles",
    "turns",
    "threadgroup_memory",
    "same_value_writes",
)


class RawCounters(ctypes.Structure):
    """The counters of a checked launch (``launch.h``)."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTERS)


class RawLaunch(ctypes.Structure):
    """A launch as the runtime library takes it (``launch.h``)."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("dynamic_bytes", ctypes.c_uint32 * 8),
        ("fibers", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("checked", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_uint32),
        ("granule", ctypes.c_uint32),
        ("budget", ctypes.c_uint64),
        ("tolerated", ctypes.c_uint32),
        ("counters", ctypes.c_void_p),
        ("work", ctypes.c_uint64),
        ("fault", ctypes.c_uint32),
        ("fault_line", ctypes.c_uint32),
        ("fault_threadgroup", ctypes.c_uint32 * 3),
        ("fault_thread", ctypes.c_uint32 * 3),
        ("message", ctypes.c_char * 256),
    )


def objects(folder: Path) -> list[Path]:
    """Compile the runtime's sources into a folder."""
    tls = [] if sys.platform == "darwin" else ["-ftls-model=initial-exec"]
    made = []
    for name in _SOURCES:
        made.append(folder / f"{name}.o")
        toolchain.run(
            [
                "c++",
                *toolchain.target(),
                "-std=c++17",
                "-O3",
                "-fPIC",
                "-fno-exceptions",
                "-fno-rtti",
                "-fno-sanitize=all",
                *tls,
                "-c",
                str(toolchain.SHIMS / f"{name}.cpp"),
                "-o",
                str(made[-1]),
            ]
        )
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
