"""Hooks into optimised LLVM IR: a call before every load, store, atomic, meeting and loop turn,
and at the end of every block for its arithmetic.

Device, constant and threadgroup memory are told apart by the address spaces of the IR, so that a
thread's own variables cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from .alu_cycles import cycles
from .llvm_ir import functions

_TYPE = r"(?:<\d+ x [^>]+>|\[[^\]]+\]|\{[^}]*\}|ptr addrspace\(\d+\)|[\w.]+)"
_POINTER = r"ptr(?: addrspace\(([123])\))? (.+?)"
_ORDER = (
    r"(?: syncscope\(\"[^\"]*\"\))?(?: (?:unordered|monotonic|acquire|release|acq_rel|seq_cst))*"
)
_LOAD = re.compile(rf"= load (atomic )?(?:volatile )?({_TYPE}), {_POINTER}{_ORDER}, align (\d+)")
_STORE = re.compile(
    rf"^\s*store (atomic )?(?:volatile )?({_TYPE}) .+?, {_POINTER}{_ORDER}, align (\d+)"
)
_UPDATE = re.compile(
    rf"= atomicrmw (?:volatile )?\w+ {_POINTER}, ({_TYPE}) [^,]+?{_ORDER}, align (\d+)"
)
_EXCHANGE = re.compile(rf"= cmpxchg (?:weak )?(?:volatile )?{_POINTER}, ({_TYPE}) .+?, align (\d+)")
_COPY = re.compile(
    r"call void @llvm\.(memcpy|memmove|memset)\.\S*?\((ptr(?: addrspace\(([123])\))?"
    r"(?: noundef| nonnull| writeonly)*(?: align (\d+))?[^%@,]*([%@][\w.\"]+)), "
    r"(?:i8 [^,]+|ptr(?: addrspace\(([123])\))?(?: noundef| nonnull| readonly)*(?: align (\d+))?"
    r"[^%@,]*([%@][\w.\"]+)), (i32|i64) (\S+), i1"
)
_MEETING = re.compile(
    r"call .*@(?:qk_simd_sync|qk_threadgroup_barrier|qk_simdgroup_barrier|qk_inactive_lane|"
    r"qk_threadgroup_memory|qk_tensor_\w+|__ubsan_handle_\w+)\("
)
_BORROWED = re.compile(r"(%[\w.]+) = addrspacecast ptr addrspace\([123]\) .* to ptr(?:,|$)", re.M)
_DERIVED = re.compile(r"(%[\w.]+) = (?:getelementptr|phi ptr|select|bitcast)\b(?! addrspace)(.*)")
_NAME = re.compile(r"%[\w.]+")
_LABEL = re.compile(r"^([\w.$-]+):")
_TERMINATOR = re.compile(r"^  (?:br|switch|ret|unreachable)\b")
_TARGET = re.compile(r"label %([\w.$-]+)")
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8}
# Metal has none, but clang may copy a float2 as one.
_SIZES["double"] = 8
_ATOMIC = 1 << 24

DECLARATIONS = """
declare void @qk_load(ptr, i64, i32, i32)
declare void @qk_store(ptr, i64, i32, i32)
declare void @qk_atomic(ptr, i64, i32, i32)
declare void @qk_at(i32)
declare void @qk_tick(i32)
declare void @qk_work(i32)
"""


def size_of(kind: str) -> int:
    """The bytes of an IR type as stored."""
    if m := re.match(r"[<\[](\d+) x (.+)[>\]]$", kind):
        return int(m.group(1)) * size_of(m.group(2))
    if kind.startswith("ptr"):
        return 8
    if kind in _SIZES:
        return _SIZES[kind]
    if m := re.match(r"i(\d+)$", kind):
        return (int(m.group(1)) + 7) // 8
    raise ValueError(f"a load or store of {kind} cannot be checked")


class Instrumented(NamedTuple):
    """IR with hooks; ``lines[i]`` is the source line of the hook that passes ``i``."""

    ir: str
    lines: list[str]
    smallest_store: int


class _Hooks:
    def __init__(self) -> None:
        self.borrowed: set[str] = set()
        self.values, self.smallest_store = 0, 16

    def access(
        self, hook: str, space: str | None, pointer: str, size: str | int, align: int, at: int
    ) -> list[str]:
        """One hook; none where the pointer is the thread's own."""
        if not space and pointer not in self.borrowed:
            return []
        self.values += 1
        if hook != "qk_load":
            bytes_ = size if isinstance(size, int) else align
            self.smallest_store = min(self.smallest_store, align, bytes_)
        name, how = f"%qk.{self.values}", align | int(space or 0) << 16 | at
        cast = f"addrspacecast ptr addrspace({space})" if space else "bitcast ptr"
        return [
            f"  {name} = {cast} {pointer} to ptr",
            f"  call void @{hook}(ptr {name}, i64 {size}, i32 {how & 0xFFFFFFFF}, i32 @LINE@)",
        ]

    def before(self, line: str) -> list[str]:
        """The calls to put in front of one instruction."""
        if " call " in line:
            if m := _COPY.search(line):
                return self._copy(m)
            return ["  call void @qk_at(i32 @LINE@)"] if _MEETING.search(line) else []
        if ", align " not in line:
            return []
        for hook, pattern in (("qk_load", _LOAD), ("qk_store", _STORE)):
            if m := pattern.search(line):
                atomic, kind, space, pointer, align = m.groups()
                at = _ATOMIC if atomic else 0
                return self.access(hook, space, pointer, size_of(kind), int(align), at)
        if m := _UPDATE.search(line) or _EXCHANGE.search(line):
            space, pointer, kind, align = m.groups()
            return self.access("qk_atomic", space, pointer, size_of(kind), int(align), _ATOMIC)
        return []

    def _copy(self, m: re.Match[str]) -> list[str]:
        to_space, to_align, to, from_space, from_align, source = m.group(3, 4, 5, 6, 7, 8)
        count, size = m.group(9), m.group(10)
        out, amount = [], size
        if count == "i32" and size.startswith("%"):
            self.values += 1
            amount = f"%qk.{self.values}"
            out.append(f"  {amount} = zext i32 {size} to i64")
        bytes_ = int(amount) if amount.isdigit() else amount
        if source:
            out += self.access("qk_load", from_space, source, bytes_, int(from_align or 1), 0)
        out += self.access("qk_store", to_space, to, bytes_, int(to_align or 1), 0)
        return out


