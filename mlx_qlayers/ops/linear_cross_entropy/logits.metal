// The losses of a block of logits, and their derivatives, without the logits in float32.
//
// y (R, C) are the products of rows with some words, before a bias (C,) and a cap. The target of a row is the
// number of one of these words; any other number is none of them. options: the cap, the share that the target
// has of a row's score, and the share that each word has.
//
// logits_losses   gives each row the logarithm of its sum of exponentials, and its score: a share of the target's
//                 logit and of each logit. A threadgroup computes a row; grid (256 * R), threadgroup 256.
// logits_slopes   gives the derivatives of lse - score by y, for the logarithm of the sum over all blocks.
//                 A threadgroup computes 2,048 of a row; grid (256 * ceil(C / 2048), R), threadgroup 256.

#include <metal_stdlib>
using namespace metal;

#define THREADS 256
#define EACH 8

template <typename T, bool biased, bool capped>
METAL_FUNC float logit(const device T* y, const device float* bias, int column, float cap) {
  float z = float(y[column]);
  if (biased) {
    z += bias[column];
  }
  return capped ? cap * precise::tanh(z / cap) : z;
}

// The maximum or the sum of a threadgroup's numbers.
template <bool largest>
METAL_FUNC float all_of(float x, threadgroup float* of_simds, uint simd, uint lane) {
  x = largest ? simd_max(x) : simd_sum(x);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    of_simds[simd] = x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = of_simds[0];
  for (int i = 1; i < THREADS / 32; i++) {
    total = largest ? max(total, of_simds[i]) : total + of_simds[i];
  }
  return total;
}

template <typename T, bool biased, bool capped, bool smoothed>
[[kernel]] void logits_losses(
    const device T* y,
    const device int* targets,
    const device float* bias,
    constant float* options,
    constant int* shape,
    device float* lse,
    device float* score,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float of_simds[THREADS / 32];
  int columns = shape[0], target = targets[group.x];
  y += size_t(group.x) * columns;
  float top = -INFINITY, total = 0.0f, sum = 0.0f;
#pragma unroll 4
  for (int i = thread_index; i < columns; i += THREADS) {
    float z = logit<T, biased, capped>(y, bias, i, options[0]);
    top = max(top, z);
    total += smoothed ? z : 0.0f;
  }
  top = all_of<true>(top, of_simds, simd, lane);
#pragma unroll 4
  for (int i = thread_index; i < columns; i += THREADS) {
    sum += precise::exp(logit<T, biased, capped>(y, bias, i, options[0]) - top);
  }
  sum = all_of<false>(sum, of_simds, simd, lane);
  if (smoothed) {
    total = all_of<false>(total, of_simds, simd, lane);
  }
  if (thread_index == 0) {
    // A difference of infinities is no number.
    lse[group.x] = abs(top) == INFINITY ? top : top + precise::log(sum);
    bool here = target >= 0 && target < columns;
    float own = here ? options[1] * logit<T, biased, capped>(y, bias, here ? target : 0, options[0]) : 0.0f;
    score[group.x] = smoothed ? own + options[2] * total : own;
  }
}

template <typename T, typename O, bool biased, bool capped, bool smoothed>
[[kernel]] void logits_slopes(
    const device T* y,
    const device int* targets,
    const device float* bias,
    const device float* lse,
    constant float* options,
    constant int* shape,
    device O* slopes,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  int columns = shape[0], target = targets[group.y], first = int(group.x) * THREADS * EACH + int(thread_index);
  float total = lse[group.y];
  y += size_t(group.y) * columns;
  slopes += size_t(group.y) * columns;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int column = first + i * THREADS;
    if (column < columns) {
      float z = logit<T, biased, capped>(y, bias, column, options[0]);
      float slope = precise::exp(z - total) - (column == target ? options[1] : 0.0f);
      if (smoothed) {
        slope -= options[2];
      }
      if (capped) {
        float share = z / options[0];
        slope *= 1.0f - share * share;
      }
      slopes[column] = O(slope);
    }
  }
}
