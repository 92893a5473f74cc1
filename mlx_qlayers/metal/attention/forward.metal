// Attention of many queries, forward: out = softmax(q k^T scale) v, one pass over the keys.
//
// A threadgroup computes ROWS = 16 * BLOCKS * SIMDS / SLICES queries of one head:
//
//   grid (32 * SIMDS * ceil(L / ROWS), H, B), threadgroup (32 * SIMDS, 1, 1)
//
//   registers     q            BLOCKS x 16 queries x D / SLICES, T, left operands
//                 sums         BLOCKS x 16 queries x DV / SLICES, float
//                 scores       BLOCKS x 16 queries x TILE keys, float; then the weights
//                 top, total   running maximum of the scores and sum of the weights of each query
//                 readers      a thread's 16-byte vectors of the next tile, in flight
//   threadgroup   keys, values TILE rows each, T; one buffer for both if ALTERNATE
//                 exchange     partial scores, float, if SLICES > 1
//   device        q, k, v and mask may have any strides; each key and value is read once by each
//                 threadgroup, plain or quantized (BITS, BITS_V > 0)
//
//   for each tile of keys that a query attends to:
//     start loading the tile's values
//     scores = q * keys^T, summed over the slices; softcap, mask
//     top' = max(top, scores), weights = exp2(scores - top'), rescale = exp2(top - top')
//     total = total * rescale + weights, sums = sums * rescale
//     store the values | barrier | start loading the next tile's keys
//     sums += weights * values
//     store the keys | barrier
//   out = sums / total, norms = top, total
//
// With asynchronous copies (DIRECT) a tile is fetched as soon as its buffer is free: this takes one more
// barrier behind the scores, and both tiles have most of an iteration to arrive.
//
// Threadgroups of late queries, which attend to most keys under a causal mask, start first. A sink is a
// weight that total begins with. A query that attends to no key gets `mean`, and the norms BLANK and 1,
// if AVERAGE.

#include "packed_tiles.metal"
#include "query_scores.metal"

template <
    typename T,
    typename K,
    typename M,
    typename N,
    int D,
    int DV,
    int BITS,
    int BITS_V,
    int GROUP,
    int MASK,
    bool SOFTCAP,
    bool SINKS,
    bool AVERAGE,
    int BLOCKS,
    int SIMDS,
    int SLICES,
    int TILE,
    bool ALTERNATE,
    bool AHEAD,
    int RESIDENT>
