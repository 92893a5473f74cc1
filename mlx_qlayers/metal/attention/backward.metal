// The gradient of attention for its queries, from the norms that forward.metal left:
//
//   weights  = exp2(scores - top) / total
//   d_scores = weights * (d_out v^T - delta) * slope,   delta = sum over the columns of d_out * out
//   d_q      = scale d_scores k
//
// attention_backward_queries: d_q and delta. A threadgroup owns ROWS = 16 * BLOCKS * SIMDS / SLICES
// queries: grid (32 * SIMDS * ceil(L / ROWS), H, B), threadgroup (32 * SIMDS, 1, 1).
//
//   registers     left, d_left    q and d_out, left operands of BLOCKS x 16 queries, a slice of columns
//                 sums            d_q, float, of the same shape
//                 scores          scores and d_weights, BLOCKS x 16 queries x TILE keys, float
//                 norm, dots      norms and dot of each query
//   threadgroup   keys, values    TILE rows each, T; one buffer for both if ALTERNATE
//                 exchange        partial scores and d_weights, float, if SLICES > 1
//   device        q, out, d_out and norms are read once, k and v once by each threadgroup
//
//   dot = sum of d_out * out, which is delta up to the rounding of out; slope is the softcap's derivative
//   for each tile of keys that a query attends to:
//     store keys and values to threadgroup memory | barrier
//     scores = q * keys^T, d_weights = d_out * values^T, added up over the slices
//     weights = exp2(scores - top) / total, delta += weights * d_weights
//     if there is one tile only, dot = delta
//     d_scores = weights * (d_weights - dot) * slope
//     start loading the next tiles
//     sums += d_scores * keys | barrier
//   d_q = sums * scale
//
// attention_backward_mask: the gradient of an additive mask, (B, H, L, S), with the same grid.
//
// With ALTERNATE the keys are stored a second time for the last product. GPUs with asynchronous copies
// fetch a tile when its buffer is free or, with AHEAD, one iteration early into a second buffer.

#include "score_output.metal"
#include "score_tile.metal"

// The loop of both kernels: it computes d_q, or the gradient of the scores.
template <
    typename T,
    typename M,
    int D,
    int DV,
    int MASK,
    bool SOFTCAP,
    bool OF_MASK,
    int BLOCKS,
    int SIMDS,
    int SLICES,
    int TILE,
    bool ALTERNATE,
    bool AHEAD>
