// One step of decoding, from the products of a token to its attention: q and k are turned by their
// positions, and every head attends to the keys of a cache, to those of its tail (what came since the
// cache was written) and to the token's own. The cache is only read; k and v become a row of a new
// tail. How many keys there are is an input, so that one launch serves until the cache grows.
//
// The rows are the queries of the heads that share a key head. One threadgroup takes one split of the
// cache's keys or the tail's for 8 * columns rows, by tiles as attention_decode does; what starts the
// softmax of the tail's first split is the token's own key. Without a split one threadgroup takes all.
//
// The threadgroups that x counts beyond the splits copy the tail, so that nobody who attends waits
// for it: rows behind the token's become zeros. In threadgroup memory lie q and the token's key,
// turned, p, and a number a row and SIMD group. Without a split the result is written; else o
// without its divisor, m and sum, all float, which attention_combine adds up.
//
// Grid (32 * simds * x, Hkv * row blocks, B), threadgroup (32 * simds, 1, 1).

#include "key_tiles.metal"
#include "rotary/rotary_rate.metal"

#include <metal_stdlib>
using namespace metal;

// What the entries of `options` are; what turn_rows takes comes behind.
enum step_option { CACHE_ROWS, TAIL_ROWS, TAIL_SPLITS, SPLITS, HEADS_SHARING, SCALE, MASK_OF_SEQUENCE, MASK_OF_HEAD, TURN };

// Where element d of a row lies among those that lanes meet in a key's runs.
template <int run>
METAL_FUNC int staged_at(int d) {
  int rest = d % (4 * run), element = rest % run;
  return (d / (4 * run) * (run / 4) + element / 4) * 16 + element / 2 % 2 * 8 + rest / run * 2 + element % 2;
}

// The tail's rows but the token's, eight numbers at a time: this thread's share of them.
template <int width, typename T>
METAL_FUNC void copy_tail(
    device T* to, const device T* from, int held, int rows, int sharer, int sharers) {
  const int words = 2 * sizeof(T);
  for (int i = sharer; i < rows * (width / 8); i += sharers) {
    int row = i / (width / 8);
    alignas(16) uint pack[words] = {};
    if (row < held) {
      load_words<words>(pack, from, int64_t(i) * 8);
    }
    if (row != held) {
#pragma unroll
      for (int j = 0; j < words; j += 4) {
        *(reinterpret_cast<device uint4*>(to + int64_t(i) * 8) + j / 4) =
            uint4(pack[j], pack[j + 1], pack[j + 2], pack[j + 3]);
      }
    }
  }
}

// Rows of q, the last of them again where there are no more, and behind `count` of those k, turned
// and staged. `rates`, bits of two floats each: the scale of positions, one that is not used, and the
// rate of each pair. Each pair's angle is computed by as many threads as there are to share its rows.
template <
    typename T,
    int D,
    int dims,
    bool traditional,
    bool listed,
    int run,
    int step,
    int padded,
    int count,
    int threads>
METAL_FUNC void turn_rows(
    threadgroup T* to,
    const device T* q,
    const device T* k,
    const device float* freqs,
    const device int* rates,
    float position,
    int rows,
    uint thread_index) {
  const int items = D - dims / 2, teams = threads > items ? threads / items : 1;
  for (int index = thread_index; index < items * teams; index += threads) {
    int i = index % items, first = i + dims / 2, second = first;
    float2 cosine_sine = float2(1.0f, 0.0f);
    if (i < dims / 2) {
      int at = listed ? 0 : 4 + 2 * i;
      float2 number = float2(as_type<float>(rates[at]), as_type<float>(rates[at + 1]));
      cosine_sine = rotation_at(position, listed ? listed_rate(freqs[i], number) : number);
      first = traditional ? 2 * i : i;
      second = traditional ? first + 1 : i + dims / 2;
    }
    for (int row = index / items; row <= count; row += teams) {
      const device T* from = row == count ? k : q + int64_t(min(row, rows - 1)) * D;
      threadgroup T* staged = to + row * step;
      float a = float(from[first]), b = float(from[second]), c = cosine_sine.x, s = cosine_sine.y;
      staged[staged_at<run>(first)] = i < dims / 2 ? T(a * c - b * s) : from[first];
      if (i < dims / 2) {
        staged[staged_at<run>(second)] = T(a * s + b * c);
      }
    }
  }
  for (int i = thread_index; i < (padded - D) * (count + 1); i += threads) {
    to[i % (count + 1) * step + staged_at<run>(D + i / (count + 1))] = T(0);
  }
}

