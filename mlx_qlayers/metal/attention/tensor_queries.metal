// The gradients of queries by Metal 4's tensor operations, from the norms of the forward pass, as in
// backward.metal. A SIMD group owns 16 rows and one of SPLIT parts of the columns of its result;
// threadgroup memory as in tensor_forward.metal. The last iteration takes the last TILE keys, and hides
// those that the one before took.
//
// attention_tensor_queries  d_q and delta: grid (32 * SIMDS * ceil(L / (16 * SIMDS)), H * SPLIT, B)
//
//   weights = exp2(q * keys^T - top) / total, d_weights = d_out * values^T
//   delta += reduce_rows(weights * d_weights)
//   d_q += (weights * (d_weights - dot) * slope) * keys,   dot = sum of d_out * out
//
//   or, for the gradient of an additive mask, d_scores = weights * (d_weights - dot) alone,
//   (B, H, L, S), without `slope`
//
// Needs TILE keys; never run on an M5.

#include "tensor_score.metal"

// The other inputs of a head's queries, and the outputs: d_scores, or d_q and delta.
template <typename T>
struct query_arrays {
  head_rows<T> out, d_out;
  const device float* norms;
  device float* d_scores;
  device T* d_q;
  device float* delta;
  float slope;
};

// The weight of a query and a key, and the slope of the softcap.
template <typename T, int MASK, bool SOFTCAP, typename M>
METAL_FUNC float2 weight_and_slope(
    float product, float2 norm, int query, int other, int key, thread const score_rule<M>& rule) {
  float2 score = score_and_slope<MASK, SOFTCAP>(product, query, other, rule);
  float unit = is_raw(MASK, SOFTCAP) ? rule.scale : 1.0f;
  float weight = power_of_2<T>(fma(score.x, unit, -norm.x)) * norm.y;
  bool hidden = !is_seen(rule, query, other, key) || (MASK != NO_MASK && score.x == LOWEST);
  return float2(hidden ? 0.0f : weight, score.y);
}

template <typename T, typename M>
METAL_FUNC void write_score(
    float d_score,
    thread const query_arrays<T>& arrays,
    thread const score_rule<M>& rule,
    int query,
    int other,
    int key) {
  if (arrays.d_scores && other >= key && query < rule.queries) {
    arrays.d_scores[ulong(query) * rule.keys + other] = d_score;
  }
}

template <int D, typename T, typename M>
METAL_FUNC void write_query(
    float sum,
    float delta,
    thread const query_arrays<T>& arrays,
    thread const score_rule<M>& rule,
    thread const own_range& of,
    int query,
    int c) {
  if (query < rule.queries && c < D) {
    arrays.d_q[long(query) * of.row + c] = T(sum * arrays.slope);
    if (c == 0) {
      arrays.delta[query] = delta;
    }
  }
}

// The loop of a SIMD group whose scores go through threadgroup memory, and its stores.
template <
    int D, int DV, int MASK, bool SOFTCAP, int SPLIT, int TILE, bool LOCKSTEP, typename T, typename M,
    typename P, typename Q>
