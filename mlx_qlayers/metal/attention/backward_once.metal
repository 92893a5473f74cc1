// All gradients of attention in one pass over the scores, with float32 atomics for d_q: five products where
// backward.metal and backward_keys.metal need seven. The names are theirs.
//
// attention_backward_statistics  of each query the log-sum-exp, and delta = sum of d_out * out:
//                                four queries a SIMD group, grid (256 * ceil(L / 32), H, B)
//
// attention_backward_once        a threadgroup owns ROWS = 16 * SIMDS keys of one query head: grid (32 * SIMDS *
//                                neighbouring heads, ceil(S / ROWS), B * (H / those heads)), threadgroup
//                                (32 * SIMDS, 1, 1)
//
//   registers     d_keys, d_values  16 keys x all columns, float
//                 scores, d_weights 16 keys x TILE queries, float
//                 d_queries         16 queries x a slice of the columns, float
//   threadgroup   keys, values      ROWS rows, T
//                 queries, d_out    TILE rows each, T; three stages
//                 d_scores          ROWS x TILE, T; two stages, as the statistics of TILE queries
//   device        k and v are read once, q, d_out and statistics once by each threadgroup; d_q is added to
//
//   begin scores = keys * queries^T, d_weights = values * d_out^T
//   for each tile of queries that attends to a key:
//     start loading the next tile
//     weights = exp2(scores - log-sum-exp), begin d_values += weights * d_out
//     store d_scores = weights * slope * (d_weights - delta)
//     store queries, d_out and statistics of the next tile | barrier
//     begin d_queries = d_scores^T * keys, d_keys += d_scores * queries
//     begin scores of the next tile, add d_queries to d_q, begin the next d_weights
//
// attention_backward_rows        converts the sums to q's dtype, 16 rows a SIMD group: grid (128 * ceil(rows / 64),
//                                heads that have sums, B), threadgroup (128, 1, 1)
//
// Sums are float32, in blocks of 16 rows in the order in which lanes hold them. If GROUPED, the query heads of a key
// head add up d_k and d_v the same way; else d_k and d_v hold elements of T, two to a float.

#include "common/tile_products.metal"
#include "key_scores.metal"
#include "score_output.metal"

// Rows of a head in the sums, padded to whole tiles; and those of a batch entry: of all query heads and, if GROUPED,
// of d_k and d_v for all key heads.
METAL_FUNC ulong whole_tiles(int rows) {
  return ulong(rows + 127) / 128 * 128;
}
METAL_FUNC ulong rows_of_sums(constant int* sizes, bool grouped) {
  ulong of_keys = whole_tiles(sizes[KEYS]) * (sizes[HEADS] / sizes[GQA_FACTOR]);
  return whole_tiles(sizes[QUERIES]) * sizes[HEADS] + (grouped ? 2 * of_keys : 0);
}

// The log-sum-exps of TILE queries, followed by their deltas.
template <int TILE>
METAL_FUNC void put_statistics(threadgroup float2* to, float2 one, uint thread_index) {
  if (thread_index < TILE) {
    threadgroup float* statistic = reinterpret_cast<threadgroup float*>(to);
    statistic[thread_index] = one.x;
    statistic[TILE + thread_index] = one.y;
  }
}

