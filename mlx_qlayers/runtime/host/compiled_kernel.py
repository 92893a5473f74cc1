"""A compiled kernel on the CPU: run it on buffers, with or without checks."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NoReturn

from ..backend import BackendError
from . import array_memory as memory
from . import compiler, errors
from .errors import HostError, KernelFault, Place
from .runtime_library import HEADER, Counters, RawLaunch, Region, entry, library

Size = tuple[int, int, int]

# In the order of ``enum Fault``, whose constants are called as the exceptions.
_FAULTS: list[type[KernelFault] | None] = [
    getattr(errors, name, None) for name in re.findall(r"^  k(\w+),$", HEADER, re.M)
]
DEFAULT_BUDGET = 300_000_000
# In the order of ``enum qk_layout``.
LAYOUTS = ("m5", "strips", "random", "apart")
_seeds = itertools.count(1)
_checked_lock = threading.Lock()


def workers() -> int:
    """The number of cores that a launch may use."""
    asked = os.environ.get("MLX_QLAYERS_HOST_THREADS") or "0"
    if not asked.isdecimal():
        raise HostError(f"MLX_QLAYERS_HOST_THREADS must be a number of cores, not {asked!r}")
    if int(asked):
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_grid(name: str, grid: Size, threadgroup: Size) -> None:
    """Refuse a grid whose threadgroups 32 bits cannot number."""
    count = prod(-(-g // t) for g, t in zip(grid, threadgroup, strict=True))
    if count >= 1 << 32:
        raise BackendError(
            f"kernel {name}: grid {grid} has {count} threadgroups of {threadgroup}; the host "
            f"backend runs fewer than 2^32"
        )


class HostKernel:
    """One kernel, compiled for the CPU.

    Args:
        compiled: from :func:`compiler.build`.
        name: what errors call it.
        checked: whether it was compiled with checks.
        cite: makes of ``source.metal:12``, a line of the compiled text, what faults cite.

    Attributes:
        signature: its parameters.
        slots: the length of its list of buffers.
        launch: runs a launch, given the address of its ``RawLaunch``; not 0 where it failed.
    """

    def __init__(
        self, compiled: compiler.Compiled, name: str, checked: bool, cite: Callable[[str], str]
    ) -> None:
        self.name, self.checked, self._cite = name, checked, cite
        self.signature, self._compiled = compiled.signature, compiled
        self._library, self._entry = entry(compiled.library)
        self.launch = library().qk_launch
        self.slots = 1 + max(self.signature.buffers, default=-1)
        self._workers = workers()

    def raw(self, grid: Size, threadgroup: Size, dynamic: Sequence[int] = ()) -> RawLaunch:
        """The part of a launch that does not depend on its buffers."""
        if not 1 <= prod(threadgroup) <= 1024:
            raise HostError(
                f"kernel {self.name}: {prod(threadgroup)} threads in a threadgroup; 1 to 1024 run"
            )
        check_grid(self.name, grid, threadgroup)
        raw = RawLaunch(entry=self._entry, fibers=self._compiled.fibers)
        raw.grid[:], raw.threadgroup[:] = grid, threadgroup
        raw.dynamic_bytes[: len(dynamic)] = list(dynamic)
        raw.workers, raw.checked = self._workers, self.checked
        raw.granule, raw.budget = self._compiled.granule, DEFAULT_BUDGET
        return raw

    def run(
        self,
        buffers: Mapping[int, Any],
        grid: Size,
        threadgroup: Size,
        *,
        writes: Sequence[int] = (),
        fresh: Sequence[int] = (),
        threadgroup_bytes: Sequence[int] = (),
        budget: int = DEFAULT_BUDGET,
        tolerate: Sequence[type[KernelFault]] = (),
        flush_subnormals: bool = False,
        tensor_layout: str = "random",
    ) -> Counters | None:
        """Run the kernel once.

        Args:
            buffers: by buffer index: an ``mx.array``, or anything with a contiguous buffer.
            grid: threads in x, y and z.
            threadgroup: threads of one threadgroup in x, y and z.
            writes: indices of the buffers that the kernel may write.
            fresh: those of them that hold no values yet and must be written whole.
            threadgroup_bytes: lengths of the ``[[threadgroup(i)]]`` parameters.
            budget: the loop turns after which a checked launch counts as hanging.
            tolerate: :class:`Race` or :class:`Uninitialised`, to let pass.
            flush_subnormals, tensor_layout: of checked launches, see :func:`~.bound_launch.checks`.

        Returns:
            The counters of a checked launch, else None.

        Raises:
            KernelFault: what the checks found; the subclass says which.
        """
        declared = self.signature.buffers
        if missing := [p.name for i, p in declared.items() if i not in buffers and not p.optional]:
            raise HostError(f"kernel {self.name}: no buffer for {', '.join(missing)}")
        given = {
            i: memory.extent(buffer, writable=i in writes, initialised=i not in fresh)
            for i, buffer in buffers.items()
            if i < self.slots
        }
        raw = self.raw(grid, threadgroup, threadgroup_bytes)
        raw.budget, raw.flush = budget, flush_subnormals
        if self.checked:
            raw.layout, raw.layout_seed = LAYOUTS.index(tensor_layout), next(_seeds)
        raw.tolerated = sum(1 << _FAULTS.index(fault) for fault in tolerate)
        addresses = (ctypes.c_uint64 * max(self.slots, 1))()
        raw.buffers = ctypes.addressof(addresses)
        if self.checked:
            return self._run_checked(raw, addresses, given)
        for i, buffer in given.items():
            addresses[i] = buffer.address + buffer.origin
        self._start(raw)
        return None

    def _run_checked(
        self, raw: RawLaunch, addresses: Any, given: dict[int, memory.Buffer]
    ) -> Counters:
        lib, counters, regions = library(), Counters(), (Region * max(self.slots, 1))()
        raw.regions, raw.region_count = ctypes.addressof(regions), self.slots
        raw.counters = ctypes.addressof(counters)
        with _checked_lock:
            try:
                for i, buffer in given.items():
                    # MLX's memory begins at multiples of 8 here: what lies elsewhere is a view.
                    at = lib.qk_place(i, buffer.bytes, buffer.address % 8)
                    if not at:
                        raise HostError(f"kernel {self.name}: no room for buffer {i}")
                    addresses[i] = at + buffer.origin
                    regions[i] = Region(at, buffer.bytes, buffer.writable, buffer.initialised)
                    if buffer.initialised and buffer.bytes:
                        ctypes.memmove(at, buffer.address, buffer.bytes)
                    else:
                        ctypes.memset(at, 0xFF, buffer.bytes)
                self._start(raw)
                for i, buffer in given.items():
                    if buffer.writable and buffer.bytes:
                        ctypes.memmove(buffer.address, regions[i].begin, buffer.bytes)
            finally:
                for i, buffer in given.items():
                    if addresses[i]:
                        lib.qk_unplace(i, buffer.bytes)
        return counters

    def _start(self, raw: RawLaunch) -> None:
        if self.launch(ctypes.addressof(raw)):
            self.fail(raw)

    def fail(self, raw: RawLaunch) -> NoReturn:
        """Raise what the runtime library reported of a launch."""
        kind = _FAULTS[raw.fault] if raw.fault < len(_FAULTS) else None
        if kind is None:
            raise HostError(f"kernel {self.name}: the launch could not be prepared")
        buffers, shared = self.signature.buffers, self.signature.shared

        def named(match: re.Match[str]) -> str:
            what, i = match[1], int(match[2])
            if what == "buffer":
                return f"buffer {i} ({buffers[i].name if i in buffers else '?'})"
            return f"{what} {shared[i] if i < len(shared) else i}"

        text = re.sub(r"\b(buffer|threadgroup array) (\d+)", named, raw.message.decode())
        if "never written" in text:
            raise kind(f"{text} (kernel {self.name})")
        lines = self._compiled.lines
        line = self._cite(lines[raw.fault_line] if raw.fault_line < len(lines) else "")
        raise kind(text, Place(self.name, (*raw.fault_threadgroup,), (*raw.fault_thread,), line))


def compile_source(
    text: str,
    function: str,
    *,
    checked: bool,
    constants: Mapping[int, object] | None = None,
    defines: Mapping[str, str] | None = None,
    language: int = 320,
    name: str | None = None,
    cite: Callable[[str], str] = str,
    first: Callable[[str], None] | None = None,
) -> HostKernel:
    """Compile one kernel of a complete Metal source for the CPU.

    Args:
        text: Metal source; MLX's installed headers can be included.
        function: the kernel: its name, its ``host_name``, or its name with template arguments.
        checked: with bounds, races and the rest checked, or as fast as the machine allows.
        constants: the values of function constants by index.
        defines: macros.
        language: ``__METAL_VERSION__``.
        name: what errors call the kernel; its function's name by default.
        cite: makes of ``source.metal:12``, a line of ``text``, what faults cite.
        first: called where it has to be compiled, before that: with the text, in which a word may
            stand for the kernel's name and another for its template arguments.

    Raises:
        CompileError: the source is not Metal as this compiler takes it.

    Example:
        >>> kernel = compile_source(
        ...     "kernel void twice(device float* x [[buffer(0)]], "
        ...     "uint i [[thread_position_in_grid]]) { x[i] *= 2; }",
        ...     "twice",
        ...     checked=True,
        ... )
        >>> x = bytearray(16)
        >>> kernel.run({0: x}, (4, 1, 1), (4, 1, 1), writes=[0]).bytes_written
        16
    """
    build = text, function, checked, constants or {}, defines or {}, language, first
    return HostKernel(compiler.build(*build), name or function, checked, cite)
