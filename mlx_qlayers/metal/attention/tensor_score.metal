// What the kernels of attention by Metal 4's tensor operations share: rows of a head as a tensor,
// scores by index, weights of the gradient.

#include "common/power.metal"
#include "score_tile.metal"

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
using namespace metal;

// Rows of a SIMD group; a turn of its loop takes TILE rows of the other side.
#define TENSOR_ROWS 16
// Rows whose SIMD groups take the same turns, each its own or TOGETHER.
#define TURN_ROWS (TOGETHER ? SIMDS * TENSOR_ROWS : TENSOR_ROWS)
// Rows whose SIMD groups take the same turns, each its own or TOGETHER.
#define TURN_ROWS (TOGETHER ? SIMDS * TENSOR_ROWS : TENSOR_ROWS)

// Rows from `first` on, of which columns are neighbours.
template <typename T>
using tensor_of = metal::tensor<device T, metal::dextents<int, 2>, metal::tensor_inline>;
template <typename T>
METAL_FUNC tensor_of<T> rows_as_tensor(head_rows<T> rows, int width, int first) {
  return tensor_of<T>(
      (device T*)(rows.at + first * rows.row),
      metal::dextents<int, 2>(width, max(rows.count - first, 0)),
      metal::array<int, 2>{1, int(rows.row)});
}

// The score of a query and a key, in units of log2 where it is not raw, and the slope of the softcap.
template <int MASK, bool SOFTCAP, typename M>
METAL_FUNC float2 score_and_slope(
    float product, int query, int key, thread const score_rule<M>& rule) {
  float score = is_raw(MASK, SOFTCAP) ? product : product * rule.scale, slope = 1.0f;
  if (SOFTCAP) {
    float bent = precise::tanh(score);
    score = bent * rule.cap;
    slope = 1.0f - bent * bent;
  }
  if (MASK != NO_MASK && query < rule.queries && key < rule.keys) {
    M value = rule.mask[query * rule.mask_query + key * rule.mask_key];
    if (MASK == BOOLEAN) {
      score = bool(value) ? score : LOWEST;
    } else {
      score = fma(float(value), LOG2E, score);
      score = score < LOWEST ? LOWEST : score;
    }
  }
  return float2(score, slope);
}

// Whether positions let a query see a key, of those from `first` on.
template <typename M>
METAL_FUNC bool is_seen(thread const score_rule<M>& rule, int query, int key, int first) {
  int low = max(first, query + rule.reach - rule.window + 1);
  return uint(key - low) < uint(max(0, min(rule.keys, query + rule.reach + 1) - low));
}
// The same, of the queries from `first` on.
template <typename M>
METAL_FUNC bool sees(thread const score_rule<M>& rule, int query, int key, int first) {
  int low = max(first, key - rule.reach);
  return uint(query - low) < uint(max(0, min(rule.queries, key - rule.reach + rule.window) - low));
}
