"""What Apple's documentation shows of tensor operations, written anew, in each layout of lanes.

[MSL] is the Metal Shading Language Specification, version 4, section 7.2.1 (matmul2d); [HEADER] the
comment at the head of MPPTensorOpsMatMul2d.h; [INLINE] the sample "Running inline ML operations in
a shader with Metal 4" (developer.apple.com/documentation/metal); [GUIDE] the Metal Performance
Primitives Programming Guide, chapter 2. Their tensors are bound by the application where these are
made inline, as an MLX kernel must.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mlx_qlayers.runtime.host import CompileError, Undefined, compile_source
from mlx_qlayers.runtime.host.compiled_kernel import LAYOUTS

M, N, K = 100, 70, 40
_RNG = np.random.default_rng(7)
A = _RNG.normal(size=(M, K)).astype(np.float16)
B = _RNG.normal(size=(K, N)).astype(np.float16)
BIAS = _RNG.normal(size=N).astype(np.float32)
_PRODUCT = A.astype(np.float64) @ B.astype(np.float64)
# Of the first tile of rows and columns.
_TILE = _PRODUCT[:64, :32]

_HEAD = """
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp;
using operand = tensor<device half, dextents<int, 2>, tensor_inline>;
using result = tensor<device float, dextents<int, 2>, tensor_inline>;
kernel void sample(
    device half* left [[buffer(0)]], device half* right [[buffer(1)]],
    device float* bias [[buffer(2)]], device float* out [[buffer(3)]],
    constant int* shape [[buffer(4)]], uint2 tile [[threadgroup_position_in_grid]]) {
  int rows = shape[0], columns = shape[1], depth = shape[2];
  operand a(left, dextents<int, 2>(depth, rows)), b(right, dextents<int, 2>(columns, depth));
  result c(out, dextents<int, 2>(columns, rows));
  constexpr auto whole = tensor_ops::matmul2d_descriptor(64, 32, 0);
  constexpr auto adding = tensor_ops::matmul2d_descriptor(
      64, 32, 0, false, false, false, tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  tensor_ops::matmul2d<whole, execution_simdgroups<4>> op;
  tensor_ops::matmul2d<adding, execution_simdgroups<4>> add;
  tensor_ops::matmul2d<whole, execution_simdgroup> one;
  auto some_a = a.slice(0, tile.y * 64), some_b = b.slice(tile.x * 32, 0);
  auto some_c = c.slice(tile.x * 32, tile.y * 64);
  auto sums = op.get_destination_cooperative_tensor<operand, operand, float>();
  auto own = one.get_destination_cooperative_tensor<operand, operand, float>();
  auto of_rows = one.get_row_reduction_destination_cooperative_tensor<operand, operand, float>();
"""
_LEAST = """
  one.run(some_a, some_b, own);
  tensor_ops::reduce_rows(own, of_rows, tensor_ops::reduction_operation::min, IDENTITY);
  if (tensor_ops::is_iterator_compatible(own, of_rows)) {
    for (auto each = own.begin(); each != own.end(); each++)
      if (each.is_valid_element()) *each += *of_rows.map_iterator(each);
  } else {
    tensor<device float, dextents<int, 1>, tensor_inline> to(bias, dextents<int, 1>(64));
    of_rows.store(to);
    simdgroup_barrier(mem_flags::mem_device);
    for (ushort i = 0; i < own.get_capacity(); i++)
      if (own.is_valid_element(i)) {
        auto at = own.get_multidimensional_index(i);
        own[i] += bias[at[1]];
      }
  }
  own.store(some_c);
"""


@dataclass(frozen=True)
class Sample:
    """What is documented where, and what it gives: all of it, or a single SIMD group's tile."""

    name: str
    source: str
    body: str
    truth: np.ndarray
    single: bool = False


SAMPLES = (
    Sample(
        "threadgroups multiply their tiles into memory, clipped at the edges",
        "[MSL] matmul2d with tensors, [HEADER] basic usage",
        "op.run(some_a, some_b, some_c);",
        _PRODUCT,
    ),
    Sample(
        "a tile inside is a slice of fixed extents",
        "[HEADER] static slices, [GUIDE]",
        "auto inside = a.slice<dynamic_extent, 64>(0, tile.y * 64);"
        "auto beside = b.slice<32, dynamic_extent>(tile.x * 32, 0);"
        "if (int(tile.y * 64 + 64) <= rows && int(tile.x * 32 + 32) <= columns)"
        "  op.run(inside, beside, some_c);"
        "else op.run(some_a, some_b, some_c);",
        _PRODUCT,
    ),
    Sample(
        "sums stay in registers over a loop in steps of the depth",
        "[INLINE], [GUIDE]",
        "auto total = add.get_destination_cooperative_tensor<operand, operand, float>();"
        "for (ushort i = 0; i < total.get_capacity(); i++)"
        "  if (total.is_valid_element(i)) total[i] = 0;"
        "for (int k = 0; k < depth; k += 16) {"
        "  operand a_step(left + k, dextents<int, 2>(min(16, depth - k), rows), "
        "array<int, 2>{1, depth});"
        "  operand b_step(right + k * columns, dextents<int, 2>(columns, min(16, depth - k)));"
        "  auto p = a_step.slice(0, tile.y * 64), q = b_step.slice(tile.x * 32, 0);"
        "  add.run(p, q, total); }"
        "total.store(some_c);",
        _PRODUCT,
    ),
    Sample(
        "an activation of what is held",
        "[HEADER] cooperative tensors",
        "op.run(some_a, some_b, sums);"
        "for (ushort i = 0; i < sums.get_capacity(); i++)"
        "  if (sums.is_valid_element(i)) sums[i] = max(sums[i], 0.0f);"
        "sums.store(some_c);",
        np.maximum(_PRODUCT, 0),
    ),
    Sample(
        "a bias that the product is added to",
        "[MSL] matmul2d with cooperative_tensor",
        "auto total = add.get_destination_cooperative_tensor<operand, operand, float>();"
        "for (ushort i = 0; i < total.get_capacity(); i++) {"
        "  if (!total.is_valid_element(i)) continue;"
        "  auto at = total.get_multidimensional_index(i);"
        "  int column = tile.x * 32 + at[0]; total[i] = column < columns ? bias[column] : 0; }"
        "add.run(some_a, some_b, total); total.store(some_c);",
        _PRODUCT + BIAS,
    ),
    Sample(
        "sums of rows",
        "[MSL] reduce_rows",
        "one.run(some_a, some_b, own);"
        "tensor_ops::reduce_rows(own, of_rows, tensor_ops::reduction_operation::sum, 0.0f);"
        "tensor<device float, dextents<int, 1>, tensor_inline> to("
        "out, dextents<int, 1>(64), array<int, 1>{1}); of_rows.store(to);",
        _TILE.sum(1),
        single=True,
    ),
    Sample(
        "the least of each row added to it",
        "[MSL] map_iterator, with the identity of a minimum",
        _LEAST.replace("IDENTITY", "numeric_limits<float>::max()"),
        _TILE + _TILE.min(1, keepdims=True),
        single=True,
    ),
)
# What is shown there, but is undefined or wrong.
REFUSED = (
    (
        "the identity of a maximum for a minimum: [MSL] map_iterator",
        _LEAST.replace("IDENTITY", "numeric_limits<float>::lowest()"),
        Undefined,
        "is not the identity of a minimum",
    ),
    (
        "a tensor of rank 1 loaded into one of rank 2: [MSL] matmul2d with cooperative_tensor",
        "tensor<device float, dextents<int, 1>, tensor_inline> from("
        "bias, dextents<int, 1>(64), array<int, 1>{1}); sums.load(from);",
        CompileError,
        "is not documented",
    ),
)
# What compiles is one kernel.
_BODIES = [s.body for s in SAMPLES] + [REFUSED[0][1]]
_CASES = "".join(f"case {i}: {{ {body} }} break;\n" for i, body in enumerate(_BODIES))


def _run(body: str, case: int, layout: str, single: bool) -> np.ndarray:
    kernel = compile_source(f"{_HEAD}{body}\n}}", "sample", checked=True, language=400)
    out = np.zeros((M, N), np.float32)
    shape = np.array([M, N, K, case], np.int32)
    buffers = {0: A.copy(), 1: B.copy(), 2: BIAS.copy(), 3: out, 4: shape}
    threads = 32 if single else 128
    grid = (threads, 1, 1) if single else (-(-N // 32) * threads, -(-M // 64), 1)
    kernel.run(buffers, grid, (threads, 1, 1), writes=[0, 1, 2, 3], tensor_layout=layout)
    return out


@pytest.mark.parametrize("case", range(len(SAMPLES)), ids=lambda i: SAMPLES[i].name)
def test_samples(case: int) -> None:
    sample = SAMPLES[case]
    for layout in LAYOUTS:
        out = _run(f"switch (shape[3]) {{\n{_CASES}}}", case, layout, sample.single)
        found = out.ravel()[:64] if sample.truth.ndim == 1 else out
        found = found[:64, :32] if sample.truth.shape == _TILE.shape else found
        assert np.abs(found - sample.truth).max() < 2**-17 * np.abs(sample.truth).max(), layout


@pytest.mark.parametrize(("name", "body", "kind", "says"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused(name: str, body: str, kind: type[Exception], says: str) -> None:
    if kind is Undefined:
        body = f"switch (shape[3]) {{\n{_CASES}}}"
    with pytest.raises(kind, match=says):
        _run(body, len(SAMPLES), "random", True)