METAL_FUNC void add_queries_in_memory(
    thread P& by_keys,
    thread Q& add,
    threadgroup float* memory,
    thread tensor_of<T>& rows,
    thread tensor_of<T>& d_tensor,
    thread tensor_of<T>& keys,
    thread tensor_of<T>& values,
    thread const query_arrays<T>& arrays,
    thread const score_rule<M>& rule,
    thread const own_range& of,
    uint lane) {
  if constexpr (!LOCKSTEP) {
    auto scores = SCORES(by_keys);
    auto d_weights = SCORES(by_keys);
    auto sums = SUMS(add, false);
    clear_tensor(sums);
    threadgroup float* of_rows = memory + TENSOR_ROWS * TILE;
    threadgroup float* half_scores = half_row<TILE>(memory, lane);
    int row = of.own + lane / 2;
    float dot = 0.0f, exact = 0.0f;
    for (int c = lane % 2; c < DV && row < rule.queries; c += 2) {
      dot += float(arrays.out.at[row * arrays.out.row + c * arrays.out.column]) *
          float(arrays.d_out.at[row * arrays.d_out.row + c * arrays.d_out.column]);
    }
    dot = sum_of_both(dot);
    for (int key = of.first; key < of.last; key += TILE) {
      int at = min(key, rule.keys - TILE);
      auto some_keys = keys.slice(0, at);
      auto some_values = values.slice(0, at);
      by_keys.run(rows, some_keys, scores);
      by_keys.run(d_tensor, some_values, d_weights);
#pragma unroll
      for (ushort i = 0; i < scores.get_capacity(); i++) {
        if (scores.is_valid_element(i)) {
          auto index = scores.get_multidimensional_index(i);
          int query = of.own + index[1];
          float2 norm = norm_of<T>(arrays.norms, query, rule.queries);
          float2 weight = weight_and_slope<T, MASK, SOFTCAP>(
              scores[i], norm, query, at + index[0], key, rule);
          memory[index[1] * TILE + index[0]] = weight.x * d_weights[i];
          scores[i] = arrays.d_scores ? weight.x : weight.x * weight.y;
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      float sum = 0.0f;
      for (int i = 0; i < TILE / 2; i++) {
        sum += half_scores[i];
      }
      exact += sum_of_both(sum);
      dot = of.first + TILE >= of.last ? exact : dot;
      if (lane % 2 == 0) {
        of_rows[lane / 2] = dot;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (ushort i = 0; i < scores.get_capacity(); i++) {
        if (scores.is_valid_element(i)) {
          auto index = scores.get_multidimensional_index(i);
          scores[i] *= d_weights[i] - of_rows[index[1]];
          write_score(scores[i], arrays, rule, of.own + index[1], at + index[0], key);
        }
      }
      if (!arrays.d_scores) {
        auto right = keys.slice(of.column, at);
        put_scores<TILE>(memory, scores);
        add_from_memory<TILE>(add, memory, right, sums);
      }
    }
    if (arrays.d_scores) {
      return;
    }
    if (lane % 2 == 0) {
      of_rows[lane / 2] = exact;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); i++) {
      if (sums.is_valid_element(i)) {
        auto index = sums.get_multidimensional_index(i);
        write_query<D>(
            sums[i], of_rows[index[1]], arrays, rule, of, of.own + index[1], of.column + index[0]);
      }
    }
  }
}

// The same with compatible cooperative tensors; returns false, with nothing done, if they are not.
template <
    int D, int DV, int MASK, bool SOFTCAP, int SPLIT, int TILE, bool LOCKSTEP, typename T, typename M,
    typename P, typename O, typename Q>
METAL_FUNC bool add_queries_in_registers(
    thread P& by_keys,
    thread O& by_values,
    thread Q& add,
    thread tensor_of<T>& rows,
    thread tensor_of<T>& d_tensor,
    thread tensor_of<T>& keys,
    thread tensor_of<T>& values,
    thread const query_arrays<T>& arrays,
    thread const score_rule<M>& rule,
    thread const own_range& of) {
  auto scores = SCORES(by_keys);
  auto d_weights = SCORES(by_values);
  auto products = SCORES(by_keys);
  auto top = STATISTIC(by_keys);
  auto factor = STATISTIC(by_keys);
  auto dot = STATISTIC(by_keys);
  auto exact = STATISTIC(by_keys);
  auto part = STATISTIC(by_keys);
  auto sums = SUMS(add, true);
  if (!add.template is_compatible_as_left_input<float, T, float>(scores) ||
      !mpp::tensor_ops::is_iterator_compatible(scores, top) ||
      !mpp::tensor_ops::is_iterator_compatible(sums, top)) {
    return false;
  }
  clear_tensor(sums);
#pragma unroll
  for (ushort i = 0; i < top.get_capacity(); i++) {
    if (top.is_valid_element(i)) {
      dot[i] = exact[i] = 0.0f;
      auto index = top.get_multidimensional_index(i);
      int query = of.own + index[0];
      float2 norm = norm_of<T>(arrays.norms, query, rule.queries);
      top[i] = norm.x;
      factor[i] = norm.y;
    }
  }
  for (int c = 0; c < DV; c += TILE) {
#pragma unroll
    for (ushort i = 0; i < products.get_capacity(); i++) {
      if (products.is_valid_element(i)) {
        auto index = products.get_multidimensional_index(i);
        int query = of.own + index[1], column = c + index[0];
        products[i] = 0.0f;
        if (query < rule.queries && column < DV) {
          products[i] =
              float(arrays.out.at[query * arrays.out.row + column * arrays.out.column]) *
              float(arrays.d_out.at[query * arrays.d_out.row + column * arrays.d_out.column]);
        }
      }
    }
    mpp::tensor_ops::reduce_rows(
        products, part, mpp::tensor_ops::reduction_operation::sum, 0.0f);
#pragma unroll
    for (ushort i = 0; i < dot.get_capacity(); i++) {
      if (dot.is_valid_element(i)) {
        dot[i] += part[i];
      }
    }
  }

  for (int key = of.first; key < of.last; key += TILE) {
    int at = min(key, rule.keys - TILE);
    auto some_keys = keys.slice(0, at);
    auto some_values = values.slice(0, at);
    by_keys.run(rows, some_keys, scores);
    by_values.run(d_tensor, some_values, d_weights);
#pragma unroll
    for (auto each = scores.begin(); each != scores.end(); each++) {
      if (each.is_valid_element()) {
        auto index = each.get_multidimensional_index();
        float2 norm = float2(*top.map_iterator(each), *factor.map_iterator(each));
        float2 weight = weight_and_slope<T, MASK, SOFTCAP>(
            *each, norm, of.own + index[1], at + index[0], key, rule);
        int i = each - scores.begin();
        products[i] = weight.x * d_weights[i];
        *each = arrays.d_scores ? weight.x : weight.x * weight.y;
      }
    }
    mpp::tensor_ops::reduce_rows(
        products, part, mpp::tensor_ops::reduction_operation::sum, 0.0f);
    bool single = of.first + TILE >= of.last;
#pragma unroll
    for (ushort i = 0; i < exact.get_capacity(); i++) {
      if (exact.is_valid_element(i)) {
        exact[i] += part[i];
        dot[i] = single ? exact[i] : dot[i];
      }
    }
#pragma unroll
    for (auto each = scores.begin(); each != scores.end(); each++) {
      if (each.is_valid_element()) {
        *each *= d_weights[each - scores.begin()] - *dot.map_iterator(each);
        auto index = each.get_multidimensional_index();
        write_score(*each, arrays, rule, of.own + index[1], at + index[0], key);
      }
    }
    auto left = add.template get_left_input_cooperative_tensor<float, T, float>(scores);
    if (arrays.d_scores) {
      // The mask's gradient has no sums.
    } else if (SPLIT == 1) {
      add.run(left, some_keys, sums);
    } else {
      auto right = keys.slice(of.column, at);
      add.run(left, right, sums);
    }
    if (LOCKSTEP) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
#pragma unroll
  for (auto each = sums.begin(); !arrays.d_scores && each != sums.end(); each++) {
    if (each.is_valid_element()) {
      auto index = each.get_multidimensional_index();
      write_query<D>(
          *each, *exact.map_iterator(each), arrays, rule, of, of.own + index[1],
          of.column + index[0]);
    }
  }
  return true;
}

template <
    typename T, typename M, int D, int DV, int MASK, bool SOFTCAP, int SIMDS, int SPLIT, int TILE, bool LOCKSTEP,
    int SHARED, bool HANDED>
[[kernel]] void attention_tensor_queries(
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
    device float* d_scores,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simd_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float memory[ALL_STEP_FLOATS];
  constexpr int COLUMNS = rounded_up((D + SPLIT - 1) / SPLIT, 8);
  constexpr auto of_keys = SCORED_TILE;
  constexpr auto of_sums = ADDED_TILE;
  mpp::tensor_ops::matmul2d<of_keys, metal::execution_simdgroup> by_values;
  mpp::tensor_ops::matmul2d<of_keys, metal::execution_simdgroup> by_keys;
  mpp::tensor_ops::matmul2d<of_sums, metal::execution_simdgroup> add;

  uint head = group.y / SPLIT, batch = group.z, kv_head = head / sizes[GQA_FACTOR];
  int own = (int(groups.x - 1 - group.x) * SIMDS + int(simd_group)) * TENSOR_ROWS;
  int column = int(group.y) % SPLIT * COLUMNS, heads = sizes[HEADS];
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  int begin = own / STEP_ROWS * STEP_ROWS;
  if (begin >= rule.queries) {
    return;
  }
  head_rows<T> d_rows = rows_of(d_out, d_out_strides, batch, head, rule.queries);
  tensor_of<T> rows = rows_as_tensor(rows_of(q, q_strides, batch, head, rule.queries), D, own);
  tensor_of<T> d_tensor = rows_as_tensor(d_rows, DV, own);
  tensor_of<T> keys = rows_as_tensor(rows_of(k, k_strides, batch, kv_head, rule.keys), D, 0);
  tensor_of<T> values = rows_as_tensor(rows_of(v, v_strides, batch, kv_head, rule.keys), DV, 0);
  ulong place = (ulong(batch) * heads + head) * rule.queries;
  query_arrays<T> arrays = {
      rows_of(out, out_strides, batch, head, rule.queries), d_rows, norms + 2 * place,
      d_scores ? d_scores + place * rule.keys : nullptr,
      d_q + (ulong(batch) * rule.queries * heads + head) * D, delta + place, factors[SLOPE]};
  own_range of = {
      own, column, heads * D, max(0, begin + rule.reach - rule.window + 1) / TILE * TILE,
      min(rule.keys, min(begin + STEP_ROWS, rule.queries) + rule.reach)};
  bool done = false;
  if constexpr (HANDED) {
    done = add_queries_in_registers<D, DV, MASK, SOFTCAP, SPLIT, TILE, LOCKSTEP>(
        by_keys, by_values, add, rows, d_tensor, keys, values, arrays, rule, of);
  }
  if (!LOCKSTEP && !done) {
    add_queries_in_memory<D, DV, MASK, SOFTCAP, SPLIT, TILE, LOCKSTEP>(
        by_keys, add, memory + simd_group * STEP_FLOATS, rows, d_tensor, keys, values, arrays, rule, of,
        lane);
  }
}