[[kernel]] void attention_forward(
    const device T* q,
    const constant int64_t* q_strides,
    const device K* k,
    const constant int64_t* k_strides,
    const device T* k_scales,
    const constant int64_t* k_scales_strides,
    const device T* k_biases,
    const constant int64_t* k_biases_strides,
    const device K* v,
    const constant int64_t* v_strides,
    const device T* v_scales,
    const constant int64_t* v_scales_strides,
    const device T* v_biases,
    const constant int64_t* v_biases_strides,
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
  constexpr int THREADS = 32 * SIMDS, OWNERS = SIMDS / SLICES, ROWS = 16 * BLOCKS * OWNERS;
  constexpr int WIDTH = rounded_up(D, 16 * SLICES), WIDTH_V = rounded_up(DV, 8 * SLICES);
  constexpr int STEPS = WIDTH / SLICES / 16, COLUMNS = WIDTH_V / SLICES / 8;
  constexpr bool WARPGROUP = uses_warpgroup<T>(OWNERS, SLICES, D, DV);
  constexpr bool DIRECT = WARPGROUP && !ALTERNATE && BITS == 0;
  constexpr bool EARLY = AHEAD && !DIRECT, LATE = !AHEAD && !DIRECT;
  constexpr int SIZE = tile_elements<T, WARPGROUP>(TILE, WIDTH);
  constexpr int PLACE_V = ALTERNATE ? 0 : SIZE;
  constexpr int ELEMENTS = larger(SIZE, PLACE_V + tile_elements<T, WARPGROUP>(TILE, WIDTH_V));
  constexpr int PARTS = SLICES == 1 ? 1 : SIMDS * BLOCKS * TILE * 8;
  threadgroup tile_packs<ELEMENTS * sizeof(T) / 16> tiles;
  threadgroup float2 exchange[PARTS];
  threadgroup T* keys = reinterpret_cast<threadgroup T*>(tiles.pack);
  threadgroup T* values = keys + PLACE_V;

  uint head = group.y, batch = group.z;
  int row = int(groups.x - 1 - group.x) * ROWS;
  int slice = SLICES == 1 ? 0 : int(simd_group) / OWNERS;
  int own = row + int(simd_group) % OWNERS * 16 * BLOCKS;
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  head_rows<T> q_rows = rows_of(q, q_strides, batch, head, rule.queries);

  int last = min(rule.keys, min(row + ROWS, rule.queries) + rule.reach);
  int first = max(0, row + rule.reach - rule.window + 1) / TILE * TILE;
  metal::conditional_t<
      BITS == 0,
      tile_reader<T, TILE, D, WIDTH, THREADS, WARPGROUP, DIRECT>,
      packed_reader<T, BITS, GROUP, TILE, D, WIDTH, THREADS, WARPGROUP>> key_reader;
  metal::conditional_t<
      BITS == 0,
      tile_reader<T, TILE, DV, WIDTH_V, THREADS, WARPGROUP, DIRECT>,
      packed_reader<T, BITS_V, GROUP, TILE, DV, WIDTH_V, THREADS, WARPGROUP>> value_reader;
  // Keys behind the last one that a query of the tile attends to are not read.
  key_reader.rows = cache_rows_of<BITS>(
      k, k_strides, k_scales, k_scales_strides, k_biases, k_biases_strides, batch,
      head / sizes[GQA_FACTOR], last);
  value_reader.rows = cache_rows_of<BITS_V>(
      v, v_strides, v_scales, v_scales_strides, v_biases, v_biases_strides, batch,
      head / sizes[GQA_FACTOR], last);
  key_reader.skip(first);
  value_reader.skip(first);
  key_reader.fetch(keys, thread_index);

  left_fragment<T> left[BLOCKS][STEPS];
  sum_fragment sums[BLOCKS][COLUMNS];
  float top[BLOCKS][2], total[BLOCKS][2];
  float unit = is_raw(MASK, SOFTCAP) ? rule.scale : 1.0f;
  float sink = SINKS ? max(float(sinks[head]) * LOG2E, LOWEST) : LOWEST;
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    load_left_rows<T, STEPS>(left[b], q_rows, D, own + 16 * b, slice * STEPS * 16, lane);
    clear<COLUMNS>(sums[b]);
#pragma unroll
    for (int p = 0; p < 2; p++) {
      top[b][p] = sink;
      // One of the four lanes of a row starts with the sink.
      total[b][p] = SINKS && fragment_col(lane) == 0 ? 1.0f : 0.0f;
    }
  }

  if (DIRECT) {
    value_reader.fetch(values, thread_index);
  }
  key_reader.template put<DIRECT>(keys, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const device M* mask_now = mask_from<false>(rule, first);
  for (int key = first; key < last; key += TILE) {
    if (EARLY) {
      value_reader.fetch(values, thread_index);
    }
    sum_fragment scores[BLOCKS][TILE / 8];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      multiply_by_rows<T, STEPS, TILE / 8, WIDTH, WARPGROUP>(
          scores[b], left[b], keys, slice * STEPS * 16, lane);
    }
    key_reader.skip(TILE);
    if (DIRECT) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      key_reader.fetch(keys, thread_index);
    }
    if (SLICES > 1) {
      add_slices<BLOCKS * TILE / 8, SLICES, OWNERS>(scores[0], exchange, simd_group, lane);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      sum_fragment slopes[TILE / 8];
      make_scores<MASK, SOFTCAP, false, TILE / 8>(
          scores[b], slopes, own + 16 * b, key, mask_now, rule, lane);
      if (!all_seen(rule, own + 16 * b, 16, key, TILE)) {
        hide_unseen<false, TILE / 8>(scores[b], own + 16 * b, key, rule, lane);
      }
      float2 rescale;
      rescale.x = make_weights<T, TILE / 8>(scores[b], 0, unit, top[b][0], total[b][0]);
      rescale.y = make_weights<T, TILE / 8>(scores[b], 1, unit, top[b][1], total[b][1]);
      // After a few tiles the maximum seldom changes.
      if (simd_any(rescale.x != 1.0f || rescale.y != 1.0f)) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          sums[b][c].part[0] *= rescale.x;
          sums[b][c].part[1] *= rescale.y;
        }
      }
    }
    if (LATE) {
      value_reader.fetch(values, thread_index);
    }
    if (ALTERNATE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    value_reader.template put<DIRECT>(values, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (EARLY) {
      key_reader.fetch(keys, thread_index);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      add_weighted_rows<T, TILE, COLUMNS, WIDTH_V, WARPGROUP>(
          sums[b], scores[b], values, slice * COLUMNS * 8, lane);
    }
    if (LATE) {
      key_reader.fetch(keys, thread_index);
    }
    if (ALTERNATE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    key_reader.put(keys, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value_reader.skip(TILE);
    mask_now += mask_step<false>(rule, TILE);
    if (DIRECT) {
      value_reader.fetch(values, thread_index);
    }
  }

  ulong kv_head = ulong(batch) * (sizes[HEADS] / sizes[GQA_FACTOR]) + head / sizes[GQA_FACTOR];
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    store_output<T, COLUMNS, DV, AVERAGE>(
        sums[b],
        top[b],
        total[b],
        mean + kv_head * DV,
        out + (ulong(batch) * rule.queries * sizes[HEADS] + head) * DV,
        norms + 2 * (ulong(batch) * sizes[HEADS] + head) * rule.queries,
        ulong(sizes[HEADS]) * DV,
        own + 16 * b,
        rule.queries,
        slice * COLUMNS * 8,
        lane);
  }
}