template <typename T, int DV>
[[kernel]] void attention_backward_statistics(
    const device T* out,
    const constant int64_t* out_strides,
    const device T* d_out,
    const constant int64_t* d_out_strides,
    const device float* norms,
    const constant int* norms_shape,
    device float* statistics,
    uint3 position [[thread_position_in_grid]]) {
  int queries = norms_shape[2], lane = int(position.x % 8), query = int(position.x / 8);
  int row = min(query, queries - 1), index = (position.z * norms_shape[1] + position.y) * queries + row;
  head_rows<T> one = rows_of(out, out_strides, position.z, position.y, queries);
  head_rows<T> other = rows_of(d_out, d_out_strides, position.z, position.y, queries);
  float delta = 0.0f;
#pragma unroll
  for (int c = 8 * lane; c < DV; c += 64) {
    const device T* x = one.at + (row * one.row + c * one.column);
    const device T* y = other.at + (row * other.row + c * other.column);
    if (one.packed && other.packed) {
      uint4 pack = *reinterpret_cast<const device uint4*>(x);
      uint4 other_pack = *reinterpret_cast<const device uint4*>(y);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float2 pair = float2(as_type<metal::vec<T, 2>>(pack[i]));
        float2 product = pair * float2(as_type<metal::vec<T, 2>>(other_pack[i]));
        delta += product.x + product.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        delta += float(x[i * one.column]) * float(y[i * other.column]);
      }
    }
  }
  delta += simd_shuffle_xor(delta, 1);
  delta += simd_shuffle_xor(delta, 2);
  delta += simd_shuffle_xor(delta, 4);
  if (lane == 0 && query < queries) {
    statistics[2 * ulong(index)] = norm_of<T>(norms, index, index + 1).x;
    statistics[2 * ulong(index) + 1] = delta;
  }
}

template <typename T, int D, int DV, int WIDTH, bool GROUPED>
[[kernel]] void attention_backward_rows(
    const device float* sums,
    constant int* sizes,
    device T* d_q,
    device T* d_k,
    device T* d_v,
    uint3 group [[threadgroup_position_in_grid]],
    uint simd_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  int row = 16 * int(4 * group.x + simd_group), head = int(group.y), heads = sizes[HEADS];
  ulong before = group.z * rows_of_sums(sizes, GROUPED) + row;
  device T* out = d_q;
  int rows = sizes[QUERIES], width = D;
  if (head < heads) {
    before += whole_tiles(rows) * head;
  } else {
    before += whole_tiles(rows) * heads + whole_tiles(sizes[KEYS]) * (head - heads);
    head -= heads;
    heads /= sizes[GQA_FACTOR];
    rows = sizes[KEYS];
    out = head < heads ? d_k : d_v;
    width = head < heads ? D : DV;
    head = head % heads;
  }
  if (row >= rows) {
    return;
  }
  const device float4* from = reinterpret_cast<const device float4*>(sums + before * WIDTH);
  sum_fragment own[WIDTH / 8];
#pragma unroll
  for (int n = 0; n < WIDTH / 8; n++) {
    float4 four = from[32 * n + lane];
    own[n].part[0] = four.xy;
    own[n].part[1] = four.zw;
  }
  out += (ulong(group.z) * rows * heads + head) * width;
  store_rows<T, WIDTH / 8>(own, out, ulong(heads) * width, row, rows, 0, width, 1.0f, lane);
}

template <
    typename T,
    typename M,
    int D,
    int DV,
    int MASK,
    bool SOFTCAP,
    bool AVERAGE,
    bool GROUPED,
    int SLICES,
    bool KEPT,
    int SIMDS,
    int TILE,
    int RESIDENT,
    int SHARED>
