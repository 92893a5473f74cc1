// The gradients of keys and values by Metal 4's tensor operations, as in backward_keys.metal. A SIMD group
// owns 16 rows and one of SPLIT parts of the columns of its result; threadgroup memory as in
// tensor_forward.metal.
//
// attention_tensor_keys     d_v (VALUES) or d_k: grid (32 * SIMDS * ceil(S / (16 * SIMDS)),
//                           Hkv * SPLIT, B); a loop over the query heads of a key head, and queries
//
//   weights^T = exp2(keys * q^T - top) / total, d_weights^T = values * d_out^T
//   d_v += weights^T * d_out, or d_k += (weights * (d_weights - delta) * slope)^T * q
//
// The last iteration takes the last TILE queries, and hides those that the one before took. Needs TILE
// queries; never run on an M5.

#include "tensor_score.metal"

// Returns false, with nothing done, if HANDED and the cooperative tensors are not compatible.
template <
    typename T, typename M, int D, int DV, int MASK, bool SOFTCAP, bool AVERAGE, bool VALUES,
    int SIMDS, int SPLIT, int TILE, bool LOCKSTEP, bool HANDED>
METAL_FUNC bool add_keys(
    threadgroup float* memory,
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
    device T* gradient,
    uint3 group,
    uint simd_group) {
  constexpr int WIDTH = VALUES ? DV : D;
  constexpr int COLUMNS = rounded_up((WIDTH + SPLIT - 1) / SPLIT, 8);
  constexpr auto of_queries = SCORED_TILE;
  constexpr auto of_sums = ADDED_TILE;
  mpp::tensor_ops::matmul2d<of_queries, metal::execution_simdgroup> by_d_out;
  mpp::tensor_ops::matmul2d<of_queries, metal::execution_simdgroup> by_queries;
  mpp::tensor_ops::matmul2d<of_sums, metal::execution_simdgroup> add;

  int gqa_factor = sizes[GQA_FACTOR], kv_heads = sizes[HEADS] / gqa_factor;
  int own = (int(group.x) * SIMDS + int(simd_group)) * TENSOR_ROWS;
  int column = int(group.y) % SPLIT * COLUMNS;
  uint kv_head = group.y / SPLIT, batch = group.z;
  int begin = own / STEP_ROWS * STEP_ROWS;
  if (begin >= sizes[KEYS]) {
    return true;
  }
  tensor_of<T> rows = rows_as_tensor(rows_of(k, k_strides, batch, kv_head, sizes[KEYS]), D, own);
  tensor_of<T> v_rows =
      rows_as_tensor(rows_of(v, v_strides, batch, kv_head, sizes[KEYS]), DV, own);
  auto scores = SCORES(by_queries);
  auto d_weights = SCORES(by_d_out);
  auto sums = SUMS(add, HANDED);
  if constexpr (HANDED) {
    if (!add.template is_compatible_as_left_input<float, T, float>(scores)) {
      return false;
    }
  }
  clear_tensor(sums);

  for (uint head = kv_head * gqa_factor; head < (kv_head + 1) * gqa_factor; head++) {
    score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
    float unit = is_raw(MASK, SOFTCAP) ? rule.scale : 1.0f;
    ulong place = (ulong(batch) * sizes[HEADS] + head) * rule.queries;
    tensor_of<T> queries =
        rows_as_tensor(rows_of(q, q_strides, batch, head, rule.queries), D, 0);
    tensor_of<T> d_rows =
        rows_as_tensor(rows_of(d_out, d_out_strides, batch, head, rule.queries), DV, 0);
    int last = min(rule.queries, begin + STEP_ROWS - 1 + rule.window - rule.reach);
    int first = max(0, begin - rule.reach) / TILE * TILE;
    for (int query = first; query < last; query += TILE) {
      int at = min(query, rule.queries - TILE);
      auto some_queries = queries.slice(0, at);
      by_queries.run(rows, some_queries, scores);
      if (!VALUES) {
        auto some = d_rows.slice(0, at);
        by_d_out.run(v_rows, some, d_weights);
      }
#pragma unroll
      for (ushort i = 0; i < scores.get_capacity(); i++) {
        if (scores.is_valid_element(i)) {
          auto index = scores.get_multidimensional_index(i);
          int other = at + index[0], key = own + index[1];
          float2 score = score_and_slope<MASK, SOFTCAP>(scores[i], other, key, rule);
          float2 norm = norm_of<T>(norms + 2 * place, other, other + 1);
          float weight = power_of_2<T>(fma(score.x, unit, -norm.x)) * norm.y;
          weight = !sees(rule, other, key, query) || (MASK != NO_MASK && score.x == LOWEST) ? 0.0f : weight;
          scores[i] = VALUES ? weight : weight * (d_weights[i] - delta[place + other]) * score.y;
        }
      }
      if (LOCKSTEP && VALUES) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (!VALUES && SPLIT == 1) {
        add_scores<T, TILE, HANDED>(add, memory, scores, some_queries, sums);
      } else {
        auto right = VALUES ? d_rows.slice(column, at) : queries.slice(column, at);
        add_scores<T, TILE, HANDED>(add, memory, scores, right, sums);
      }
      if (LOCKSTEP && !VALUES) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
  }

  int keys = sizes[KEYS];
  float slope = VALUES ? 1.0f : factors[SLOPE];
  device T* to = gradient + (ulong(batch) * keys * kv_heads + kv_head) * WIDTH;
#pragma unroll
  for (auto each = sums.begin(); each != sums.end(); each++) {
    if (each.is_valid_element()) {
      auto index = each.get_multidimensional_index();
      int key = own + index[1], c = column + index[0];
      if (key < keys && c < WIDTH) {
        float sum = *each * slope;
        if (AVERAGE && VALUES) {
          sum += average[(ulong(batch) * kv_heads + kv_head) * DV + c];
        }
        to[long(key) * (kv_heads * WIDTH) + c] = T(sum);
      }
    }
  }
  return true;
}

template <
    typename T, typename M, int D, int DV, int MASK, bool SOFTCAP, bool AVERAGE, bool VALUES,
    int SIMDS, int SPLIT, int TILE, bool LOCKSTEP, int SHARED, bool HANDED>
[[kernel]] void attention_tensor_keys(
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
    device T* gradient,
    uint3 group [[threadgroup_position_in_grid]],
    uint simd_group [[simdgroup_index_in_threadgroup]]) {
  threadgroup float memory[ALL_STEP_FLOATS];
  bool done = false;
  if constexpr (HANDED) {
    done = add_keys<
        T, M, D, DV, MASK, SOFTCAP, AVERAGE, VALUES, SIMDS, SPLIT, TILE, LOCKSTEP, true>(
        memory, q, q_strides, k, k_strides, v, v_strides, mask, mask_strides, d_out, d_out_strides, norms,
        delta, average, sizes, factors, gradient, group, simd_group);
  }
  if (!LOCKSTEP && !done) {
    add_keys<
        T, M, D, DV, MASK, SOFTCAP, AVERAGE, VALUES, SIMDS, SPLIT, TILE, LOCKSTEP, LOCKSTEP>(
        memory + (LOCKSTEP ? 0 : simd_group * STEP_FLOATS),
        q, q_strides, k, k_strides, v, v_strides, mask, mask_strides, d_out, d_out_strides, norms,
        delta, average, sizes, factors, gradient, group, simd_group);
  }
}
