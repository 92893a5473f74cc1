"""Errors of Metal kernels that are compiled for, or run on, the CPU."""

from __future__ import annotations

from dataclasses import dataclass


class HostError(RuntimeError):
    """Anything that the host backend finds wrong with a kernel."""


class CompileError(HostError):
    """The source is not Metal as every supported compiler would take it."""


@dataclass(frozen=True)
class Place:
    """Where a fault happened: the kernel, the threadgroup, its thread, and the source line."""

    kernel: str
    threadgroup: tuple[int, int, int]
    thread: tuple[int, int, int]
    line: str = ""

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"kernel {self.kernel}, threadgroup {self.threadgroup}, thread {self.thread}{at}"


class KernelFault(HostError):
    """A kernel did what would be undefined on a GPU; ``place`` says where."""

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(f"{message} ({place})" if place else message)
        self.place = place


class OutOfBounds(KernelFault):
    """A load or store outside every buffer, or in the padding of one."""


class Misaligned(KernelFault):
    """A load or store at an address that its type does not allow."""


class Uninitialised(KernelFault):
    """A load of memory that nobody wrote, or an output left partly unwritten."""


class Race(KernelFault):
    """Two threads used the same bytes, one of them writing, with nothing to order them."""


class Divergence(KernelFault):
    """A barrier or SIMD function that not all live threads reach."""


class ThreadgroupMemory(KernelFault):
    """More threadgroup memory than Metal has."""


class Hang(KernelFault):
    """The kernel used up its budget of steps."""


class Undefined(KernelFault):
    """Integer arithmetic without a defined result: division by zero."""
