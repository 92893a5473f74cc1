// Product of few rows with a quantized matrix: y (M, N) = x (M, K) * w^T + bias, M up to `rows`.
//
// w is (N, K) packed in `bits` bits an element; `group` elements of a row share a scale (and in
// mode affine a bias). A tile is `outputs` neighbouring rows of w, read and unpacked once for all
// rows of x by the `lanes` threads of one SIMD group, or by one thread where `lanes` is 1:
//
//   grid ((tiles * lanes), 1, 1), tiles of at least ceil(N / outputs); threadgroup any multiple of
//   `lanes`; no threadgroup memory. A thread takes runs of `run` elements of K, every lanes-th.
//
// Sums are float32, in `ways` parts that a processor with vectors adds side by side. At the edge of
// N a tile reads the last row again and writes only what exists.

#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

// sums[i % ways] += a[i] * b[i]
template <int count, int ways>
METAL_FUNC void accumulate(thread float* sums, const thread float* a, const thread float* b) {
  float parts[ways];
#pragma unroll
  for (int j = 0; j < ways; j++) {
    parts[j] = sums[j];
  }
#pragma unroll
  for (int i = 0; i < count; i++) {
    parts[i % ways] = fma(a[i], b[i], parts[i % ways]);
  }
#pragma unroll
  for (int j = 0; j < ways; j++) {
    sums[j] = parts[j];
  }
}

template <
    typename T,
    typename S,
    int mode,
    int group,
    int bits,
    int rows,
    int outputs,
    int run,
    int lanes,
    int ways,
    bool biased>
[[kernel]] void quantized_matmul_few_rows(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    constant int* shape,
    device T* y,
    uint id [[thread_position_in_grid]]) {
  int M = shape[0], N = shape[1], K = shape[2];
  int first = int(id / lanes) * outputs, lane = id % lanes;
  size_t words = size_t(K) * bits / 32, groups = K / group;
  alignas(64) float sums[rows][outputs][ways] = {};

  // A tile beyond N, there to fill the last threadgroup, reads nothing.
  int depth = first < N ? K : 0;
  for (int k = lane * run; k < depth; k += lanes * run) {
    alignas(64) float weights[outputs][run];
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
    for (int n = 0; n < outputs; n++) {
      size_t row = min(first + n, N - 1), at = row * groups + k / group;
      float scale = decoded_scale<mode>(scales[at]);
      float offset = mode == AFFINE ? float(biases[at]) : 0.0f;
      dequantize<mode, bits, run>(
          weights[n], w + row * words + size_t(k) * bits / 32, scale, offset);
    }
#pragma unroll(lanes > 1 ? rows : 1)
    for (int m = 0; m < rows; m++) {
      if (rows > 1 && m >= M) {
        continue;
      }
      float values[run];
#pragma unroll
      for (int i = 0; i < run; i++) {
        values[i] = float(x[size_t(m) * K + k + i]);
      }
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
      for (int n = 0; n < outputs; n++) {
        accumulate<run, ways>(sums[m][n], weights[n], values);
      }
    }
  }

#pragma unroll(lanes > 1 ? rows : 1)
  for (int m = 0; m < rows; m++) {
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
    for (int n = 0; n < outputs; n++) {
      // In pairs: one after another would round more often.
#pragma unroll
      for (int pair = ways / 2; pair > 0; pair /= 2) {
        for (int j = 0; j < pair; j++) {
          sums[m][n][j] += sums[m][n][j + pair];
        }
      }
      float sum = sums[m][n][0];
      if (lanes > 1) {
        sum = simd_sum(sum);
      }
      if (lane == 0 && m < M && first + n < N) {
        y[size_t(m) * N + first + n] = T(biased ? sum + float(bias[first + n]) : sum);
      }
    }
  }
}
