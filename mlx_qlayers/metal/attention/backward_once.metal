// All gradients of attention with one look at each score, where sums of many threadgroups may be added
// in any order: five products where backward.metal and backward_keys.metal need seven. Names as there.
//
// attention_backward_statistics  for each query what lowers its scores, and delta = sum of d_out * out:
//                                four queries a SIMD group, grid (32 * ceil(B H L / 4), 1, 1)
//
// attention_backward_once        a threadgroup owns ROWS = 16 * SIMDS / SLICES keys of one query head: grid (32 *
//                                SIMDS * ceil(S / ROWS), H, B), threadgroup (32 * SIMDS, 1, 1)
//
//   registers     d_keys, d_values  16 keys, a slice of the columns, float
//                 scores, d_weights 16 keys x TILE queries, float
//                 d_queries         16 queries x a part of the columns, float
//   threadgroup   keys, values      ROWS rows, T
//                 queries, d_out    TILE rows each, T; two or three where GPUs copy beside registers
//                 d_scores          ROWS x TILE, T
//                 statistics        of TILE queries, as often as those
//   device        k and v are read once, q, d_out and statistics once a threadgroup, and d_q is added to
//
//   for each tile of queries that may see one of the keys:
//     put queries, d_out and statistics in their places | barrier | start reading the next ones
//     begin scores = keys * queries^T, d_weights = values * d_out^T
//     weights = exp2(scores - lowered), begin d_values += weights * d_out
//     d_scores = weights * bend * (d_weights - delta), to their place | barrier
//     begin d_queries = d_scores^T * keys, d_keys += d_scores * queries
//     add d_queries to d_q
//
// d_q is float32. If GROUPED, heads that share keys add to d_k and d_v, float32 too; else these hold
// numbers of T, two to a float.

#include "common/tile_products.metal"
#include "key_scores.metal"
#include "score_output.metal"

// As store_rows, added to sums of other threadgroups; WHOLE if there are all columns.
template <int COUNT, bool WHOLE>
METAL_FUNC void add_rows(
    thread const sum_fragment* sums,
    device atomic<float>* out,
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
      device atomic<float>* to = out + ((row + 8 * p) * stride + column);
      add_pairs<COUNT>(to, sums, p, factor, WHOLE ? 8 * COUNT : width - column);
    }
  }
}

