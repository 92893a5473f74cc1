// Rows times the matrices of the experts that they chose, few rows: each matrix is read once.
//
// Product p of P takes expert right[p] of E, and row p / share of x. A matrix is (E, N, K) packed;
// `group` elements of a row share a scale. shape is P, N, K, share. Sums are float32.
//
// experts_products   y (P, N) and y1 = x * w^T + bias and the same with w1, or with a gate
//                    activation(y) * y1 alone, or y without w1. Of GATE_CLIPPED shape has the bits
//                    of three floats behind. A SIMD group takes `outputs` rows of
//                    the matrices, or half as many of both, for the products of an expert, `rows` at
//                    a time: the first product that chose it does it for all, the others nothing.
//                    Grid (32 * tiles of N, P, 1), threadgroup any multiple of 32.
// experts_combined   y (R, N): the sum over a row's products p of scores[p] * (x[p] * w^T + bias).
//                    The `simds` SIMD groups of a threadgroup share the products of a row.
//                    Grid (32 * simds * tiles of N, R, 1), threadgroup (32 * simds, 1, 1); in
//                    threadgroup memory a float for each output and SIMD group.

#include "quantized_matmul/epilogue.metal"
#include "quantized_matmul/packed.metal"

#include <metal_stdlib>
using namespace metal;

enum { PRODUCTS, OUTPUTS, DEPTH, SHARE, LIMIT, ALPHA, SHIFT };
#define GATE_CLIPPED 4

// (clip(up) + shift) * gate * sigmoid(alpha * gate), gate clipped from above; what is no number stays.
METAL_FUNC float clipped_product(float gate, float up, const constant int* shape) {
  const float limit = as_type<float>(shape[LIMIT]);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  const float turned = 1 + precise::exp(-as_type<float>(shape[ALPHA]) * gate);
  return (up + as_type<float>(shape[SHIFT])) * (gate / turned);
}

