// The router of a mixture of experts.
//
// experts_chosen   right and weights (R, J): the experts with the J largest of E values of a row, and
//                  their routing weights. The values are scores of logits, plus a bias, or the logits
//                  themselves, whose weights are a softmax of the chosen. Of `groups` of experts the
//                  `dropped` lowest, by their maximum or by the sum of the two largest, count as FILL.
//                  Weights are scores, or FILL if `masked`; if `normed`, divided by their sum plus
//                  EPSILON, at least FLOOR; times FACTOR, times the expert's entry of `factors`. With
//                  SPARSEMIXER the weight of each is a softmax over the remaining logits near it, by
//                  EPSILON. A SIMD group computes a row, a lane every 32nd logit, `per` of them.
//                  Grid (32, R, 1), threadgroup (32, 1, 1).

#include <metal_stdlib>
using namespace metal;

enum { SOFTMAX, SIGMOID, SQRT_SOFTPLUS, LOGITS, SPARSEMIXER };
enum { FILL, EPSILON, FLOOR, FACTOR };

// A float as an unsigned integer of the same order; NaN comes last, or first.
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

// Removes and returns the largest key of a row, with its index in `at`; 0 if none is left. Of equal keys it
// takes the first or the last.
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
    } else if (score == SQRT_SOFTPLUS) {
      // log1p(least), which is exact for small arguments too.
      const float least = metal::precise::exp(-abs(values[i])), more = 1 + least;
      const float rest = more == 1 ? least : metal::precise::log(more) * (least / (more - 1));
      values[i] = metal::precise::sqrt((values[i] > 0 ? values[i] : 0.0f) + rest);
    }
  }
  // `normed` divides by the sum of the chosen scores only.
  total = score == LOGITS || score == SPARSEMIXER ? 1.0f : simd_sum(total);
  if (score < LOGITS && (score != SOFTMAX || bias || groups > 1 || isnan(total))) {
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
      bool is_least = left == least && int(lane) < groups && !(out >> lane & 1);
      out |= 1u << simd_min(is_least ? lane : 31u);
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
    const float largest = unordered(taken_largest<per, last>(keys, expert, lane));
    float weight = 0;
#pragma unroll
    for (int i = 0; i < per; i++) {
      if (score == SPARSEMIXER) {
        const float apart = T(T(largest - values[i]) / T(max(abs(values[i]), largest)));
        const bool near = keys[i] != 0 && !(apart > float(T(numbers[EPSILON])));
        weight += near ? metal::precise::exp(values[i] - largest) : 0.0f;
      } else {
        weight = uint(i * 32) + lane == expert ? values[i] : weight;
      }
    }
    weight = score == SPARSEMIXER ? 1 / (1 + simd_sum(weight))
                                 : simd_shuffle(weight, ushort(expert % 32));
    sum += weight;
    own = int(lane) == j ? weight : own;
    own_expert = int(lane) == j ? expert : own_expert;
  }
  if (int(lane) < J) {
    if (normed) {
      total = max(sum + numbers[EPSILON] * total, numbers[FLOOR] * total);
      // NaN propagates, as in MLX's maximum.
      total = isnan(sum) ? sum : total;
    }
    float factor = factors ? float(factors[own_expert]) : 1.0f;
    right[row * J + lane] = own_expert;
    weights[row * J + lane] = W(own / total * (numbers[FACTOR] * factor));
  }
}
