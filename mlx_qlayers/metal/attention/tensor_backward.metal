// The gradients of attention by Metal 4's tensor operations, from the norms of the forward pass, as in
// backward.metal and backward_keys.metal. A SIMD group owns 16 rows, and of the columns of its result
// one of SPLIT parts; there is no threadgroup memory, and no barrier but where SIMD groups read
// TOGETHER, as in tensor_forward.metal. The last turn of each loop takes the last TILE rows of the other
// side, and hides those that were there before.
//
// attention_tensor_queries  d_q and delta: grid (32 * SIMDS * ceil(L / (16 * SIMDS)), H * SPLIT, B)
//
//   weights = exp2(q * keys^T - top) / total, d_weights = d_out * values^T
//   delta += reduce_rows(weights * d_weights)
//   d_q += (weights * (d_weights - dot) * bend) * keys,   dot = sum of d_out * out
//
//   or, where the gradient of an additive mask is asked for, d_scores = weights * (d_weights - dot)
//   alone, (B, H, L, S), without `bend`
//
// attention_tensor_keys     d_v (VALUES) or d_k: grid (32 * SIMDS * ceil(S / (16 * SIMDS)),
//                           Hkv * SPLIT, B); a loop over the heads that share the keys, and queries
//
//   weights^T = exp2(keys * q^T - top) / total, d_weights^T = values * d_out^T
//   d_v += weights^T * d_out, or d_k += (weights * (d_weights - delta) * bend)^T * q
//
// Needs TILE keys and queries; never run on an M5.

#include "tensor_score.metal"