METAL_FUNC void query_gradients(
    head_rows<T> q_rows,
    head_rows<T> k_rows,
    head_rows<T> v_rows,
    head_rows<T> out_rows,
    head_rows<T> d_rows,
    thread const score_rule<M>& rule,
    const device float* norms,
    device float* delta,
    device T* d_q,
    device float* d_scores,
    ulong stride,
    float slope,
    threadgroup T* keys,
    threadgroup float2* exchange,
    int row,
    uint thread_index,
    uint simd_group,
    uint lane) {
  constexpr int THREADS = 32 * SIMDS, OWNERS = SIMDS / SLICES, ROWS = 16 * BLOCKS * OWNERS;
  constexpr int WIDTH = rounded_up(D, 16 * SLICES), WIDTH_V = rounded_up(DV, 16 * SLICES);
  constexpr int STEPS = WIDTH / SLICES / 16, STEPS_V = WIDTH_V / SLICES / 16;
  constexpr int COLUMNS = 2 * STEPS, COUNT = TILE / 8;
  constexpr bool WARPGROUP = uses_warpgroup<T>(SIMDS / SLICES, SLICES, D, DV);
  constexpr bool DIRECT = WARPGROUP && !ALTERNATE, TWICE = DIRECT && AHEAD;
  constexpr bool EARLY = AHEAD && !DIRECT, LATE = !AHEAD && !DIRECT;
  constexpr int SIZE = tile_elements<T, WARPGROUP>(TILE, WIDTH);
  constexpr int SIZE_V = tile_elements<T, WARPGROUP>(TILE, WIDTH_V);
  threadgroup T* values = keys + (ALTERNATE ? 0 : SIZE);
  int turn = 0;
  int slice = SLICES == 1 ? 0 : int(simd_group) / OWNERS;
  int own = row + int(simd_group) % OWNERS * 16 * BLOCKS;

  float unit = is_raw(MASK, SOFTCAP) ? rule.scale : 1.0f;
  left_fragment<T> left[BLOCKS][STEPS], d_left[BLOCKS][STEPS_V];
  sum_fragment sums[BLOCKS][COLUMNS], dots[BLOCKS];
  float2 norm[BLOCKS][2];
  float exact[BLOCKS][2] = {};
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    int first = own + 16 * b;
    load_left_rows<T, STEPS>(left[b], q_rows, D, first, slice * STEPS * 16, lane);
    load_left_rows<T, STEPS_V>(d_left[b], d_rows, DV, first, slice * STEPS_V * 16, lane);
    clear<COLUMNS>(sums[b]);
    clear<1>(&dots[b]);
#pragma unroll
    for (int i = 0; i < STEPS_V; i++) {
      left_fragment<T> result;
      load_left_rows<T, 1>(&result, out_rows, DV, first, (slice * STEPS_V + i) * 16, lane);
#pragma unroll
      for (int p = 0; p < 4; p++) {
        dots[b].part[p % 2].x += float(result.part[p].x) * float(d_left[b][i].part[p].x);
        dots[b].part[p % 2].x += float(result.part[p].y) * float(d_left[b][i].part[p].y);
      }
    }
#pragma unroll
    for (int p = 0; p < 2; p++) {
      int query = first + fragment_row(lane) + 8 * p;
      dots[b].part[p].x = fragment_row_sum(dots[b].part[p].x);
      norm[b][p] = norm_of<T>(norms, query, rule.queries);
    }
  }
  if (SLICES > 1) {
    add_slices<BLOCKS, SLICES, OWNERS>(dots, exchange, simd_group, lane);
  }
  int last = min(rule.keys, min(row + ROWS, rule.queries) + rule.reach);
  int first = max(0, row + rule.reach - rule.window + 1) / TILE * TILE;
  tile_reader<T, TILE, D, WIDTH, THREADS, WARPGROUP, DIRECT> key_reader;
  tile_reader<T, TILE, DV, WIDTH_V, THREADS, WARPGROUP, DIRECT> value_reader;
  key_reader.rows = k_rows;
  value_reader.rows = v_rows;
  // Keys behind the last one that a query of the tile attends to are not read.
  key_reader.rows.count = value_reader.rows.count = last;
  key_reader.skip(first);
  value_reader.skip(first);
  if (AHEAD || DIRECT) {
    key_reader.fetch(keys, thread_index);
    value_reader.fetch(values, thread_index);
  }
  const device M* mask_now = mask_from<false>(rule, first);
  for (int key = first; key < last; key += TILE) {
    if (!DIRECT) {
      // Behind this barrier no SIMD group reads the previous tiles.
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (LATE) {
      key_reader.fetch(keys, thread_index);
    }
    key_reader.put(keys, thread_index);
    if (!ALTERNATE) {
      if (LATE) {
        value_reader.fetch(values, thread_index);
      }
      value_reader.put(values, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const threadgroup T *keys_now = keys, *values_now = values;
    if (TWICE) {
      turn = turn == 0 ? SIZE + SIZE_V : -turn;
      keys += turn;
      values += turn;
      key_reader.skip(TILE);
      value_reader.skip(TILE);
      key_reader.fetch(keys, thread_index);
      value_reader.fetch(values, thread_index);
    }
    sum_fragment scores[2][BLOCKS][COUNT];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      multiply_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(
          scores[0][b], left[b], keys_now, slice * STEPS * 16, lane);
    }
    if (ALTERNATE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      value_reader.fetch(values, thread_index);
      value_reader.put(values, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      multiply_by_rows<T, STEPS_V, COUNT, WIDTH_V, WARPGROUP>(
          scores[1][b], d_left[b], values_now, slice * STEPS_V * 16, lane);
    }
    if (DIRECT && !TWICE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      value_reader.skip(TILE);
      value_reader.fetch(values, thread_index);
    }
    if (SLICES > 1) {
      add_slices<2 * BLOCKS * COUNT, SLICES, OWNERS>(scores[0][0], exchange, simd_group, lane);
    }
    if (ALTERNATE && !OF_MASK) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      key_reader.put(keys, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      sum_fragment slopes[COUNT];
      make_scores<MASK, SOFTCAP, false, COUNT>(
          scores[0][b], slopes, own + 16 * b, key, mask_now, rule, lane);
      if (!all_seen(rule, own + 16 * b, 16, key, TILE)) {
        hide_unseen<false, COUNT>(scores[0][b], own + 16 * b, key, rule, lane);
      }
#pragma unroll
      for (int i = 0; i < 2 * COUNT; i++) {
        int n = i / 2, p = i % 2;
        float2 score = scores[0][b][n].part[p], d_weight = scores[1][b][n].part[p];
        float2 weight = weights_of<T>(score, unit, float2(norm[b][p].x), float2(norm[b][p].y));
        scores[0][b][n].part[p] = weight;
        exact[b][p] += weight.x * d_weight.x + weight.y * d_weight.y;
      }
      if (last - first <= TILE) {
        dots[b].part[0].x = fragment_row_sum(exact[b][0]);
        dots[b].part[1].x = fragment_row_sum(exact[b][1]);
      }
#pragma unroll
      for (int i = 0; i < 2 * COUNT; i++) {
        int n = i / 2, p = i % 2;
        float2 d_weight = scores[1][b][n].part[p] - dots[b].part[p].x;
        float2 d_score = scores[0][b][n].part[p] * d_weight;
        scores[0][b][n].part[p] = SOFTCAP && !OF_MASK ? d_score * slopes[n].part[p] : d_score;
      }
    }
    mask_now += mask_step<false>(rule, TILE);
    if (!TWICE) {
      key_reader.skip(TILE);
    }
    if (!DIRECT) {
      value_reader.skip(TILE);
    }
    if (EARLY) {
      key_reader.fetch(keys, thread_index);
      value_reader.fetch(values, thread_index);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      if (!OF_MASK) {
        add_weighted_rows<T, TILE, COLUMNS, WIDTH, WARPGROUP>(
            sums[b], scores[0][b], keys_now, slice * COLUMNS * 8, lane);
      } else if (slice == 0) {
        store_scores<COUNT>(scores[0][b], d_scores, own + 16 * b, key, rule, lane);
      }
    }
    if (DIRECT && !TWICE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      key_reader.fetch(keys, thread_index);
    }
  }
  if (!OF_MASK) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      store_rows<T, COLUMNS>(
          sums[b], d_q, stride, own + 16 * b, rule.queries, slice * COLUMNS * 8, D, slope, lane);
#pragma unroll
      for (int p = 0; p < 2; p++) {
        int query = own + 16 * b + fragment_row(lane) + 8 * p;
        float sum = fragment_row_sum(exact[b][p]);
        if (slice == 0 && fragment_col(lane) == 0 && query < rule.queries) {
          delta[query] = sum;
        }
      }
    }
  }
}

