// Products by tensor operations whose right operand is dequantized once for the threadgroup: words are loaded
// into registers while the previous part is multiplied, dequantized to T and stored in one of two buffers in
// threadgroup memory. Each SIMD group multiplies rows of x in device memory with its columns there. Both
// operands are in memory: no input is a cooperative tensor.

#include "epilogue.metal"
#include "packed_runs.metal"

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
using namespace metal;

// Columns of y that a SIMD group computes.
#define TENSOR_COLUMNS 32

// The stride of rows of a dequantized part, its elements, and the 16-byte vectors of both buffers.
#define STAGED_STRIDE ((transposed ? tile_k : TENSOR_COLUMNS * simds_n) + PADDING)
#define STAGED_PART ((transposed ? TENSOR_COLUMNS * simds_n : tile_k) * STAGED_STRIDE)
#define STAGED_PACKS (staged ? 2 * STAGED_PART * int(sizeof(T)) / 16 : 1)

template <typename T>
using staged_operand = metal::tensor<threadgroup T, metal::dextents<int, 2>, metal::tensor_inline>;
template <typename T>
using row_operand = metal::tensor<device T, metal::dextents<int, 2>, metal::tensor_inline>;

template <typename C>
METAL_FUNC void clear_sums(thread C& sums) {
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      sums[i] = 0.0f;
    }
  }
}

// The epilogue: stores sums to y from (m, n) on, with those of a gate's other matrix.
template <int gate, typename T, typename O, typename C>
METAL_FUNC void write_tensor(
    thread C& sums,
    thread C& others,
    float factor,
    const device T* bias,
    const device T* other_bias,
    const device T* residual,
    device O* y,
    int m,
    int M,
    int n,
    int N) {
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      auto index = sums.get_multidimensional_index(i);
      int r = m + index[1], c = n + index[0];
      if (r < M && c < N) {
        size_t at = size_t(r) * N + c;
        // With O other than T, bias and residual are null.
        y[at] = finished<O, gate>(
            sums[i] * factor, gate ? others[i] : 0.0f, c, at,
            reinterpret_cast<const device O*>(bias),
            reinterpret_cast<const device O*>(other_bias),
            reinterpret_cast<const device O*>(residual));
      }
    }
  }
}

// sums += x * w of the part in `stage`, while the part of `next` from k on is copied to the other stage, which
// was last read before the barrier of the previous step. Without sums it only copies.
template <
    typename T, int mode, int group, int bits, bool transposed, int tile_k, int simds_m, int simds_n,
    typename S, typename P, typename L, typename C>
METAL_FUNC void staged_step(
    thread P& product,
    thread L& left,
    thread C& sums,
    threadgroup T* tiles,
    thread int& stage,
    thread const packed_matrix<S>& next,
    int depth,
    int n,
    int k,
    int end,
    int N,
    int K,
    bool any,
    int thread_index) {
  constexpr int threads = 32 * simds_m * simds_n, run = bits % 2 ? 32 : 16;
  constexpr int pieces = TENSOR_COLUMNS * simds_n * tile_k / run;
  constexpr int across = (STAGED_STRIDE - PADDING) / run;
  packed_run<S, run * bits / 32> held[PIECES_PER_THREAD(pieces, threads)];
  int row = transposed ? n : k, column = transposed ? k : n;
  int rows = transposed ? N : K, columns = transposed ? K : N;
  if (k < end) {
    fetch_runs<mode, group, bits, run, pieces, across, threads, false>(
        held, next.w, next.scales, next.biases, row, column, rows, columns, thread_index,
        begins_odd(next.w));
  }
  if (any) {
    int own = thread_index / 32 % simds_n * TENSOR_COLUMNS;
    staged_operand<T> right(
        tiles + stage * STAGED_PART + own * (transposed ? STAGED_STRIDE : 1),
        metal::dextents<int, 2>(
            transposed ? depth : TENSOR_COLUMNS, transposed ? TENSOR_COLUMNS : depth),
        metal::array<int, 2>{1, STAGED_STRIDE});
    product.run(left, right, sums);
  }
  stage = 1 - stage;
  if (k < end) {
    place_runs<T, mode, bits, run, pieces, across, threads, S>(
        tiles + stage * STAGED_PART, held, thread_index);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Computes y from (m, n) on for a threadgroup, as multiply_tensors does.
template <
    typename T, typename O, typename S, int mode, int group, int bits, bool transposed, int rows,
    int tile_k, int simds_m, int simds_n, bool ragged, int gate>
METAL_FUNC void multiply_staged(
    threadgroup T* tiles,
    const device T* x,
    packed_matrix<S> matrix,
    packed_matrix<S> other,
    const device T* bias,
    const device T* other_bias,
    const device T* residual,
    float factor,
    device O* y,
    int m,
    int M,
    int n,
    int N,
    int first,
    int depth,
    int K,
    int thread_index) {
  // The last step of a ragged K is shorter, and only a dynamic depth is clipped.
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      rows, TENSOR_COLUMNS, ragged ? int(metal::dynamic_extent) : tile_k, false, transposed,
      sizeof(T) == 2, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> product;
  int simd = thread_index / 32, stage = 1, end = min(first + depth, K);
  m += simd / simds_n * rows;
  x += size_t(m) * K;
  bool any = m < M;
  auto sums = product.template get_destination_cooperative_tensor<
      row_operand<T>, staged_operand<T>, float>();
  auto others = product.template get_destination_cooperative_tensor<
      row_operand<T>, staged_operand<T>, float>();
  clear_sums(sums);
  if (gate) {
    clear_sums(others);
  }
  // The step before the first one only loads its part.
  for (int k = first - tile_k; k < end; k += tile_k) {
    bool begun = k >= first;
    int at = max(k, first), deep = min(tile_k, K - at);
    row_operand<T> left(
        (device T*)x + at, metal::dextents<int, 2>(deep, max(M - m, 0)),
        metal::array<int, 2>{1, K});
    if (gate && begun) {
      staged_step<T, mode, group, bits, transposed, tile_k, simds_m, simds_n>(
          product, left, sums, tiles, stage, other, deep, n, k, end, N, K, any, thread_index);
    }
    staged_step<T, mode, group, bits, transposed, tile_k, simds_m, simds_n>(
        product, left, gate ? others : sums, tiles, stage, matrix, deep, n, k + tile_k, end, N, K,
        any && begun, thread_index);
  }
  write_tensor<gate>(
      sums, others, factor, bias, other_bias, residual, y, m, M, n + simd % simds_n * TENSOR_COLUMNS,
      N);
}
