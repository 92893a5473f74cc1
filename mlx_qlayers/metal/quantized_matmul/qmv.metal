// qmv: up to 16 rows times up to three quantized matrices, without matrix units:
//
//   y_i (M, N_i) = norm(x) (M, K) * w_i^T + bias_i,   or   gate(y_0) * y_1,   or   y_0 + residual
//
// with M up to `rows`. w_i is (N_i, K) packed in `bits` bits an element; `group` elements of a row have one
// scale (and in mode affine one bias). A tile is `outputs` neighbouring rows of a matrix, or half as many
// of both matrices of a gate, read and dequantized once for all rows of x by the `lanes` threads of one
// SIMD group, or by one thread if `lanes` is 1:
//
//   grid (tiles * lanes, 1, 1) or more; threadgroup any multiple of `lanes`; no threadgroup memory.
//   A thread takes every lanes-th run of `run` elements of K.
//
// Sums are float32, in `ways` partial sums that a CPU adds as vectors. At the edge of a matrix a tile repeats
// the last row, and does not store the repetitions. `epsilon` holds the bits of a float.

#include "epilogue.metal"
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

// Loads `run` contiguous elements, four at a time if `fours`.
template <int run, bool fours, typename T>
METAL_FUNC void read_values(thread float* values, const device T* from) {
#pragma unroll
  for (int i = 0; i < run; i += fours ? 4 : 1) {
    if (fours) {
      float4 four = four_floats(from + i);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        values[i + j] = four[j];
      }
    } else {
      values[i] = float(from[i]);
    }
  }
}

template <
    typename T,
    typename S,
    int mode,
    int group,
    int bits,
    int gate,
    bool normed,
    int epsilon,
    int rows,
    int outputs,
    int run,
    int lanes,
    int ways>
[[kernel]] void qmv(
    const device T* x,
    const device T* norm_weight,
    const device T* residual,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    const device uint* w1,
    const device S* scales1,
    const device S* biases1,
    const device T* bias1,
    const device uint* w2,
    const device S* scales2,
    const device S* biases2,
    const device T* bias2,
    constant int* shape,
    device T* y,
    device T* y1,
    device T* y2,
    uint id [[thread_position_in_grid]]) {
  const int height = gate ? outputs / 2 : outputs;
  int M = shape[0], K = shape[1], lane = id % lanes;
  size_t words = size_t(K) * bits / 32, groups = K / group;
  tile_place place =
      place_of_tile<gate, height>(id / lanes * (gate ? 2 : 1), shape + 2, w1, w2);
  int first = place.first, m0 = place.matrix, N = shape[2 + m0];
  packed_matrix<S> matrix = {
      m0 == 0 ? w : m0 == 1 ? w1 : w2,
      m0 == 0 ? scales : m0 == 1 ? scales1 : scales2,
      m0 == 0 ? biases : m0 == 1 ? biases1 : biases2};
  alignas(64) float sums[rows][outputs][ways] = {};
  float squares[rows] = {};

  // A tile beyond N only fills the last threadgroup, and reads nothing.
  int depth = first < N ? K : 0;
  for (int k = lane * run; k < depth; k += lanes * run) {
    alignas(64) float weights[outputs][run];
    alignas(16) uint codes[outputs][run * bits / 32];
    float scale[outputs], offset[outputs];
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
    for (int n = 0; n < outputs; n++) {
      bool second = n >= height;
      const device uint* from = second ? w1 : matrix.w;
      const device S* scales_of = second ? scales1 : matrix.scales;
      const device S* biases_of = second ? biases1 : matrix.biases;
      size_t row = min(first + n % height, N - 1), at = row * groups + k / group;
      scale[n] = decoded_scale<mode>(scales_of[at]);
      offset[n] = mode == AFFINE ? float(biases_of[at]) : 0.0f;
      at = row * words + size_t(k) * bits / 32;
      if (lanes > 1) {
        load_words<run * bits / 32>(codes[n], from, at);
        if (rows > 1) {
          decode_codes<T, mode, bits, run>(weights[n], codes[n]);
        }
      } else {
        dequantize<mode, bits, run>(weights[n], from, at, scale[n], offset[n]);
      }
    }
#pragma unroll(lanes > 1 ? rows : 1)
    for (int m = 0; m < rows; m++) {
      if (rows > 1 && m >= M) {
        continue;
      }
      float values[run], all = 0;
      read_values<run, (lanes > 1)>(values, x + size_t(m) * K + k);
      if (normed) {
        float weight[run];
        if (norm_weight) {
          read_values<run, (lanes > 1)>(weight, norm_weight + k);
        }
#pragma unroll
        for (int i = 0; i < run; i++) {
          squares[m] = fma(values[i], values[i], squares[m]);
          values[i] *= norm_weight ? weight[i] : 1.0f;
        }
      }
      if (lanes > 1 && mode == AFFINE) {
#pragma unroll
        for (int i = 0; i < run; i++) {
          all += values[i];
        }
      }
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
      for (int n = 0; n < outputs; n++) {
        if (lanes > 1) {
          // With a single row, weights are used as soon as they are dequantized, which saves registers.
          if (rows == 1) {
            decode_codes<T, mode, bits, run>(weights[n], codes[n]);
          }
          float sum = weights[n][0] * values[0];
          accumulate<run - 1, 1>(&sum, weights[n] + 1, values + 1);
          sum = fma(scale[n], code_factor<T, mode, bits>() * sum, sums[m][n][0]);
          sums[m][n][0] = mode == AFFINE ? fma(offset[n], all, sum) : sum;
        } else {
          accumulate<run, ways>(sums[m][n], weights[n], values);
        }
      }
    }
  }

#pragma unroll(lanes > 1 ? rows : 1)
  for (int m = 0; m < rows; m++) {
    float factor = 1, total[outputs];
    if (normed) {
      float square = lanes > 1 ? simd_sum(squares[m]) : squares[m];
      factor = metal::precise::rsqrt(square / float(K) + as_type<float>(epsilon));
    }
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
      total[n] = factor * (lanes > 1 ? simd_sum(sums[m][n][0]) : sums[m][n][0]);
    }
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
    for (int n = 0; n < height; n++) {
      if (lane == 0 && m < M && first + n < N) {
        device T* out = m0 == 0 ? y : m0 == 1 ? y1 : y2;
        size_t at = size_t(m) * N + first + n;
        out[at] = finished<T, gate>(
            total[n],
            total[outputs - height + n],
            first + n,
            at,
            m0 == 0 ? bias : m0 == 1 ? bias1 : bias2,
            bias1,
            residual);
      }
    }
  }
}