template <
    typename T,
    typename M,
    int D,
    int DV,
    int MASK,
    bool SOFTCAP,
    int BLOCKS,
    int SIMDS,
    int SLICES,
    int TILE,
    bool ALTERNATE,
    bool AHEAD,
    int RESIDENT>
[[kernel]] void attention_backward_queries(
    const device T* q,
    const constant int64_t* q_strides,
    const device T* k,
    const constant int64_t* k_strides,
    const device T* v,
    const constant int64_t* v_strides,
    const device M* mask,
    const constant int64_t* mask_strides,
    const device T* out,
    const constant int64_t* out_strides,
    const device T* d_out,
    const constant int64_t* d_out_strides,
    const device float* norms,
    constant int* sizes,
    constant float* factors,
    device T* d_q,
    device float* delta,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int ROWS = 16 * BLOCKS * SIMDS / SLICES;
  constexpr bool WARPGROUP = uses_warpgroup<T>(SIMDS / SLICES, SLICES, D, DV);
  constexpr int SIZE = tile_elements<T, WARPGROUP>(TILE, rounded_up(D, 16 * SLICES));
  constexpr int SIZE_V = tile_elements<T, WARPGROUP>(TILE, rounded_up(DV, 16 * SLICES));
  constexpr int ELEMENTS =
      ALTERNATE ? larger(SIZE, SIZE_V) : (WARPGROUP && AHEAD ? 2 : 1) * (SIZE + SIZE_V);
  constexpr int PARTS = SLICES == 1 ? 1 : SIMDS * BLOCKS * TILE * 16;
  threadgroup tile_packs<ELEMENTS * sizeof(T) / 16> tiles;
  threadgroup float2 exchange[PARTS];
  uint head = group.y, batch = group.z;
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  ulong place = (ulong(batch) * sizes[HEADS] + head) * rule.queries;
  query_gradients<
      T, M, D, DV, MASK, SOFTCAP, false, BLOCKS, SIMDS, SLICES, TILE, ALTERNATE, AHEAD>(
      rows_of(q, q_strides, batch, head, rule.queries),
      rows_of(k, k_strides, batch, head / sizes[GQA_FACTOR], rule.keys),
      rows_of(v, v_strides, batch, head / sizes[GQA_FACTOR], rule.keys),
      rows_of(out, out_strides, batch, head, rule.queries),
      rows_of(d_out, d_out_strides, batch, head, rule.queries),
      rule,
      norms + 2 * place,
      delta + place,
      d_q + (ulong(batch) * rule.queries * sizes[HEADS] + head) * D,
      delta,
      ulong(sizes[HEADS]) * D,
      factors[SLOPE],
      reinterpret_cast<threadgroup T*>(tiles.pack),
      exchange,
      int(groups.x - 1 - group.x) * ROWS,
      thread_index,
      simd_group,
      lane);
}

