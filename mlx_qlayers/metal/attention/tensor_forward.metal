// Attention of many queries by Metal 4's tensor operations: out = softmax(q k^T scale) v.
//
// A SIMD group computes 16 queries of one head, and of the columns of its values one of SPLIT parts:
//
//   grid (32 * SIMDS * ceil(L / (16 * SIMDS)), H * SPLIT, B), threadgroup (32 * SIMDS, 1, 1)
//
//   scores         16 x TILE, a cooperative destination; then the weights
//   sums           16 x DV / SPLIT, a cooperative destination
//   top, total     statistics of the rows of scores
//
//   for each TILE keys that one of the queries may see:
//     scores = q * keys^T, from inline tensors; softcap, mask, by index
//     highest = reduce_rows(scores), top' = max(top, highest), shrink = exp2(top - top')
//     scores = exp2(scores - top'), total = total * shrink + reduce_rows(scores), sums *= shrink
//     sums += weights * values, the weights handed over as the left input
//
// There is no threadgroup memory, and no barrier but where SIMD groups read TOGETHER. The last turn takes the last TILE keys: those that
// were there before are hidden. Needs TILE keys, Metal 4 and macOS 26.2; never run on an M5.

#include "tensor_score.metal"

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
    int SPLIT,
    int TILE,
    bool TOGETHER,
    int SHARED,
    int RESIDENT>