// This lane's part of rows of x, `count` of them at `at`, times rows of two matrices, from `row` on,
// of which each has `height` up to `last`: sums[m * outputs + n].
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
    constant int* shape,
    device T* y,
    device T* y1,
    uint3 id [[thread_position_in_grid]]) {
  const int P = shape[PRODUCTS], N = shape[OUTPUTS], K = shape[DEPTH];
  const int lane = id.x % 32, first = int(id.x / 32) * height, begin = id.y;
  // A tile beyond N is there to fill the last threadgroup.
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
      at[m] = size_t(product[m] / shape[SHARE]) * K;
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
#pragma unroll
      for (int n = 0; n < outputs; n++) {
        sums[m * outputs + n] = simd_sum(sums[m * outputs + n]);
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
    constant int* shape,
    device T* y,
    uint3 group_index [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int N = shape[OUTPUTS], K = shape[DEPTH], share = shape[SHARE];
  const int first = int(group_index.x) * outputs, token = group_index.y;
  threadgroup float parts[simds * outputs];
  const packed_matrix<S> matrix = {w, scales, biases};
  float totals[outputs] = {};
  for (int j = simd; j < share; j += simds) {
    const int p = token * share + j;
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
    y[size_t(token) * N + first + n] = T(total);
  }
}

// A number as an unsigned one of the same order; one that is none comes last, or first of all.
METAL_FUNC uint ordered(float x, bool none_is_last) {
  if (isnan(x)) {
    return none_is_last ? 0xFFFFFFFFu : 1u;
  }
  const uint bits = as_type<uint>(x == 0 ? 0.0f : x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

METAL_FUNC float unordered(uint key) {
  return as_type<float>(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// What of a row's largest is left: the next one's key, and its place in `at`; 0 where none is. Of
// equal ones the first or the last.
template <int per, bool last>
METAL_FUNC uint taken_largest(thread uint* keys, thread uint& at, uint lane) {
  uint best = keys[0], place = lane;
#pragma unroll
  for (int i = 1; i < per; i++) {
    bool more = last ? keys[i] >= best : keys[i] > best;
    place = more ? i * 32 + lane : place;
    best = more ? keys[i] : best;
  }
  const uint largest = simd_max(best);
  at = last ? simd_max(best == largest ? place : 0u) : simd_min(best == largest ? place : ~0u);
#pragma unroll
  for (int i = 0; i < per; i++) {
    keys[i] = i * 32 + lane == at ? 0u : keys[i];
  }
  return largest;
}

enum { SOFTMAX, SIGMOID, SQRT_SOFTPLUS, LOGITS };
enum { FILL, EPSILON, FLOOR, FACTOR };

// experts_chosen   right and weights (R, J): the experts with the J largest of E numbers of a row, and
//                  their shares. The numbers are scores of logits, plus a bias, or logits, whose
//                  shares are a softmax of the chosen. Of `groups` of them
//                  the `dropped` lowest, by their largest or by the sum of two, count as FILL. Shares
//                  are scores, FILL too where `masked`; `normed` by their sum plus EPSILON, at least
//                  FLOOR; times FACTOR, times the expert's of `factors`.
//                  A SIMD group takes a row; a lane every 32nd logit, `per` of them.
//                  Grid (32, R, 1), threadgroup (32, 1, 1).
template <
    typename T,
    typename B,
    typename F,
    typename W,
    int per,
    int J,
    int score,
    int groups,
    int dropped,
    bool pairs,
    bool masked,
    bool last,
    bool normed>
[[kernel]] void experts_chosen(
    const device T* logits,
    const device B* bias,
    const device F* factors,
    constant float* numbers,
    const constant int* logits_shape,
    const constant int& logits_ndim,
    device uint* right,
    device W* weights,
    uint3 group_index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int E = logits_shape[logits_ndim - 1];
  const size_t row = group_index.y;
  float values[per], top = -INFINITY, total = 0, sum = 0, own = 0;
  uint keys[per], own_expert = 0;
#pragma unroll
  for (int i = 0; i < per; i++) {
    int e = i * 32 + lane;
    values[i] = e < E ? float(logits[row * E + e]) : -INFINITY;
    top = max(top, values[i]);
    // A softmax has the order of its logits.
    keys[i] = e < E ? ordered(values[i], last) : 0u;
  }
  top = simd_max(top);
#pragma unroll
  for (int i = 0; i < per; i++) {
    if (score == SOFTMAX || score == LOGITS) {
      values[i] = metal::precise::exp(values[i] - top);
      total += values[i];
    } else if (score == SIGMOID) {
      float small = 1 / (1 + metal::precise::exp(abs(values[i])));
      values[i] = values[i] < 0 ? small : 1 - small;
    } else {
      // log(1 + least), to the last bit for small ones too.
      const float least = metal::precise::exp(-abs(values[i])), more = 1 + least;
      const float rest = more == 1 ? least : metal::precise::log(more) * (least / (more - 1));
      values[i] = metal::precise::sqrt((values[i] > 0 ? values[i] : 0.0f) + rest);
    }
  }
  // Those of the chosen logits alone are shared by `normed`.
  total = score == LOGITS ? 1.0f : simd_sum(total);
  if (score != LOGITS && (score != SOFTMAX || bias || groups > 1 || isnan(total))) {
#pragma unroll
    for (int i = 0; i < per; i++) {
      int e = i * 32 + lane;
      values[i] = score == SOFTMAX ? values[i] / total : values[i];
      keys[i] = e < E ? ordered(values[i] + (bias ? float(bias[e]) : 0.0f), last) : 0u;
    }
    total = 1;
  }
  if (groups > 1 && dropped > 0) {
    const int size = E / groups;
    uint rank = ~0u, out = 0;
    for (int g = 0; g < groups; g++) {
      uint inside[per], at;
#pragma unroll
      for (int i = 0; i < per; i++) {
        int e = i * 32 + lane;
        bool none = keys[i] == ordered(NAN, last);
        inside[i] = e / size != g || e >= E ? 0u : none ? ~0u : keys[i];
      }
      float of_group = unordered(taken_largest<per, false>(inside, at, lane));
      if (pairs && size > 1) {
        of_group += unordered(taken_largest<per, false>(inside, at, lane));
      }
      rank = int(lane) == g ? ordered(of_group, true) : rank;
    }
    for (int j = 0; j < dropped; j++) {
      uint left = int(lane) < groups && !(out >> lane & 1) ? rank : ~0u;
      uint least = simd_min(left);
      bool mine = left == least && int(lane) < groups && !(out >> lane & 1);
      out |= 1u << simd_min(mine ? lane : 31u);
    }
#pragma unroll
    for (int i = 0; i < per; i++) {
      int e = i * 32 + lane;
      if (e < E && (out >> (e / size) & 1)) {
        keys[i] = ordered(numbers[FILL], last);
        values[i] = masked ? numbers[FILL] : values[i];
      }
    }
  }
  for (int j = 0; j < J; j++) {
    uint expert;
    taken_largest<per, last>(keys, expert, lane);
    float share = 0;
#pragma unroll
    for (int i = 0; i < per; i++) {
      share = uint(i * 32) + lane == expert ? values[i] : share;
    }
    share = simd_shuffle(share, ushort(expert % 32));
    sum += share;
    own = int(lane) == j ? share : own;
    own_expert = int(lane) == j ? expert : own_expert;
  }
  if (int(lane) < J) {
    if (normed) {
      total = max(sum + numbers[EPSILON] * total, numbers[FLOOR] * total);
      // As stock's maximum, a number that is none stays.
      total = isnan(sum) ? sum : total;
    }
    float factor = factors ? float(factors[own_expert]) : 1.0f;
    right[row * J + lane] = own_expert;
    weights[row * J + lane] = W(own / total * (numbers[FACTOR] * factor));
  }
}
