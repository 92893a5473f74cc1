// One step of decoding, from the products of `tokens` tokens of each sequence to their attention. The rotary
// embedding is applied to q and k, and every head attends to the keys of a cache, to those of its append buffer (the
// tokens since the cache was written), and to the keys of its own token and of those before it in the step. The cache
// is only read; k and v become rows of a new append buffer. The number of keys is an input, so that one launch serves
// until the cache grows. Keys and values may be packed as by mx.quantize (`bits`, of values `bits_v` > 0): then k and
// v are packed too before any query attends to them, and a row of the append buffer holds words, scales, biases and
// padding. With `sinking`, sinks (H,) are scores of keys without a value. With `normed`, each head of q and k goes
// through an RMS norm first, with the weights q_norm and k_norm (D,).
//
// The rows are the queries of the query heads of a key head, token by token. One threadgroup computes one split of
// the keys of the cache or of the append buffer for 8 * columns rows, tile by tile as attention_decode does; the
// tokens' own keys start the softmax of the append buffer's first split. Without split-K one threadgroup
// computes all. Its SIMD groups form `teams` of `simds`, each with tiles and a softmax of its own until the end.
//
// The threadgroups along x beyond the splits copy the append buffer, so that no threadgroup that computes
// attention waits for the copy; rows behind the tokens' become zeros. Threadgroup memory holds q and the
// tokens' keys after the rotary embedding, p, and a float for each row and SIMD group. Without split-K the
// result is written; else the unnormalized o, m and sum, all float, which attention_combine combines. With
// `joined`, splits write the normalized o in T, m and sum in float, and the last threadgroup of a row block
// combines them. It has to see other threadgroups' writes, which Metal 3.1 does not guarantee, so only CUDA is
// launched like this. The split-K `semaphores`, one for each of (B, Hkv, row blocks), are 0 before and after a
// launch, so that launches that do not run at the same time may share them.
//
// Grid (32 * simds * teams * x, Hkv * row blocks, B), threadgroup (32 * simds * teams, 1, 1).

#include "step_parts.metal"

#include <metal_stdlib>
using namespace metal;

template <
    typename T,
    typename K,
    int D,
    int Dv,
    int group_size,
    int bits,
    int bits_v,
    bool masked,
    int dims,
    bool traditional,
    bool listed,
    bool sinking,
    bool normed,
    int tokens,
    int columns,
    int simds,
    int blocks,
    int slice,
    int teams,
    typename P,
    bool split,
    bool joined,
    int RESIDENT>
