// Writes tiles of rows and of scores to device memory.

#include "score_tile.metal"

// Stores the gradient of a tile of scores to an array (L, S).
template <int COUNT, typename M>
METAL_FUNC void store_scores(
    thread const sum_fragment* scores,
    device float* out,
    int row,
    int column,
    thread const score_rule<M>& rule,
    uint lane) {
  row += fragment_row(lane);
  column += fragment_col(lane);
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int query = row + i / 2 * 8, key = column + 8 * n + i % 2;
      if (query < rule.queries && key < rule.keys) {
        out[query * ulong(rule.keys) + key] = scores[n].part[i / 2][i % 2];
      }
    }
  }
}

// Stores 16 rows from `row` on, times `factor`; `stride` is the stride of rows.
template <typename T, int COUNT>
METAL_FUNC void store_rows(
    thread const sum_fragment* sums,
    device T* out,
    ulong stride,
    int row,
    int rows,
    int column,
    int width,
    float factor,
    uint lane) {
  row += fragment_row(lane);
  column += fragment_col(lane);
#pragma unroll
  for (int p = 0; p < 2; p++) {
    if (row + 8 * p < rows) {
      device T* to = out + (row + 8 * p) * stride;
#pragma unroll
      for (int c = 0; c < COUNT; c++) {
        if (column + 8 * c < width) {
          *reinterpret_cast<device metal::vec<T, 2>*>(to + column + 8 * c) =
              metal::vec<T, 2>(sums[c].part[p] * factor);
        }
      }
    }
  }
}
