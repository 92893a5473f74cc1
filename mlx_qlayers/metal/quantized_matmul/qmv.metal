// qmv: up to 16 rows times up to three quantized matrices, without matrix units:
//
//   y_i (M, N_i) = norm(x) (M, K) * w_i^T + bias_i,   or   gate(y_0) * y_1,   or   y_0 + residual
//
// with M up to `rows`. w_i is (N_i, K) packed in `bits` bits an element; `group` elements of a row have one
// scale (and in mode affine one bias). A tile is `outputs` neighbouring rows of a matrix, or half as many
// of both matrices of a gate, read and dequantized once for all rows of x by one SIMD group:
//
//   grid (tiles * 32, 1, 1) or more; threadgroup any multiple of 32; no threadgroup memory.
//   A thread takes every 32nd run of `run` elements of K.
//
// Sums are float32. At the edge of a matrix a tile repeats the last row, and does not store the repetitions.
// `epsilon` holds the bits of a float.

#include "epilogue.metal"
#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

// Loads `run` contiguous elements, four at a time.
template <int run, typename T>
METAL_FUNC void read_values(thread float* values, const device T* from) {
#pragma unroll
  for (int i = 0; i < run; i += 4) {
    float4 four = four_floats(from + i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      values[i + j] = four[j];
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
    int run>
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
  int M = shape[0], K = shape[1], lane = id % 32;
  size_t words = size_t(K) * bits / 32, groups = K / group;
  tile_place place =
      place_of_tile<gate, height>(id / 32 * (gate ? 2 : 1), shape + 2, w1, w2);
  int first = place.first, m0 = place.matrix, N = shape[2 + m0];
  packed_matrix<S> matrix = {
      m0 == 0 ? w : m0 == 1 ? w1 : w2,
      m0 == 0 ? scales : m0 == 1 ? scales1 : scales2,
      m0 == 0 ? biases : m0 == 1 ? biases1 : biases2};
  float sums[rows][outputs] = {};
  float squares[rows] = {};

  // A tile beyond N only fills the last threadgroup, and reads nothing.
  int depth = first < N ? K : 0;
  for (int k = lane * run; k < depth; k += 32 * run) {
    float weights[outputs][run];
    alignas(16) uint codes[outputs][run * bits / 32];
    float scale[outputs], offset[outputs];
#pragma unroll
    for (int n = 0; n < outputs; n++) {
      bool second = n >= height;
      const device uint* from = second ? w1 : matrix.w;
      const device S* scales_of = second ? scales1 : matrix.scales;
      const device S* biases_of = second ? biases1 : matrix.biases;
      size_t row = min(first + n % height, N - 1), at = row * groups + k / group;
      scale[n] = decoded_scale<mode>(scales_of[at]);
      offset[n] = mode == AFFINE ? float(biases_of[at]) : 0.0f;
      at = row * words + size_t(k) * bits / 32;
      load_words<run * bits / 32>(codes[n], from, at);
      if (rows > 1) {
        decode_codes<T, mode, bits, run>(weights[n], codes[n]);
      }
    }
#pragma unroll
    for (int m = 0; m < rows; m++) {
      if (rows > 1 && m >= M) {
        continue;
      }
      float values[run], all = 0;
      read_values<run>(values, x + size_t(m) * K + k);
      if (normed) {
        float weight[run];
        if (norm_weight) {
          read_values<run>(weight, norm_weight + k);
        }
#pragma unroll
        for (int i = 0; i < run; i++) {
          squares[m] = fma(values[i], values[i], squares[m]);
          values[i] *= norm_weight ? weight[i] : 1.0f;
        }
      }
      if (mode == AFFINE) {
#pragma unroll
        for (int i = 0; i < run; i++) {
          all += values[i];
        }
      }
#pragma unroll
      for (int n = 0; n < outputs; n++) {
        // With a single row, weights are used as soon as they are dequantized, which saves registers.
        if (rows == 1) {
          decode_codes<T, mode, bits, run>(weights[n], codes[n]);
        }
        float sum = weights[n][0] * values[0];
#pragma unroll
        for (int i = 1; i < run; i++) {
          sum = fma(weights[n][i], values[i], sum);
        }
        sum = fma(scale[n], code_factor<T, mode, bits>() * sum, sums[m][n]);
        sums[m][n] = mode == AFFINE ? fma(offset[n], all, sum) : sum;
      }
    }
  }

#pragma unroll
  for (int m = 0; m < rows; m++) {
    float factor = 1, total[outputs];
    if (normed) {
      factor = metal::precise::rsqrt(simd_sum(squares[m]) / float(K) + as_type<float>(epsilon));
    }
#pragma unroll
    for (int n = 0; n < outputs; n++) {
      total[n] = factor * simd_sum(sums[m][n]);
    }
#pragma unroll
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
