// qvm, up to 16 rows times a quantized matrix that is not transposed: y (M, N) = x (M, K) * w (K, N) + bias.
//
// w is packed along N; packed.metal says how. A thread owns `run` neighbouring columns of one group
// for all rows of x, and reads every shares-th block of `block` rows of w:
//
//   grid (threads of N / run columns, shares, parts), threadgroup (columns, shares, 1); threadgroup
//   memory 4 * columns * run * shares bytes where `shares` is above 1. Sums are float32.
//
// Part z takes `depth` elements of K from z * depth on and writes its sums to plane z of y, in
// float32 if there are several, for qmm_sum to add.

#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

template <
    typename T,
    typename O,
    typename S,
    int mode,
    int group,
    int bits,
    int rows,
    int run,
    int block,
    int columns,
    int shares,
    bool biased>
[[kernel]] void qvm(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    constant int* shape,
    device O* y,
    uint3 id [[thread_position_in_grid]],
    uint3 local [[thread_position_in_threadgroup]]) {
  threadgroup float shared[shares > 1 ? columns * run * shares : 1];
  int M = shape[0], N = shape[1], K = shape[2], depth = shape[3];
  int n = int(id.x) * run, begin = int(id.z) * depth;
  // Columns beyond N, there to fill the last threadgroup, read nothing.
  int end = n < N ? min(begin + depth, K) : 0;
  size_t words = size_t(N) * bits / 32, groups = N / group;
  alignas(64) float sums[rows][run] = {};

  for (int k = begin + int(id.y) * block; k < end; k += shares * block) {
    alignas(64) float weights[block][run];
#pragma unroll(shares > 1 ? block : 1)
    for (int i = 0; i < block; i++) {
      if (k + i < end) {
        size_t row = k + i, at = row * groups + n / group;
        dequantize<mode, bits, run>(
            weights[i],
            w,
            row * words + n * bits / 32,
            decoded_scale<mode>(scales[at]),
            mode == AFFINE ? float(biases[at]) : 0.0f);
      } else {
#pragma unroll
        for (int j = 0; j < run; j++) {
          weights[i][j] = 0;
        }
      }
    }
#pragma unroll(shares > 1 ? rows : 1)
    for (int m = 0; m < rows; m++) {
      if (rows > 1 && m >= M) {
        continue;
      }
      float values[run];
#pragma unroll
      for (int j = 0; j < run; j++) {
        values[j] = sums[m][j];
      }
#pragma unroll
      for (int i = 0; i < block; i++) {
        float factor = k + i < end ? float(x[size_t(m) * K + k + i]) : 0.0f;
#pragma unroll
        for (int j = 0; j < run; j++) {
          values[j] = fma(factor, weights[i][j], values[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < run; j++) {
        sums[m][j] = values[j];
      }
    }
  }

  y += id.z * size_t(M) * N;
#pragma unroll(shares > 1 ? rows : 1)
  for (int m = 0; m < rows; m++) {
    if (shares > 1) {
      // Column by column, so that neighbouring threads meet neighbouring banks.
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (int j = 0; j < run; j++) {
        shared[(local.y * run + j) * columns + local.x] = sums[m][j];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (int j = 0; j < run; j++) {
        if (j % shares == int(local.y)) {
          for (int i = 0; i < shares; i++) {
            if (i != int(local.y)) {
              sums[m][j] += shared[(i * run + j) * columns + local.x];
            }
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < run; j++) {
      if (j % shares == int(local.y) && m < M && n < N) {
        float added = biased ? float(bias[n + j]) : 0.0f;
        y[size_t(m) * N + n + j] = O(sums[m][j] + added);
      }
    }
  }
}
