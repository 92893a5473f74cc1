// The products of decoding attention's tiles: keys times queries, and values times weights.

#include "kv_cache.metal"
#include "query_rows.metal"
#include "common/fragment.metal"

#include <metal_stdlib>
using namespace metal;

// Stages q in the order in which lanes read the runs of a key, with zeros behind D.
template <int D, int bits, int run, int parts, int step, int count, int threads, typename T>
METAL_FUNC void stage_queries(
    threadgroup T* to,
    const device T* q,
    const constant int64_t* strides,
    int first,
    int rows,
    int L,
    uint thread_index) {
  for (int i = thread_index; i < count * 16 * parts; i += threads) {
    int row = min(first + i / (16 * parts), rows - 1), at = i % (16 * parts), part = at / 16;
    int d = part / (run / 4) * 4 * run + at % 8 / 2 * run +
        pair_element<bits>(part % (run / 4) * 2 + at % 16 / 8, at % 2);
    to[i / (16 * parts) * step + at] = d < D
        ? q[row / L * strides[1] + row % L * strides[2] + d * strides[3]]
        : T(0);
  }
}

// scores^T = k q^T of one tile. `queries` are in registers if `kept`, else in threadgroup memory.
template <
    typename T,
    int bits,
    int run,
    int steps,
    int blocks,
    int columns,
    bool kept,
    typename S,
    int words>
METAL_FUNC void multiply_keys(
    thread sum_fragment (*s)[columns],
    const thread cache_run<S, words>* key_runs,
    const thread right_fragment<T>* queries,
    const threadgroup T* q_tile,
    int q_step,
    uint lane) {
  const int parts = steps * run / 4;
#pragma unroll
  for (int i = 0; i < blocks * columns; i++) {
    s[i / columns][i % columns].part[0] = s[i / columns][i % columns].part[1] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < blocks * steps; i++) {
    int b = i / steps, j = i % steps;
    metal::vec<T, 2> low[run / 2], high[run / 2];
    unpack<T, bits, run>(low, key_runs[2 * b * steps + j]);
    unpack<T, bits, run>(high, key_runs[(2 * b + 1) * steps + j]);
#pragma unroll
    for (int f = 0; f < run / 4; f++) {
      left_fragment<T> left;
      left.part[0] = low[2 * f];
      left.part[1] = high[2 * f];
      left.part[2] = low[2 * f + 1];
      left.part[3] = high[2 * f + 1];
      int part = j * (run / 4) + f;
#pragma unroll
      for (int t = 0; t < columns; t++) {
        right_fragment<T> right = queries[kept ? t * parts + part : 0];
        if (!kept) {
          load_right_transposed(right, q_tile + 8 * t * q_step + 16 * part, q_step, lane);
        }
        multiply_accumulate(s[b][t], left, right);
      }
    }
  }
}

// out^T += v^T p of one tile. The p of `tall` blocks of 16 keys are in threadgroup memory.
template <typename T, int bits, int run, int steps, int tall, int columns, typename S, int words>
METAL_FUNC void multiply_values(
    thread sum_fragment (*o)[columns],
    const thread cache_run<S, words>* value_runs,
    const threadgroup T* p_tile,
    int p_step,
    uint lane) {
#pragma unroll
  for (int b = 0; b < tall; b++) {
    right_fragment<T> p[columns];
#pragma unroll
    for (int t = 0; t < columns; t++) {
      load_right(p[t], p_tile + 16 * b * p_step + 8 * t, p_step, lane);
    }
#pragma unroll
    for (int j = 0; j < steps; j++) {
      metal::vec<T, 2> value[4][run / 2];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        unpack<T, bits, run>(value[n], value_runs[(4 * b + n) * steps + j]);
      }
#pragma unroll
      for (int f = 0; f < run / 2; f++) {
        left_fragment<T> left;
        left.part[0] = metal::vec<T, 2>(value[0][f].x, value[1][f].x);
        left.part[1] = metal::vec<T, 2>(value[0][f].y, value[1][f].y);
        left.part[2] = metal::vec<T, 2>(value[2][f].x, value[3][f].x);
        left.part[3] = metal::vec<T, 2>(value[2][f].y, value[3][f].y);
#pragma unroll
        for (int t = 0; t < columns; t++) {
          multiply_accumulate(o[j * (run / 2) + f][t], left, p[t]);
        }
      }
    }
  }
}
