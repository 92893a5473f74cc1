// Attention of many queries by Metal 4's tensor operations: out = softmax(q k^T scale) v.
//
// A SIMD group computes 16 queries of one head and one of SPLIT parts of the columns of v:
//
//   grid (32 * SIMDS * ceil(L / (16 * SIMDS)), H * SPLIT, B), threadgroup (32 * SIMDS, 1, 1);
//   threadgroup memory 64 * SIMDS * (TILE + 2), used if cooperative tensors are not compatible
//
//   scores         16 x TILE, a cooperative destination; then the weights
//   sums           16 x DV / SPLIT, a cooperative destination
//   top, total     statistics of the rows of scores
//
//   for each TILE keys that a query attends to:
//     scores = q * keys^T, from inline tensors; softcap, mask, by index
//     highest = reduce_rows(scores), top' = max(top, highest), rescale = exp2(top - top')
//     scores = exp2(scores - top'), total = total * rescale + reduce_rows(scores), sums *= rescale
//     sums += weights * values, with the weights as left operand, see tensor_score.metal
//
// Threadgroup barriers are needed only in LOCKSTEP. The last iteration takes the last TILE keys, and hides
// those that the one before took. Needs TILE keys, Metal 4 and macOS 26.2; never run on an M5.

#include "tensor_score.metal"

#define VALUE_COLUMNS rounded_up((DV + SPLIT - 1) / SPLIT, 8)

// Rescales the sum of a query and a column by its row's maximum score and total weight.
template <typename T, bool AVERAGE>
METAL_FUNC void write_value(
    float sum,
    float inverse,
    float lowered,
    float whole,
    thread const own_range& to,
    const device float* mean,
    device T* out,
    device float* norm,
    int query,
    int c) {
  float value = sizeof(T) == 4 ? sum / whole : sum * inverse;
  bool blank = AVERAGE && lowered == LOWEST && whole == whole;
  out[long(query) * to.row + c] = T(blank ? mean[c] : value);
  if (c == 0) {
    norm[2 * query] = blank ? BLANK : lowered;
    norm[2 * query + 1] = blank ? 1.0f : whole;
  }
}

// The loop of a SIMD group whose weights go through threadgroup memory, and its stores.
template <
    typename T, typename M, int DV, int MASK, bool SOFTCAP, bool AVERAGE, int SPLIT, int TILE,
    bool LOCKSTEP>
