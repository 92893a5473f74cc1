"""Metal's words in the spelling of C++ for OpenCL."""

from __future__ import annotations

import pytest

from mlx_qlayers.runtime.host.cpp_text import angle, closing, edit, split
from mlx_qlayers.runtime.host.errors import CompileError
from mlx_qlayers.runtime.host.opencl_spelling import respell

T = "__qk_thread__"


@pytest.mark.parametrize(
    ("metal", "spelled"),
    [
        (f"{T} float* p", "__generic float* p"),
        (f"const {T} metal::vec<float, 4>* p", "const __generic metal::vec<float, 4>* p"),
        (f"{T} float& r", " float& r"),
        (f"{T} float a[4];", " float a[4];"),
        (f"void f() const {T} {{", "void f() const  {"),
        (f"{T} T (&a)[4]", " T (&a)[4]"),
        ("__constant int& n", "const __constant int& n"),
        ("const __constant int& n", "const __constant int& n"),
        ("__constant float table[2] = {1, 2};", "__constant float table[2] = {1, 2};"),
        ("float4(a, b)", "metal::qk_make<float, 4>(a, b)"),
        ("metal::half2(x)", "metal::qk_make<half, 2>(x)"),
        ("operator float4() const", "operator float4() const"),
        ("metal::vec<T, 2 * (N)>(a)", "metal::qk_make<T, 2 * (N)>(a)"),
        ("metal::vec<T, 4> v;", "metal::vec<T, 4> v;"),
        ("static_cast<bfloat>(h)", "metal::qk_cast<bfloat>(h)"),
        ("bfloat(h)", "metal::qk_cast<bfloat>(h)"),
        ("static_cast<device T&>(x)", "static_cast<device T&>(x)"),
    ],
)
def test_respelled(metal: str, spelled: str) -> None:
    assert respell(metal) == spelled


def test_a_template_keeps_address_spaces_out_of_its_types() -> None:
    swap = f"template <typename T> void swap({T} T& a, {T} T& b) {{ T c = a; }}"
    assert respell(swap) == (
        "template <typename qk_T, typename T = metal::remove_addrspace_t<qk_T>> "
        "void swap(qk_T& a, metal::remove_addrspace_t<qk_T>& b) { T c = a; }"
    )
    load = f"template <typename T, int N> void load(__global T* p, {T} T& v, const {T} T& w) {{}}"
    assert respell(load) == (
        "template <typename T, int N> "
        "void load(__global T* p, metal::remove_addrspace_t<T>& v, T  w) {}"
    )


def test_lines_stay_where_they_are() -> None:
    assert edit("a\nb\nc\nd", [(2, 5, "x")]) == "a\nx\n\nd"
    assert edit("abc", [(1, 2, ""), (2, 2, "!")]) == "a!c"


def test_brackets() -> None:
    assert closing('f(a, ")", (b))c', 1) == 14
    assert split("a<b, c>, d[e, f], {g, h}") == ["a<b, c>", "d[e, f]", "{g, h}"]
    assert angle("<a, (b > c)>d", 0) == 12
    with pytest.raises(CompileError, match="unbalanced"):
        closing("(a", 0)