def _borrowed(body: str) -> set[str]:
    """The ordinary pointers of a function that come from another address space: struct copies."""
    names = set(_BORROWED.findall(body)) if "addrspacecast" in body else set()
    if not names:
        return names
    uses: dict[str, list[str]] = {}
    for m in _DERIVED.finditer(body):
        for operand in _NAME.findall(m.group(2)):
            uses.setdefault(operand, []).append(m.group(1))
    work = list(names)
    while work:
        for name in uses.get(work.pop(), ()):
            if name not in names:
                names.add(name)
                work.append(name)
    return names


def instrument(ir: str, locate: Callable[[str], str]) -> Instrumented:
    """Put the hooks of the checked build into IR; ``locate`` finds the line of a ``!dbg``."""
    hooks, lines = _Hooks(), {"": 0}
    out: list[str] = []
    labels: set[str] = set()
    work = 0
    bodies = iter([body for _, body in functions(ir)])
    for line in ir.split("\n"):
        if line.startswith("define "):
            labels, hooks.borrowed, work = set(), _borrowed(next(bodies)), 0
        elif line.startswith("  "):
            added = hooks.before(line)
            turns = line.startswith(("  br ", "  switch "))
            if turns and (line.startswith("  switch") or labels & set(_TARGET.findall(line))):
                added = ["  call void @qk_tick(i32 @LINE@)"]
            if added:
                number = str(lines.setdefault(locate(line), len(lines)))
                out += [x.replace("@LINE@", number) for x in added]
            work += cycles(line)
            if work and _TERMINATOR.match(line):
                out.append(f"  call void @qk_work(i32 {work})")
                work = 0
        elif m := _LABEL.match(line):
            labels.add(m.group(1))
        out.append(line)
    # A call inside a function with debug information would need a location of its own.
    text = re.sub(r" !dbg !\d+", "", re.sub(r", !dbg !\d+", "", "\n".join(out)))
    return Instrumented(text + DECLARATIONS, list(lines), hooks.smallest_store)