template <
    typename T, typename M, int D, int DV, int MASK, bool SOFTCAP, int SIMDS, int SPLIT, int TILE, bool TOGETHER, int SHARED>
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
    uint simd_group [[simdgroup_index_in_threadgroup]]) {
  constexpr int COLUMNS = rounded_up((D + SPLIT - 1) / SPLIT, 8);
  constexpr auto of_keys = mpp::tensor_ops::matmul2d_descriptor(
      TENSOR_ROWS, TILE, int(metal::dynamic_extent), false, true, sizeof(T) == 2);
  constexpr auto of_sums = mpp::tensor_ops::matmul2d_descriptor(
      TENSOR_ROWS, COLUMNS, TILE, false, false, sizeof(T) == 2,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<of_keys, metal::execution_simdgroup> by_values;
  mpp::tensor_ops::matmul2d<of_keys, metal::execution_simdgroup> by_keys;
  mpp::tensor_ops::matmul2d<of_sums, metal::execution_simdgroup> add;

  uint head = group.y / SPLIT, batch = group.z, kv_head = head / sizes[SHARE];
  int own = (int(groups.x - 1 - group.x) * SIMDS + int(simd_group)) * TENSOR_ROWS;
  int column = int(group.y) % SPLIT * COLUMNS;
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  int begin = own / TURN_ROWS * TURN_ROWS;
  if (begin >= rule.queries) {
    return;
  }
  head_rows<T> out_rows = rows_of(out, out_strides, batch, head, rule.queries);
  head_rows<T> d_rows = rows_of(d_out, d_out_strides, batch, head, rule.queries);
  tensor_of<T> rows = rows_as_tensor(rows_of(q, q_strides, batch, head, rule.queries), D, own);
  tensor_of<T> d_tensor = rows_as_tensor(d_rows, DV, own);
  tensor_of<T> keys = rows_as_tensor(rows_of(k, k_strides, batch, kv_head, rule.keys), D, 0);
  tensor_of<T> values = rows_as_tensor(rows_of(v, v_strides, batch, kv_head, rule.keys), DV, 0);
  ulong place = (ulong(batch) * sizes[HEADS] + head) * rule.queries;

  auto scores = by_keys.template get_destination_cooperative_tensor<
      tensor_of<T>, tensor_of<T>, float>();
  auto d_weights = scores, products = scores;
  float unit = is_raw(MASK, SOFTCAP) ? rule.scale : 1.0f;
  auto top = by_keys.template get_row_reduction_destination_cooperative_tensor<
      tensor_of<T>, tensor_of<T>, float>();
  auto factor = top, dot = top, exact = top, part = top;
  using weights = decltype(add.template get_left_input_cooperative_tensor<float, T, float>());
  auto sums = add.template get_destination_cooperative_tensor<
      metal::remove_addrspace_t<weights>, tensor_of<T>, float>();
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    sums[i] = 0.0f;
  }
#pragma unroll
  for (ushort i = 0; i < top.get_capacity(); i++) {
    dot[i] = exact[i] = 0.0f;
    if (top.is_valid_element(i)) {
      auto index = top.get_multidimensional_index(i);
      int query = own + index[0];
      float2 norm = norm_of<T>(norms + 2 * place, query, rule.queries);
      top[i] = norm.x;
      factor[i] = norm.y;
    }
  }
  for (int c = 0; c < DV; c += TILE) {
#pragma unroll
    for (ushort i = 0; i < products.get_capacity(); i++) {
      products[i] = 0.0f;
      if (products.is_valid_element(i)) {
        auto index = products.get_multidimensional_index(i);
        int query = own + index[1], column = c + index[0];
        if (query < rule.queries && column < DV) {
          products[i] = float(out_rows.at[query * out_rows.row + column * out_rows.column]) *
              float(d_rows.at[query * d_rows.row + column * d_rows.column]);
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

  int last = min(rule.keys, min(begin + TURN_ROWS, rule.queries) + rule.reach);
  int first = max(0, begin + rule.reach - rule.window + 1) / TILE * TILE;
  for (int key = first; key < last; key += TILE) {
    int at = min(key, rule.keys - TILE);
    auto some_keys = keys.slice(0, at);
    auto some_values = values.slice(0, at);
    by_keys.run(rows, some_keys, scores);
    by_values.run(d_tensor, some_values, d_weights);
#pragma unroll
    for (auto each = scores.begin(); each != scores.end(); each++) {
      if (each.is_valid_element()) {
        auto index = each.get_multidimensional_index();
        int query = own + index[1], other = at + index[0];
        float2 score = score_and_slope<MASK, SOFTCAP>(*each, query, other, rule);
        float weight = power_of_2<T>(fma(score.x, unit, -*top.map_iterator(each))) *
            *factor.map_iterator(each);
        weight = !is_seen(rule, query, other, key) || (MASK != NO_MASK && score.x == LOWEST) ? 0.0f : weight;
        int i = each - scores.begin();
        products[i] = weight * d_weights[i];
        *each = d_scores ? weight : weight * score.y;
      }
    }
    mpp::tensor_ops::reduce_rows(
        products, part, mpp::tensor_ops::reduction_operation::sum, 0.0f);
    bool single = first + TILE >= last;
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
        int query = own + index[1], other = at + index[0];
        if (d_scores && other >= key && query < rule.queries) {
          d_scores[(place + query) * rule.keys + other] = *each;
        }
      }
    }
    auto left = add.template get_left_input_cooperative_tensor<float, T, float>(scores);
    if (d_scores) {
      // No sums.
    } else if (SPLIT == 1) {
      add.run(left, some_keys, sums);
    } else {
      auto right = keys.slice(column, at);
      add.run(left, right, sums);
    }
    if (TOGETHER) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  int heads = sizes[HEADS];
  float slope = factors[SLOPE];
  device T* to = d_q + (ulong(batch) * rule.queries * heads + head) * D;
#pragma unroll
  for (auto each = sums.begin(); !d_scores && each != sums.end(); each++) {
    if (each.is_valid_element()) {
      auto index = each.get_multidimensional_index();
      int query = own + index[1], c = column + index[0];
      if (query < rule.queries && c < D) {
        to[long(query) * (heads * D) + c] = T(*each * slope);
        if (c == 0) {
          delta[place + query] = *exact.map_iterator(each);
        }
      }
    }
  }
}

template <
    typename T, typename M, int D, int DV, int MASK, bool SOFTCAP, bool AVERAGE, bool VALUES,
    int SIMDS, int SPLIT, int TILE, bool TOGETHER, int SHARED>
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
  constexpr int WIDTH = VALUES ? DV : D;
  constexpr int COLUMNS = rounded_up((WIDTH + SPLIT - 1) / SPLIT, 8);
  constexpr auto of_queries = mpp::tensor_ops::matmul2d_descriptor(
      TENSOR_ROWS, TILE, int(metal::dynamic_extent), false, true, sizeof(T) == 2);
  constexpr auto of_sums = mpp::tensor_ops::matmul2d_descriptor(
      TENSOR_ROWS, COLUMNS, TILE, false, false, sizeof(T) == 2,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<of_queries, metal::execution_simdgroup> by_d_out;
  mpp::tensor_ops::matmul2d<of_queries, metal::execution_simdgroup> by_queries;
  mpp::tensor_ops::matmul2d<of_sums, metal::execution_simdgroup> add;

  int share = sizes[SHARE], kv_heads = sizes[HEADS] / share;
  int own = (int(group.x) * SIMDS + int(simd_group)) * TENSOR_ROWS;
  int column = int(group.y) % SPLIT * COLUMNS;
  uint kv_head = group.y / SPLIT, batch = group.z;
  int begin = own / TURN_ROWS * TURN_ROWS;
  if (begin >= sizes[KEYS]) {
    return;
  }
  tensor_of<T> rows = rows_as_tensor(rows_of(k, k_strides, batch, kv_head, sizes[KEYS]), D, own);
  tensor_of<T> v_rows =
      rows_as_tensor(rows_of(v, v_strides, batch, kv_head, sizes[KEYS]), DV, own);
  auto scores = by_queries.template get_destination_cooperative_tensor<
      tensor_of<T>, tensor_of<T>, float>();
  auto d_weights = scores;
  using weights = decltype(add.template get_left_input_cooperative_tensor<float, T, float>());
  auto sums = add.template get_destination_cooperative_tensor<
      metal::remove_addrspace_t<weights>, tensor_of<T>, float>();
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    sums[i] = 0.0f;
  }

  for (uint head = kv_head * share; head < (kv_head + 1) * share; head++) {
    score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
    float unit = is_raw(MASK, SOFTCAP) ? rule.scale : 1.0f;
    ulong place = (ulong(batch) * sizes[HEADS] + head) * rule.queries;
    tensor_of<T> queries =
        rows_as_tensor(rows_of(q, q_strides, batch, head, rule.queries), D, 0);
    tensor_of<T> d_rows =
        rows_as_tensor(rows_of(d_out, d_out_strides, batch, head, rule.queries), DV, 0);
    int last = min(rule.queries, begin + TURN_ROWS - 1 + rule.window - rule.reach);
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
      auto left = add.template get_left_input_cooperative_tensor<float, T, float>(scores);
      if (TOGETHER && VALUES) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (!VALUES && SPLIT == 1) {
        add.run(left, some_queries, sums);
      } else {
        auto right = VALUES ? d_rows.slice(column, at) : queries.slice(column, at);
        add.run(left, right, sums);
      }
      if (TOGETHER && !VALUES) {
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
}