METAL_FUNC void attend_in_memory(
    threadgroup float* memory,
    thread tensor_of<T>& rows,
    thread tensor_of<T>& keys,
    thread tensor_of<T>& values,
    thread const score_rule<M>& rule,
    thread const own_range& of,
    float top,
    float total,
    const device float* mean,
    device T* out,
    device float* norm,
    uint lane) {
  if constexpr (!LOCKSTEP) {
    constexpr int COLUMNS = VALUE_COLUMNS;
    constexpr auto of_values = ADDED_TILE;
    constexpr auto of_keys = SCORED_TILE;
    mpp::tensor_ops::matmul2d<of_keys, metal::execution_simdgroup> by_keys;
    mpp::tensor_ops::matmul2d<of_values, metal::execution_simdgroup> by_values;
    auto scores = SCORES(by_keys);
    auto sums = SUMS(by_values, false);
    float unit = is_raw(MASK, SOFTCAP) ? rule.scale : 1.0f;
    threadgroup float* of_rows = memory + TENSOR_ROWS * TILE;
    threadgroup float* half_scores = half_row<TILE>(memory, lane);
    clear_tensor(sums);
    for (int key = of.first; key < of.last; key += TILE) {
      int at = min(key, rule.keys - TILE);
      auto some_keys = keys.slice(0, at);
      by_keys.run(rows, some_keys, scores);
#pragma unroll
      for (ushort i = 0; i < scores.get_capacity(); i++) {
        if (scores.is_valid_element(i)) {
          auto index = scores.get_multidimensional_index(i);
          int query = of.own + index[1], other = at + index[0];
          float score = score_and_slope<MASK, SOFTCAP>(scores[i], query, other, rule).x * unit;
          scores[i] = is_seen(rule, query, other, key) ? score : LOWEST;
        }
      }
      put_scores<TILE>(memory, scores);
      float highest = LOWEST, sum = 0.0f, before = top;
      for (int i = 0; i < TILE / 2; i++) {
        highest = max(highest, half_scores[i]);
      }
      top = max(top, max(highest, simd_shuffle_xor(highest, 1)));
      float lowered = top == LOWEST ? 0.0f : top, rescale = power_of_2<T>(before - lowered);
      for (int i = 0; i < TILE / 2; i++) {
        half_scores[i] = power_of_2<T>(half_scores[i] - lowered);
        sum += half_scores[i];
      }
      total = fma(total, rescale, sum_of_both(sum));
      if (lane % 2 == 0) {
        of_rows[lane / 2] = rescale;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (simd_any(rescale != 1.0f)) {
#pragma unroll
        for (ushort i = 0; i < sums.get_capacity(); i++) {
          if (sums.is_valid_element(i)) {
            auto index = sums.get_multidimensional_index(i);
            sums[i] *= of_rows[index[1]];
          }
        }
      }
      auto some_values = values.slice(of.column, at);
      add_from_memory<TILE>(by_values, memory, some_values, sums);
    }
    if (lane % 2 == 0) {
      of_rows[lane / 2] = top;
      of_rows[lane / 2 + TENSOR_ROWS] = total;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); i++) {
      if (sums.is_valid_element(i)) {
        auto index = sums.get_multidimensional_index(i);
        int query = of.own + index[1], c = of.column + index[0];
        float whole = of_rows[index[1] + TENSOR_ROWS];
        if (query < rule.queries && c < DV) {
          write_value<T, AVERAGE>(
              sums[i], 1.0f / whole, of_rows[index[1]], whole, of, mean, out, norm, query, c);
        }
      }
    }
  }
}

// The same with compatible cooperative tensors; returns false, with nothing done, if they are not.
template <
    typename T, typename M, int DV, int MASK, bool SOFTCAP, bool AVERAGE, int SPLIT, int TILE,
    bool LOCKSTEP>
