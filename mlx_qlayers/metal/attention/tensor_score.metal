// Code that the attention kernels with Metal 4's tensor operations share: rows of a head as a tensor,
// scores by index, and how scores become the left operand of the next product:
//
//   HANDED   as a cooperative input, if the tensors say that they are compatible
//   else     through threadgroup memory, where lanes 2 r and 2 r + 1 hold half of row r each

#include "common/power.metal"
#include "score_tile.metal"

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
using namespace metal;

// Rows of a SIMD group; an iteration takes TILE rows of the other operand.
#define TENSOR_ROWS 16
// Rows whose SIMD groups have the same loop bounds: in LOCKSTEP those of the threadgroup.
#define STEP_ROWS (LOCKSTEP ? SIMDS * TENSOR_ROWS : TENSOR_ROWS)
// Threadgroup memory of a SIMD group whose cooperative tensors are not compatible: scores, and two
// floats for each row. On CUDA, which runs in LOCKSTEP, they always are compatible.
#define STEP_FLOATS (TENSOR_ROWS * (TILE + 2))
#define ALL_STEP_FLOATS (LOCKSTEP ? 1 : SIMDS * STEP_FLOATS)

// Products with TILE rows of the other operand: scores, weighted sums, and reductions of rows.
#define ADDED_TILE mpp::tensor_ops::matmul2d_descriptor( \
    TENSOR_ROWS, COLUMNS, TILE, false, false, sizeof(T) == 2, \
    mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate)
#define SCORED_TILE mpp::tensor_ops::matmul2d_descriptor( \
    TENSOR_ROWS, TILE, int(metal::dynamic_extent), false, true, sizeof(T) == 2)
#define SCORES(product) \
  product.template get_destination_cooperative_tensor<tensor_of<T>, tensor_of<T>, float>()
#define SUMS(product, handed) \
  product.template get_destination_cooperative_tensor< \
      typename left_scores<decltype(product), T, handed>::type, tensor_of<T>, float>()
#define STATISTIC(product) \
  product.template get_row_reduction_destination_cooperative_tensor< \
      tensor_of<T>, tensor_of<T>, float>()

// A SIMD group's first row and column, the stride of rows of its result, and its loop bounds.
struct own_range {
  int own, column, row, first, last;
};

// The scores as the left operand of the operation P: a cooperative tensor, or threadgroup memory.
template <typename P, typename T, bool HANDED>
struct left_scores {
  using type = metal::tensor<threadgroup float, metal::dextents<int, 2>, metal::tensor_inline>;
};
template <typename P, typename T>
struct left_scores<P, T, true> {
  using product = metal::remove_addrspace_t<metal::remove_reference_t<P>>;
  using type = metal::remove_addrspace_t<decltype(
      ((thread product*)nullptr)->template get_left_input_cooperative_tensor<float, T, float>())>;
};

// Rows from `first` on; columns are contiguous.
template <typename T>
using tensor_of = metal::tensor<device T, metal::dextents<int, 2>, metal::tensor_inline>;
template <typename T>
METAL_FUNC tensor_of<T> rows_as_tensor(head_rows<T> rows, int width, int first) {
  return tensor_of<T>(
      (device T*)(rows.at + first * rows.row),
      metal::dextents<int, 2>(width, max(rows.count - first, 0)),
      metal::array<int, 2>{1, int(rows.row)});
}

// The score of a query and a key, in units of log2 where it is not raw, and the slope of the softcap.
template <int MASK, bool SOFTCAP, typename M>
METAL_FUNC float2 score_and_slope(
    float product, int query, int key, thread const score_rule<M>& rule) {
  float score = is_raw(MASK, SOFTCAP) ? product : product * rule.scale, slope = 1.0f;
  if (SOFTCAP) {
    float tanh_score = precise::tanh(score);
    score = tanh_score * rule.cap;
    slope = 1.0f - tanh_score * tanh_score;
  }
  if (MASK != NO_MASK && query < rule.queries && key < rule.keys) {
    M value = rule.mask[query * rule.mask_query + key * rule.mask_key];
    if (MASK == BOOLEAN) {
      score = bool(value) ? score : LOWEST;
    } else {
      score = fma(float(value), LOG2E, score);
      score = score < LOWEST ? LOWEST : score;
    }
  }
  return float2(score, slope);
}

// Whether, by positions, a query attends to a key, of the keys from `first` on.
template <typename M>
METAL_FUNC bool is_seen(thread const score_rule<M>& rule, int query, int key, int first) {
  int low = max(first, query + rule.reach - rule.window + 1);
  return uint(key - low) < uint(max(0, min(rule.keys, query + rule.reach + 1) - low));
}
// The same, of the queries from `first` on.
template <typename M>
METAL_FUNC bool sees(thread const score_rule<M>& rule, int query, int key, int first) {
  int low = max(first, key - rule.reach);
  return uint(query - low) < uint(max(0, min(rule.queries, key - rule.reach + rule.window) - low));
}

// The half row of a lane, in scores that are in threadgroup memory; and the sum of both lanes.
template <int TILE>
METAL_FUNC threadgroup float* half_row(threadgroup float* memory, uint lane) {
  return memory + lane / 2 * TILE + lane % 2 * (TILE / 2);
}
METAL_FUNC float sum_of_both(float x) {
  return x + simd_shuffle_xor(x, 1);
}

template <typename C>
METAL_FUNC void clear_tensor(thread C& sums) {
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      sums[i] = 0.0f;
    }
  }
}

template <int TILE, typename C>
METAL_FUNC void put_scores(threadgroup float* memory, thread C& scores) {
#pragma unroll
  for (ushort i = 0; i < scores.get_capacity(); i++) {
    if (scores.is_valid_element(i)) {
      auto index = scores.get_multidimensional_index(i);
      memory[index[1] * TILE + index[0]] = scores[i];
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// sums += scores * right. The scores of 16 rows are in threadgroup memory, which is free afterwards.
template <int TILE, typename P, typename R, typename C>
METAL_FUNC void add_from_memory(
    thread P& add, threadgroup float* memory, thread R& right, thread C& sums) {
  typename left_scores<P, float, false>::type left(
      memory, metal::dextents<int, 2>(TILE, TENSOR_ROWS));
  add.run(left, right, sums);
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// sums += scores * right, with scores as a cooperative input or through threadgroup memory.
template <typename T, int TILE, bool HANDED, typename P, typename S, typename R, typename C>
METAL_FUNC void add_scores(
    thread P& add, threadgroup float* memory, thread S& scores, thread R& right, thread C& sums) {
  if constexpr (HANDED) {
    auto left = add.template get_left_input_cooperative_tensor<float, T, float>(scores);
    add.run(left, right, sums);
  } else {
    put_scores<TILE>(memory, scores);
    add_from_memory<TILE>(add, memory, right, sums);
  }
}
