// Products in 8-bit integers: rows of x are quantized to int8 in each call, w at conversion.
//
// int8_rows     q (M, K) = round(r (M, K) / scale), scale (M,) = the largest |r| of a row / 127, where
//               r is x (M, K), or activation(x) * other (M, K) with a gate, or with normed the RMS
//               norm of x, with the weight other (K,) if normed is 2. Each `block` columns of r (0, or
//               16 to 128) are multiplied by 1/8 of a Hadamard matrix first. A threadgroup computes a
//               row, a thread `runs` times 8 contiguous elements, with K at most 8 * threads * runs.
//               shape: K, and the bits of epsilon. Grid (threads * M, 1, 1), threadgroup
//               (threads, 1, 1).
// int8_product  y (M, N) = row_scales * (q (M, K) * w (N, K)^T) * column_scales + bias, by Metal 4's
//               tensor operations: sums of int32 over all of the depth in a cooperative destination
//               of tile_m x tile_n, spread over 8 SIMD groups. Grid (ceil(M / tile_m) * 256,
//               ceil(N / tile_n), 1), threadgroup (256, 1, 1). SHARED is the dynamic shared memory
//               that the operation takes on CUDA; 0 elsewhere.
//
// K is a multiple of 16. Needs Metal 4, macOS 26.2; int8_product was never run on an M5.

#include "common/load.metal"
#include "quantized_matmul/epilogue.metal"

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
using namespace metal;

#define INT8_SIMDS 8
// Elements that a thread loads and stores as a vector.
#define INT8_RUN 8

// Contiguous elements of a row as floats.
template <typename T>
METAL_FUNC void read_run(thread float* to, const device T* x, size_t at) {
  alignas(16) uint words[INT8_RUN * sizeof(T) / 4];
  load_words<INT8_RUN * sizeof(T) / 4>(words, x, at);
  const thread T* values = reinterpret_cast<const thread T*>(words);
#pragma unroll
  for (int i = 0; i < INT8_RUN; i++) {
    to[i] = float(values[i]);
  }
}

// Multiplies the columns of a block by a Hadamard matrix; each of block / 8 lanes holds 8 columns.
template <int block>
METAL_FUNC void mix_run(thread float* values, uint lane) {
#pragma unroll
  for (int step = 1; step < INT8_RUN; step *= 2) {
#pragma unroll
    for (int i = 0; i < INT8_RUN; i++) {
      if ((i & step) == 0) {
        float low = values[i], high = values[i + step];
        values[i] = low + high;
        values[i + step] = low - high;
      }
    }
  }
#pragma unroll
  for (int step = 1; step < block / INT8_RUN; step *= 2) {
    float sign = (lane & step) ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < INT8_RUN; i++) {
      values[i] = fma(sign, values[i], simd_shuffle_xor(values[i], ushort(step)));
    }
  }
}

// activation() with fast exponential and division, whose error is below the rounding to 8 bits.
template <int gate>
METAL_FUNC float quick_activation(float x) {
  if (gate == GATE_GELU) {
    return activation<gate>(x);
  }
  float u = gate == GATE_SILU ? x : 1.59576912f * fma(0.044715f * x * x, x, x);
  return fast::divide(x, 1 + fast::exp(-u));
}

