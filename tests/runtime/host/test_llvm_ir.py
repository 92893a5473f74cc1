"""What is refused in the IR of the strict compile, and how its address spaces are merged."""

from __future__ import annotations

import pytest

from mlx_qlayers.runtime.host.errors import CompileError
from mlx_qlayers.runtime.host.llvm_ir import check, collapse, demangle, unalign

BORROWED = """
define void @_Z1fv(ptr addrspace(1) %0) {{
  %2 = addrspacecast ptr addrspace(1) %0 to ptr addrspace(4)
  {use}
  ret void
}}
"""
COPY = "call void @llvm.memcpy.p4.p4.i64(ptr addrspace(4) %3, ptr addrspace(4) %2, i64 8, i1 false)"


def test_a_struct_may_be_copied_from_device_memory() -> None:
    check(BORROWED.format(use=COPY))
    with pytest.raises(CompileError, match=r"a device pointer or object .* in f"):
        check(BORROWED.format(use="store ptr addrspace(4) %2, ptr %4"))


def test_recursion_through_another_function() -> None:
    text = "".join(
        f"define void @{a}() {{\n  call void @{b}()\n  ret void\n}}\n"
        for a, b in (("a", "b"), ("b", "c"), ("c", "d"), ("d", "b"))
    )
    with pytest.raises(CompileError, match="recursion: b calls itself"):
        check(text)
    check(text.replace("@d() {\n  call void @b()", "@d() {\n  call void @x()"))


def test_collapse() -> None:
    text = (
        "  %1 = addrspacecast ptr %0 to ptr addrspace(4)\n"
        "  %2 = addrspacecast ptr addrspace(1) %x to ptr addrspace(4)\n"
        "  call void @llvm.memcpy.p4.p1.i64(ptr addrspace(4) %1, ptr addrspace(1) %x, i64 4)\n"
        "declare void @llvm.memcpy.p4.p1.i64(ptr, ptr, i64)\n"
        "declare void @llvm.memcpy.p4.p4.i64(ptr, ptr, i64)"
    )
    assert collapse(text, all_spaces=False) == (
        "  %1 = bitcast ptr %0 to ptr\n"
        "  %2 = addrspacecast ptr addrspace(1) %x to ptr\n"
        "  call void @llvm.memcpy.p0.p1.i64(ptr %1, ptr addrspace(1) %x, i64 4)\n"
        "declare void @llvm.memcpy.p0.p1.i64(ptr, ptr, i64)\n"
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64)"
    )
    merged = collapse(text, all_spaces=True)
    assert "addrspace" not in merged and merged.count("declare") == 1


def test_atomics_keep_their_alignment() -> None:
    load = "  %1 = load <4 x float>, ptr addrspace(1) %0, align 16"
    add = "  %2 = atomicrmw add ptr addrspace(1) %0, i32 1 monotonic, align 4"
    own = "  %3 = load float, ptr %p, align 4"
    assert unalign(f"{load}\n{add}\n{own}") == f"{load[:-2]}1\n{add}\n{own}"


def test_demangle() -> None:
    assert [demangle(x) for x in ("_Z1fv", "_ZN5metal3expEf", "main")] == ["f", "exp", "main"]
