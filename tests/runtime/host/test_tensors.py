"""Tensor operations on the host backend: what they compute in each layout, and planted faults.

The product and the softmax are those of Apple's published samples: tensors made inline, slices
whose edges are clipped, statistics of rows, a destination that becomes the next product's input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mlx_qlayers.runtime.host import (
    CompileError,
    Divergence,
    HostKernel,
    KernelFault,
    OutOfBounds,
    Race,
    Undefined,
    Uninitialised,
    compile_source,
)
from mlx_qlayers.runtime.host.compiled_kernel import LAYOUTS

Record = Callable[[str, Any], None]

_HEAD = """
#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
using matrix = tensor<device half, dextents<int, 2>, tensor_inline>;
using result = tensor<device float, dextents<int, 2>, tensor_inline>;
kernel void tensors(
    const device half* x [[buffer(0)]], const device half* w [[buffer(1)]],
    device float* y [[buffer(2)]], constant int* shape [[buffer(3)]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  int M = shape[0], N = shape[1], K = shape[2];
  matrix a((device half*)x, dextents<int, 2>(K, M));
  matrix b((device half*)w, dextents<int, 2>(K, N));
  result c(y, dextents<int, 2>(N, M));
  constexpr auto overwrite = matmul2d_descriptor(16, 32, (int)dynamic_extent, false, true);
  constexpr auto accumulate = matmul2d_descriptor(
      16, 32, (int)dynamic_extent, false, true, false,
      matmul2d_descriptor::mode::multiply_accumulate);
  constexpr auto fixed = matmul2d_descriptor(16, 32, 32, false, true);
  matmul2d<overwrite, execution_simdgroup> op;
  matmul2d<accumulate, execution_simdgroup> add;
  matmul2d<fixed, execution_simdgroup> tile;
  matmul2d<overwrite, execution_simdgroups<2>> pair;
  auto sums = op.get_destination_cooperative_tensor<matrix, matrix, float>();
"""
M, N, K = 16, 32, 40
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(M, K)).astype(np.float16)
W = _RNG.normal(size=(N, K)).astype(np.float16)
_BY_INDEX = """for (ushort i = 0; i < CT.get_capacity(); i++) {
  if (CT.is_valid_element(i)) { auto at = CT.get_multidimensional_index(i); DO }
}
"""


def _each(name: str, do: str) -> str:
    return _BY_INDEX.replace("CT", name).replace("DO", do)


_PRODUCT = X.astype(np.float64) @ W.astype(np.float64).T
_SOFTMAX = np.exp(_PRODUCT - _PRODUCT.max(1, keepdims=True))
_SOFTMAX /= _SOFTMAX.sum(1, keepdims=True)
_STATISTICS = """
  op.run(a, b, sums);
  auto most = op.get_row_reduction_destination_cooperative_tensor<matrix, matrix, float>();
  auto total = op.get_row_reduction_destination_cooperative_tensor<matrix, matrix, float>();
  reduce_rows(sums, most, reduction_operation::max, -INFINITY);
  for (auto it = sums.begin(); it != sums.end(); it++) {
    if (it.is_valid_element()) *it = exp(*it - *most.map_iterator(it));
  }
  reduce_rows(sums, total);
  for (auto it = sums.begin(); it != sums.end(); it++) {
    if (it.is_valid_element()) *it /= *total.map_iterator(it);
  }
"""
# Name, body, result.
RIGHT = {
    "product": ("op.run(a, b, sums); sums.store(c);", _PRODUCT),
    "product into memory": ("op.run(a, b, c);", _PRODUCT),
    "product of parts": (
        _each("sums2", "sums2[i] = 0;").replace("sums2", "part")
        + "for (int k = 0; k < K; k += 16) {"
        "  auto s = a.slice(k, 0); auto t = b.slice(k, 0);"
        "  auto u = s.slice<16, dynamic_extent>(0, 0);"
        "  auto v = t.slice<16, dynamic_extent>(0, 0);"
        "  if (k + 16 <= K) add.run(u, v, part); else add.run(s, t, part); } part.store(c);",
        _PRODUCT,
    ),
    "inputs by index": (
        "auto p = tile.get_left_input_cooperative_tensor<half, half, float>();"
        "auto q = tile.get_right_input_cooperative_tensor<half, half, float>();"
        "auto r = tile.get_destination_cooperative_tensor<decltype(p), decltype(q), float>();"
        + _each("p", "p[i] = x[at[1] * K + at[0]];")
        + _each("q", "q[i] = w[at[1] * K + at[0]];")
        + "tile.run(p, q, r);"
        + _each("r", "y[at[1] * N + at[0]] = r[i];"),
        X[:, :32].astype(np.float64) @ W[:, :32].astype(np.float64).T,
    ),
    "softmax": (_STATISTICS + "sums.store(c);", _SOFTMAX),
    "two products": (
        _STATISTICS + "constexpr auto next = matmul2d_descriptor(16, 32, 32);"
        "matmul2d<next, execution_simdgroup> second;"
        "auto p = second.get_left_input_cooperative_tensor<float, half, float>(sums);"
        "matrix v((device half*)w, dextents<int, 2>(32, 32), array<int, 2>{1, K});"
        "auto o = second.get_destination_cooperative_tensor<decltype(p), matrix, float>();"
        "second.run(p, v, o); o.store(c);",
        _SOFTMAX @ W[:, :32].astype(np.float64),
    ),
    "two SIMD groups": (
        "auto both = pair.get_destination_cooperative_tensor<matrix, matrix, float>();"
        "pair.run(a, b, both); both.store(c);",
        _PRODUCT,
    ),
    "integers": (
        "constexpr auto bytes = matmul2d_descriptor(16, 32, (int)dynamic_extent, false, true);"
        "matmul2d<bytes, execution_simdgroup> ints;"
        "tensor<device int8_t, dextents<int, 2>, tensor_inline> p((device int8_t*)x, "
        "dextents<int, 2>(K, M)), q((device int8_t*)w, dextents<int, 2>(K, N));"
        "auto r = ints.get_destination_cooperative_tensor<decltype(p), decltype(q), int>();"
        "ints.run(p, q, r);" + _each("r", "y[at[1] * N + at[0]] = r[i];"),
        X.view(np.int8).ravel()[: M * K].reshape(M, K).astype(np.float64)
        @ W.view(np.int8).ravel()[: N * K].reshape(N, K).astype(np.float64).T,
    ),
    "codes of 4 bits": (
        "constexpr auto half_bytes = matmul2d_descriptor(16, 32, 32, false, true);"
        "matmul2d<half_bytes, execution_simdgroup> four;"
        "tensor<device uint4b_format, dextents<int, 2>, tensor_inline> q((device uchar*)w, "
        "dextents<int, 2>(32, N));"
        "auto r = four.get_destination_cooperative_tensor<matrix, decltype(q), float>();"
        "four.run(a, q, r); r.store(c);",
        X[:, :32].astype(np.float64)
        @ np.stack(
            [W.view(np.uint8).ravel()[: N * 16] & 15, W.view(np.uint8).ravel()[: N * 16] >> 4], 1
        )
        .reshape(N, 32)
        .T,
    ),
}
RIGHT["product of parts"] = (
    "auto part = add.get_destination_cooperative_tensor<matrix, matrix, float>();"
    + RIGHT["product of parts"][0],
    _PRODUCT,
)


def _wrong(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(found - truth).max() / np.abs(truth).max())


@dataclass(frozen=True)
class Planted:
    """A body with a fault, the exception and what it says; None where the result is wrong."""

    name: str
    body: str
    kind: type[Exception] | None
    says: str = ""
    threads: int = 32
    system: str = "260200"


_CT = "get_destination_cooperative_tensor"
_INPUTS = (
    "auto p = tile.get_left_input_cooperative_tensor<half, half, float>();"
    "auto q = tile.get_right_input_cooperative_tensor<half, half, float>();"
    "auto r = tile.get_destination_cooperative_tensor<decltype(p), decltype(q), float>();"
)
_FILL = _each("p", "p[i] = x[at[1] * K + at[0]];") + _each("q", "q[i] = w[at[1] * K + at[0]];")
PLANTED = (
    Planted(
        "const operand",
        "tensor<device const half, dextents<int, 2>, tensor_inline> d(x, dextents<int, 2>(K, M));"
        "op.run(d, b, sums);",
        CompileError,
        "not const",
    ),
    Planted(
        "types that do not go together",
        f"auto r = op.{_CT}<matrix, matrix, int>();",
        CompileError,
        "does not take these types",
    ),
    Planted(
        "half result of float",
        f"auto r = op.{_CT}<result, matrix, half>();",
        CompileError,
        "does not take these types",
    ),
    Planted(
        "bfloat on macOS 26.0",
        "tile.get_left_input_cooperative_tensor<bfloat, bfloat, float>();",
        CompileError,
        "26.1",
        system="260000",
    ),
    Planted("inputs on macOS 26.1", _INPUTS, CompileError, "26.2", system="260100"),
    Planted(
        "codes of 4 bits on macOS 26.2",
        "tensor<device uint4b_format, dextents<int, 2>, tensor_inline> q((device uchar*)w, "
        "dextents<int, 2>(K, N));",
        CompileError,
        "uint4b_format",
    ),
    Planted(
        "codes of 4 bits as an input",
        "tile.get_right_input_cooperative_tensor<half, uint4b_format, float>();",
        CompileError,
        "right operands in memory only",
        system="260400",
    ),
    Planted(
        "codes of 4 bits, 24 of them",
        "constexpr auto d = matmul2d_descriptor(16, 32, 24, false, true);"
        "matmul2d<d, execution_simdgroup> o;"
        "tensor<device uint4b_format, dextents<int, 2>, tensor_inline> q((device uchar*)w, "
        "dextents<int, 2>(K, N));"
        f"auto r = o.{_CT}<matrix, decltype(q), float>();",
        CompileError,
        "multiple of 32",
        system="260400",
    ),
    Planted(
        "inputs of two SIMD groups",
        "matmul2d<fixed, execution_simdgroups<2>> o;"
        "o.get_left_input_cooperative_tensor<half, half, float>();",
        CompileError,
        "single SIMD group",
    ),
    Planted(
        "statistics of two SIMD groups",
        "pair.get_row_reduction_destination_cooperative_tensor<matrix, matrix, float>();",
        CompileError,
        "single SIMD group",
    ),
    Planted(
        "store that would convert",
        "op.run(a, b, sums); matrix h((device half*)y, dextents<int, 2>(N, M)); sums.store(h);",
        CompileError,
        "do not convert",
    ),
    Planted(
        "tensor of another operation",
        f"auto r = tile.{_CT}<matrix, matrix, float>(); op.run(a, b, r);",
        CompileError,
        "another operation",
    ),
    Planted(
        "input of another type than the destination",
        "op.run(a, b, sums); constexpr auto next = matmul2d_descriptor(16, 32, 32);"
        "matmul2d<next, execution_simdgroup> second;"
        "auto p = second.get_left_input_cooperative_tensor<half, half, float>(sums);",
        CompileError,
        "same element type",
    ),
    Planted("get_mask", "sums.get_mask(0);", CompileError, "is_valid_element"),
    Planted(
        "tile of 8 x 8",
        "constexpr auto d = matmul2d_descriptor(8, 8); matmul2d<d, execution_simdgroup> o;"
        "auto s = o.get_destination_cooperative_tensor<matrix, matrix, float>();",
        CompileError,
        "multiple of 16",
    ),
    Planted(
        "destination not cleared",
        f"auto r = add.{_CT}<matrix, matrix, float>(); add.run(a, b, r); r.store(c);",
        Uninitialised,
        "the destination is read in row",
    ),
    Planted(
        "input not filled",
        _INPUTS + _each("p", "p[i] = 1;") + "tile.run(p, q, r); r.store(c);",
        Uninitialised,
        "the right operand is read in row",
    ),
    Planted(
        "identity of a maximum left out",
        "op.run(a, b, sums);"
        "auto most = op.get_row_reduction_destination_cooperative_tensor<matrix, matrix, float>();"
        "reduce_rows(sums, most, reduction_operation::max);",
        Undefined,
        "0 is not the identity of a maximum",
    ),
    Planted(
        "depth beyond the operands",
        f"auto r = tile.{_CT}<matrix, matrix, float>();"
        "auto s = a.slice(32, 0); auto t = b.slice(32, 0); tile.run(s, t, r); r.store(c);",
        OutOfBounds,
        "a fixed depth of 32 reaches past the operands, which have 8 and 8",
    ),
    Planted(
        "fixed tile beyond its tensor",
        "auto s = a.slice<32, 16>(16, 0); auto t = b.slice<32, 32>(16, 0);"
        "op.run(s, t, sums); sums.store(c);",
        OutOfBounds,
        "a fixed tile of 32 columns and 16 rows, of which 24 and 16",
    ),
    Planted(
        "tensor larger than its buffer",
        "matrix d((device half*)x, dextents<int, 2>(K, M + 1)); auto s = d.slice(0, 1);"
        "op.run(s, b, sums); sums.store(c);",
        OutOfBounds,
        "buffer 0 (x)",
    ),
    Planted(
        "depths that differ",
        "auto s = a.slice(8, 0); op.run(s, b, sums);",
        Undefined,
        "a depth of 32, the right one of 40",
    ),
    Planted(
        "columns that are no neighbours",
        "matrix d((device half*)x, dextents<int, 2>(M, K), array<int, 2>{K, 1});",
        Undefined,
        "first stride",
    ),
    Planted("run of half the lanes", "if (lane < 16) op.run(a, b, sums);", Divergence, "16 of 32"),
    Planted(
        "run in two branches",
        "if (lane < 16) op.run(a, b, sums); else op.run(a, b, sums);",
        Divergence,
        "different places",
    ),
    Planted(
        "scope of two SIMD groups in three",
        "pair.run(a, b, c);",
        Divergence,
        "a scope of 2 SIMD groups in a threadgroup of 96 threads",
        threads=96,
    ),
    Planted(
        "one SIMD group of two",
        "if (simd == 0) pair.run(a, b, c);",
        Divergence,
        "take part",
        threads=64,
    ),
    Planted(
        "another slice in each lane",
        "auto s = a.slice(0, lane % 2); op.run(s, b, sums);",
        Divergence,
        "the left operand is not the same in threads",
    ),
    Planted(
        "result read without a barrier",
        "op.run(a, b, c); y[lane] += 1;",
        Race,
        "race",
    ),
    Planted(
        "element beyond the capacity",
        "op.run(a, b, sums); y[lane] = sums.is_valid_element(sums.get_capacity());",
        OutOfBounds,
        "of which each thread has",
    ),
    Planted(
        "slice with row before column",
        "auto s = a.slice(8, 0); auto d = a.slice(0, 8); auto t = b.slice(8, 0);"
        "auto u = d.slice(8, 0); op.run(u, t, sums); sums.store(c);",
        None,
    ),
    Planted(
        "fixed map of lanes",
        _INPUTS + _FILL + "tile.run(p, q, r);"
        "int f = lane >> 2; for (int i = 0; i < 16; i++) "
        "y[((f & 4 | lane >> 1 & 3) + i % 8 / 4 * 8) * N"
        " + (f & 2 | lane & 1) * 4 + i % 4 + i / 8 * 16]"
        " = r[i];",
        None,
    ),
    Planted(
        "elements that are none",
        "op.run(a, b, sums); float sum = 0;"
        "for (ushort i = 0; i < sums.get_capacity(); i++) sum += sums[i];"
        "y[lane] = sum; y[lane] = simd_sum(sum);",
        None,
    ),
)


RUNNING = [p for p in PLANTED if p.kind is not CompileError]
# What compiles is one kernel, so that it is compiled once.
_BODIES = [body for body, _ in RIGHT.values()] + [p.body for p in RUNNING]
_CASES = "".join(f"case {i}: {{ {body} }} break;\n" for i, body in enumerate(_BODIES))


def _compile(body: str, checked: bool, system: str, language: int = 400) -> HostKernel:
    return compile_source(
        *(f"{_HEAD}{body}\n}}", "tensors"),
        checked=checked,
        language=language,
        defines={"__ENVIRONMENT_OS_VERSION_MIN_REQUIRED__": system},
    )


def _run(case: int, layout: str = "random", threads: int = 32, checked: bool = True) -> np.ndarray:
    kernel = _compile(f"switch (shape[3]) {{\n{_CASES}}}", checked, "260400")
    y = np.zeros((M, N), np.float32)
    buffers = {0: X, 1: W, 2: y, 3: np.array([M, N, K, case], np.int32)}
    groups = (threads, 1, 1)
    kernel.run(buffers, groups, groups, writes=[2], tensor_layout=layout)
    return y


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    case, truth = list(RIGHT).index(name), RIGHT[name][1]
    for layout in LAYOUTS:
        found = _run(case, layout, 64 if "two SIMD" in name else 32)
        assert _wrong(found, truth) < 2**-17, layout


def test_fast_build() -> None:
    found = _run(list(RIGHT).index("two products"), "m5", checked=False)
    assert _wrong(found, RIGHT["two products"][1]) < 2**-17


def _record(planted: Planted, found: str, record_property: Record) -> None:
    record_property("table: faults planted in tensor operations", [planted.name, found])


@pytest.mark.parametrize(
    "planted", [p for p in PLANTED if p.kind is CompileError], ids=lambda p: p.name
)
def test_refused(planted: Planted, record_property: Record) -> None:
    with pytest.raises(CompileError, match=planted.says) as caught:
        _compile(planted.body, True, planted.system)
    found = str(caught.value).split("error: ")[1].split("\n")[0]
    _record(planted, found, record_property)


@pytest.mark.parametrize("planted", RUNNING, ids=lambda p: p.name)
def test_found(planted: Planted, record_property: Record) -> None:
    case = len(RIGHT) + RUNNING.index(planted)
    if planted.kind is None:
        # One layout in which the fault does not show may come by chance, three in a row do not.
        assert any(not _wrong(_run(case), _PRODUCT) < 0.1 for _ in range(3))
        _record(planted, "the result is wrong", record_property)
        return
    with pytest.raises(planted.kind) as caught:
        _run(case, threads=planted.threads)
    assert type(caught.value) is planted.kind, str(caught.value)
    assert planted.says in str(caught.value)
    assert isinstance(caught.value, KernelFault) and caught.value.place is not None
    _record(planted, str(caught.value), record_property)


def test_before_metal_4() -> None:
    with pytest.raises(CompileError, match="mpp"):
        _compile("", True, "260200", language=320)
