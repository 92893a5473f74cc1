// What the kernels of attention by Metal 4's tensor operations share: rows of a head as a tensor,
// scores by index, weights of the gradient.

#include "common/power.metal"
#include "score_tile.metal"

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
using namespace metal;

// Rows of a SIMD group, and rows of the other side that a turn of its loop takes.
#define TENSOR_ROWS 16
#define TENSOR_TILE 32
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

// The score of a query and a key, in units of log2, and the slope of the softcap.
template <int MASK, bool SOFTCAP, typename M>
METAL_FUNC float2 score_and_slope(
    float product, int query, int key, thread const score_rule<M>& rule) {
  float score = product * rule.scale, slope = 1.0f;
  if (SOFTCAP) {
    float bent = precise::tanh(score);
    score = bent * rule.cap;
    slope = 1.0f - bent * bent;
  }
  bool inside = query < rule.queries && key < rule.keys;
  if (MASK != NO_MASK && inside) {
    M value = rule.mask[query * rule.mask_query + key * rule.mask_key];
    if (MASK == BOOLEAN) {
      score = bool(value) ? score : LOWEST;
    } else {
      score = fma(float(value), LOG2E, score);
      score = score < LOWEST ? LOWEST : score;
    }
  }
  bool seen = inside && key <= query + rule.reach && key > query + rule.reach - rule.window;
  return float2(seen ? score : LOWEST, slope);
}