METAL_FUNC bool attend_in_registers(
    thread tensor_of<T>& rows,
    thread tensor_of<T>& keys,
    thread tensor_of<T>& values,
    thread const score_rule<M>& rule,
    thread const own_range& of,
    float sink,
    float weight_of_sink,
    const device float* mean,
    device T* out,
    device float* norm) {
  constexpr int COLUMNS = VALUE_COLUMNS;
  constexpr auto of_values = ADDED_TILE;
  constexpr auto of_keys = SCORED_TILE;
  mpp::tensor_ops::matmul2d<of_keys, metal::execution_simdgroup> by_keys;
  mpp::tensor_ops::matmul2d<of_values, metal::execution_simdgroup> by_values;
  auto scores = SCORES(by_keys);
  auto top = STATISTIC(by_keys);
  auto total = STATISTIC(by_keys);
  auto highest = STATISTIC(by_keys);
  auto rescale = STATISTIC(by_keys);
  auto sums = SUMS(by_values, true);
  if (!by_values.template is_compatible_as_left_input<float, T, float>(scores) ||
      !mpp::tensor_ops::is_iterator_compatible(scores, top) ||
      !mpp::tensor_ops::is_iterator_compatible(sums, top)) {
    return false;
  }
  constexpr bool RAW = is_raw(MASK, SOFTCAP);
  float unit = RAW ? rule.scale : 1.0f;
  clear_tensor(sums);
#pragma unroll
  for (ushort i = 0; i < top.get_capacity(); i++) {
    if (top.is_valid_element(i)) {
      top[i] = sink;
      total[i] = weight_of_sink;
    }
  }

  for (int key = of.first; key < of.last; key += TILE) {
    int at = min(key, rule.keys - TILE);
    auto some_keys = keys.slice(0, at);
    by_keys.run(rows, some_keys, scores);
    bool whole = at == key && all_seen(rule, of.own, TENSOR_ROWS, at, TILE);
#pragma unroll
    for (ushort i = 0; i < scores.get_capacity() && !(RAW && whole); i++) {
      if (scores.is_valid_element(i)) {
        auto index = scores.get_multidimensional_index(i);
        int query = of.own + index[1], other = at + index[0];
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
        // Until a key is attended to, weights are 0.
        rescale[i] = power_of_2<T>(before - (top[i] == LOWEST ? 0.0f : top[i]));
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
    bool rescales = false;
#pragma unroll
    for (ushort i = 0; i < total.get_capacity(); i++) {
      if (total.is_valid_element(i)) {
        total[i] = fma(total[i], rescale[i], highest[i]);
        rescales = rescales || rescale[i] != 1.0f;
      }
    }
    // After a few iterations the maximum seldom changes.
    if (simd_any(rescales)) {
#pragma unroll
      for (auto each = sums.begin(); each != sums.end(); each++) {
        if (each.is_valid_element()) {
          *each *= *rescale.map_iterator(each);
        }
      }
    }
    auto left = by_values.template get_left_input_cooperative_tensor<float, T, float>(scores);
    if (LOCKSTEP) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    auto some_values = values.slice(of.column, at);
    by_values.run(left, some_values, sums);
  }

#pragma unroll
  for (ushort i = 0; i < total.get_capacity(); i++) {
    if (total.is_valid_element(i)) {
      rescale[i] = 1.0f / total[i];
    }
  }
#pragma unroll
  for (auto each = sums.begin(); each != sums.end(); each++) {
    if (!each.is_valid_element()) {
      continue;
    }
    auto index = each.get_multidimensional_index();
    int query = of.own + index[1], c = of.column + index[0];
    if (query >= rule.queries || c >= DV) {
      continue;
    }
    write_value<T, AVERAGE>(
        *each, *rescale.map_iterator(each), *top.map_iterator(each), *total.map_iterator(each), of,
        mean, out, norm, query, c);
  }
  return true;
}

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
    bool LOCKSTEP,
    int SHARED,
    bool HANDED,
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
    uint simd_group [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float memory[ALL_STEP_FLOATS];
  uint head = group.y / SPLIT, batch = group.z, kv_head = head / sizes[GQA_FACTOR];
  int own = (int(groups.x - 1 - group.x) * SIMDS + int(simd_group)) * TENSOR_ROWS;
  int column = int(group.y) % SPLIT * VALUE_COLUMNS, heads = sizes[HEADS];
  score_rule<M> rule = rule_of(mask, mask_strides, sizes, factors, batch, head);
  int begin = own / STEP_ROWS * STEP_ROWS;
  if (begin >= rule.queries) {
    return;
  }
  tensor_of<T> rows =
      rows_as_tensor(rows_of(q, q_strides, batch, head, rule.queries), D, own);
  tensor_of<T> keys = rows_as_tensor(rows_of(k, k_strides, batch, kv_head, rule.keys), D, 0);
  tensor_of<T> values = rows_as_tensor(rows_of(v, v_strides, batch, kv_head, rule.keys), DV, 0);
  own_range of = {
      own, column, heads * DV, max(0, begin + rule.reach - rule.window + 1) / TILE * TILE,
      min(rule.keys, min(begin + STEP_ROWS, rule.queries) + rule.reach)};
  float sink = SINKS ? max(float(sinks[head]) * LOG2E, LOWEST) : LOWEST;
  mean += (ulong(batch) * (heads / sizes[GQA_FACTOR]) + kv_head) * DV;
  out += (ulong(batch) * rule.queries * heads + head) * DV;
  norms += 2 * (ulong(batch) * heads + head) * rule.queries;
  bool done = false;
  if constexpr (HANDED) {
    done = attend_in_registers<T, M, DV, MASK, SOFTCAP, AVERAGE, SPLIT, TILE, LOCKSTEP>(
        rows, keys, values, rule, of, sink, SINKS ? 1.0f : 0.0f, mean, out, norms);
  }
  if (!LOCKSTEP && !done) {
    attend_in_memory<T, M, DV, MASK, SOFTCAP, AVERAGE, SPLIT, TILE, LOCKSTEP>(
        memory + simd_group * STEP_FLOATS, rows, keys, values, rule, of, sink, SINKS ? 1.0f : 0.0f,
        mean, out, norms, lane);
  }
}