template <typename T, int threads, int runs, int block, int gate, int normed>
[[kernel]] void int8_rows(
    const device T* x,
    const device T* other,
    constant int* shape,
    device int8_t* q,
    device float* scales,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float squares_of[threads / 32];
  threadgroup uint most_of[threads / 32];
  int K = shape[0], first = thread_index * INT8_RUN;
  size_t row = size_t(place.x) * K;
  float values[runs][INT8_RUN], squares = 0.0f;
#pragma unroll
  for (int r = 0; r < runs; r++) {
    int k = first + r * threads * INT8_RUN;
    float others[INT8_RUN];
    if (k < K) {
      read_run(values[r], x, row + k);
      if (gate) {
        read_run(others, other, row + k);
      }
    }
#pragma unroll
    for (int i = 0; i < INT8_RUN; i++) {
      values[r][i] = k < K ? values[r][i] : 0.0f;
      if (gate && k < K) {
        values[r][i] = quick_activation<gate>(values[r][i]) * others[i];
      }
      squares += values[r][i] * values[r][i];
    }
  }
  float factor = block ? 0.125f : 1.0f;
  if (normed) {
    float sum = simd_sum(squares);
    if (lane == 0) {
      squares_of[simd] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0.0f;
    for (int i = 0; i < threads / 32; i++) {
      sum += squares_of[i];
    }
    factor *= precise::rsqrt(sum / K + as_type<float>(shape[1]));
  }
  // The bits of positive floats have the order of their values, and NaN is the largest.
  uint most = 0;
#pragma unroll
  for (int r = 0; r < runs; r++) {
    int k = first + r * threads * INT8_RUN;
    float weights[INT8_RUN];
    if (normed == 2 && k < K) {
      read_run(weights, other, k);
    }
#pragma unroll
    for (int i = 0; i < INT8_RUN; i++) {
      values[r][i] *= normed == 2 ? (k < K ? factor * weights[i] : 0.0f) : factor;
    }
    if (block) {
      mix_run<block>(values[r], lane);
    }
#pragma unroll
    for (int i = 0; i < INT8_RUN; i++) {
      most = max(most, as_type<uint>(abs(values[r][i])));
    }
  }
  most = simd_max(most);
  if (lane == 0) {
    most_of[simd] = most;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < threads / 32; i++) {
    most = max(most, most_of[i]);
  }
  float whole = as_type<float>(most);
  float inverse = whole > 0 && whole < INFINITY ? 127.0f / whole : 0.0f;
  if (thread_index == 0) {
    scales[place.x] = whole / 127.0f;
  }
#pragma unroll
  for (int r = 0; r < runs; r++) {
    int k = first + r * threads * INT8_RUN;
    alignas(8) int8_t codes[INT8_RUN];
#pragma unroll
    for (int i = 0; i < INT8_RUN; i++) {
      codes[i] = inverse == 0 ? 0 : int8_t(int(rint(values[r][i] * inverse)));
    }
    if (k < K) {
      *reinterpret_cast<device uint2*>(q + row + k) = *reinterpret_cast<thread uint2*>(codes);
    }
  }
}

// Whether the element in the next slot, or in the one before, is that of the next column, or of the one before.
template <typename C>
METAL_FUNC bool has_neighbour(thread C& sums, ushort i, int step, int column, int row) {
  ushort other = ushort(int(i) + step);
  if (other >= sums.get_capacity() || !sums.is_valid_element(other)) {
    return false;
  }
  auto index = sums.get_multidimensional_index(other);
  return index[0] == column + step && index[1] == row;
}

// Stores element i of a tile at (m, n) to y (M, N), together with the next element if that is its neighbour;
// stores nothing if the element before has stored it.
template <typename T, typename C>
METAL_FUNC void write_element(thread C& sums, ushort i, device T* y, int m, int M, int n, int N) {
  if (!sums.is_valid_element(i)) {
    return;
  }
  auto index = sums.get_multidimensional_index(i);
  int r = m + index[1], c = n + index[0];
  bool pairs = N % 2 == 0 && reinterpret_cast<ulong>(y) % (2 * sizeof(T)) == 0;
  bool first = pairs && c % 2 == 0 && has_neighbour(sums, i, 1, index[0], index[1]);
  bool second = pairs && c % 2 == 1 && i > 0 && has_neighbour(sums, i, -1, index[0], index[1]);
  if (r >= M || c >= N || second) {
    return;
  }
  device T* to = y + size_t(r) * N + c;
  if (first) {
    float2 both = float2(as_type<float>(sums[i]), as_type<float>(sums[i + 1]));
    *reinterpret_cast<device metal::vec<T, 2>*>(to) = metal::vec<T, 2>(both);
  } else {
    to[0] = T(as_type<float>(sums[i]));
  }
}

template <typename T, int tile_m, int tile_n, bool biased, int SHARED>
[[kernel]] void int8_product(
    const device int8_t* x,
    const device int8_t* w,
    const device float* row_scales,
    const device float* column_scales,
    const device T* bias,
    constant int* shape,
    device T* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      tile_m, tile_n, int(metal::dynamic_extent), false, true);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroups<INT8_SIMDS>> product;
  using operand = metal::tensor<device int8_t, metal::dextents<int, 2>, metal::tensor_inline>;
  int M = shape[0], N = shape[1], K = shape[2], m = place.x * tile_m, n = place.y * tile_n;
  operand left((device int8_t*)x + size_t(m) * K, metal::dextents<int, 2>(K, M - m));
  operand right((device int8_t*)w + size_t(n) * K, metal::dextents<int, 2>(K, N - n));
  auto sums = product.template get_destination_cooperative_tensor<operand, operand, int>();
  product.run(left, right, sums);
  // Scaled first and stored afterwards, so that each scale is loaded once.
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      auto index = sums.get_multidimensional_index(i);
      int r = min(m + index[1], M - 1), c = min(n + index[0], N - 1);
      float scaled = float(sums[i]) * row_scales[r] * column_scales[c];
      sums[i] = as_type<int>(biased ? scaled + float(bias[c]) : scaled);
    }
  }
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    write_element(sums, i, y, m, M, n, N);
  }
}
