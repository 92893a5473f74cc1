// Product of many rows with a quantized matrix by Metal 4's tensor operations:
// y (M, N) = x (M, K) * w + bias. packed.metal says how w is packed, transposed (N, K) or not (K, N).
//
// A threadgroup computes rows * simds_m x 32 * simds_n of y, each SIMD group rows x 32. Per step of
// tile_k the threadgroup brings packed words and scales of w into threadgroup memory; each SIMD group
// decodes them into its cooperative right input, rounded to T, and multiplies with rows of x in device
// memory. Sums stay in a cooperative destination. Which lane holds which element is asked of the
// tensors, never assumed.
//
//   grid (ceil(M / (rows * simds_m)) * threads, ceil(N / (32 * simds_n)), 1), threadgroup (threads, 1, 1)
//   with threads = 32 * simds_m * simds_n; threadgroup memory 2 * (words, scales and biases of a step).
//
// tile_k divides K, or else the product is `ragged`: then x too comes through a cooperative input.
// Needs Metal 4, macOS 26.2; never run on the hardware that it is for.

#include "packed.metal"

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
using namespace metal;

// Columns of y that a SIMD group computes.
#define TENSOR_COLUMNS 32

// The part of w that a threadgroup needs for a step: its rows and columns as they are packed.
#define PART_ROWS (transposed ? TENSOR_COLUMNS * simds_n : tile_k)
#define PART_COLUMNS (transposed ? tile_k : TENSOR_COLUMNS * simds_n)
#define PART_WORDS (PART_COLUMNS * bits / 32)
#define PART_GROUPS (PART_COLUMNS > group ? PART_COLUMNS / group : 1)

// Words, scales and biases of the part at (row, column) of a matrix (rows, columns); zeros beyond it.
template <
    int mode, int group, int bits, int part_rows, int part_words, int part_groups, int threads,
    typename S>
METAL_FUNC void bring_part(
    threadgroup uint* words,
    threadgroup float* factors,
    threadgroup float* offsets,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    int row,
    int column,
    int rows,
    int columns,
    int thread_index) {
  int row_words = columns * bits / 32, row_groups = columns / group;
  for (int i = thread_index; i < part_rows * part_words; i += threads) {
    int r = row + i / part_words, c = column * bits / 32 + i % part_words;
    words[i] = r < rows && c < row_words ? w[size_t(r) * row_words + c] : 0;
  }
  for (int i = thread_index; i < part_rows * part_groups; i += threads) {
    int r = row + i / part_groups, c = column / group + i % part_groups;
    bool inside = r < rows && c < row_groups;
    size_t at = size_t(r) * row_groups + c;
    factors[i] = inside ? decoded_scale<mode>(scales[at]) : 0.0f;
    if (mode == AFFINE) {
      offsets[i] = inside ? float(biases[at]) : 0.0f;
    }
  }
}

// One element of a part, decoded.
template <int mode, int group, int bits, int part_words, int part_groups>
METAL_FUNC float part_element(
    const threadgroup uint* words,
    const threadgroup float* factors,
    const threadgroup float* offsets,
    int row,
    int column) {
  int word = row * part_words + column * bits / 32, shift = column * bits % 32;
  uint code = words[word] >> shift;
  if (32 % bits != 0 && shift + bits > 32) {
    code |= words[word + 1] << (32 - shift);
  }
  code &= (1u << bits) - 1;
  int of_group = row * part_groups + (part_groups > 1 ? column / group : 0);
  return fma(
      factors[of_group], decoded<mode>(code), mode == AFFINE ? offsets[of_group] : 0.0f);
}

// What a SIMD group multiplies with: x by rows from device memory, or an input that is filled here.
template <typename T, bool ragged>
struct tensor_rows;
template <typename T>
struct tensor_rows<T, false> {
  using left = metal::tensor<device T, metal::dextents<int, 2>, metal::tensor_inline>;
  template <typename P>
  METAL_FUNC static left at(thread const P& product, const device T* x, int k, int K, int M) {
    left all((device T*)x, metal::dextents<int, 2>(K, M));
    return all.slice(k, 0);
  }
};
template <typename T>
struct tensor_rows<T, true> {
  template <typename P>
  METAL_FUNC static auto at(thread const P& product, const device T* x, int k, int K, int M) {
    auto part = product.template get_left_input_cooperative_tensor<T, T, float>();
    for (ushort i = 0; i < part.get_capacity(); i++) {
      if (part.is_valid_element(i)) {
        auto index = part.get_multidimensional_index(i);
        bool inside = index[0] + k < K && index[1] < M;
        part[i] = inside ? x[size_t(index[1]) * K + k + index[0]] : T(0);
      }
    }
    return part;
  }
};

