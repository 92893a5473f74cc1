"""What is read from a kernel's signature and body, and the entry point that fills it."""

from __future__ import annotations

import pytest

from mlx_qlayers.runtime.host.errors import CompileError
from mlx_qlayers.runtime.host.translate import Parameter, translate

K = "__qk_kernel__"
UNIT = f"""
__constant bool flag [[function_constant(3)]];
template <typename T>
[[{K}, max_total_threads_per_threadgroup(64)]] void f(
    const __global T* x [[buffer(2)]], __global T* y, __constant int& n [[buffer(0)]],
    __global T* z [[buffer(4), function_constant(flag)]], __local T* s [[__local(1)]],
    uint3 at [[thread_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {{
  __local T a[4][sizeof(T) * (2)], b[8];
  __local T* p = s;
  if (flag) {{ __local float c; }}
}}
template [[host_name("f" "_half")]] [[{K}]] decltype(f<half>) f<half>;
template [[host_name("f_float")]] [[{K}]] void f<float>(const __global float* x [[buffer(2)]]);
{K} void g(__global float* y [[buffer(0)]]) {{ y[0] = 1; }}
"""


@pytest.mark.parametrize("name", ["f_half", "f<half>"])
def test_signature(name: str) -> None:
    text, signature = translate(UNIT, name, {3: True})
    assert signature.expression == "f<half>" and signature.shared == ("a", "b", "c")
    assert signature.parameters == (
        Parameter("x", "buffer", 2),
        Parameter("y", "buffer", 1),
        Parameter("n", "buffer", 0),
        Parameter("z", "buffer", 4, optional=True),
        Parameter("s", "threadgroup", 1),
        Parameter("at", "thread_position_in_grid"),
        Parameter("lane", "thread_index_in_simdgroup"),
    )
    assert [p.name for _, p in sorted(signature.buffers.items())] == ["n", "y", "x", "z"]
    assert "flag = (bool)(true)" in text and "__qk_" not in text and "host_name" not in text
    assert "typedef T qk_type_a [4][sizeof(T) * (2)]" in text
    assert "__local T* p = s;" in text
    assert text.index("void g(") and text[: text.index("void g(")].count("\n") == UNIT[
        : UNIT.index("void g(")
    ].count("\n")


def test_explicit_instantiation_with_parameters() -> None:
    assert translate(UNIT, "f_float", {})[1].expression == "f<float>"


@pytest.mark.parametrize(
    ("unit", "name", "says"),
    [
        (UNIT, "h", "no kernel 'h' in the source; kernels: f, g"),
        (f"{K} int f() {{ return 1; }}", "f", "must return void"),
        (f"{K} void f(uint i [[sample_id]]) {{}}", "f", "no attribute 'sample_id'"),
        (f"{K} void f(uint i) {{}}", "f", "parameter 'i': no attribute"),
    ],
)
def test_refused(unit: str, name: str, says: str) -> None:
    with pytest.raises(CompileError, match=says):
        translate(unit, name, {})
