// Attention of a few queries over a long cache: out = softmax(q k^T scale) v.
//
// The rows are the L queries of all query heads of a key head. The keys are divided into splits; one
// threadgroup computes one split of one key head for 8 * columns rows (further rows belong to further
// threadgroups), so that keys and values are read once. It computes
//
//   for each tile of 16 * blocks * simds keys of the split:
//     scores^T (keys x rows) = k q^T: 16 * blocks keys in each SIMD group            [registers]
//     m' = max(m, scores);  p = exp2(scores - m');  sum = sum * exp2(m - m') + p     [registers]
//     p and m' for all SIMD groups                                                   [threadgroup]
//     out^T (Dv x rows) = out^T * exp2(m - m') + v^T p: `slice` of Dv in each        [registers]
//
// Keys and values go from device memory straight to registers, keys one tile ahead. Threadgroup memory
// holds q, p, and a float for each row and SIMD group. With one split the result is written; else the
// unnormalized out, m and sum, all float, which attention_combine combines.
//
// Grid (32 * simds * splits, Hkv * row blocks, B), threadgroup (32 * simds, 1, 1).
//
// A key beyond its split has the score -infinity. If `starts` are given, each sequence's splits begin
// at such a key and have as many as the options say; one split gives the bits that attention_combine would.
// Tiles behind the last key that a mask shows to a row add nothing, and are left out.

#include "key_tiles.metal"

#include <metal_stdlib>
using namespace metal;

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
    int bits_v,
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
    const device int* starts,
    constant int* options,
    device P* out,
    uint3 position [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  // A lane reads `run` of every 4 * run elements of a key, and run_v of every 8 * run_v of a value.
  const int words = run * held_bits<T, bits>() / 32, steps = (D + 4 * run - 1) / (4 * run);
  const int widest = bits == 0 ? 16 / sizeof(T) : 8;
  const int run_v = slice / 8 < widest ? slice / 8 : widest;
  const int words_v = run_v * held_bits<T, bits_v>() / 32, steps_v = slice / (8 * run_v);
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

  // Only a mask array can leave a row without a key inside its window.
  int first = windowed && seen < BOOLEAN ? max(0, keys - L - window + 1) : 0;
  int split_keys = (keys - first + int(groups.x) - 1) / int(groups.x);
  split_keys = (split_keys + tile - 1) / tile * tile;
  if (starts) {
    first = starts[batch];
    split_keys = options[3];
  }
  int start = first + int(position.x) * split_keys;
  int stop = min(start + split_keys, keys), last = stop - 1;

  cache_rows<K, S> key_rows = rows_of_head<bits>(
      k, k_strides, k_scales, k_scales_strides, k_biases, k_biases_strides, batch, head,
      words * 4 / int(sizeof(K)));
  cache_rows<K, S> value_rows = rows_of_head<bits_v>(
      v, v_strides, v_scales, v_scales_strides, v_biases, v_biases_strides, batch, head,
      words_v * 4 / int(sizeof(K)));

  // This lane's row of 8, and its run in a key, which is also its pair of columns.
  int near = fragment_row(lane), quarter = fragment_col(lane) / 2;
  int own = 16 * blocks * int(simd) + near;
  cache_run<S, words> key_runs[blocks * 2 * steps];
  if (start < stop) {
    read_tile<bits, group, blocks, 2, steps, 4 * run, limit>(
        key_runs, key_rows, start + own, last, run * quarter);
  }

  const bool ends = seen == BOOLEAN && starts;
  if (ends) {
    int behind = start;
    for (int key = start + int(thread_index); key < stop; key += 32 * simds) {
      bool any = false;
#pragma unroll
      for (int i = 0; i < 8 * columns; i++) {
        int row = min(first_row + i, rows - 1);
        any |= bool(mask[batch * mask_strides[1] + (head * share + row / L) * mask_strides[2] +
                         row % L * mask_strides[3] + key * mask_strides[4]]);
      }
      behind = any ? key + 1 : behind;
    }
    reduced[simd][0][0].x = as_type<float>(simd_max(behind));
  }
  stage_queries<D, bits, run, parts, q_step, 8 * columns, 32 * simds>(
      q_tile, q + batch * q_strides[0] + head * share * q_strides[1], q_strides, first_row, rows,
      L, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int until = ends ? start : stop;
  if (ends) {
    for (int g = 0; g < simds; g++) {
      until = max(until, as_type<int>(reduced[g][0][0].x));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
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
  int64_t mask_step = seen >= BOOLEAN ? mask_strides[4] : 0;
  int64_t mask_from = (start + own) * mask_step, mask_end = last * mask_step;
  for (int base = start; base < until; base += tile) {
    cache_run<S, words_v> value_runs[simds * blocks * 4 * steps_v];
    read_tile<bits_v, group, simds * blocks, 4, steps_v, 8 * run_v, limit_v>(
        value_runs, value_rows, base + 2 * quarter, last, int(simd) * slice + run_v * near);

    sum_fragment s[blocks][columns];
    multiply_keys<T, bits, run, steps, blocks, columns, kept>(
        s, key_runs, queries, q_tile, q_step, lane);
    if (base + tile < until) {
      read_tile<bits, group, blocks, 2, steps, 4 * run, limit>(
          key_runs, key_rows, base + tile + own, last, run * quarter);
    }

    score_tile<seen, windowed, capped, blocks, columns>(
        s, &reduced[simd][0][0], own_rows, scale, cap, mask_step, mask_from, mask_end,
        base + own, stop, window, lane);
    mask_from += tile * mask_step;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_scores<T, simds, blocks, columns>(
        state, s, &reduced[0][0][0], p_tile + (own - near) * p_step, p_step, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    multiply_values<T, bits_v, run_v, steps_v, simds * blocks, columns>(
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
    float factor = 1.0f, divisor = 1.0f;
    if (!split && starts) {
      divisor = total;
    } else if (!split) {
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
        to[d + pair_element<bits_v>(f, 0)] = P(state.o[n][t].part[0][c] * factor / divisor);
        to[d + pair_element<bits_v>(f, 1)] = P(state.o[n][t].part[1][c] * factor / divisor);
      }
    }
    if (split && simd == 0 && near == 0) {
      to[Dv] = P(state.top[t][c]);
      to[Dv + 1] = P(total);
    }
  }
}
