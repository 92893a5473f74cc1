"""Kernels of tensor operations, with the result of each.

The product and the softmax are those of Apple's published samples: tensors made inline, slices
whose edges are clipped, statistics of rows, a destination that becomes the next product's input.
"""

import numpy as np

HEAD = """
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


def each(name: str, do: str) -> str:
    return _BY_INDEX.replace("CT", name).replace("DO", do)


PRODUCT = X.astype(np.float64) @ W.astype(np.float64).T
_SOFTMAX = np.exp(PRODUCT - PRODUCT.max(1, keepdims=True))
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
_LEAST = """
  op.run(a, b, sums);
  auto least = op.get_row_reduction_destination_cooperative_tensor<matrix, matrix, float>();
  reduce_rows(sums, least, reduction_operation::min, IDENTITY);
  for (auto it = sums.begin(); it != sums.end(); it++) {
    if (it.is_valid_element()) *it += *least.map_iterator(it);
  }
  sums.store(c);
"""
# As Apple's specification has it, which is the identity of a maximum.
WRONG_LEAST = _LEAST.replace("IDENTITY", "numeric_limits<float>::lowest()")
# Name, body, result.
RIGHT = {
    "product": ("op.run(a, b, sums); sums.store(c);", PRODUCT),
    "product into memory": ("op.run(a, b, c);", PRODUCT),
    "product of parts": (
        each("part", "part[i] = 0;") + "for (int k = 0; k < K; k += 16) {"
        "  auto s = a.slice(k, 0); auto t = b.slice(k, 0);"
        "  auto u = s.slice<16, dynamic_extent>(0, 0);"
        "  auto v = t.slice<16, dynamic_extent>(0, 0);"
        "  if (k + 16 <= K) add.run(u, v, part); else add.run(s, t, part); } part.store(c);",
        PRODUCT,
    ),
    "inputs by index": (
        "auto p = tile.get_left_input_cooperative_tensor<half, half, float>();"
        "auto q = tile.get_right_input_cooperative_tensor<half, half, float>();"
        "auto r = tile.get_destination_cooperative_tensor<decltype(p), decltype(q), float>();"
        + each("p", "p[i] = x[at[1] * K + at[0]];")
        + each("q", "q[i] = w[at[1] * K + at[0]];")
        + "tile.run(p, q, r);"
        + each("r", "y[at[1] * N + at[0]] = r[i];"),
        X[:, :32].astype(np.float64) @ W[:, :32].astype(np.float64).T,
    ),
    "softmax": (_STATISTICS + "sums.store(c);", _SOFTMAX),
    "a bias that the product is added to": (
        "auto total = add.get_destination_cooperative_tensor<matrix, matrix, float>();"
        + each("total", "total[i] = w[at[0]];")
        + "add.run(a, b, total); total.store(c);",
        PRODUCT + W.ravel()[:N].astype(np.float64),
    ),
    "least of each row": (
        _LEAST.replace("IDENTITY", "numeric_limits<float>::max()"),
        PRODUCT + PRODUCT.min(1, keepdims=True),
    ),
    "two products": (
        _STATISTICS + "constexpr auto next = matmul2d_descriptor(16, 32, 32);"
        "matmul2d<next, execution_simdgroup> second;"
        "auto p = second.get_left_input_cooperative_tensor<float, half, float>(sums);"
        "matrix v((device half*)w, dextents<int, 2>(32, 32), array<int, 2>{1, K});"
        "auto o = second.get_destination_cooperative_tensor<decltype(p), matrix, float>();"
        "second.run(p, v, o); o.store(c);",
        _SOFTMAX @ W[:, :32].astype(np.float64),
    ),
    "sums as an input": (
        "op.run(a, b, sums); constexpr auto next = matmul2d_descriptor(16, 32, 32);"
        "matmul2d<next, execution_simdgroup> second;"
        "auto p = second.get_left_input_cooperative_tensor<float, half, float>(sums);"
        "matrix v((device half*)w, dextents<int, 2>(32, 32), array<int, 2>{1, K});"
        "second.run(p, v, c);",
        PRODUCT @ W[:, :32].astype(np.float64),
    ),
    "two SIMD groups": (
        "auto both = pair.get_destination_cooperative_tensor<matrix, matrix, float>();"
        "pair.run(a, b, both); both.store(c);",
        PRODUCT,
    ),
    "integers": (
        "constexpr auto bytes = matmul2d_descriptor(16, 32, (int)dynamic_extent, false, true);"
        "matmul2d<bytes, execution_simdgroup> ints;"
        "tensor<device int8_t, dextents<int, 2>, tensor_inline> p((device int8_t*)x, "
        "dextents<int, 2>(K, M)), q((device int8_t*)w, dextents<int, 2>(K, N));"
        "auto r = ints.get_destination_cooperative_tensor<decltype(p), decltype(q), int>();"
        "ints.run(p, q, r);" + each("r", "y[at[1] * N + at[0]] = r[i];"),
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
# Programs that take elements of one tensor for those of another without asking.
NOT_ASKED = {
    "softmax": "is_iterator_compatible",
    "least of each row": "is_iterator_compatible",
    "two products": "is_iterator_compatible",
    "sums as an input": "is_compatible_as_left_input",
}
RIGHT["product of parts"] = (
    "auto part = add.get_destination_cooperative_tensor<matrix, matrix, float>();"
    + RIGHT["product of parts"][0],
    PRODUCT,
)