// y from (m, n) on for a threadgroup; x, y and M are those of one matrix.
template <
    typename T, typename S, int mode, int group, int bits, bool transposed, int rows, int tile_k,
    int simds_m, int simds_n, bool ragged, bool biased>
METAL_FUNC void multiply_tensors(
    threadgroup uint* words,
    threadgroup float* factors,
    threadgroup float* offsets,
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    float factor,
    device T* y,
    int m,
    int M,
    int n,
    int N,
    int K,
    int thread_index) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      rows, TENSOR_COLUMNS, tile_k, false, transposed, sizeof(T) == 2,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> product;
  constexpr int threads = 32 * simds_m * simds_n, count = PART_ROWS * PART_WORDS;
  constexpr int scaled = PART_ROWS * PART_GROUPS;
  int simd = thread_index / 32, column = simd % simds_n * TENSOR_COLUMNS;
  int first = n, stage = 0, w_rows = transposed ? N : K, w_columns = transposed ? K : N;
  m += simd / simds_n * rows;
  n += column;
  x += size_t(m) * K;
  bool any = m < M;

  auto right = product.template get_right_input_cooperative_tensor<T, T, float>();
  using left = decltype(tensor_rows<T, ragged>::at(product, x, 0, K, 0));
  auto sums = product.template get_destination_cooperative_tensor<
      metal::remove_addrspace_t<left>, metal::remove_addrspace_t<decltype(right)>, float>();
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    sums[i] = 0.0f;
  }
  for (int k = 0; k < K; k += tile_k) {
    threadgroup uint* held = words + stage * count;
    threadgroup float* scale = factors + stage * scaled;
    threadgroup float* offset = offsets + stage * scaled;
    bring_part<mode, group, bits, PART_ROWS, PART_WORDS, PART_GROUPS, threads>(
        held, scale, offset, w, scales, biases, transposed ? first : k, transposed ? k : first,
        w_rows, w_columns, thread_index);
    // What was brought two steps before was read before the barrier of the last step.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage = 1 - stage;
    if (any) {
      for (ushort i = 0; i < right.get_capacity(); i++) {
        if (right.is_valid_element(i)) {
          auto index = right.get_multidimensional_index(i);
          right[i] = T(part_element<mode, group, bits, PART_WORDS, PART_GROUPS>(
              held, scale, offset, index[1] + (transposed ? column : 0),
              index[0] + (transposed ? 0 : column)));
        }
      }
      auto of_x = tensor_rows<T, ragged>::at(product, x, k, K, M - m);
      product.run(of_x, right, sums);
    }
  }
  for (ushort i = 0; any && i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      auto index = sums.get_multidimensional_index(i);
      int r = m + index[1], c = n + index[0];
      if (r < M && c < N) {
        y[size_t(r) * N + c] = T(fma(sums[i], factor, biased ? float(bias[c]) : 0.0f));
      }
    }
  }
}

#define TENSOR_MEMORY                                        \
  threadgroup uint words[2 * PART_ROWS * PART_WORDS];        \
  threadgroup float factors_of_part[2 * PART_ROWS * PART_GROUPS]; \
  threadgroup float offsets[mode == AFFINE ? 2 * PART_ROWS * PART_GROUPS : 1];

template <
    typename T, typename S, int mode, int group, int bits, bool transposed, int rows, int tile_k,
    int simds_m, int simds_n, bool ragged, bool biased>
[[kernel]] void qmm_tensor(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    constant int* shape,
    device T* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  TENSOR_MEMORY
  multiply_tensors<
      T, S, mode, group, bits, transposed, rows, tile_k, simds_m, simds_n, ragged, biased>(
      words, factors_of_part, offsets, x, w, scales, biases, bias, 1.0f, y, place.x * rows * simds_m,
      shape[0], place.y * TENSOR_COLUMNS * simds_n, shape[1], shape[2], thread_index);
}