// What lowers the scores of each of TILE queries, and behind that their deltas.
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
  int heads = norms_shape[1], queries = norms_shape[2], rows = norms_shape[0] * heads * queries;
  int index = int(position.x / 8), lane = int(position.x % 8), here = min(index, rows - 1);
  int row = here % queries, head = here / queries % heads, batch = here / queries / heads;
  head_rows<T> one = rows_of(out, out_strides, batch, head, queries);
  head_rows<T> other = rows_of(d_out, d_out_strides, batch, head, queries);
  float delta = 0.0f;
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
  if (lane == 0 && index < rows) {
    statistics[2 * ulong(index)] = norm_of<T>(norms, index, rows).x;
    statistics[2 * ulong(index) + 1] = delta;
  }
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
    device atomic<float>* d_q,
    device atomic<float>* d_k,
    device atomic<float>* d_v,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int THREADS = 32 * SIMDS, OWNERS = SIMDS / SLICES, ROWS = 16 * OWNERS;
  // A SIMD group has 16 queries of a tile and a part of their columns.
  constexpr int PARTS = 16 * SIMDS / TILE, COUNT = TILE / 8;
  constexpr int WIDTH = rounded_up(larger(D, DV), larger(product_columns() * SLICES, 16 * PARTS));
  constexpr int STEPS = WIDTH / 16, COLUMNS = WIDTH / SLICES / 8, PART = WIDTH / PARTS / 8;
  constexpr bool TOGETHER = products_together<T>(OWNERS, SLICES, WIDTH, WIDTH);
  constexpr int PLACES = TOGETHER ? (SLICES == 1 ? 3 : 2) : 1;
  constexpr int OWN = tile_elements<T, TOGETHER>(ROWS, WIDTH);
  constexpr int OTHER = tile_elements<T, TOGETHER>(TILE, WIDTH);
  constexpr int SCORES = tile_elements<T, TOGETHER>(ROWS, TILE);
  constexpr int ELEMENTS = 2 * OWN + PLACES * 2 * OTHER + SCORES;
  constexpr int BYTES = ELEMENTS * sizeof(T) + PLACES * 2 * TILE * sizeof(float);
  threadgroup tile_packs<declared_packs(BYTES / 16)> tiles;
  threadgroup T* keys = reinterpret_cast<threadgroup T*>(all_packs(tiles));
  threadgroup T *values = keys + OWN, *first_tile = values + OWN;
  threadgroup T* d_scores = first_tile + PLACES * 2 * OTHER;
  threadgroup float2* first_statistics = reinterpret_cast<threadgroup float2*>(d_scores + SCORES);

  uint head = group.y, batch = group.z, kv_head = head / sizes[SHARE];
  int row = int(group.x) * ROWS, mine = int(simd_group) % OWNERS * 16, own = row + mine;
  int column = int(simd_group) / OWNERS * COLUMNS * 8;
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  int first = max(0, row - rule.reach) / TILE * TILE;
  int last = min(rule.queries, row + ROWS - 1 - rule.reach + rule.window);
  tile_reader<T, TILE, D, WIDTH, THREADS, TOGETHER, TOGETHER> reader;
  tile_reader<T, TILE, DV, WIDTH, THREADS, TOGETHER, TOGETHER> d_reader;
  reader.rows = rows_of(q, q_strides, batch, head, last);
  d_reader.rows = rows_of(d_out, d_out_strides, batch, head, last);
  reader.skip(first);
  d_reader.skip(first);
  ulong place = (ulong(batch) * sizes[HEADS] + head) * rule.queries;
  const device float2* of_queries = reinterpret_cast<const device float2*>(statistics) + place;
  float2 held = float2(BLANK, 0.0f);
  {
    tile_reader<T, ROWS, D, WIDTH, THREADS, TOGETHER, TOGETHER> k_reader;
    tile_reader<T, ROWS, DV, WIDTH, THREADS, TOGETHER, TOGETHER> v_reader;
    k_reader.rows = rows_of(k, k_strides, batch, kv_head, rule.keys);
    v_reader.rows = rows_of(v, v_strides, batch, kv_head, rule.keys);
    k_reader.skip(row);
    v_reader.skip(row);
    k_reader.fetch(keys, thread_index);
    v_reader.fetch(values, thread_index);
    if (TOGETHER) {
      reader.fetch(first_tile, thread_index);
      d_reader.fetch(first_tile + OTHER, thread_index);
      if (thread_index < TILE && first + int(thread_index) < last) {
        held = of_queries[first + int(thread_index)];
      }
    }
    k_reader.put(keys, thread_index);
    v_reader.put(values, thread_index);
  }

  sum_fragment d_keys[COLUMNS], d_values[COLUMNS];
  sum_fragment scores[COUNT], d_weights[COUNT];
  left_fragment<T> d_left[TILE / 16];
  clear<COLUMNS>(d_keys);
  clear<COLUMNS>(d_values);
  int from = int(simd_group) % (TILE / 16) * 16, part = int(simd_group) / (TILE / 16) * PART;
  device atomic<float>* to = d_q + (ulong(batch) * rule.queries * sizes[HEADS] + head) * D;
  const device M* mask_now = mask_from<true>(rule, first);
  int turn = 0;
  for (int query = first; query < last; query += TILE) {
    threadgroup T* now = first_tile + turn * 2 * OTHER;
    threadgroup float2* statistics_now = first_statistics + turn * TILE;
    if (!TOGETHER) {
      // Behind this nobody uses the last tiles any more.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      reader.fetch(now, thread_index);
      d_reader.fetch(now + OTHER, thread_index);
      if (thread_index < TILE) {
        int i = query + int(thread_index);
        held = i < last ? of_queries[i] : float2(BLANK, 0.0f);
      }
    }
    if (!TOGETHER || query == first) {
      reader.put(now, thread_index);
      d_reader.put(now + OTHER, thread_index);
      put_statistics<TILE>(statistics_now, held, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    reader.skip(TILE);
    d_reader.skip(TILE);
    if (TOGETHER) {
      turn = turn == PLACES - 1 ? 0 : turn + 1;
      reader.fetch(first_tile + turn * 2 * OTHER, thread_index);
      d_reader.fetch(first_tile + (turn * 2 + 1) * OTHER, thread_index);
      int i = query + TILE + int(thread_index);
      held = thread_index < TILE && i < last ? of_queries[i] : float2(BLANK, 0.0f);
    }

    sum_fragment bent[COUNT];
    left_fragment<T> left[TILE / 16];
    begin_rows_by_rows<T, STEPS, COUNT, ROWS, WIDTH, TOGETHER>(
        scores, keys, mine, now, lane);
    begin_rows_by_rows<T, STEPS, COUNT, ROWS, WIDTH, TOGETHER>(
        d_weights, values, mine, now + OTHER, lane);
    finish_products<1, COUNT>(scores);
    finish_products<1, COLUMNS>(d_keys);
    release_operands<T, TILE / 16>(d_left);
    make_weights_of_keys<T, MASK, SOFTCAP, COUNT>(
        scores, bent, statistics_now, own, query, mask_now, rule, lane);
    mask_now += mask_step<true>(rule, TILE);
#pragma unroll
    for (int i = 0; i < TILE / 16; i++) {
      left_from_sums(left[i], scores[2 * i], scores[2 * i + 1]);
    }
    begin_weighted_rows<T, TILE, COLUMNS, WIDTH, TOGETHER>(d_values, left, now + OTHER, column, lane);
    finish_products<1, COUNT>(d_weights);
    make_d_scores<COUNT>(d_weights, bent, statistics_now, lane);
#pragma unroll
    for (int i = 0; i < TILE / 16; i++) {
      left_from_sums(d_left[i], d_weights[2 * i], d_weights[2 * i + 1]);
      if (SLICES == 1 || column == 0) {
        left_fragment<T> seen = d_left[i];
#pragma unroll
        for (int p = 0; p < 4; p++) {
          // What keys that there are not would give may be infinite.
          uint pair = as_type<uint>(seen.part[p]);
          pair = own + fragment_row(lane) + p % 2 * 8 < rule.keys ? pair : 0u;
          seen.part[p] = as_type<metal::vec<T, 2>>(pair);
        }
        store_left<T, ROWS, TILE, TOGETHER>(seen, d_scores, mine, 16 * i, lane);
      }
    }
    if (PLACES == 2) {
      // Registers are short.
      finish_products<0, COLUMNS>(d_values);
      release_operands<T, TILE / 16>(left);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum_fragment d_queries[PART];
    left_fragment<T> of_queries_left[ROWS / 16];
    begin_columns_by_tile<T, ROWS, PART, TILE, WIDTH, TOGETHER>(
        d_queries, of_queries_left, d_scores, from, keys, 8 * part, lane);
    begin_weighted_rows<T, TILE, COLUMNS, WIDTH, TOGETHER>(d_keys, d_left, now, column, lane);
    if (TOGETHER) {
      // Ahead of the additions, for which this would wait.
      reader.put(first_tile + turn * 2 * OTHER, thread_index);
      d_reader.put(first_tile + (turn * 2 + 1) * OTHER, thread_index);
      put_statistics<TILE>(first_statistics + turn * TILE, held, thread_index);
    }
    finish_products<1, PART>(d_queries);
    if (PLACES != 2) {
      finish_products<1, COLUMNS>(d_values);
      release_operands<T, TILE / 16>(left);
    }
    release_operands<T, ROWS / 16>(of_queries_left);
    add_rows<PART, WIDTH == D>(
        d_queries,
        to,
        ulong(sizes[HEADS]) * D,
        query + from,
        rule.queries,
        8 * part,
        D,
        factors[SLOPE],
        lane);
    if (PLACES == 2) {
      finish_products<0, COLUMNS>(d_keys);
    }
  }
  if (PLACES == 3 && first < last) {
    finish_products<0, COLUMNS>(d_keys);
  }

  int kv_heads = sizes[HEADS] / sizes[SHARE];
#pragma unroll
  for (int i = 0; i < (AVERAGE ? 2 * COLUMNS : 0); i++) {
    int c = column + i / 2 * 8 + fragment_col(lane);
    if (c < DV && head % sizes[SHARE] == 0) {
      const device float* more = average + (ulong(batch) * kv_heads + kv_head) * DV + c;
      d_values[i / 2].part[i % 2] += float2(more[0], more[1]);
    }
  }
  ulong at = ulong(batch) * rule.keys * kv_heads + kv_head, k_row = ulong(kv_heads) * D;
  ulong v_row = ulong(kv_heads) * DV;
  if (GROUPED) {
    add_rows<COLUMNS, WIDTH == D>(
        d_keys, d_k + at * D, k_row, own, rule.keys, column, D, factors[SLOPE], lane);
    add_rows<COLUMNS, WIDTH == DV>(
        d_values, d_v + at * DV, v_row, own, rule.keys, column, DV, 1.0f, lane);
  } else {
    device T* k_out = reinterpret_cast<device T*>(d_k) + at * D;
    device T* v_out = reinterpret_cast<device T*>(d_v) + at * DV;
    store_rows<T, COLUMNS>(d_keys, k_out, k_row, own, rule.keys, column, D, factors[SLOPE], lane);
    store_rows<T, COLUMNS>(d_values, v_out, v_row, own, rule.keys, column, DV, 1.0f, lane);
  }
}
