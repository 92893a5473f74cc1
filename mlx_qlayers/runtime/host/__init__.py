"""The host backend: Metal kernels compiled by clang and executed on the CPU."""

from .bound_launch import Report, bind, checks
from .compiled_kernel import Counters, HostKernel, compile_source
from .errors import (
    CompileError,
    Divergence,
    Hang,
    HostError,
    KernelFault,
    Misaligned,
    OutOfBounds,
    Place,
    Race,
    ThreadgroupMemory,
    Undefined,
    Uninitialised,
)
from .lint import lint

__all__ = [
    "CompileError",
    "Counters",
    "Divergence",
    "Hang",
    "HostError",
    "HostKernel",
    "KernelFault",
    "Misaligned",
    "OutOfBounds",
    "Place",
    "Race",
    "Report",
    "ThreadgroupMemory",
    "Undefined",
    "Uninitialised",
    "bind",
    "checks",
    "compile_source",
    "lint",
]
