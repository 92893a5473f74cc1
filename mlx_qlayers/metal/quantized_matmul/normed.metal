// norm_rows: an RMS norm whose squares are added up as the launch of a product gives them for the next one:
//
//   y (M, K) = x * rsqrt(mean(x * x) + epsilon) * weight, in float, rounded once
//
// A threadgroup computes a row: a lane squares an element, the sums of 16 columns go to threadgroup memory, and each
// SIMD group adds these up. Grid (32 * simds * M, 1, 1), threadgroup (32 * simds, 1, 1). `epsilon` holds the bits
// of a float.

#include "qmv_matrix_steps.metal"

#include <metal_stdlib>
using namespace metal;

template <typename T, int K, int epsilon, int simds>
[[kernel]] void norm_rows(
    const device T* x,
    const device T* weight,
    device T* y,
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int tiles = (K + 15) / 16, threads = 32 * simds;
  threadgroup float squares[tiles];
  x += size_t(row) * K;
  y += size_t(row) * K;
  for (int i = thread_index; i < (tiles + 1) / 2 * 32; i += threads) {
    float value = i < K ? float(x[i]) : 0.0f;
    float square = tile_squares(i < K ? value * value : 0.0f);
    if (i % 16 == 0 && i < K) {
      squares[i / 16] = square;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float factor = norm_factor(squares, tiles, K, as_type<float>(epsilon), lane);
  for (int i = thread_index; i < K; i += threads) {
    y[i] = normed_element<T>(float(x[i]), factor, float(weight[i]));
  }
}
