// Products of sorted rows with the quantized matrices that they chose, by tensor operations: the list
// of tiles is that of gather_qmm.metal, a tile is computed as in quantized_matmul/qmm_tensor.metal,
// with the same memory. shape: N, K.
// Grid (threads * tiles in the list, ceil(N / (32 * simds_n)), 1).

#include "quantized_matmul/qmm_tensor.metal"

#include <metal_stdlib>
using namespace metal;

template <
    typename T, typename S, int mode, int group, int bits, bool transposed, int rows, int tile_k,
    int simds_m, int simds_n, bool ragged, bool staged, bool scaled>
[[kernel]] void gather_qmm_tensor(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device float* factors,
    const device uint* list,
    constant int* shape,
    device T* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint words[PART_SIZE(PART_WORDS)];
  threadgroup float factors_of_part[PART_SIZE(PART_GROUPS)];
  threadgroup float offsets[mode == AFFINE ? PART_SIZE(PART_GROUPS) : 1];
  threadgroup uint4 packs[STAGED_PACKS];
  int N = shape[0], K = shape[1], w_columns = transposed ? K : N;
  uint matrix = list[3 * place.x];
  int m = list[3 * place.x + 1], M = list[3 * place.x + 2];
  if (m == M) {
    return;
  }
  size_t w_rows = size_t(matrix) * (transposed ? N : K), groups = w_rows * (w_columns / group);
  packed_matrix<S> chosen = {
      w + w_rows * (size_t(w_columns) * bits / 32), scales + groups, biases + groups};
  multiply_tensors<
      T, T, S, mode, group, bits, transposed, rows, tile_k, simds_m, simds_n, ragged, staged, 0>(
      words, factors_of_part, offsets, reinterpret_cast<threadgroup T*>(packs), x, chosen, chosen, nullptr, nullptr, nullptr,
      scaled ? factors[matrix] : 1.0f, y, m, M, place.y * TENSOR_COLUMNS * simds_n, N, 0, K, K,
      thread_index);
}
