// Few rows times the matrices of the experts that they chose; each matrix is read once.
//
// Product p of P is that of row p / per_row of x with expert right[p] of E. A matrix is (E, N, K), packed;
// `group` elements of a row have one scale. shape: P, N, K, per_row. Sums are float32.
//
// experts_products   y (P, N) and y1 = x * w^T + bias and the same with w1, or with a gate
//                    activation(y) * y1 alone, or y without w1. For GATE_CLIPPED the bits of three
//                    floats follow in shape. With `squares` (R, ceil(K / 16)), the partial sums of
//                    squares of a deferred RMS norm, products are multiplied by its factor. A SIMD
//                    group computes `outputs` rows of a matrix, or half as many of both, for all
//                    products of an expert, `rows` at a time: the SIMD group of the expert's first
//                    product does it for all, the others do nothing.
//                    Grid (32 * tiles of N, P, 1), threadgroup any multiple of 32.
// experts_combined   y (R, N): the sum over a row's products p of scores[p] * (x[p] * w^T + bias), and
//                    the residual (R, N).
//                    The `simds` SIMD groups of a threadgroup divide the products of a row.
//                    Grid (32 * simds * tiles of N, R, 1), threadgroup (32 * simds, 1, 1); in
//                    threadgroup memory a float for each output and SIMD group.

#include "quantized_matmul/epilogue.metal"
#include "quantized_matmul/packed.metal"

#include <metal_stdlib>
using namespace metal;

enum { PRODUCTS, OUTPUTS, DEPTH, PER_ROW, LIMIT, ALPHA, SHIFT };
#define GATE_CLIPPED 4

// (clip(up) + shift) * gate * sigmoid(alpha * gate), with gate clipped from above; NaN propagates.
METAL_FUNC float clipped_product(float gate, float up, const constant int* shape) {
  const float limit = as_type<float>(shape[LIMIT]);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  const float denominator = 1 + precise::exp(-as_type<float>(shape[ALPHA]) * gate);
  return (up + as_type<float>(shape[SHIFT])) * (gate / denominator);
}