// The scores of the token's own key, a row to a SIMD group.
template <typename T, bool masked, int padded, int step, int count, int simds>
METAL_FUNC void own_scores(
    threadgroup float* scores,
    const threadgroup T* staged,
    float scale,
    const device bool* mask,
    int first_row,
    int rows,
    int mask_step,
    uint simd,
    uint lane) {
  const threadgroup T* k = staged + count * step;
  for (int row = simd; row < count; row += simds) {
    float s = 0.0f;
    for (int i = lane; i < padded; i += 32) {
      s = fma(float(staged[row * step + i]), float(k[i]), s);
    }
    s = simd_sum(s) * scale;
    if (lane == 0) {
      bool seen = !masked || mask[min(first_row + row, rows - 1) * mask_step];
      scores[row] = seen ? s : LOWEST;
    }
  }
}

template <
    typename T,
    int D,
    int Dv,
    bool masked,
    int dims,
    bool traditional,
    bool listed,
    int columns,
    int simds,
    int blocks,
    int slice,
    typename P,
    bool split,
    int RESIDENT>
[[kernel]] void attention_step(
    const device T* q,
    const device T* k,
    const device T* v,
    const device T* k_cache,
    const device T* v_cache,
    const device T* k_tail,
    const device T* v_tail,
    const device int* positions,
    const device bool* mask,
    const device float* freqs,
    const device int* options,
    device P* out,
    device T* k_out,
    device T* v_out,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  // A lane reads `run` in every 4 * run numbers of a key, and run_v in every 8 * run_v of a value.
  const int run = 16 / sizeof(T), steps = (D + 4 * run - 1) / (4 * run), padded = 4 * run * steps;
  const int run_v = slice / 8 < run ? slice / 8 : run;
  const int words_v = run_v * sizeof(T) / 4, steps_v = slice / (8 * run_v);
  const int limit = D == padded ? 0 : D, limit_v = Dv == slice * simds ? 0 : Dv;
  const int tile = 16 * blocks * simds, count = 8 * columns, parts = padded / 16;
  // Rows of 16 * odd bytes keep matrix loads free of bank conflicts.
  const int q_step = padded + 16 / sizeof(T), p_step = count + (columns % 2 == 0 ? 8 : 0);
  threadgroup T q_tile[(count + 1) * q_step];
  threadgroup T p_tile[tile * p_step];
  threadgroup float2 reduced[simds][columns][4];
  threadgroup float own_tops[count];

  int before = positions[0], held = positions[1], rows = options[HEADS_SHARING];
  int row_blocks = (rows + count - 1) / count, heads = int(groups.y) / row_blocks;
  int head = int(group.y) % heads, first_row = int(group.y) / heads * count;
  int64_t kv_head = int64_t(group.z) * heads + head;
  k += kv_head * D;
  v += kv_head * Dv;
  k_cache += kv_head * options[CACHE_ROWS] * D;
  v_cache += kv_head * options[CACHE_ROWS] * Dv;
  k_tail += kv_head * options[TAIL_ROWS] * D;
  v_tail += kv_head * options[TAIL_ROWS] * Dv;
  k_out += kv_head * options[TAIL_ROWS] * D;
  v_out += kv_head * options[TAIL_ROWS] * Dv;
  int splits = options[SPLITS], tail_splits = options[TAIL_SPLITS];
  if (int(group.x) >= splits) {
    if (first_row == 0) {
      int sharer = (int(group.x) - splits) * 32 * simds + int(thread_index);
      int sharers = (int(groups.x) - splits) * 32 * simds;
      copy_tail<D>(k_out, k_tail, held, options[TAIL_ROWS], sharer, sharers);
      copy_tail<Dv>(v_out, v_tail, held, options[TAIL_ROWS], sharer, sharers);
    }
    return;
  }

  // The first splits are the tail's, the others the cache's.
  bool of_tail = int(group.x) < tail_splits, is_first = group.x == 0;
  turn_rows<T, D, dims, traditional, listed, run, q_step, padded, count, 32 * simds>(
      q_tile, q + (kv_head * rows + first_row) * D, k, freqs, options + TURN,
      float(positions[2 + group.z]), rows - first_row, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float scale = as_type<float>(options[SCALE]);
  if (masked) {
    mask += int64_t(group.z) * options[MASK_OF_SEQUENCE] + head * rows * options[MASK_OF_HEAD];
  }
  if (is_first) {
    own_scores<T, masked, padded, q_step, count, simds>(
        own_tops, q_tile, scale, mask + (masked ? before + held : 0), first_row, rows,
        options[MASK_OF_HEAD], simd, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int d = thread_index; first_row == 0 && d < D; d += 32 * simds) {
      k_out[int64_t(held) * D + d] = q_tile[count * q_step + staged_at<run>(d)];
    }
    for (int d = thread_index; first_row == 0 && d < Dv; d += 32 * simds) {
      v_out[int64_t(held) * Dv + d] = v[d];
    }
  }

  // This lane's row of 8, its run in a key, its pair of columns.
  int near = fragment_row(lane), quarter = fragment_col(lane) / 2;
  int own = 16 * blocks * int(simd) + near;
  const bool kept = columns * parts <= 16;
  right_fragment<T> queries[kept ? columns * parts : 1];
  if (kept) {
#pragma unroll
    for (int i = 0; i < columns * parts; i++) {
      load_right_transposed(
          queries[kept ? i : 0], q_tile + i / parts * 8 * q_step + i % parts * 16, q_step, lane);
    }
  }
  attended_rows<columns, slice / 16> state = nothing_attended<columns, slice / 16>();
  if (is_first) {
#pragma unroll
    for (int i = 0; i < 2 * columns; i++) {
      int t = i / 2, c = i % 2;
      state.top[t][c] = own_tops[8 * t + 2 * quarter + c];
      state.sum[t][c] = simd == 0 && near == 0 ? 1.0f : 0.0f;
#pragma unroll
      for (int n = 0; n < slice / 16; n++) {
        int d = int(simd) * slice + n / (run_v / 2) * 8 * run_v + run_v * near + n % (run_v / 2) * 2;
        if (limit_v == 0 || d < Dv) {
          state.o[n][t].part[0][c] = float(v[d]);
          state.o[n][t].part[1][c] = float(v[d + 1]);
        }
      }
    }
  }

#pragma clang loop unroll(disable)
  for (int part = split && of_tail ? 1 : 0; part < (split && !of_tail ? 1 : 2); part++) {
    int keys = part == 0 ? before : held, sharing = part == 1 ? tail_splits : split ? splits - tail_splits : 1;
    int split_keys = ((keys + sharing - 1) / sharing + tile - 1) / tile * tile;
    int start = (int(group.x) - (split && part == 0 ? tail_splits : 0)) * split_keys;
    int stop = min(start + split_keys, keys), last = stop - 1;
    cache_rows<T, T> key_rows, value_rows;
    key_rows.elements = part == 0 ? k_cache : k_tail;
    value_rows.elements = part == 0 ? v_cache : v_tail;
    key_rows.step = D;
    value_rows.step = Dv;
    key_rows.span = value_rows.span = 1;
    key_rows.aligned = reinterpret_cast<size_t>(key_rows.elements) % 16 == 0;
    value_rows.aligned = reinterpret_cast<size_t>(value_rows.elements) % 16 == 0;
    lane_rows<bool, columns> own_rows;
#pragma unroll
    for (int i = 0; i < 2 * columns; i++) {
      int row = min(first_row + i / 2 * 8 + 2 * quarter + i % 2, rows - 1);
      own_rows.position[i / 2][i % 2] = 0;
      own_rows.mask[i / 2][i % 2] = mask;
      if (masked) {
        own_rows.mask[i / 2][i % 2] += row * options[MASK_OF_HEAD] + (part == 0 ? 0 : before);
      }
    }

    cache_run<T, 4> key_runs[blocks * 2 * steps];
    if (start < stop) {
      read_tile<0, 1, blocks, 2, steps, 4 * run, limit>(
          key_runs, key_rows, start + own, last, run * quarter);
    }
    for (int base = start; base < stop; base += tile) {
      cache_run<T, words_v> value_runs[simds * blocks * 4 * steps_v];
      read_tile<0, 1, simds * blocks, 4, steps_v, 8 * run_v, limit_v>(
          value_runs, value_rows, base + 2 * quarter, last, int(simd) * slice + run_v * near);

      sum_fragment s[blocks][columns];
      multiply_keys<T, 0, run, steps, blocks, columns, kept>(
          s, key_runs, queries, q_tile, q_step, lane);
      if (base + tile < stop) {
        read_tile<0, 1, blocks, 2, steps, 4 * run, limit>(
            key_runs, key_rows, base + tile + own, last, run * quarter);
      }

      score_tile<masked ? BOOLEAN : ALL, false, false, blocks, columns>(
          s, &reduced[simd][0][0], own_rows, scale, 0.0f, 1, base + own, last, base + own, stop, 0,
          lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      add_scores<T, simds, blocks, columns>(
          state, s, &reduced[0][0][0], p_tile + (own - near) * p_step, p_step, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      multiply_values<T, 0, run_v, steps_v, simds * blocks, columns>(
          state.o, value_runs, p_tile, p_step, lane);
    }
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
    float factor = split ? 1.0f : 1.0f / total;
    int64_t at = kv_head * rows + row;
    device P* to = split ? out + (at * splits + group.x) * (Dv + 2) : out + at * Dv;
#pragma unroll
    for (int n = 0; n < slice / 16; n++) {
      int d = int(simd) * slice + n / (run_v / 2) * 8 * run_v + run_v * near + n % (run_v / 2) * 2;
      if (limit_v == 0 || d < Dv) {
        to[d] = P(state.o[n][t].part[0][c] * factor);
        to[d + 1] = P(state.o[n][t].part[1][c] * factor);
      }
    }
    if (split && simd == 0 && near == 0) {
      to[Dv] = P(state.top[t][c]);
      to[Dv + 1] = P(total);
    }
  }
}
