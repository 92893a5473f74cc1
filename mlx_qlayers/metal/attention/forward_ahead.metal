// Attention of many queries as in forward.metal, where the scores of the next tile are computed while the
// weights of the last one are multiplied with the values. The names are those of forward.metal.
//
//   scores = q * keys^T of the first tile
//   for each tile of keys:
//     store the next keys and these values, arrive at the barrier
//     weights and rescale from the scores
//     wait for the others | start loading the keys and values AHEAD tiles further
//     finish the last sums, sums *= rescale
//     begin scores of the next tile, sums += weights * values
//     finish scores
//
// Between arrive and wait other SIMD groups may multiply: they alternate between products and weights (ping-pong).
//
// A threadgroup computes SIMDS * 16 queries: grid (32 * SIMDS * neighbouring heads, ceil(L / ROWS),
// B * (H / those heads)).

#include "common/tile_products.metal"
#include "query_scores.metal"

template <
    typename T,
    typename M,
    typename N,
    int D,
    int DV,
    int MASK,
    bool SOFTCAP,
    bool SINKS,
    bool AVERAGE,
    int SIMDS,
    int TILE,
    int RESIDENT,
    int SHARED>
[[kernel]] void attention_forward_ahead(
    const device T* q,
    const constant int64_t* q_strides,
    const device T* k,
    const constant int64_t* k_strides,
    const device T* v,
    const constant int64_t* v_strides,
    const device M* mask,
    const constant int64_t* mask_strides,
    const device N* sinks,
    const device float* mean,
    constant int* sizes,
    constant float* factors,
    device T* out,
    device float* norms,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int THREADS = 32 * SIMDS, ROWS = 16 * SIMDS, COUNT = TILE / 8;
  constexpr int WIDTH = rounded_up(D, product_columns());
  constexpr int WIDTH_V = rounded_up(DV, product_columns());
  constexpr int STEPS = WIDTH / 16, COLUMNS = WIDTH_V / 8;
  constexpr bool WARPGROUP = uses_warpgroup<T>(SIMDS, 1, WIDTH, WIDTH_V);
  constexpr int SIZE = tile_elements<T, WARPGROUP>(TILE, WIDTH);
  constexpr int SIZE_V = tile_elements<T, WARPGROUP>(TILE, WIDTH_V);
  constexpr int AHEAD = WARPGROUP ? 2 : 1;
  constexpr int ELEMENTS = (AHEAD + 1) * SIZE + (AHEAD + 2) * SIZE_V;
  threadgroup tile_packs<declared_packs(ELEMENTS * sizeof(T) / 16 + 1)> tiles;
  threadgroup T* keys = reinterpret_cast<threadgroup T*>(all_packs(tiles));
  threadgroup T* values = keys + (AHEAD + 1) * SIZE;
  threadgroup ulong* split_barrier = reinterpret_cast<threadgroup ulong*>(values + (AHEAD + 2) * SIZE_V);
  start_split_barrier(split_barrier, THREADS, thread_index);

  uint3 part = part_of(group, groups, sizes);
  uint head = part.y, batch = part.z, kv_head = head / sizes[GQA_FACTOR];
  int row = int(groups.y - 1 - part.x) * ROWS, own = row + 16 * int(simd_group);
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  int last = min(rule.keys, min(row + ROWS, rule.queries) + rule.reach);
  int first = max(0, row + rule.reach - rule.window + 1) / TILE * TILE;
  tile_reader<T, TILE, D, WIDTH, THREADS, WARPGROUP, WARPGROUP> key_reader;
  tile_reader<T, TILE, DV, WIDTH_V, THREADS, WARPGROUP, WARPGROUP> value_reader;
  // Keys behind the last one that a query of the tile attends to are not read.
  key_reader.rows = rows_of(k, k_strides, batch, kv_head, last);
  value_reader.rows = rows_of(v, v_strides, batch, kv_head, last);
  key_reader.skip(first);
  value_reader.skip(first);
  key_reader.fetch(keys, thread_index);

  left_fragment<T> left[STEPS], weights[TILE / 16];
  sum_fragment sums[COLUMNS], scores[COUNT];
  float unit = is_raw(MASK, SOFTCAP) ? rule.scale : 1.0f;
  float sink = SINKS ? max(float(sinks[head]) * LOG2E, LOWEST) : LOWEST;
  // One of the four lanes of a row starts with the sink.
  float begun = SINKS && fragment_col(lane) == 0 ? 1.0f : 0.0f;
  float top[2] = {sink, sink}, total[2] = {begun, begun};
  load_left_rows<T, STEPS>(
      left, rows_of(q, q_strides, batch, head, rule.queries), D, own, 0, lane);
  clear<COLUMNS>(sums);
  key_reader.put(keys, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    key_reader.skip(TILE);
    key_reader.fetch(keys + (i + 1) * SIZE, thread_index);
    value_reader.skip(i == 0 ? 0 : TILE);
    value_reader.fetch(values + i * SIZE_V, thread_index);
  }
  begin_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(scores, left, keys, 0, lane);
  finish_products<0, COUNT>(scores);

  // Two groups of asynchronous copies are in flight for each tile.
  constexpr int LATER = 2 * (AHEAD - 1), BACK = (AHEAD - 1) * TILE;
  const device M* mask_now = mask_from<false>(rule, first);
  int stage = 0, place = 0, parity = 0;
  for (int key = first; key < last; key += TILE) {
    threadgroup T *last_keys = keys + stage * SIZE, *values_now = values + place * SIZE_V;
    stage = stage == AHEAD ? 0 : stage + 1;
    threadgroup T* next_keys = keys + stage * SIZE;
    key_reader.template put<LATER, false>(next_keys, thread_index, BACK);
    value_reader.template put<LATER>(values_now, thread_index, BACK);
    arrive_at(split_barrier);

    sum_fragment slopes[COUNT];
    make_scores<MASK, SOFTCAP, false, COUNT>(scores, slopes, own, key, mask_now, rule, lane);
    if (!all_seen(rule, own, 16, key, TILE)) {
      hide_unseen<false, COUNT>(scores, own, key, rule, lane);
    }
    mask_now += mask_step<false>(rule, TILE);
    float2 rescale;
    rescale.x = make_weights<T, COUNT>(scores, 0, unit, top[0], total[0]);
    rescale.y = make_weights<T, COUNT>(scores, 1, unit, top[1], total[1]);
    complete(min(total[0], total[1]));
    // Behind this barrier no SIMD group reads the last keys or the values before the last ones.
    wait_for(split_barrier, parity);
    parity = 1 - parity;
    key_reader.skip(TILE);
    value_reader.skip(TILE);
    key_reader.fetch(last_keys, thread_index);
    value_reader.fetch(
        values + (place < 2 ? place + AHEAD : place - 2) * SIZE_V, thread_index);
    place = place == AHEAD + 1 ? 0 : place + 1;
    finish_products<0, COLUMNS>(sums);
    release_operands<T, TILE / 16>(weights);
    // After a few tiles the maximum seldom changes.
    if (simd_any(rescale.x != 1.0f || rescale.y != 1.0f)) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        sums[c].part[0] *= rescale.x;
        sums[c].part[1] *= rescale.y;
      }
    }
#pragma unroll
    for (int i = 0; i < TILE / 16; i++) {
      left_from_sums(weights[i], scores[2 * i], scores[2 * i + 1]);
    }
    begin_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(scores, left, next_keys, 0, lane);
    begin_weighted_rows<T, TILE, COLUMNS, WIDTH_V, WARPGROUP>(sums, weights, values_now, 0, lane);
    finish_products<1, COUNT>(scores);
  }
  finish_products<0, COLUMNS>(sums);
  store_output<T, COLUMNS, DV, AVERAGE>(
      sums,
      top,
      total,
      mean + (ulong(batch) * (sizes[HEADS] / sizes[GQA_FACTOR]) + kv_head) * DV,
      out + (ulong(batch) * rule.queries * sizes[HEADS] + head) * DV,
      norms + 2 * (ulong(batch) * sizes[HEADS] + head) * rule.queries,
      ulong(sizes[HEADS]) * DV,
      own,
      rule.queries,
      0,
      lane);
}