[[kernel]] void attention_backward_once(
    const device T* q,
    const constant int64_t* q_strides,
    const device T* k,
    const constant int64_t* k_strides,
    const device T* v,
    const constant int64_t* v_strides,
    const device M* mask,
    const constant int64_t* mask_strides,
    const device T* d_out,
    const constant int64_t* d_out_strides,
    const device float* statistics,
    const device float* average,
    constant int* sizes,
    constant float* factors,
    device atomic<float>* sums,
    device atomic<float>* d_k,
    device atomic<float>* d_v,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int THREADS = 32 * SIMDS, OWNERS = SIMDS / SLICES, ROWS = 16 * OWNERS;
  // A SIMD group computes 16 queries of a tile and a slice of their columns.
  constexpr int PARTS = 16 * SIMDS / TILE, SEEN = TILE / SLICES, COUNT = SEEN / 8;
  constexpr int WIDTH = rounded_up(larger(D, DV), SLICES * larger(product_columns(), 16 * PARTS));
  constexpr int STEPS = WIDTH / 16, COLUMNS = WIDTH / SLICES / 8;
  constexpr int PART = WIDTH / PARTS / SLICES / 8;
  constexpr int PLACES = SLICES == 1 ? 3 : 2;
  constexpr bool WARPGROUP = uses_warpgroup<T>(OWNERS, SLICES, WIDTH, WIDTH);
  constexpr int OWN = tile_elements<T, WARPGROUP>(ROWS, WIDTH);
  constexpr int OTHER = tile_elements<T, WARPGROUP>(TILE, WIDTH);
  constexpr int SCORES = tile_elements<T, WARPGROUP>(ROWS, TILE);
  constexpr int ELEMENTS = 2 * OWN + PLACES * 2 * OTHER + 2 * SCORES;
  constexpr int BYTES = ELEMENTS * sizeof(T) + 4 * TILE * sizeof(float);
  threadgroup tile_packs<declared_packs(BYTES / 16)> tiles;
  threadgroup T* keys = reinterpret_cast<threadgroup T*>(all_packs(tiles));
  threadgroup T *values = keys + OWN, *first_tile = values + OWN;
  threadgroup T* d_scores = first_tile + PLACES * 2 * OTHER;
  threadgroup float2* first_statistics =
      reinterpret_cast<threadgroup float2*>(d_scores + 2 * SCORES);

  uint3 part = part_of(group, groups, sizes);
  uint head = part.y, batch = part.z, kv_head = head / sizes[GQA_FACTOR];
  int row = int(part.x) * ROWS, slice = SLICES == 1 ? 0 : int(simd_group) / OWNERS;
  int block_row = (int(simd_group) - slice * OWNERS) * 16, own = row + block_row;
  int first_column = slice * COLUMNS * 8;
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  int first = max(0, row - rule.reach) / TILE * TILE;
  int last = min(rule.queries, row + ROWS - 1 - rule.reach + rule.window);
  tile_reader<T, TILE, D, WIDTH, THREADS, WARPGROUP, WARPGROUP> reader;
  tile_reader<T, TILE, DV, WIDTH, THREADS, WARPGROUP, WARPGROUP> d_reader;
  reader.rows = rows_of(q, q_strides, batch, head, last);
  d_reader.rows = rows_of(d_out, d_out_strides, batch, head, last);
  reader.skip(first);
  d_reader.skip(first);
  ulong place = (ulong(batch) * sizes[HEADS] + head) * rule.queries;
  const device float2* of_queries = reinterpret_cast<const device float2*>(statistics) + place;
  tile_reader<T, ROWS, D, WIDTH, THREADS, WARPGROUP, WARPGROUP> k_reader;
  tile_reader<T, ROWS, DV, WIDTH, THREADS, WARPGROUP, WARPGROUP> v_reader;
  k_reader.rows = rows_of(k, k_strides, batch, kv_head, rule.keys);
  v_reader.rows = rows_of(v, v_strides, batch, kv_head, rule.keys);
  k_reader.skip(row);
  v_reader.skip(row);
  k_reader.fetch(keys, thread_index);
  reader.fetch(first_tile, thread_index);
  v_reader.fetch(values, thread_index);
  d_reader.fetch(first_tile + OTHER, thread_index);
  bool counted = thread_index < TILE;
  int i = first + int(thread_index);
  float2 held = counted && i < last ? of_queries[i] : float2(BLANK, 0.0f);
  // The first scores do not wait for the values.
  k_reader.template put<2, false>(keys, thread_index);
  reader.template put<2>(first_tile, thread_index);
  put_statistics<TILE>(first_statistics, held, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  sum_fragment d_keys[COLUMNS], d_values[COLUMNS];
  sum_fragment scores[COUNT], d_weights[COUNT];
  left_fragment<T> left[SEEN / 16], d_left[SEEN / 16];
  clear<COLUMNS>(d_keys);
  clear<COLUMNS>(d_values);
  // Both have arrived before the first product begins.
  finish_products<0, COLUMNS>(d_keys);
  finish_products<0, COLUMNS>(d_values);
  left_fragment<T> own_keys[KEPT ? STEPS : 1], own_values[KEPT ? STEPS : 1];
  if (KEPT) {
    load_left_rows<T, STEPS>(
        own_keys, rows_of(k, k_strides, batch, kv_head, rule.keys), D, own, 0, lane);
    load_left_rows<T, STEPS>(
        own_values, rows_of(v, v_strides, batch, kv_head, rule.keys), DV, own, 0, lane);
  }
  int seen_first = place_in_tile<T, TILE, WIDTH, WARPGROUP>(slice * SEEN, 0);
  if (KEPT) {
    begin_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(scores, own_keys, first_tile + seen_first, 0, lane);
  } else {
    begin_rows_by_rows<T, STEPS, COUNT, ROWS, TILE, WIDTH, WARPGROUP>(
        scores, keys, block_row, first_tile + seen_first, lane);
  }
  v_reader.template put<0, false>(values, thread_index);
  d_reader.put(first_tile + OTHER, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  finish_products<0, COUNT>(scores);
  int from = int(simd_group) % (TILE / 16) * 16, column = int(simd_group) / (TILE / 16) * SLICES * PART * 8;
  ulong before = batch * rows_of_sums(sizes, GROUPED);
  device atomic<float>* to = sums +
      ((before + whole_tiles(rule.queries) * head + first + from) * WIDTH + 16 * column);
  const device M* mask_now = mask_from<true>(rule, first + slice * SEEN);
  int stage = 0, odd = 0;
  for (int query = first; query < last; query += TILE) {
    threadgroup T *now = first_tile + stage * 2 * OTHER, *d_scores_now = d_scores + (SLICES == 1 ? odd : 1) * SCORES;
    threadgroup float2* statistics_now = first_statistics + odd * TILE;
    stage = stage == PLACES - 1 ? 0 : stage + 1;
    odd = 1 - odd;
    threadgroup T* next = first_tile + stage * 2 * OTHER;
    reader.skip(TILE);
    d_reader.skip(TILE);
    // No SIMD group reads the previous contents.
    reader.fetch(next, thread_index);
    d_reader.fetch(next + OTHER, thread_index);
    i += TILE;
    held = counted && i < last ? of_queries[i] : float2(BLANK, 0.0f);

    sum_fragment slopes[COUNT];
    if (KEPT) {
      begin_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(d_weights, own_values, now + OTHER + seen_first, 0, lane);
    } else {
      begin_rows_by_rows<T, STEPS, COUNT, ROWS, TILE, WIDTH, WARPGROUP>(
          d_weights, values, block_row, now + OTHER + seen_first, lane);
    }
    int seen_from = slice * SEEN;
    make_weights_of_keys<T, MASK, SOFTCAP, COUNT, TILE>(
        scores, slopes, statistics_now + seen_from / 2, own, query + seen_from, mask_now, rule, lane);
    mask_now += mask_step<true>(rule, TILE);
#pragma unroll
    for (int i = 0; i < SEEN / 16; i++) {
      left_from_sums(left[i], scores[2 * i], scores[2 * i + 1]);
    }
    if (SLICES == 1) {
      begin_weighted_rows<T, TILE, COLUMNS, WIDTH, WARPGROUP>(
          d_values, left, now + OTHER, 0, lane);
    }
    finish_products<SLICES == 1 ? 1 : 0, COUNT>(d_weights);
    make_d_scores<COUNT, TILE>(d_weights, slopes, statistics_now + seen_from / 2, lane);
#pragma unroll
    for (int i = 0; i < SEEN / 16; i++) {
      left_from_sums(d_left[i], d_weights[2 * i], d_weights[2 * i + 1]);
      int column = seen_from + 16 * i;
      if (SLICES > 1) {
        store_left<T, ROWS, TILE, WARPGROUP>(left[i], d_scores, block_row, column, lane);
      }
      left_fragment<T> seen = d_left[i];
#pragma unroll
      for (int p = 0; p < 4; p++) {
        // Keys beyond the last one may give infinities.
        uint pair = as_type<uint>(seen.part[p]);
        pair = own + fragment_row(lane) + p % 2 * 8 < rule.keys ? pair : 0u;
        seen.part[p] = as_type<metal::vec<T, 2>>(pair);
      }
      store_left<T, ROWS, TILE, WARPGROUP>(seen, d_scores_now, block_row, column, lane);
    }
    // One barrier for these scores and the next tile.
    reader.template put<0, false>(next, thread_index);
    d_reader.put(next + OTHER, thread_index);
    put_statistics<TILE>(first_statistics + odd * TILE, held, thread_index);
    if (SLICES == 1) {
      begin_weighted_rows<T, TILE, COLUMNS, WIDTH, WARPGROUP>(d_keys, d_left, now, 0, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum_fragment d_queries[PART];
    begin_by_tile<T, ROWS, PART, TILE, WIDTH, WARPGROUP, true>(
        d_queries, d_scores_now, from, keys, column, lane);
    if (SLICES == 1) {
      finish_products<1, COLUMNS>(d_values);
      finish_products<1, COLUMNS>(d_keys);
      release_operands<T, SEEN / 16>(left);
      release_operands<T, SEEN / 16>(d_left);
    } else {
      begin_by_tile<T, TILE, COLUMNS, ROWS, WIDTH, WARPGROUP, false>(
          d_values, d_scores, block_row, now + OTHER, first_column, lane);
      finish_products<1, PART>(d_queries);
      add_block<PART>(to, d_queries, factors[SLOPE], lane);
      begin_by_tile<T, ROWS, PART, TILE, WIDTH, WARPGROUP, true>(
          d_queries, d_scores_now, from, keys, column + 8 * PART, lane);
      begin_by_tile<T, TILE, COLUMNS, ROWS, WIDTH, WARPGROUP, false>(
          d_keys, d_scores_now, block_row, now, first_column, lane);
      finish_products<1, COLUMNS>(d_values);
    }
    // Rows beyond the last tile are zeros.
    if (KEPT) {
      begin_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(
          scores, own_keys, next + seen_first, 0, lane);
    } else {
      begin_rows_by_rows<T, STEPS, COUNT, ROWS, TILE, WIDTH, WARPGROUP>(
          scores, keys, block_row, next + seen_first, lane);
    }
    finish_products<SLICES, PART>(d_queries);
    add_block<PART>(to + (SLICES - 1) * PART * 128, d_queries, factors[SLOPE], lane);
    to += TILE * WIDTH;
    if (SLICES > 1) {
      finish_products<1, COLUMNS>(d_keys);
      // Behind this barrier no SIMD group reads this tile and its scores.
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    finish_products<0, COUNT>(scores);
  }

  int kv_heads = sizes[HEADS] / sizes[GQA_FACTOR];
#pragma unroll
  for (int i = 0; i < (AVERAGE ? 2 * COLUMNS : 0); i++) {
    int c = first_column + i / 2 * 8 + fragment_col(lane);
    if (c < DV && head % sizes[GQA_FACTOR] == 0) {
      const device float* more = average + (ulong(batch) * kv_heads + kv_head) * DV + c;
      d_values[i / 2].part[i % 2] += float2(more[0], more[1]);
    }
  }
  if (GROUPED) {
    before += whole_tiles(rule.queries) * sizes[HEADS] + whole_tiles(rule.keys) * kv_head + own;
    device atomic<float>* to = sums + (before * WIDTH + 16 * first_column);
    add_block<COLUMNS>(to, d_keys, factors[SLOPE], lane);
    add_block<COLUMNS>(to + whole_tiles(rule.keys) * kv_heads * WIDTH, d_values, 1.0f, lane);
  } else {
    ulong at = ulong(batch) * rule.keys * kv_heads + kv_head, stride = kv_heads;
    device T* k_out = reinterpret_cast<device T*>(d_k) + at * D;
    device T* v_out = reinterpret_cast<device T*>(d_v) + at * DV;
    int first = first_column, rows = rule.keys;
    store_rows<T, COLUMNS>(d_keys, k_out, stride * D, own, rows, first, D, factors[SLOPE], lane);
    store_rows<T, COLUMNS>(d_values, v_out, stride * DV, own, rows, first, DV, 1.0f, lane);
  }
}
