// The gradients of attention for its keys and values, from the norms that forward.metal and
// the delta that backward.metal left:
//
//   d_v = weights^T d_out,   d_k = scale d_scores^T q   with the names of backward.metal
//
// A threadgroup owns ROWS = 16 * BLOCKS * SIMDS / (SLICES * ROLES) keys: grid (32 * SIMDS *
// ceil(S / ROWS), Hkv, B), threadgroup (32 * SIMDS, 1, 1). Products are transposed: rows are keys.
//
//   registers     left         left operands of BLOCKS x 16 rows, a slice of columns: of k for product 0,
//                              of v for product 1. With two ROLES a SIMD group computes one product
//                 sums         d_v of product 0, d_k of product 1, float, of the same shape
//                 scores       scores of product 0, d_weights of product 1, BLOCKS x 16 x TILE, float
//   threadgroup   tile         queries, then d_out, TILE rows each, T; one buffer for both if ALTERNATE
//                 statistics   norms and delta of each of these queries
//                 exchange     partial scores, float, if SLICES > 1
//                 shared       weights * slope, float, if ROLES is 2
//   device        k and v are read once, q, d_out, norms and delta once by each threadgroup
//
//   for each query head of the group, for each tile of queries that attends to a key:
//     store queries and d_out to threadgroup memory | barrier
//     product 0: scores = k * queries^T          product 1: d_weights = v * d_out^T
//             weights = exp2(scores - top) / total
//             write weights * slope to `shared` | barrier
//                                                d_scores = weights * slope * (d_weights - delta)
//     start loading the next tiles
//             d_v += weights * d_out                     d_k += d_scores * queries
//     barrier
//
// There are no atomics, so that results are deterministic. With ALTERNATE queries are stored a second time
// for the last product. With AVERAGE, `average` is added to each row of d_v: the gradient through queries
// that attend to no key, whose output is the mean of the values.

#include "key_scores.metal"
#include "score_output.metal"

template <
    typename T,
    typename M,
    int D,
    int DV,
    int MASK,
    bool SOFTCAP,
    bool AVERAGE,
    int ROLES,
    int BLOCKS,
    int SIMDS,
    int SLICES,
    int TILE,
    bool ALTERNATE,
    bool AHEAD,
    int RESIDENT>
[[kernel]] void attention_backward_keys(
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
    const device float* norms,
    const device float* delta,
    const device float* average,
    constant int* sizes,
    constant float* factors,
    device T* d_k,
    device T* d_v,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int THREADS = 32 * SIMDS, PRODUCTS = 2 / ROLES, COUNT = TILE / 8;
  constexpr int OWNERS = SIMDS / (SLICES * ROLES), ROWS = 16 * BLOCKS * OWNERS;
  constexpr int WIDTH = rounded_up(larger(D, DV), 16 * SLICES);
  constexpr int STEPS = WIDTH / SLICES / 16, COLUMNS = 2 * STEPS;
  constexpr bool WARPGROUP = uses_warpgroup<T>(OWNERS, SLICES, D, DV);
  constexpr bool DIRECT = WARPGROUP && !ALTERNATE;
  constexpr int STATISTICS = (sizeof(T) == 4 ? 3 : 2) * TILE / 2;
  constexpr bool TWICE = DIRECT && AHEAD, EARLY = AHEAD && !DIRECT;
  constexpr int PLACES = TWICE ? 4 : 2;
  constexpr int ELEMENTS = tile_elements<T, WARPGROUP>(TILE, WIDTH);
  constexpr int PARTS = SLICES == 1 ? 1 : SIMDS * PRODUCTS * BLOCKS * TILE * 8;
  constexpr int SHARED = ROLES == 1 ? 1 : ROWS * TILE / 2;
  threadgroup tile_packs<(ALTERNATE ? 1 : PLACES) * ELEMENTS * sizeof(T) / 16> tiles;
  threadgroup float2 exchange[PARTS];
  threadgroup float2 shared[SHARED];
  threadgroup float2 all_statistics[PLACES / 2 * STATISTICS];
  // The queries; d_out follows OTHER elements behind.
  threadgroup T* tile = reinterpret_cast<threadgroup T*>(tiles.pack);
  threadgroup float2* statistics = all_statistics;
  constexpr int OTHER = ALTERNATE ? 0 : ELEMENTS;

  uint kv_head = group.y, batch = group.z;
  int block = int(simd_group) % OWNERS, slice = int(simd_group) / OWNERS % SLICES;
  int role = ROLES == 1 ? 0 : int(simd_group) / (OWNERS * SLICES), row = int(group.x) * ROWS;
  int own = row + block * 16 * BLOCKS, column = slice * STEPS * 16;
  int gqa_factor = sizes[GQA_FACTOR], heads = sizes[HEADS];
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, kv_head * gqa_factor);

  left_fragment<T> left[PRODUCTS][BLOCKS][STEPS];
  sum_fragment sums[PRODUCTS][BLOCKS][COLUMNS];
