// Products of rows with quantized matrices that each row chooses among E: a mixture of experts.
//
// Result r of R belongs to pair p = r / M, which names a matrix, right[p], and M rows of x: block left[p]
// if `listed`, else block p / per_block. w is (E, N, K), or (E, K, N) in gather_qmm_columns, packed;
// `group` elements of a row have one scale. shape: R, N, K, M, per_block.
//
// A tile is `rows` neighbouring results by some columns. It reads a matrix once for each run of neighbours
// that chose the same one: runs are few if the choices are sorted, and any order is right.
//
// gather_qmm_rows      y (R, N) = x * w^T: `outputs` rows of w by the `lanes` threads of one SIMD
//                      group, or by one thread where `lanes` is 1. A thread takes runs of `run`
//                      elements of K, every lanes-th.
//                      Grid (tiles of N * lanes, ceil(R / rows), 1).
// gather_qmm_columns   y (R, N) = x * w: `wide` neighbouring threads take `run` columns each, and
//                      `chunk` rows of w at a time; the lanes / wide sets of a SIMD group divide K, with
//                      chunk 1. Grid as above.
//
// No threadgroup memory. Sums are float32; `scaled` results are multiplied by factors[right[p]].

#include "quantized_matmul/packed.metal"

#include <metal_stdlib>
using namespace metal;

enum { RESULTS, OUTPUTS, DEPTH, ROWS_PER_PAIR, PER_BLOCK };

