// qvm, up to 16 rows times a quantized matrix that is not transposed: y (M, N) = x (M, K) * w (K, N) + bias.
//
// w is packed along N (see packed.metal). A thread owns `run` contiguous columns of one group for all rows of
// x, and reads blocks of `block` rows of w:
//
//   grid (threads of N / run columns). Sums are float32. No threadgroup memory.

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
    bool biased>
[[kernel]] void qvm(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    constant int* shape,
    device O* y,
    uint id [[thread_position_in_grid]]) {
  int M = shape[0], N = shape[1], K = shape[2], n = int(id) * run;
  if (n >= N) {
    return;
  }
  size_t words = size_t(N) * bits / 32, groups = N / group;
  alignas(64) float sums[rows][run] = {};

  for (int k = 0; k < K; k += block) {
    alignas(64) float weights[block][run];
#pragma unroll(1)
    for (int i = 0; i < block; i++) {
      if (k + i < K) {
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
#pragma unroll(1)
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
        float factor = k + i < K ? float(x[size_t(m) * K + k + i]) : 0.0f;
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

#pragma unroll(1)
  for (int m = 0; m < rows; m++) {
    if (m < M) {
#pragma unroll
      for (int j = 0; j < run; j++) {
        float added = biased ? float(bias[n + j]) : 0.0f;
        y[size_t(m) * N + n + j] = O(sums[m][j] + added);
      }
    }
  }
}