[[kernel]] void attention_tensor(
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
    uint simd_group [[simdgroup_index_in_threadgroup]]) {
  constexpr int COLUMNS = rounded_up((DV + SPLIT - 1) / SPLIT, 8);
  constexpr auto of_values = mpp::tensor_ops::matmul2d_descriptor(
      TENSOR_ROWS, COLUMNS, TILE, false, false, sizeof(T) == 2,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  constexpr auto of_keys = mpp::tensor_ops::matmul2d_descriptor(
      TENSOR_ROWS, TILE, int(metal::dynamic_extent), false, true, sizeof(T) == 2);
  mpp::tensor_ops::matmul2d<of_keys, metal::execution_simdgroup> by_keys;
  mpp::tensor_ops::matmul2d<of_values, metal::execution_simdgroup> by_values;

  uint head = group.y / SPLIT, batch = group.z, kv_head = head / sizes[SHARE];
  int own = (int(groups.x - 1 - group.x) * SIMDS + int(simd_group)) * TENSOR_ROWS;
  int column = int(group.y) % SPLIT * COLUMNS;
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  int begin = own / TURN_ROWS * TURN_ROWS;
  if (begin >= rule.queries) {
    return;
  }
  tensor_of<T> rows =
      rows_as_tensor(rows_of(q, q_strides, batch, head, rule.queries), D, own);
  tensor_of<T> keys = rows_as_tensor(rows_of(k, k_strides, batch, kv_head, rule.keys), D, 0);
  tensor_of<T> values = rows_as_tensor(rows_of(v, v_strides, batch, kv_head, rule.keys), DV, 0);

  auto scores = by_keys.template get_destination_cooperative_tensor<
      tensor_of<T>, tensor_of<T>, float>();
  auto top = by_keys.template get_row_reduction_destination_cooperative_tensor<
      tensor_of<T>, tensor_of<T>, float>();
  auto total = top, highest = top, shrink = top;
  using weights = decltype(by_values.template get_left_input_cooperative_tensor<float, T, float>());
  auto sums = by_values.template get_destination_cooperative_tensor<
      metal::remove_addrspace_t<weights>, tensor_of<T>, float>();
  constexpr bool RAW = is_raw(MASK, SOFTCAP);
  float unit = RAW ? rule.scale : 1.0f;
  float sink = SINKS ? max(float(sinks[head]) * LOG2E, LOWEST) : LOWEST;
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    sums[i] = 0.0f;
  }
#pragma unroll
  for (ushort i = 0; i < top.get_capacity(); i++) {
    top[i] = sink;
    total[i] = SINKS ? 1.0f : 0.0f;
  }

  int last = min(rule.keys, min(begin + TURN_ROWS, rule.queries) + rule.reach);
  int first = max(0, begin + rule.reach - rule.window + 1) / TILE * TILE;
  for (int key = first; key < last; key += TILE) {
    int at = min(key, rule.keys - TILE);
    auto some_keys = keys.slice(0, at);
    by_keys.run(rows, some_keys, scores);
    bool whole = at == key && all_seen(rule, own, TENSOR_ROWS, at, TILE);
#pragma unroll
    for (ushort i = 0; i < scores.get_capacity() && !(RAW && whole); i++) {
      if (scores.is_valid_element(i)) {
        auto index = scores.get_multidimensional_index(i);
        int query = own + index[1], other = at + index[0];
        float score = score_and_slope<MASK, SOFTCAP>(scores[i], query, other, rule).x;
        scores[i] = is_seen(rule, query, other, key) ? score : LOWEST;
      }
    }
    mpp::tensor_ops::reduce_rows(
        scores, highest, mpp::tensor_ops::reduction_operation::max, -INFINITY);
#pragma unroll
    for (ushort i = 0; i < top.get_capacity(); i++) {
      if (top.is_valid_element(i)) {
        float before = top[i];
        top[i] = max(before, highest[i] == LOWEST ? LOWEST : highest[i] * unit);
        // As long as no key was seen, weights are 0.
        shrink[i] = power_of_2<T>(before - (top[i] == LOWEST ? 0.0f : top[i]));
      }
    }
#pragma unroll
    for (auto each = scores.begin(); each != scores.end(); each++) {
      if (each.is_valid_element()) {
        float lowered = *top.map_iterator(each);
        *each = power_of_2<T>(fma(*each, unit, lowered == LOWEST ? 0.0f : -lowered));
      }
    }
    mpp::tensor_ops::reduce_rows(
        scores, highest, mpp::tensor_ops::reduction_operation::sum, 0.0f);
    bool shrinks = false;
#pragma unroll
    for (ushort i = 0; i < total.get_capacity(); i++) {
      if (total.is_valid_element(i)) {
        total[i] = fma(total[i], shrink[i], highest[i]);
        shrinks = shrinks || shrink[i] != 1.0f;
      }
    }
    // After a few turns the largest scores seldom change.
    if (simd_any(shrinks)) {
#pragma unroll
      for (auto each = sums.begin(); each != sums.end(); each++) {
        if (each.is_valid_element()) {
          *each *= *shrink.map_iterator(each);
        }
      }
    }
    auto left = by_values.template get_left_input_cooperative_tensor<float, T, float>(scores);
    if (TOGETHER) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    auto some_values = values.slice(column, at);
    by_values.run(left, some_values, sums);
  }

  int heads = sizes[HEADS];
  ulong kv = ulong(batch) * (heads / sizes[SHARE]) + kv_head;
  device T* to = out + (ulong(batch) * rule.queries * heads + head) * DV;
  device float* norm = norms + 2 * (ulong(batch) * heads + head) * rule.queries;
#pragma unroll
  for (ushort i = 0; i < total.get_capacity(); i++) {
    shrink[i] = 1.0f / total[i];
  }
#pragma unroll
  for (auto each = sums.begin(); each != sums.end(); each++) {
    if (!each.is_valid_element()) {
      continue;
    }
    auto index = each.get_multidimensional_index();
    int query = own + index[1], c = column + index[0];
    if (query >= rule.queries || c >= DV) {
      continue;
    }
    float lowered = *top.map_iterator(each), whole = *total.map_iterator(each);
    float value = sizeof(T) == 4 ? *each / whole : *each * *shrink.map_iterator(each);
    bool blank = AVERAGE && lowered == LOWEST && whole == whole;
    to[long(query) * (heads * DV) + c] = T(blank ? mean[kv * DV + c] : value);
    if (c == 0) {
      norm[2 * query] = blank ? BLANK : lowered;
      norm[2 * query + 1] = blank ? 1.0f : whole;
    }
  }
}