// sums[i % ways] += a[i] * b[i]
template <int count, int ways>
METAL_FUNC void add_products(thread float* sums, const thread float* a, const thread float* b) {
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

// The row of x for result r.
template <bool listed>
METAL_FUNC size_t row_of_x(const device uint* left, int r, constant int* shape) {
  int pair = r / shape[ROWS_PER_PAIR];
  size_t block = listed ? size_t(left[pair]) : size_t(pair / shape[PER_BLOCK]);
  return block * shape[ROWS_PER_PAIR] + r % shape[ROWS_PER_PAIR];
}

// The end of the run of equal choices that begins at result r.
METAL_FUNC int end_of_run(const device uint* right, int r, int end, int per_pair) {
  uint matrix = right[r / per_pair];
  for (r++; r < end && right[r / per_pair] == matrix; r++) {
  }
  return r;
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
    bool listed,
    bool scaled>
[[kernel]] void gather_qmm_rows(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device float* factors,
    const device uint* left,
    const device uint* right,
    constant int* shape,
    device T* y,
    uint3 id [[thread_position_in_grid]]) {
  int N = shape[OUTPUTS], K = shape[DEPTH], per_pair = shape[ROWS_PER_PAIR];
  int first = int(id.x / lanes) * outputs, lane = id.x % lanes;
  int begin = id.y * rows, count = min(rows, shape[RESULTS] - begin);
  size_t words = size_t(K) * bits / 32, groups = K / group;
  size_t at[rows];
#pragma unroll
  for (int m = 0; m < rows; m++) {
    at[m] = row_of_x<listed>(left, begin + min(m, count - 1), shape) * K;
  }
  alignas(64) float sums[rows][outputs][ways] = {};

  // A tile beyond N only fills the last threadgroup.
  for (int start = 0, end = 0; start < count && first < N; start = end) {
    end = end_of_run(right, begin + start, begin + count, per_pair) - begin;
    size_t matrix = size_t(right[(begin + start) / per_pair]) * N;
    for (int k = lane * run; k < K; k += lanes * run) {
      alignas(64) float weights[outputs][run];
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
      for (int n = 0; n < outputs; n++) {
        size_t row = matrix + min(first + n, N - 1), place = row * groups + k / group;
        float bias = mode == AFFINE ? float(biases[place]) : 0.0f;
        dequantize<mode, bits, run>(
            weights[n],
            w,
            row * words + size_t(k) * bits / 32,
            decoded_scale<mode>(scales[place]),
            bias);
      }
      // Indices that are known at compile time keep the sums in registers.
#pragma unroll(lanes > 1 ? rows : 1)
      for (int m = lanes > 1 ? 0 : start; m < (lanes > 1 ? rows : end); m++) {
        if (lanes > 1 && rows > 1 && (m < start || m >= end)) {
          continue;
        }
        alignas(16) T held[run];
        load_words<run * sizeof(T) / 4>(reinterpret_cast<thread uint*>(held), x, at[m] + k);
        alignas(64) float values[run];
#pragma unroll
        for (int i = 0; i < run; i++) {
          values[i] = float(held[i]);
        }
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
        for (int n = 0; n < outputs; n++) {
          add_products<run, ways>(sums[m][n], weights[n], values);
        }
      }
    }
  }

#pragma unroll(lanes > 1 ? rows : 1)
  for (int m = 0; m < rows; m++) {
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
    for (int n = 0; n < outputs; n++) {
      // Added in pairs, which rounds less often than one by one.
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
      if (lane == 0 && m < count && first + n < N) {
        float factor = scaled ? factors[right[(begin + m) / per_pair]] : 1.0f;
        y[size_t(begin + m) * N + first + n] = T(sum * factor);
      }
    }
  }
}

template <
    typename T,
    typename S,
    int mode,
    int group,
    int bits,
    int rows,
    int run,
    int chunk,
    int wide,
    int lanes,
    bool listed,
    bool scaled>
[[kernel]] void gather_qmm_columns(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device float* factors,
    const device uint* left,
    const device uint* right,
    constant int* shape,
    device T* y,
    uint3 id [[thread_position_in_grid]]) {
  int N = shape[OUTPUTS], K = shape[DEPTH], per_pair = shape[ROWS_PER_PAIR];
  int lane = id.x % lanes, column = (int(id.x / lanes) * wide + lane % wide) * run;
  int begin = id.y * rows, count = min(rows, shape[RESULTS] - begin);
  size_t words = size_t(N) * bits / 32, groups = N / group;
  size_t at[rows];
#pragma unroll
  for (int m = 0; m < rows; m++) {
    at[m] = row_of_x<listed>(left, begin + min(m, count - 1), shape) * K;
  }
  alignas(64) float sums[rows][run] = {};

  for (int start = 0, end = 0; start < count && column < N; start = end) {
    end = end_of_run(right, begin + start, begin + count, per_pair) - begin;
    size_t matrix = size_t(right[(begin + start) / per_pair]) * K;
    for (int k = lane / wide; k < K; k += lanes / wide * chunk) {
      alignas(64) float weights[chunk][run];
#pragma unroll(chunk > 1 ? 1 : chunk)
      for (int d = 0; d < min(chunk, K - k); d++) {
        size_t row = matrix + k + d, place = row * groups + column / group;
        float bias = mode == AFFINE ? float(biases[place]) : 0.0f;
        dequantize<mode, bits, run>(
            weights[d],
            w,
            row * words + size_t(column) * bits / 32,
            decoded_scale<mode>(scales[place]),
            bias);
      }
#pragma unroll(lanes > 1 ? rows : 1)
      for (int m = lanes > 1 ? 0 : start; m < (lanes > 1 ? rows : end); m++) {
        if (lanes > 1 && rows > 1 && (m < start || m >= end)) {
          continue;
        }
        float parts[run];
#pragma unroll
        for (int i = 0; i < run; i++) {
          parts[i] = sums[m][i];
        }
#pragma unroll(chunk > 1 ? 1 : chunk)
        for (int d = 0; d < min(chunk, K - k); d++) {
          float value = float(x[at[m] + k + d]);
#pragma unroll
          for (int i = 0; i < run; i++) {
            parts[i] = fma(value, weights[d][i], parts[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < run; i++) {
          sums[m][i] = parts[i];
        }
      }
    }
  }

#pragma unroll(lanes > 1 ? rows : 1)
  for (int m = 0; m < rows; m++) {
    float factor = 1;
    if (scaled && m < count) {
      factor = factors[right[(begin + m) / per_pair]];
    }
#pragma unroll
    for (int i = 0; i < run; i++) {
      float sum = sums[m][i];
#pragma unroll
      for (int other = wide; other < lanes; other *= 2) {
        sum += simd_shuffle_xor(sum, other);
      }
      if (lane < wide && m < count && column < N) {
        y[size_t(begin + m) * N + column + i] = T(sum * factor);
      }
    }
  }
}