#pragma unroll
  for (int s = 0; s < PRODUCTS; s++) {
    head_rows<T> k_rows = rows_of(k, k_strides, batch, kv_head, rule.keys);
    head_rows<T> v_rows = rows_of(v, v_strides, batch, kv_head, rule.keys);
    bool values = ROLES == 2 ? role == 1 : s == 1;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      load_left_rows<T, STEPS>(
          left[s][b], values ? v_rows : k_rows, values ? DV : D, own + 16 * b, column, lane);
      clear<COLUMNS>(sums[s][b]);
    }
  }

  int stage = 0, first = max(0, row - rule.reach) / TILE * TILE;
  int last = min(rule.queries, row + ROWS - 1 - rule.reach + rule.window);
  tile_reader<T, TILE, D, WIDTH, THREADS, WARPGROUP, DIRECT> reader;
  tile_reader<T, TILE, DV, WIDTH, THREADS, WARPGROUP, DIRECT> d_reader;
  for (int h = 0; h < gqa_factor; h++) {
    uint head = kv_head * gqa_factor + h;
    rule.mask = mask + (batch * long(mask_strides[1]) + head * long(mask_strides[2]));
    reader.rows = rows_of(q, q_strides, batch, head, last);
    d_reader.rows = rows_of(d_out, d_out_strides, batch, head, last);
    ulong place = (ulong(batch) * heads + head) * rule.queries;
    reader.skip(first);
    d_reader.skip(first);
    if (AHEAD) {
      if (TWICE) {
        // Copies beyond the last tile of the previous head must be complete before new ones begin.
        wait_for_copies<0>();
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      reader.fetch(tile, thread_index);
      d_reader.fetch(tile + OTHER, thread_index);
    }
    const device M* mask_now = mask_from<true>(rule, first);
    for (int query = first; query < last; query += TILE) {
      // Behind this barrier no SIMD group reads the previous tiles.
      if (!TWICE) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (!AHEAD) {
        reader.fetch(tile, thread_index);
        d_reader.fetch(tile + OTHER, thread_index);
      }
      reader.put(tile, thread_index);
      if (!ALTERNATE) {
        d_reader.put(tile + OTHER, thread_index);
      }
      if (thread_index < TILE) {
        int i = query + int(thread_index);
        float2 norm = norm_of<T>(norms + 2 * place, i, last);
        threadgroup float* statistic = reinterpret_cast<threadgroup float*>(statistics);
        statistic[thread_index] = norm.x;
        statistic[TILE + thread_index] = i < last ? delta[place + i] : 0.0f;
        if (sizeof(T) == 4) {
          statistic[2 * TILE + thread_index] = norm.y;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const threadgroup T* now = tile;
      const threadgroup float2* statistics_now = statistics;
      if (TWICE) {
        stage = 1 - stage;
        tile = reinterpret_cast<threadgroup T*>(tiles.pack) + stage * 2 * ELEMENTS;
        statistics = all_statistics + stage * STATISTICS;
        reader.skip(TILE);
        d_reader.skip(TILE);
        reader.fetch(tile, thread_index);
        d_reader.fetch(tile + OTHER, thread_index);
      }

      sum_fragment scores[PRODUCTS][BLOCKS][COUNT];
#pragma unroll
      for (int s = 0; s < PRODUCTS; s++) {
        if (ALTERNATE && s == 1) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          d_reader.put(tile, thread_index);
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        int product = ROLES == 2 ? role : s;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
          multiply_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(
              scores[s][b], left[s][b], now + product * OTHER, column, lane);
        }
      }
      if (SLICES > 1) {
        add_slices<PRODUCTS * BLOCKS * COUNT, SLICES, OWNERS>(scores[0][0], exchange, simd_group, lane);
      }
      sum_fragment slopes[BLOCKS][COUNT];
      if (ROLES == 1 || role == 0) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
          make_weights_of_keys<T, MASK, SOFTCAP, COUNT, TILE>(
              scores[0][b], slopes[b], statistics_now, own + 16 * b, query, mask_now, rule, lane);
        }
      }
      mask_now += mask_step<true>(rule, TILE);
      if (ROLES == 2) {
        threadgroup float2* place = shared + (block * 2 * BLOCKS * COUNT * 32 + lane);
        // All slices hold the same values; one of them writes.
        if (role == 0 && slice == 0) {
#pragma unroll
          for (int i = 0; i < 2 * BLOCKS * COUNT; i++) {
            place[32 * i] = slopes[0][i / 2].part[i % 2];
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (role == 1) {
#pragma unroll
          for (int i = 0; i < 2 * BLOCKS * COUNT; i++) {
            slopes[0][i / 2].part[i % 2] = place[32 * i];
          }
        }
      }
      if (ROLES == 1 || role == 1) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
          make_d_scores<COUNT, TILE>(scores[PRODUCTS - 1][b], slopes[b], statistics_now, lane);
        }
      }
      if (EARLY) {
        reader.skip(TILE);
        d_reader.skip(TILE);
        reader.fetch(tile, thread_index);
        d_reader.fetch(tile + OTHER, thread_index);
      }
#pragma unroll
      for (int s = 0; s < PRODUCTS; s++) {
        if (ALTERNATE && s == 1) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          reader.put(tile, thread_index);
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        int product = ROLES == 2 ? role : s;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
          add_weighted_rows<T, TILE, COLUMNS, WIDTH, WARPGROUP>(
              sums[s][b], scores[s][b], now + (1 - product) * OTHER, column, lane);
        }
      }
      if (!AHEAD) {
        reader.skip(TILE);
        d_reader.skip(TILE);
      }
    }
  }

#pragma unroll
  for (int s = 0; s < PRODUCTS; s++) {
    bool of_keys = ROLES == 2 ? role == 1 : s == 1;
    int width = of_keys ? D : DV, kv_heads = heads / gqa_factor;
    ulong place = (ulong(batch) * rule.keys * kv_heads + kv_head) * width;
    device T* out = (of_keys ? d_k : d_v) + place;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      if (AVERAGE && !of_keys) {
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; i++) {
          int c = column + i / 2 * 8 + fragment_col(lane);
          if (c < DV) {
            const device float* more = average + (ulong(batch) * kv_heads + kv_head) * DV + c;
            sums[s][b][i / 2].part[i % 2] += float2(more[0], more[1]);
          }
        }
      }
      store_rows<T, COLUMNS>(
          sums[s][b],
          out,
          ulong(kv_heads) * width,
          own + 16 * b,
          rule.keys,
          column,
          width,
          of_keys ? factors[SLOPE] : 1.0f,
          lane);
    }
  }
}
