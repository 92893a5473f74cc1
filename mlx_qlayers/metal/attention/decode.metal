// Attention of a few queries over a long cache: out = softmax(q k^T scale) v.
//
// The rows are the queries of all heads that share a key head: `share * L`. Keys are cut into
// splits, and one threadgroup takes one split of one key head for 8 * columns rows (more rows
// take further threadgroups), so that keys and values are read once. It computes
//
//   for each tile of 16 * blocks * simds keys of the split:
//     scores^T (keys x rows) = k q^T: 16 * blocks keys in each SIMD group            [registers]
//     m' = max(m, scores);  p = exp2(scores - m');  sum = sum * exp2(m - m') + p     [registers]
//     p and m' for all SIMD groups                                                   [threadgroup]
//     out^T (Dv x rows) = out^T * exp2(m - m') + v^T p: `slice` of Dv in each        [registers]
//
// Keys and values go from device memory straight to registers, keys a tile ahead. In threadgroup
// memory lie q, p, and a number a row and SIMD group. With one split the result is written; else
// out without its divisor, m and sum, all float, and attention_combine adds the splits up.
//
// Grid (32 * simds * splits, Hkv * row blocks, B), threadgroup (32 * simds, 1, 1).
//
// A key of another split has the score -infinity.

#include "kv_cache.metal"
#include "query_rows.metal"
#include "common/fragment.metal"

#include <metal_stdlib>
using namespace metal;

// q in the order in which a lane meets the runs of a key, with zeros behind D.
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

// scores^T = k q^T of one tile: `queries` are held in registers, or (not `kept`) read where they
// lie.
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

// out^T += v^T p of one tile: the p of `tall` blocks of 16 keys lie in threadgroup memory.
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

template <
    typename T,
    typename K,
    typename S,
    typename M,
    typename N,
    int D,
    int Dv,
    int group,
    int bits,
    int seen,
    bool windowed,
    bool capped,
    bool sinking,
    int columns,
    int simds,
    int blocks,
    int slice,
    int run,
    typename P,
    bool split,
    int RESIDENT>
