// The softmax of decoding attention's tiles: scores from products, and the running state of each row.
//
// Fragments are transposed, keys x rows: a lane holds two of every eight rows.

#include "score.metal"
#include "common/fragment.metal"

#include <metal_stdlib>
using namespace metal;

// The positions and masks of the two rows in every eight that a lane holds.
template <typename M, int columns>
struct lane_rows {
  int position[columns][2];
  const device M* mask[columns][2];
};

// Turns the products of a tile into scores, and finds the maximum of each row over all SIMD groups. The
// lane's keys are every eighth from `first` on. A row's mask has the value of `first` at mask_from, and
// that of the last key at mask_end.
template <int seen, bool windowed, bool capped, int blocks, int columns, typename M>
METAL_FUNC void score_tile(
    thread sum_fragment (*s)[columns],
    threadgroup float2* reduced,
    const thread lane_rows<M, columns>& rows,
    float scale,
    float cap,
    int64_t mask_step,
    int64_t mask_from,
    int64_t mask_end,
    int first,
    int stop,
    int window,
    uint lane) {
#pragma unroll
  for (int t = 0; t < columns; t++) {
    float2 largest = LOWEST;
#pragma unroll
    for (int i = 0; i < 4 * blocks; i++) {
      int key = first + 8 * (i / 2), c = i % 2;
      float x = score<seen, windowed, capped>(
          s[i / 4][t].part[i / 2 % 2][c], scale, cap, rows.mask[t][c],
          key < stop ? mask_from + i / 2 * 8 * mask_step : mask_end, key - rows.position[t][c], window);
      x = key < stop ? x : -INFINITY;
      s[i / 4][t].part[i / 2 % 2][c] = x;
      largest[c] = max(largest[c], x);
    }
    largest = fragment_column_max(largest);
    if (fragment_row(lane) == 0) {
      reduced[4 * t + fragment_col(lane) / 2] = largest;
    }
  }
}

// The online softmax of a SIMD group: maximum and sum of each row, and its slice of out.
template <int columns, int fragments>
struct attended_rows {
  float2 top[columns], sum[columns];
  sum_fragment o[fragments][columns];
};

template <int columns, int fragments>
METAL_FUNC attended_rows<columns, fragments> nothing_attended() {
  attended_rows<columns, fragments> state;
#pragma unroll
  for (int t = 0; t < columns; t++) {
    state.top[t] = LOWEST;
    state.sum[t] = 0.0f;
#pragma unroll
    for (int n = 0; n < fragments; n++) {
      state.o[n][t].part[0] = state.o[n][t].part[1] = 0.0f;
    }
  }
  return state;
}

// Adds the scores of a tile: stores their p for all SIMD groups and rescales the state.
template <typename T, int simds, int blocks, int columns, int fragments>
METAL_FUNC void add_scores(
    thread attended_rows<columns, fragments>& state,
    thread sum_fragment (*s)[columns],
    const threadgroup float2* reduced,
    threadgroup T* p_tile,
    int p_step,
    uint lane) {
#pragma unroll
  for (int t = 0; t < columns; t++) {
    float2 before = state.top[t];
#pragma unroll
    for (int g = 0; g < simds; g++) {
      state.top[t] = max(state.top[t], reduced[4 * (g * columns + t) + fragment_col(lane) / 2]);
    }
    float2 rescale = powers_of_2<T>(before - state.top[t]);
    state.sum[t] *= rescale;
#pragma unroll
    for (int n = 0; n < fragments; n++) {
      state.o[n][t].part[0] *= rescale;
      state.o[n][t].part[1] *= rescale;
    }
#pragma unroll
    for (int b = 0; b < blocks; b++) {
      s[b][t].part[0] = powers_of_2<T>(s[b][t].part[0] - state.top[t]);
      s[b][t].part[1] = powers_of_2<T>(s[b][t].part[1] - state.top[t]);
      state.sum[t] += s[b][t].part[0] + s[b][t].part[1];
      store_sum<T>(s[b][t], p_tile + 16 * b * p_step + 8 * t, p_step, lane);
    }
  }
}