[[kernel]] void attention_step(
    const device T* q,
    const device T* k,
    const device T* v,
    const device K* k_cache,
    const device T* k_scales,
    const device T* k_biases,
    const device K* v_cache,
    const device T* v_scales,
    const device T* v_biases,
    const device K* k_append,
    const device K* v_append,
    const device int* positions,
    const device bool* mask,
    const device float* freqs,
    const device T* sinks,
    const device T* q_norm,
    const device T* k_norm,
    const device int* options,
    const device int* semaphores,
    device P* out,
    device K* k_out,
    device K* v_out,
    device T* parts,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  // A lane reads `run` of every 4 * run elements of a key, and run_v of every 8 * run_v of a value.
  const int run = bits > 0 ? 16 : 16 / sizeof(T), steps = (D + 4 * run - 1) / (4 * run);
  const int padded = 4 * run * steps, widest = bits > 0 ? 8 : run;
  const int run_v = slice / 8 < widest ? slice / 8 : widest, words = run * held_bits<T, bits>() / 32;
  const int words_v = run_v * held_bits<T, bits_v>() / 32, steps_v = slice / (8 * run_v);
  const int limit = D == padded ? 0 : D, limit_v = Dv == slice * simds ? 0 : Dv;
  const int own_tile = 16 * blocks * simds, tile = own_tile * teams, all = simds * teams;
  const int count = 8 * columns, depths = padded / 16, sums = slice / 4 * columns;
  // Rows of 16 * odd bytes keep matrix loads free of bank conflicts.
  const int q_step = padded + 16 / sizeof(T), p_step = count + (columns % 2 == 0 ? 8 : 0);
  // Elements of a row in the cache, and in the append buffer, where rows are whole vectors of eight elements.
  const int count_k = bits > 0 ? D * bits / 32 : D, count_v = bits > 0 ? Dv * bits_v / 32 : Dv;
  const int groups_k = D / group_size, groups_v = Dv / group_size, half_size = sizeof(T) / 2;
  const int whole_k = bits > 0 ? (count_k + groups_k * half_size + 7) / 8 * 8 : D;
  const int whole_v = bits > 0 ? (count_v + groups_v * half_size + 7) / 8 * 8 : Dv;
  threadgroup T q_tile[(count + tokens) * q_step];
  threadgroup T p_tiles[tile * p_step];
  threadgroup float2 reduced[all][columns][4], tops[teams][columns][4];
  threadgroup float factors[normed ? count + tokens : 1];
  threadgroup float own_tops[count * tokens], taken[teams > 1 ? (teams - 1) * sums * 32 * simds : 1];
  threadgroup T own_values[bits > 0 ? tokens * Dv : 1];
  threadgroup float weights[joined ? count * MOST_JOINED : 1];
  threadgroup int arrived;
  int team = int(simd) / simds, member = int(simd) % simds;
  threadgroup T* p_tile = p_tiles + team * own_tile * p_step;

  int before = positions[0], held = positions[1], share = options[QUERIES_PER_KV_HEAD];
  int row_blocks = (share * tokens + count - 1) / count, kv_heads = int(groups.y) / row_blocks;
  int head = int(group.y) % kv_heads, heads = kv_heads * share;
  step_rows rows = {int(group.y) / kv_heads * count, share * tokens, share};
  int64_t kv_head = int64_t(group.z) * kv_heads + head;
  int64_t own_head = int64_t(group.z) * tokens * kv_heads + head;
  q += own_head * share * D;
  k += own_head * D;
  v += own_head * Dv;
  k_cache += kv_head * options[CACHE_ROWS] * count_k;
  v_cache += kv_head * options[CACHE_ROWS] * count_v;
  k_append += kv_head * options[APPEND_ROWS] * whole_k;
  v_append += kv_head * options[APPEND_ROWS] * whole_v;
  k_out += kv_head * options[APPEND_ROWS] * whole_k;
  v_out += kv_head * options[APPEND_ROWS] * whole_v;
  if (bits > 0) {
    k_scales += kv_head * options[CACHE_ROWS] * groups_k;
    k_biases += kv_head * options[CACHE_ROWS] * groups_k;
    v_scales += kv_head * options[CACHE_ROWS] * groups_v;
    v_biases += kv_head * options[CACHE_ROWS] * groups_v;
  }
  int splits = options[SPLITS], append_splits = options[APPEND_SPLITS];
  if (int(group.x) >= splits) {
    if (rows.first == 0) {
      int copy_thread = (int(group.x) - splits) * 32 * all + int(thread_index);
      int copy_threads = (int(groups.x) - splits) * 32 * all;
      copy_append<whole_k, tokens>(k_out, k_append, held, options[APPEND_ROWS], copy_thread, copy_threads);
      copy_append<whole_v, tokens>(v_out, v_append, held, options[APPEND_ROWS], copy_thread, copy_threads);
    }
    return;
  }

  // The first splits are the append buffer's, the others the cache's.
  bool of_append = int(group.x) < append_splits, is_first = group.x == 0;
  int own_keys = is_first ? tokens : 0;
  if (normed) {
    norm_rows<T, D, tokens, count, all>(
        factors, q, k, as_type<float>(options[NORM_EPSILON]), rows, heads, kv_heads, own_keys, simd, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  rotate_rows<T, D, bits, dims, traditional, listed, normed, tokens, run, q_step, padded, count, 32 * all>(
      q_tile, q, k, factors, q_norm, k_norm, freqs, options + ROTATION,
      positions[2 + group.z], rows, heads, kv_heads, own_keys, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float scale = as_type<float>(options[SCALE]);
  if (masked) {
    mask += int64_t(group.z) * options[MASK_OF_SEQUENCE] + head * share * options[MASK_OF_HEAD];
  }
  bool writes = rows.first == 0;
  if (is_first && bits > 0) {
    for (int i = thread_index; i < tokens * Dv; i += 32 * all) {
      own_values[bits > 0 ? i : 0] = v[int64_t(i / Dv) * kv_heads * Dv + i % Dv];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float least = as_type<float>(options[LEAST_OF_GROUP]);
    for (int i = 0; i < tokens; i++) {
      pack_row<D, group_size, bits, whole_k, run, true, all>(
          k_out + int64_t(held + i) * whole_k, q_tile + (count + i) * q_step, writes, least, simd, lane);
      pack_row<Dv, group_size, bits_v, whole_v, run, false, all>(
          v_out + int64_t(held + i) * whole_v, own_values + (bits > 0 ? i * Dv : 0), writes, least, simd, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (is_first) {
    own_scores<T, masked, tokens, padded, q_step, count, all>(
        own_tops, q_tile, scale, mask + (masked ? before + held : 0), rows, options[MASK_OF_HEAD], simd, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; bits == 0 && writes && i < tokens * D; i += 32 * all) {
      k_out[int64_t(held) * D + i] = q_tile[(count + i / D) * q_step + staged_at<run, bits>(i % D)];
    }
    for (int i = thread_index; bits == 0 && writes && i < tokens * Dv; i += 32 * all) {
      v_out[int64_t(held) * Dv + i] = v[int64_t(i / Dv) * kv_heads * Dv + i % Dv];
    }
  }

  // This lane's row of 8, and its run in a key, which is also its pair of columns.
  int near = fragment_row(lane), quarter = fragment_col(lane) / 2;
  int own = 16 * blocks * member + near;
  const bool kept = columns * depths <= 16;
  right_fragment<T> queries[kept ? columns * depths : 1];
  if (kept) {
#pragma unroll
    for (int i = 0; i < columns * depths; i++) {
      load_right_transposed(
          queries[kept ? i : 0], q_tile + i / depths * 8 * q_step + i % depths * 16, q_step, lane);
    }
  }
  attended_rows<columns, slice / 16> state = nothing_attended<columns, slice / 16>();
  if (is_first && team == 0) {
#pragma unroll
    for (int i = 0; i < 2 * columns; i++) {
      int t = i / 2, c = i % 2;
      int row = 8 * t + 2 * quarter + c;
      // The softmax starts with the sink, a score without a value, and the scores of the tokens' own keys.
      float sink = sinking ? float(sinks[head * share + head_of<tokens>(rows, row)]) * LOG2_E : LOWEST;
      float top = max(sink, LOWEST);
      for (int token = 0; token < tokens; token++) {
        top = max(top, own_tops[row * tokens + token]);
      }
      float total = sinking ? power_of_2<T>(sink - top) : 0.0f;
      for (int token = 0; token < tokens; token++) {
        float weight = power_of_2<T>(own_tops[row * tokens + token] - top);
        total += weight;
#pragma unroll
        for (int n = 0; n < slice / 16; n++) {
          int f = n % (run_v / 2), d = member * slice + n / (run_v / 2) * 8 * run_v + run_v * near;
          if (limit_v == 0 || d < Dv) {
#pragma unroll
            for (int part = 0; part < 2; part++) {
              int at = d + pair_element<bits_v>(f, part);
              float value = float(
                  bits > 0 ? own_values[bits > 0 ? token * Dv + at : 0] : v[int64_t(token) * kv_heads * Dv + at]);
              state.o[n][t].part[part][c] = fma(weight, value, state.o[n][t].part[part][c]);
            }
          }
        }
      }
      state.top[t][c] = top;
      state.sum[t][c] = member == 0 && near == 0 ? total : 0.0f;
    }
  }

#pragma clang loop unroll(disable)
  for (int part = split && of_append ? 1 : 0; part < (split && !of_append ? 1 : 2); part++) {
    int keys = part == 0 ? before : held, sharing = part == 1 ? append_splits : split ? splits - append_splits : 1;
    int split_keys = ((keys + sharing - 1) / sharing + tile - 1) / tile * tile;
    int start = (int(group.x) - (split && part == 0 ? append_splits : 0)) * split_keys;
    int stop = min(start + split_keys, keys), last = stop - 1;
    cache_rows<K, T> key_rows, value_rows;
    key_rows.elements = part == 0 ? k_cache : k_append;
    value_rows.elements = part == 0 ? v_cache : v_append;
    key_rows.step = part == 0 ? count_k : whole_k;
    value_rows.step = part == 0 ? count_v : whole_v;
    if (bits > 0) {
      set_groups(key_rows, k_scales, k_biases, count_k, groups_k, part == 1);
      set_groups(value_rows, v_scales, v_biases, count_v, groups_v, part == 1);
    }
    key_rows.span = value_rows.span = 1;
    key_rows.aligned = reinterpret_cast<size_t>(key_rows.elements) % 16 == 0;
    value_rows.aligned = reinterpret_cast<size_t>(value_rows.elements) % 16 == 0;
    lane_rows<bool, columns> own_rows;
#pragma unroll
    for (int i = 0; i < 2 * columns; i++) {
      int row = i / 2 * 8 + 2 * quarter + i % 2;
      own_rows.position[i / 2][i % 2] = 0;
      own_rows.mask[i / 2][i % 2] = mask;
      if (masked) {
        own_rows.mask[i / 2][i % 2] += head_of<tokens>(rows, row) * options[MASK_OF_HEAD] + (part == 0 ? 0 : before);
      }
    }

    cache_run<T, words> key_runs[blocks * 2 * steps];
    if (start < stop) {
      read_tile<bits, group_size, blocks, 2, steps, 4 * run, limit>(
          key_runs, key_rows, start + team * own_tile + own, last, run * quarter);
    }
    for (int whole = start; whole < stop; whole += tile) {
      int base = whole + team * own_tile;
      cache_run<T, words_v> value_runs[simds * blocks * 4 * steps_v];
      read_tile<bits_v, group_size, simds * blocks, 4, steps_v, 8 * run_v, limit_v>(
          value_runs, value_rows, base + 2 * quarter, last, member * slice + run_v * near);

      sum_fragment s[blocks][columns];
      multiply_keys<T, bits, run, steps, blocks, columns, kept>(
          s, key_runs, queries, q_tile, q_step, lane);
      if (whole + tile < stop) {
        read_tile<bits, group_size, blocks, 2, steps, 4 * run, limit>(
            key_runs, key_rows, base + tile + own, last, run * quarter);
      }

      score_tile<masked ? BOOLEAN : ALL, false, false, blocks, columns>(
          s, &reduced[simd][0][0], own_rows, scale, 0.0f, 1, base + own, last, base + own, stop, 0,
          lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      add_scores<T, simds, blocks, columns>(
          state, s, &reduced[team * simds][0][0], p_tile + (own - near) * p_step, p_step, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      multiply_values<T, bits_v, run_v, steps_v, simds * blocks, columns>(
          state.o, value_runs, p_tile, p_step, lane);
    }
  }

#pragma unroll
  for (int t = 0; t < columns; t++) {
    state.sum[t] = fragment_column_sum(state.sum[t]);
    if (near == 0) {
      reduced[simd][t][quarter] = state.sum[t];
      tops[team][t][quarter] = state.top[t];
    }
  }
  // The other teams store their sums for the first.
  int of_team = member * 32 + int(lane);
#pragma unroll
  for (int i = 0; i < sums; i++) {
    if (team > 0) {
      taken[((team - 1) * sums + i) * 32 * simds + of_team] =
          state.o[i / 4 / columns][i / 4 % columns].part[i / 2 % 2][i % 2];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int64_t first_row = kv_head * rows.all + rows.first, first_out = own_head * share;
#pragma unroll
  for (int i = 0; i < 2 * columns; i++) {
    int t = i / 2, c = i % 2, row = 8 * t + 2 * quarter + c;
    if (team > 0 || rows.first + row >= rows.all) {
      continue;
    }
    float top = LOWEST, total = 0.0f, rescales[teams];
#pragma unroll
    for (int g = 0; g < teams; g++) {
      top = max(top, tops[g][t][quarter][c]);
    }
#pragma unroll
    for (int g = 0; g < teams; g++) {
      rescales[g] = teams == 1 ? 1.0f : power_of_2<T>(tops[g][t][quarter][c] - top);
      for (int m = 0; m < simds; m++) {
        total += rescales[g] * reduced[g * simds + m][t][quarter][c];
      }
    }
    // A split without a key has the sum 0.
    float factor = !split ? 1.0f / total : joined && total > 0.0f ? 1.0f / total : 1.0f;
    int64_t at = first_out + heads_before<tokens>(rows, row, heads);
    int64_t of_split = (joined ? first_row + row : at) * splits + group.x;
    device P* to = split && !joined ? out + of_split * (Dv + 2) : out + at * Dv;
    device T* part_of = parts + (joined ? of_split * Dv : 0);
#pragma unroll
    for (int n = 0; n < slice / 16; n++) {
      int f = n % (run_v / 2), d = member * slice + n / (run_v / 2) * 8 * run_v + run_v * near;
      int low = d + pair_element<bits_v>(f, 0), high = d + pair_element<bits_v>(f, 1);
      float pair[2];
#pragma unroll
      for (int part = 0; part < 2; part++) {
        pair[part] = rescales[0] * state.o[n][t].part[part][c];
#pragma unroll
        for (int g = 1; g < teams; g++) {
          float other = taken[((g - 1) * sums + 4 * (n * columns + t) + 2 * part + c) * 32 * simds + of_team];
          pair[part] += rescales[g] > 0.0f ? rescales[g] * other : 0.0f;
        }
        pair[part] *= factor;
      }
      if (limit_v == 0 || d < Dv) {
        if (joined) {
          part_of[low] = T(pair[0]);
          part_of[high] = T(pair[1]);
        } else {
          to[low] = P(pair[0]);
          to[high] = P(pair[1]);
        }
      }
    }
    if (split && member == 0 && near == 0) {
      if (joined) {
        device float2* sums_of = reinterpret_cast<device float2*>(parts + int64_t(groups.z) * kv_heads * rows.all * splits * Dv);
        sums_of[of_split] = float2(top, total);
      } else {
        to[Dv] = P(top);
        to[Dv + 1] = P(total);
      }
    }
  }
  if (joined) {
    device int* semaphore = const_cast<device int*>(semaphores) + int64_t(group.z) * groups.y + group.y;
    threadgroup_barrier(mem_flags::mem_device);
    if (thread_index == 0) {
      arrived = arrive(semaphore);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (arrived == splits - 1) {
      const device float2* sums_of =
          reinterpret_cast<const device float2*>(parts + int64_t(groups.z) * kv_heads * rows.all * splits * Dv);
      add_splits<T, Dv, tokens, MOST_JOINED, all>(
          reinterpret_cast<device T*>(out) + first_out * Dv, parts + first_row * splits * Dv,
          sums_of + first_row * splits, weights, rows, min(rows.all - rows.first, count), heads, splits,
          thread_index, simd, lane);
      if (thread_index == 0) {
        *semaphore = 0;
      }
    }
  }
}