// This lane's part of `count` rows of x at `at`, times `height` rows of each of two matrices from `row` on,
// at most up to `last`: sums[m * outputs + n].
template <int mode, int group, int bits, int rows, int outputs, int height, int run, typename T, typename S>
METAL_FUNC void add_products(
    thread float* sums,
    const device T* x,
    const thread size_t* at,
    int count,
    packed_matrix<S> one,
    packed_matrix<S> other,
    size_t row,
    size_t last,
    int K,
    int lane) {
  const size_t words = size_t(K) * bits / 32, groups = K / group;
  for (int k = lane * run; k < K; k += 32 * run) {
    alignas(16) uint codes[outputs][run * bits / 32];
    float scale[outputs], offset[outputs];
#pragma unroll
    for (int n = 0; n < outputs; n++) {
      size_t from = min(row + n % height, last);
      size_t number = from * groups + k / group;
      scale[n] = decoded_scale<mode>(n < height ? one.scales[number] : other.scales[number]);
      offset[n] = 0;
      if (mode == AFFINE) {
        offset[n] = float(n < height ? one.biases[number] : other.biases[number]);
      }
      load_words<run * bits / 32>(
          codes[n], n < height ? one.w : other.w, from * words + size_t(k) * bits / 32);
    }
    alignas(64) float weights[rows > 1 ? outputs : 1][run];
#pragma unroll
    for (int n = 0; n < (rows > 1 ? outputs : 0); n++) {
      decode_codes<T, mode, bits, run>(weights[n], codes[n]);
    }
#pragma unroll
    for (int m = 0; m < rows; m++) {
      if (rows > 1 && m >= count) {
        continue;
      }
      float values[run], all = 0;
#pragma unroll
      for (int i = 0; i < run; i += 4) {
        float4 four = four_floats(x + at[m] + k + i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          values[i + j] = four[j];
          all += four[j];
        }
      }
#pragma unroll
      for (int n = 0; n < outputs; n++) {
        if (rows == 1) {
          decode_codes<T, mode, bits, run>(weights[0], codes[n]);
        }
        float sum = 0;
#pragma unroll
        for (int i = 0; i < run; i++) {
          sum = fma(weights[rows > 1 ? n : 0][i], values[i], sum);
        }
        sum *= code_factor<T, mode, bits>();
        sums[m * outputs + n] = fma(scale[n], sum, sums[m * outputs + n]);
        if (mode == AFFINE) {
          sums[m * outputs + n] = fma(offset[n], all, sums[m * outputs + n]);
        }
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
    int gate,
    int rows,
    int outputs,
    int height,
    int run>
[[kernel]] void experts_products(
    const device T* x,
    const device uint* right,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    const device uint* w1,
    const device S* scales1,
    const device S* biases1,
    const device T* bias1,
    const device float* squares,
    constant float* epsilon,
    constant int* shape,
    device T* y,
    device T* y1,
    uint3 id [[thread_position_in_grid]]) {
  const int P = shape[PRODUCTS], N = shape[OUTPUTS], K = shape[DEPTH];
  const int lane = id.x % 32, first = int(id.x / 32) * height, begin = id.y;
  // A tile beyond N only fills the last threadgroup.
  if (first >= N) {
    return;
  }
  const uint expert = right[begin];
  if (rows > 1) {
    bool earlier = false;
    for (int p = lane; p < begin; p += 32) {
      earlier = earlier || right[p] == expert;
    }
    if (simd_any(earlier)) {
      return;
    }
  }
  const packed_matrix<S> one = {w, scales, biases}, other = {w1, scales1, biases1};
  const size_t row = size_t(expert) * N + first, last = size_t(expert) * N + N - 1;
  for (int next = begin; next < P;) {
    int product[rows], count = 0;
    size_t at[rows];
#pragma unroll
    for (int m = 0; m < rows; m++) {
      while (rows > 1 && next < P && right[next] != expert) {
        next++;
      }
      product[m] = min(next, P - 1);
      count += next < P;
      at[m] = size_t(product[m] / shape[PER_ROW]) * K;
      next++;
    }
    if (count == 0) {
      break;
    }
    float sums[rows * outputs] = {};
    add_products<mode, group, bits, rows, outputs, height, run>(
        sums, x, at, count, one, other, row, last, K, lane);
#pragma unroll
    for (int m = 0; m < rows; m++) {
      float factor = 1;
      if (squares) {
        const int tiles = (K + 15) / 16;
        float square = 0;
        for (int i = lane; i < tiles; i += 32) {
          square += squares[size_t(product[m] / shape[PER_ROW]) * tiles + i];
        }
        factor = precise::rsqrt(simd_sum(square) / K + epsilon[0]);
      }
#pragma unroll
      for (int n = 0; n < outputs; n++) {
        sums[m * outputs + n] = simd_sum(sums[m * outputs + n]) * factor;
      }
#pragma unroll
      for (int n = 0; n < height; n++) {
        if (lane == 0 && m < count && first + n < N) {
          size_t to = size_t(product[m]) * N + first + n;
          float sum = sums[m * outputs + n], second = sums[m * outputs + outputs - height + n];
          const device T* own = bias ? bias + size_t(expert) * N : bias;
          const device T* others = bias1 ? bias1 + size_t(expert) * N : bias1;
          if (gate == GATE_CLIPPED) {
            sum += own ? float(own[first + n]) : 0.0f;
            second += others ? float(others[first + n]) : 0.0f;
            y[to] = T(clipped_product(sum, second, shape));
            continue;
          }
          y[to] = finished<T, gate>(sum, second, first + n, to, own, others, nullptr);
          if (y1) {
            y1[to] = finished<T, 0>(second, 0.0f, first + n, to, others, nullptr, nullptr);
          }
        }
      }
    }
    if (rows == 1) {
      break;
    }
  }
}

template <
    typename T,
    typename S,
    typename W,
    int mode,
    int group,
    int bits,
    int outputs,
    int run,
    int simds>
[[kernel]] void experts_combined(
    const device T* x,
    const device uint* right,
    const device W* scores,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    const device T* residual,
    constant int* shape,
    device T* y,
    uint3 group_index [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int N = shape[OUTPUTS], K = shape[DEPTH], per_row = shape[PER_ROW];
  const int first = int(group_index.x) * outputs, token = group_index.y;
  threadgroup float parts[simds * outputs];
  const packed_matrix<S> matrix = {w, scales, biases};
  float totals[outputs] = {};
  for (int j = simd; j < per_row; j += simds) {
    const int p = token * per_row + j;
    const size_t expert = right[p], at[1] = {size_t(p) * K};
    const float score = float(scores[p]);
    float sums[outputs] = {};
    add_products<mode, group, bits, 1, outputs, outputs, run>(
        sums, x, at, 1, matrix, matrix, expert * N + first, expert * N + N - 1, K, lane);
#pragma unroll
    for (int n = 0; n < outputs; n++) {
      if (bias && lane == 0) {
        sums[n] += float(bias[expert * N + min(first + n, N - 1)]);
      }
      totals[n] = fma(score, sums[n], totals[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < outputs; n++) {
    float total = simd_sum(totals[n]);
    if (lane == 0) {
      parts[simd * outputs + n] = total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int n = simd * 32 + lane;
  if (n < outputs && first + n < N) {
    float total = 0;
    for (int i = 0; i < simds; i++) {
      total += parts[i * outputs + n];
    }
    const size_t to = size_t(token) * N + first + n;
    y[to] = T(residual ? total + float(residual[to]) : total);
  }
}
