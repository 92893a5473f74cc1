// matmul2d of one warp on NVIDIA GPUs, in half precision with float32 sums: what
// quantized_matmul/qmm_tensor.metal uses. The right operand is a cooperative tensor, the left one too
// or lies in device memory; their elements are where the tensor cores of mma.h want them, but for the
// order of the depth, of which a lane has K / 4 neighbours: it is the same in both operands.
#pragma once

#include "mma.h"
#include "tensor.h"

namespace mlx::core::cu {

// Sums M x N: tiles of 16 x 8, along the columns first.
template <int M, int N>
struct warp_sums {
  static constexpr int COUNT = M * N / 32;
  static index_array<int, 2> at(int i) {
    int lane = threadIdx.x % 32, tile = i / 4;
    return {{tile % (N / 8) * 8 + lane % 4 * 2 + i % 2,
             tile / (N / 8) * 16 + lane / 4 + i / 2 % 2 * 8}};
  }
};
// A left operand M x K: tiles of 16 x 16, along the depth first.
template <int M, int K>
struct warp_left {
  static constexpr int COUNT = M * K / 32;
  static index_array<int, 2> at(int i) {
    int lane = threadIdx.x % 32, tile = i / 8;
    return {{lane % 4 * (K / 4) + tile % (K / 16) * 4 + i % 2 + i / 4 % 2 * 2,
             tile / (K / 16) * 16 + lane / 4 + i / 2 % 2 * 8}};
  }
};
// A right operand K x N: tiles of 16 x 8, along the columns first.
template <int K, int N, bool TRANSPOSED>
struct warp_right {
  static constexpr int COUNT = K * N / 32;
  static index_array<int, 2> at(int i) {
    int lane = threadIdx.x % 32, tile = i / 4;
    int k = lane % 4 * (K / 4) + tile / (N / 8) * 4 + i % 4;
    int n = tile % (N / 8) * 8 + lane / 4;
    return {{TRANSPOSED ? k : n, TRANSPOSED ? n : k}};
  }
};

// The 16 rows from `row` on of a left operand: from memory, zeros below its rows.
template <int K, typename T, typename E, typename S>
void left_rows(vec<T, 2> (*to)[4], const tensor<T, E, S>& from, int row) {
  constexpr int RUN = K / 4;
  struct alignas(2 * RUN) run {
    T values[RUN];
  };
  int lane = threadIdx.x % 32;
  bool whole = reinterpret_cast<uint64_t>(from.p) % sizeof(run) == 0 && from.stride % RUN == 0;
#pragma unroll
  for (int below = 0; below < 2; below++) {
    int r = row + lane / 4 + below * 8;
    bool inside = r < from.extents.values[1];
    const T* at = from.p + (inside ? r * from.stride : 0) + lane % 4 * RUN;
    run own;
    if (whole) {
      own = *reinterpret_cast<const run*>(at);
    } else {
#pragma unroll
      for (int i = 0; i < RUN; i++) {
        own.values[i] = at[i];
      }
    }
#pragma unroll
    for (int i = 0; i < RUN; i += 2) {
      vec<T, 2> pair(own.values[i], own.values[i + 1]), none(T(0.0f), T(0.0f));
      to[i / 4][below + i / 2 % 2 * 2] = inside ? pair : none;
    }
  }
}
template <int K, typename T, typename L>
void left_rows(vec<T, 2> (*to)[4], const cooperative_tensor<T, L>& from, int row) {
#pragma unroll
  for (int part = 0; part < K / 4; part++) {
    int i = row / 16 * (K / 2) + part * 2;
    to[part / 4][part % 4] = vec<T, 2>(from.elements[i], from.elements[i + 1]);
  }
}

namespace mpp::tensor_ops {

template <uint64_t D>
struct matmul2d<D, execution_simdgroups<1>> {
  static constexpr int M = D & 0xffff, N = D >> 16 & 0xffff, K = D >> 32 & 0xffff;
  static constexpr bool TRANSPOSED = D >> 49 & 1, ACCUMULATE = D >> 50 & 1;
  static_assert(
      M % 16 == 0 && N % 8 == 0 && K % 16 == 0 && K > 0 && !(D >> 48 & 1),
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
  cooperative_tensor<C, warp_sums<M, N>> get_destination_cooperative_tensor() const {
    return {};
  }
  template <typename L, typename T>
  void run(
      const L& left, const cooperative_tensor<T, warp_right<K, N, TRANSPOSED>>& right,
      cooperative_tensor<float, warp_sums<M, N>>& to) const {
    static_assert(sizeof(T) == 2, "on CUDA: half precision");
#pragma unroll
    for (int m = 0; m < M; m += 16) {
      vec<T, 2> rows[K / 16][4];
      left_rows<K>(rows, left, m);
#pragma unroll
      for (int k = 0; k < K; k += 16) {
#pragma unroll
        for (int n = 0; n < N; n += 8) {
          const T* from = right.elements + (k / 16 * (N / 8) + n / 8) * 4;
          vec<T, 2> columns[2] = {vec<T, 2>(from[0], from[1]), vec<T, 2>(from[2], from[3])};
          float* sum = to.elements + (m / 16 * (N / 8) + n / 8) * 4;
          bool fresh = !ACCUMULATE && k == 0;
          float2 sums[2] = {
              fresh ? float2(0.0f) : float2(sum[0], sum[1]),
              fresh ? float2(0.0f) : float2(sum[2], sum[3])};
          tensor_core_16(sums, rows[k / 16], columns);
          sum[0] = sums[0].x;
          sum[1] = sums[0].y;
          sum[2] = sums[1].x;
          sum[3] = sums[1].y;
        }
      }
    }
  }
};

} // namespace mpp::tensor_ops

} // namespace mlx::core::cu