[[kernel]] void attention_decode(
    const device T* q,
    const constant int* q_shape,
    const constant int64_t* q_strides,
    const device K* k,
    const constant int* k_shape,
    const constant int64_t* k_strides,
    const device S* k_scales,
    const constant int64_t* k_scales_strides,
    const device S* k_biases,
    const constant int64_t* k_biases_strides,
    const device K* v,
    const constant int64_t* v_strides,
    const device S* v_scales,
    const constant int64_t* v_scales_strides,
    const device S* v_biases,
    const constant int64_t* v_biases_strides,
    const device M* mask,
    const constant int64_t* mask_strides,
    const device N* sinks,
    constant int* options,
    device P* out,
    uint3 position [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  // A lane reads `run` in every 4 * run numbers of a key, and run_v in every 8 * run_v of a value.
  const int width = bits == 0 ? 8 * sizeof(T) : bits;
  const int words = run * width / 32, steps = (D + 4 * run - 1) / (4 * run);
  const int widest = bits == 0 ? 16 / sizeof(T) : 8;
  const int run_v = slice / 8 < widest ? slice / 8 : widest;
  const int words_v = run_v * width / 32, steps_v = slice / (8 * run_v);
  const int limit = D % (4 * run) == 0 ? 0 : D, limit_v = Dv == slice * simds ? 0 : Dv;
  const int tile = 16 * blocks * simds, parts = steps * run / 4;
  // Rows of 16 * odd bytes keep matrix loads free of bank conflicts.
  const int q_step = 16 * parts + 16 / sizeof(T);
  const int p_step = 8 * columns + (columns % 2 == 0 ? 8 : 0);
  threadgroup T q_tile[8 * columns * q_step];
  threadgroup T p_tile[tile * p_step];
  threadgroup float2 reduced[simds][columns][4];

  int L = q_shape[2], keys = k_shape[2], heads = k_shape[1], share = q_shape[1] / heads;
  int batch = position.z, head = int(position.y) % heads;
  int rows = share * L, first_row = int(position.y) / heads * 8 * columns;
  float scale = as_type<float>(options[0]), cap = as_type<float>(options[1]);
  int window = options[2];

  // Without an array that hides keys too, every row sees a key inside its window.
  int first = windowed && seen < BOOLEAN ? max(0, keys - L - window + 1) : 0;
  int split_keys = (keys - first + int(groups.x) - 1) / int(groups.x);
  split_keys = (split_keys + tile - 1) / tile * tile;
  int start = first + int(position.x) * split_keys;
  int stop = min(start + split_keys, keys), last = stop - 1;

  cache_rows<K, S> key_rows = rows_of_head<bits>(
      k, k_strides, k_scales, k_scales_strides, k_biases, k_biases_strides, batch, head,
      words * 4 / int(sizeof(K)));
  cache_rows<K, S> value_rows = rows_of_head<bits>(
      v, v_strides, v_scales, v_scales_strides, v_biases, v_biases_strides, batch, head,
      words_v * 4 / int(sizeof(K)));

  // This lane's row of 8, its run in a key, its pair of columns.
  int near = fragment_row(lane), quarter = fragment_col(lane) / 2;
  int own = 16 * blocks * int(simd) + near;
  cache_run<S, words> key_runs[blocks * 2 * steps];
  if (start < stop) {
    read_tile<bits, group, blocks, 2, steps, 4 * run, limit>(
        key_runs, key_rows, start + own, last, run * quarter);
  }

  stage_queries<D, bits, run, parts, q_step, 8 * columns, 32 * simds>(
      q_tile, q + batch * q_strides[0] + head * share * q_strides[1], q_strides, first_row, rows,
      L, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const bool kept = columns * parts <= 16;
  right_fragment<T> queries[kept ? columns * parts : 1];
  if (kept) {
#pragma unroll
    for (int i = 0; i < columns * parts; i++) {
      load_right_transposed(
          queries[kept ? i : 0], q_tile + i / parts * 8 * q_step + i % parts * 16, q_step, lane);
    }
  }

  lane_rows<M, columns> own_rows;
#pragma unroll
  for (int i = 0; i < 2 * columns; i++) {
    int row = min(first_row + i / 2 * 8 + 2 * quarter + i % 2, rows - 1);
    own_rows.position[i / 2][i % 2] = keys - L + row % L;
    own_rows.mask[i / 2][i % 2] = mask;
    if (seen >= BOOLEAN) {
      own_rows.mask[i / 2][i % 2] += batch * mask_strides[1] +
          (head * share + row / L) * mask_strides[2] + row % L * mask_strides[3];
    }
  }

  attended_rows<columns, slice / 16> state = nothing_attended<columns, slice / 16>();
  for (int base = start; base < stop; base += tile) {
    cache_run<S, words_v> value_runs[simds * blocks * 4 * steps_v];
    read_tile<bits, group, simds * blocks, 4, steps_v, 8 * run_v, limit_v>(
        value_runs, value_rows, base + 2 * quarter, last, int(simd) * slice + run_v * near);

    sum_fragment s[blocks][columns];
    multiply_keys<T, bits, run, steps, blocks, columns, kept>(
        s, key_runs, queries, q_tile, q_step, lane);
    if (base + tile < stop) {
      read_tile<bits, group, blocks, 2, steps, 4 * run, limit>(
          key_runs, key_rows, base + tile + own, last, run * quarter);
    }

    score_tile<seen, windowed, capped, blocks, columns>(
        s, &reduced[simd][0][0], own_rows, scale, cap, seen >= BOOLEAN ? mask_strides[4] : 0,
        base + own, stop, window, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_scores<T, simds, blocks, columns>(
        state, s, &reduced[0][0][0], p_tile + (own - near) * p_step, p_step, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    multiply_values<T, bits, run_v, steps_v, simds * blocks, columns>(
        state.o, value_runs, p_tile, p_step, lane);
  }

#pragma unroll
  for (int t = 0; t < columns; t++) {
    state.sum[t] = fragment_column_sum(state.sum[t]);
    if (near == 0) {
      reduced[simd][t][quarter] = state.sum[t];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < 2 * columns; i++) {
    int t = i / 2, c = i % 2, row = first_row + 8 * t + 2 * quarter + c;
    if (row >= rows) {
      continue;
    }
    float total = 0.0f;
    for (int g = 0; g < simds; g++) {
      total += reduced[g][t][quarter][c];
    }
    float factor = 1.0f;
    if (!split) {
      if (sinking) {
        float sink = float(sinks[head * share + row / L]) * LOG2_E;
        float peak = max(state.top[t][c], sink);
        factor = fast::exp2(state.top[t][c] - peak);
        total = total * factor + fast::exp2(sink - peak);
      }
      factor /= total;
    }
    int64_t at = (int64_t(batch) * L + row % L) * heads * share + head * share + row / L;
    device P* to = split ? out + (at * groups.x + position.x) * (Dv + 2) : out + at * Dv;
#pragma unroll
    for (int n = 0; n < slice / 16; n++) {
      int f = n % (run_v / 2), d = int(simd) * slice + n / (run_v / 2) * 8 * run_v + run_v * near;
      if (limit_v == 0 || d < Dv) {
        to[d + pair_element<bits>(f, 0)] = P(state.o[n][t].part[0][c] * factor);
        to[d + pair_element<bits>(f, 1)] = P(state.o[n][t].part[1][c] * factor);
      }
    }
    if (split && simd == 0 && near == 0) {
      to[Dv] = P(state.top[t][c]);
      to[Dv + 1] = P(total);
    }
  }
}