template <
    typename T,
    typename M,
    int D,
    int DV,
    int MASK,
    bool SOFTCAP,
    int BLOCKS,
    int SIMDS,
    int SLICES,
    int TILE,
    bool ALTERNATE,
    bool AHEAD,
    int RESIDENT>
[[kernel]] void attention_backward_mask(
    const device T* q,
    const constant int64_t* q_strides,
    const device T* k,
    const constant int64_t* k_strides,
    const device T* v,
    const constant int64_t* v_strides,
    const device M* mask,
    const constant int64_t* mask_strides,
    const device T* out,
    const constant int64_t* out_strides,
    const device T* d_out,
    const constant int64_t* d_out_strides,
    const device float* norms,
    constant int* sizes,
    constant float* factors,
    device float* d_scores,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int ROWS = 16 * BLOCKS * SIMDS / SLICES;
  constexpr bool WARPGROUP = uses_warpgroup<T>(SIMDS / SLICES, SLICES, D, DV);
  constexpr int SIZE = tile_elements<T, WARPGROUP>(TILE, rounded_up(D, 16 * SLICES));
  constexpr int SIZE_V = tile_elements<T, WARPGROUP>(TILE, rounded_up(DV, 16 * SLICES));
  constexpr int ELEMENTS =
      ALTERNATE ? larger(SIZE, SIZE_V) : (WARPGROUP && AHEAD ? 2 : 1) * (SIZE + SIZE_V);
  constexpr int PARTS = SLICES == 1 ? 1 : SIMDS * BLOCKS * TILE * 16;
  threadgroup tile_packs<ELEMENTS * sizeof(T) / 16> tiles;
  threadgroup float2 exchange[PARTS];
  uint head = group.y, batch = group.z;
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  ulong place = (ulong(batch) * sizes[HEADS] + head) * rule.queries;
  query_gradients<
      T, M, D, DV, MASK, SOFTCAP, true, BLOCKS, SIMDS, SLICES, TILE, ALTERNATE, AHEAD>(
      rows_of(q, q_strides, batch, head, rule.queries),
      rows_of(k, k_strides, batch, head / sizes[GQA_FACTOR], rule.keys),
      rows_of(v, v_strides, batch, head / sizes[GQA_FACTOR], rule.keys),
      rows_of(out, out_strides, batch, head, rule.queries),
      rows_of(d_out, d_out_strides, batch, head, rule.queries),
      rule,
      norms + 2 * place,
      d_scores,
      nullptr,
      d_scores + place * rule.keys,
      ulong(sizes[HEADS]) * D,
      factors[SLOPE],
      reinterpret_cast<threadgroup T*>(tiles.pack),
      exchange,
      int(groups.x - 1 - group.x) * ROWS,
      thread_index,
      simd_group,
      lane);
}
