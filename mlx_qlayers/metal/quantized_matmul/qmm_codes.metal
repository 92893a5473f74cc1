// Product of many rows with a matrix of 4-bit codes (affine, transposed), which Metal 4's tensor operations
// take packed; with the epilogues of qmm_tensor.metal. A weight is scale * code + bias, so that, over the
// groups of K,
//
//   x * w^T = sum of scale * (x * codes^T) + (sums of x) * biases^T
//
// group_sums   the sums of x, (M, 2 * K / group) bfloat: rounded sums, then their rounding errors
//
// qmm_codes    A threadgroup of `simds` SIMD groups computes rows x columns of y. First it multiplies
//              sums of x and biases, through threadgroup memory; then it multiplies each group of codes
//              with x, from device memory. The products of a group have a destination of their own, and
//              are added to `sums`, times the scales of their columns, by index.
//
//   grid (32 * simds * ceil(M / rows), ceil(N / columns), 1), threadgroup (32 * simds, 1, 1);
//   threadgroup memory 4 * columns * (rows + 2 * AT_ONCE). A gate's matrices are computed one after the other.
//
// Needs Metal 4, macOS 26.4; never run on the hardware that it is for.

#include "qmm_tensor.metal"

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
using namespace metal;

// Groups whose scales are loaded at once.
#define AT_ONCE 4

template <typename T, int group>
[[kernel]] void group_sums(
    const device T* x,
    constant int* shape,
    device bfloat* sums,
    uint3 place [[thread_position_in_grid]]) {
  int groups = shape[1] / group, row = place.x / groups, g = place.x % groups;
  if (row < shape[0]) {
    float4 parts = 0.0f;
    for (int k = 0; k < group; k += 4) {
      parts += four_floats(x + size_t(row) * shape[1] + g * group + k);
    }
    float sum = parts.x + parts.y + parts.z + parts.w;
    device bfloat* to = sums + size_t(row) * 2 * groups + g;
    to[0] = bfloat(sum);
    to[groups] = bfloat(sum - float(to[0]));
  }
}

// sums = (the sums of x) * biases^T, through threadgroup memory.
template <int rows, int columns, int simds, typename S, typename C>
METAL_FUNC void add_offsets(
    thread C& sums,
    threadgroup float* memory,
    const device bfloat* x_sums,
    const device S* biases,
    int M,
    int n,
    int N,
    int groups) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      rows, columns, int(metal::dynamic_extent), false, true, false,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroups<simds>> product;
  using left = row_operand<bfloat>;
  using right = row_operand<S>;
  auto offsets = product.template get_destination_cooperative_tensor<left, right, float>();
  clear_sums(offsets);
  right all((device S*)biases, metal::dextents<int, 2>(groups, N));
  auto part = all.slice(0, n);
  for (int i = 0; i < 2; i++) {
    left of_x(
        (device bfloat*)x_sums + i * groups, metal::dextents<int, 2>(groups, M),
        metal::array<int, 2>{1, 2 * groups});
    product.run(of_x, part, offsets);
  }
  metal::tensor<threadgroup float, metal::dextents<int, 2>, metal::tensor_inline> to(
      memory, metal::dextents<int, 2>(columns, rows));
  offsets.store(to);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      auto index = sums.get_multidimensional_index(i);
      sums[i] = memory[index[1] * columns + index[0]];
    }
  }
}

// sums += scale * (x * codes^T) of every group.
template <int group, int columns, int simds, typename T, typename S, typename P, typename C>
METAL_FUNC void add_groups(
    thread P& product,
    thread C& sums,
    thread C& of_group,
    threadgroup float* factors,
    const device T* x,
    const device uint* w,
    const device S* scales,
    int M,
    int n,
    int N,
    int K,
    int thread_index) {
  int groups = K / group, stage = 0;
  row_operand<T> rows((device T*)x, metal::dextents<int, 2>(K, M));
  row_operand<uint4b_format> codes((device uchar*)w, metal::dextents<int, 2>(K, N));
  for (int first = 0; first < groups; first += AT_ONCE) {
    threadgroup float* held = factors + stage * AT_ONCE * columns;
    for (int i = thread_index; i < AT_ONCE * columns; i += 32 * simds) {
      int column = n + i / AT_ONCE, g = first + i % AT_ONCE;
      bool inside = column < N && g < groups;
      held[i] = inside ? float(scales[size_t(column) * groups + g]) : 0.0f;
    }
    // The copy of two iterations ago was read before the barrier of the last iteration.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage = 1 - stage;
    for (int g = first; g < min(first + AT_ONCE, groups); g++) {
      auto some_rows = rows.slice(g * group, 0);
      auto some_codes = codes.slice(g * group, n);
      product.run(some_rows, some_codes, of_group);
      for (ushort i = 0; i < sums.get_capacity(); i++) {
        if (sums.is_valid_element(i)) {
          auto index = sums.get_multidimensional_index(i);
          sums[i] = fma(of_group[i], held[index[0] * AT_ONCE + g - first], sums[i]);
        }
      }
    }
  }
}

template <typename T, typename S, int group, int rows, int columns, int simds, int gate>
[[kernel]] void qmm_codes(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    const device T* residual,
    const device uint* w1,
    const device S* scales1,
    const device S* biases1,
    const device T* bias1,
    const device bfloat* x_sums,
    constant int* shape,
    device T* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      rows, columns, group, false, true, true,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroups<simds>> product;
  threadgroup float memory[rows * columns];
  threadgroup float factors[2 * AT_ONCE * columns];
  int M = shape[0], N = shape[1], K = shape[2], groups = K / group;
  int m = place.x * rows, n = place.y * columns;
  x += size_t(m) * K;
  x_sums += size_t(m) * 2 * groups;
  auto sums = product.template get_destination_cooperative_tensor<
      row_operand<T>, row_operand<uint4b_format>, float>();
  auto others = product.template get_destination_cooperative_tensor<
      row_operand<T>, row_operand<uint4b_format>, float>();
  auto of_group = product.template get_destination_cooperative_tensor<
      row_operand<T>, row_operand<uint4b_format>, float>();
  add_offsets<rows, columns, simds>(sums, memory, x_sums, biases, M - m, n, N, groups);
  add_groups<group, columns, simds>(
      product, sums, of_group, factors, x, w, scales, M - m, n, N, K, thread_index);
  if (gate) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_offsets<rows, columns, simds>(others, memory, x_sums, biases1, M - m, n, N, groups);
    add_groups<group, columns, simds>(
        product, others, of_group, factors, x, w1, scales1, M - m, n, N, K, thread_index);
  }
  write_tensor<gate>(sums, others, 1.0f, bias, bias1, residual, y, m, M, n, N);
}
