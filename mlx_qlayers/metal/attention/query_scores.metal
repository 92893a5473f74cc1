// The online softmax of tiles of queries x keys, and the stores of its results.

#include "score_output.metal"
#include "score_tile.metal"

// Updates a row's maximum and total with one more tile, and turns scores into weights. Returns the factor
// that rescales earlier sums: it is computed from the rounded maxima, as the weights are, so that all tiles
// have one scale.
template <typename T, int COUNT>
METAL_FUNC float make_weights(
    thread sum_fragment* scores, int part, float unit, thread float& top, thread float& total) {
  float highest = LOWEST;
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    highest = max(highest, max(scores[n].part[part].x, scores[n].part[part].y));
  }
  highest = fragment_row_max(highest);
  float before = top;
  top = max(top, highest == LOWEST ? LOWEST : highest * unit);
  // Until a key is attended to, weights are 0.
  float base = top == LOWEST ? 0.0f : top, sum = 0.0f;
  float rescale = power_of_2<T>(before - base);
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    float2 weight = float2(
        power_of_2<T>(fma(scores[n].part[part].x, unit, -base)),
        power_of_2<T>(fma(scores[n].part[part].y, unit, -base)));
    scores[n].part[part] = weight;
    sum += weight.x + weight.y;
  }
  total = fma(total, rescale, sum);
  return rescale;
}

// Stores 16 rows of sums, from this column on; the SIMD group of the first column stores the norms.
template <typename T, int COUNT, int DV, bool AVERAGE>
METAL_FUNC void store_output(
    thread sum_fragment* sums,
    thread const float* top,
    thread const float* total,
    const device float* mean,
    device T* out,
    device float* norms,
    ulong stride,
    int row,
    int queries,
    int column,
    uint lane) {
#pragma unroll
  for (int p = 0; p < 2; p++) {
    int query = row + fragment_row(lane) + 8 * p;
    float whole = fragment_row_sum(total[p]), inverse = 1.0f / whole;
    bool blank = AVERAGE && top[p] == LOWEST && whole == whole;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      int c = column + 8 * n + fragment_col(lane);
      float2 sum = sums[n].part[p];
      sums[n].part[p] = sizeof(T) == 4 ? sum / whole : sum * inverse;
      if (blank && c < DV) {
        sums[n].part[p] = float2(mean[c], mean[c + 1]);
      }
    }
    if (column + fragment_col(lane) == 0 && query < queries) {
      norms[2 * query] = blank ? BLANK : top[p];
      norms[2 * query + 1] = blank ? 1.0f : whole;
    }
  }
  store_rows<T, COUNT>(sums, out, stride, row, queries, column, DV, 1.0f, lane);
}
