// matmul2d of one warp on NVIDIA GPUs, in half precision with float32 sums: what
// quantized_matmul/qmm_tensor.metal and attention/tensor_*.metal use. Operands lie in device memory
// or are cooperative tensors, whose elements are where the tensor cores of mma.h want them.
#pragma once

#include "shared_tensor.h"

namespace mlx::core::cu {

// Whether warps share the rows of such a step: tensor cores read them from shared memory.
template <int K>
constexpr bool SHARES_ROWS = MSL_LOCKSTEP && HAS_WARPGROUPS && MSL_GROUP_SIZE % 128 == 0 && K % 64 == 0;

// The index along the depth K of a lane's element i in a row or column of an operand: runs of neighbours,
// each one load of a row of x and one word of 4-bit codes. Both operands permute the depth alike, so
// that any order gives the same sums.
template <int K>
struct warp_depth {
  static constexpr int COUNT = K / 4, RUN = SHARES_ROWS<K> ? 2 : COUNT < 8 ? COUNT : 8;
  static int at(int i) {
    return i / RUN * (4 * RUN) + int(threadIdx.x % 4) * RUN + i % RUN;
  }
};

// Columns of a lane, one of every eight; neighbours where rows of the right operand run along them.
template <int N, bool TRANSPOSED>
struct warp_columns {
  static constexpr int COUNT = N / 8;
  static constexpr int RUN = TRANSPOSED ? 1 : COUNT % 8 == 0 ? 8 : COUNT % 4 == 0 ? 4 : 2;
  static int at(int i) {
    return i / RUN * (8 * RUN) + int(threadIdx.x % 32) / 4 * RUN + i % RUN;
  }
};

// Sums M x N: of their transpose, tiles of 16 x 8, so that a run of a row of x is registers of one
// operand as it was loaded, and decoded weights those of the other.
template <int M, int N, bool TRANSPOSED>
struct warp_sums {
  static constexpr int COUNT = M * N / 32;
  // The row of a lane's element i.
  static int row(int i) {
    return i / (N / 4) * 2 + i % 2;
  }
  static index_array<int, 2> at(int i) {
    return {{warp_columns<N, TRANSPOSED>::at(i / 4 % (N / 16) * 2 + i / 2 % 2),
             i / (N / 4) * 8 + int(threadIdx.x % 4) * 2 + i % 2}};
  }
};
// A left operand M x K: of every eight rows one, along the depth.
template <int M, int K>
struct warp_left {
  static constexpr int COUNT = M * K / 32, DEPTH = warp_depth<K>::COUNT;
  static index_array<int, 2> at(int i) {
    return {{warp_depth<K>::at(i % DEPTH), i / DEPTH * 8 + int(threadIdx.x % 32) / 4}};
  }
};
// A right operand K x N: of every eight columns one, along the depth.
template <int K, int N, bool TRANSPOSED>
struct warp_right {
  static constexpr int COUNT = K * N / 32, DEPTH = warp_depth<K>::COUNT;
  static index_array<int, 2> at(int i) {
    int k = warp_depth<K>::at(i % DEPTH), n = warp_columns<N, TRANSPOSED>::at(i / DEPTH);
    return {{TRANSPOSED ? k : n, TRANSPOSED ? n : k}};
  }
};
// Whether runs of a left operand's rows are one load each.
template <int K, typename T, typename E, typename S>
bool in_whole_loads(const tensor<T, E, S>& from) {
  uint64_t bytes = reinterpret_cast<uint64_t>(from.p) | from.stride * sizeof(T);
  return bytes % (warp_depth<K>::RUN * sizeof(T)) == 0;
}
template <int K, typename T, typename L>
bool in_whole_loads(const cooperative_tensor<T, L>&) {
  return true;
}

// A lane's pairs of eight rows of a left operand from `row` on: from memory. Rows beyond it are
// its last one, whose products have no place in a result.
template <int K, bool WHOLE, typename T, typename E, typename S>
void left_pairs(vec<T, 2>* to, const tensor<T, E, S>& from, int row) {
  constexpr int COUNT = warp_depth<K>::COUNT, RUN = warp_depth<K>::RUN;
  uint r = ::min(row + int(threadIdx.x % 32) / 4, from.extents.values[1] - 1);
  const T* first = from.p + uint64_t(r) * uint(from.stride);
#pragma unroll
  for (int i = 0; i < COUNT; i += RUN) {
    const T* at = first + warp_depth<K>::at(i);
    if constexpr (WHOLE)
      load_aligned<RUN / 2, READ_AHEAD>(
          reinterpret_cast<uint*>(to + i / 2), reinterpret_cast<const uint*>(at));
    else
#pragma unroll
      for (int j = 0; j < RUN; j += 2)
        to[(i + j) / 2] = vec<T, 2>(at[j], at[j + 1]);
  }
}
template <int K, bool WHOLE, typename T, typename L>
void left_pairs(vec<T, 2>* to, const cooperative_tensor<T, L>& from, int row) {
  constexpr int COUNT = warp_depth<K>::COUNT;
#pragma unroll
  for (int i = 0; i < COUNT; i += 2)
    to[i / 2] = vec<T, 2>(
        from.elements[row / 8 * COUNT + i], from.elements[row / 8 * COUNT + i + 1]);
}

namespace mpp::tensor_ops {

enum class reduction_operation { sum, max, min };
template <int N>
void reduce_rows(
    const cooperative_tensor<float, row_sums<N>>& from,
    cooperative_tensor<float, row_statistics>& to, reduction_operation how, float identity) {
  auto both = [&](float a, float b) {
    return how == reduction_operation::sum ? a + b
        : how == reduction_operation::max  ? ::fmaxf(a, b)
                                           : ::fminf(a, b);
  };
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float whole = identity;
#pragma unroll
    for (int i = 2 * row; i < N / 2; i += 4)
      whole = both(whole, both(from.elements[i], from.elements[i + 1]));
    whole = both(whole, __shfl_xor_sync(0xffffffffu, whole, 1));
    to.elements[row] = both(whole, __shfl_xor_sync(0xffffffffu, whole, 2));
  }
}

// Sums lie as the left operands that are made of them, and statistics where their rows are.
template <typename L, typename R>
constexpr bool is_iterator_compatible(const L&, const R&) {
  return true;
}

template <uint64_t D, int PLACE>
struct matmul2d<D, execution_simdgroups<1, PLACE>> {
  static constexpr int M = D & 0xffff, N = D >> 16 & 0xffff, K = D >> 32 & 0xffff;
  static constexpr bool TRANSPOSED = D >> 49 & 1, ACCUMULATE = D >> 50 & 1;
  using sums = warp_sums<M, N, TRANSPOSED>;
  static_assert(
      M % 8 == 0 && N % 16 == 0 && K % 16 == 0 && !(D >> 48 & 1),
      "on CUDA: whole tiles of tensor cores, the left operand as it is");
  template <typename L, typename R, typename C>
  cooperative_tensor<L, warp_left<M, K>> get_left_input_cooperative_tensor() const {
    return {};
  }
  template <typename L, typename R, typename C>
  cooperative_tensor<R, warp_right<K, N, TRANSPOSED>> get_right_input_cooperative_tensor() const {
    return {};
  }
  template <typename L, typename R, typename C>
  auto get_destination_cooperative_tensor() const {
    if constexpr (is_tensor<R>)
      return cooperative_tensor<C, row_sums<N>>{};
    else
      return cooperative_tensor<C, sums>{};
  }
  template <typename L, typename R, typename C>
  cooperative_tensor<C, row_statistics> get_row_reduction_destination_cooperative_tensor() const {
    return {};
  }
  template <typename L, typename T, typename C>
  cooperative_tensor<float, row_sums<K>> get_left_input_cooperative_tensor(
      const cooperative_tensor<float, row_sums<K>>& from) const {
    return from;
  }
  template <typename L, typename T, typename C>
  constexpr bool is_compatible_as_left_input(const cooperative_tensor<float, row_sums<K>>&) const {
    return true;
  }
  // With rows of memory: of memory too, or weights that were sums.
  shared_operand<D, PLACE> shared;
  template <typename L, typename T, typename E, typename S>
  void run(
      const L& left, const tensor<T, E, S>& right,
      cooperative_tensor<float, row_sums<N>>& to) const {
    if constexpr (is_tensor<L>)
      shared.multiply_rows(left, right, to.elements);
    else
      shared.add_weighted(left, right, to.elements);
  }
  template <typename L, typename T>
  void run(
      const L& left, const cooperative_tensor<T, warp_right<K, N, TRANSPOSED>>& right,
      cooperative_tensor<float, sums>& to) const {
    static_assert(sizeof(T) == 2, "on CUDA: half precision");
    if constexpr (SHARES_ROWS<K> && is_tensor<L>)
      return shared.add_decoded(left, right.elements, to.elements);
    else if (!in_whole_loads<K>(left))
      add<false>(left, right.elements, to.elements);
    else
      add<true>(left, right.elements, to.elements);
  }
  template <bool WHOLE, typename L, typename T>
  static void add(const L& left, const T* right, float* to) {
    constexpr int PAIRS = warp_depth<K>::COUNT / 2;
#pragma unroll
    for (int m = 0; m < M; m += 8) {
      vec<T, 2> rows[PAIRS];
      left_pairs<K, WHOLE>(rows, left, m);
#pragma unroll
      for (int i = 0; i < PAIRS; i += 2)
#pragma unroll
        for (int n = 0; n < N; n += 16) {
          vec<T, 2> columns[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const T* from = right + (n / 8 + j % 2) * (2 * PAIRS) + 2 * (i + j / 2);
            columns[j] = vec<T, 2>(from[0], from[1]);
          }
          float* sum = to + (m / 8 * (N / 16) + n / 16) * 4;
          bool fresh = !ACCUMULATE && i == 0;
          float2 sums[2] = {
              fresh ? float2(0.0f) : float2(sum[0], sum[1]),
              fresh ? float2(0.0f) : float2(sum[2], sum[3])};
          tensor_core_16(sums, columns, rows + i);
          sum[0] = sums[0].x;
          sum[1] = sums[0].y;
          sum[2] = sums[1].x;
          sum[3] = sums[1].y;
        }
    }
  }
};

} // namespace mpp::tensor_ops

} // namespace mlx::core::cu
