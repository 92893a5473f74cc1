// Product of many rows with a quantized matrix by Metal 4's tensor operations:
//
//   y (M, N) = x (M, K) * w + bias,   or   gate(x * w + bias) * (x * w1 + bias1),   or   + residual
//
// packed.metal says how w is packed, transposed (N, K) or not (K, N).
//
// A threadgroup computes rows * simds_m x 32 * simds_n of y, each SIMD group rows x 32. Per step of
// tile_k the threadgroup brings packed words and scales of w into threadgroup memory, which were read
// during the step before; each SIMD group decodes them into its cooperative right input, rounded to T, and multiplies with rows of x in device
// memory. Sums stay in a cooperative destination; with a gate its two matrices take turns, and have one
// each. Which lane holds which element is asked of the tensors, never assumed.
//
//   grid (ceil(M / (rows * simds_m)) * threads, ceil(N / (32 * simds_n)), 1), threadgroup (threads, 1, 1)
//   with threads = 32 * simds_m * simds_n; threadgroup memory 2 * (words, scales and biases of a step).
//
// tile_k divides K, or else the product is `ragged`: then x too comes through a cooperative input.
// Needs Metal 4, macOS 26.2; never run on the hardware that it is for.

#include "epilogue.metal"
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

// What a thread brings of a part: words, scales and biases.
template <int words_each, int scales_each>
struct share_of_part {
  uint words[words_each];
  float factors[scales_each], offsets[scales_each];
};

// Reads it for the part at (row, column) of a matrix (rows, columns); zeros beyond it.
template <
    int mode, int group, int bits, int part_rows, int part_words, int part_groups, int threads,
    typename S, typename H>
METAL_FUNC void read_part(
    thread H& share,
    thread const packed_matrix<S>& from,
    int row,
    int column,
    int rows,
    int columns,
    int thread_index) {
  const int count = part_rows * part_words, scaled = part_rows * part_groups;
  int row_words = columns * bits / 32, row_groups = columns / group;
#pragma unroll
  for (int first = 0; first < count; first += threads) {
    int i = first + thread_index, r = row + i / part_words;
    int c = column * bits / 32 + i % part_words;
    bool inside = i < count && r < rows && c < row_words;
    share.words[first / threads] = inside ? from.w[size_t(r) * row_words + c] : 0;
  }
#pragma unroll
  for (int first = 0; first < scaled; first += threads) {
    int i = first + thread_index, r = row + i / part_groups, c = column / group + i % part_groups;
    bool inside = i < scaled && r < rows && c < row_groups;
    size_t at = size_t(r) * row_groups + c;
    share.factors[first / threads] = inside ? decoded_scale<mode>(from.scales[at]) : 0.0f;
    if (mode == AFFINE) {
      share.offsets[first / threads] = inside ? float(from.biases[at]) : 0.0f;
    }
  }
}

// Writes what was read, for all threads of the group to see behind a barrier.
template <int mode, int count, int scaled, int threads, typename H>
METAL_FUNC void write_part(
    thread const H& share,
    threadgroup uint* words,
    threadgroup float* factors,
    threadgroup float* offsets,
    int thread_index) {
#pragma unroll
  for (int first = 0; first < count; first += threads) {
    if (first + thread_index < count) {
      words[first + thread_index] = share.words[first / threads];
    }
  }
#pragma unroll
  for (int first = 0; first < scaled; first += threads) {
    if (first + thread_index < scaled) {
      factors[first + thread_index] = share.factors[first / threads];
      if (mode == AFFINE) {
        offsets[first + thread_index] = share.offsets[first / threads];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
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

// sums += x * w for a step: its part of w, which was read before, is written, decoded and multiplied,
// and that of the next one is read meanwhile.
template <
    typename T, int mode, int group, int bits, bool transposed, int tile_k, int simds_m, int simds_n,
    typename S, typename P, typename L, typename R, typename C, typename H>
METAL_FUNC void add_step(
    thread const P& product,
    thread L& left,
    thread R& right,
    thread C& sums,
    thread H& share,
    threadgroup uint* words,
    threadgroup float* factors,
    threadgroup float* offsets,
    thread const packed_matrix<S>& next,
    int n,
    int next_k,
    int N,
    int K,
    bool any,
    int thread_index) {
  constexpr int threads = 32 * simds_m * simds_n;
  int column = thread_index / 32 % simds_n * TENSOR_COLUMNS;
  // What was written two steps before was read before the barrier of the last step.
  write_part<mode, PART_ROWS * PART_WORDS, PART_ROWS * PART_GROUPS, threads>(
      share, words, factors, offsets, thread_index);
  read_part<mode, group, bits, PART_ROWS, PART_WORDS, PART_GROUPS, threads>(
      share, next, transposed ? n : next_k, transposed ? next_k : n, transposed ? N : K,
      transposed ? K : N, thread_index);
  if (any) {
    for (ushort i = 0; i < right.get_capacity(); i++) {
      if (right.is_valid_element(i)) {
        auto index = right.get_multidimensional_index(i);
        right[i] = T(part_element<mode, group, bits, PART_WORDS, PART_GROUPS>(
            words, factors, offsets, index[1] + (transposed ? column : 0),
            index[0] + (transposed ? 0 : column)));
      }
    }
    product.run(left, right, sums);
  }
}

// What becomes of sums, from (m, n) of y on; of a gate's other matrix too.
template <int gate, typename T, typename C>
METAL_FUNC void write_tensor(
    thread C& sums,
    thread C& others,
    float factor,
    const device T* bias,
    const device T* other_bias,
    const device T* residual,
    device T* y,
    int m,
    int M,
    int n,
    int N) {
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      auto index = sums.get_multidimensional_index(i);
      int r = m + index[1], c = n + index[0];
      if (r < M && c < N) {
        size_t at = size_t(r) * N + c;
        y[at] = finished<T, gate>(
            sums[i] * factor, gate ? others[i] : 0.0f, c, at, bias, other_bias, residual);
      }
    }
  }
}

// y from (m, n) on for a threadgroup; x, y and M are those of one matrix.
template <
    typename T, typename S, int mode, int group, int bits, bool transposed, int rows, int tile_k,
    int simds_m, int simds_n, bool ragged, int gate>
METAL_FUNC void multiply_tensors(
    threadgroup uint* words,
    threadgroup float* factors,
    threadgroup float* offsets,
    const device T* x,
    packed_matrix<S> matrix,
    packed_matrix<S> other,
    const device T* bias,
    const device T* other_bias,
    const device T* residual,
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
  constexpr int count = PART_ROWS * PART_WORDS, scaled = PART_ROWS * PART_GROUPS;
  constexpr int threads = 32 * simds_m * simds_n;
  int simd = thread_index / 32, stage = 0;
  m += simd / simds_n * rows;
  x += size_t(m) * K;
  bool any = m < M;

  auto right = product.template get_right_input_cooperative_tensor<T, T, float>();
  using left = decltype(tensor_rows<T, ragged>::at(product, x, 0, K, 0));
  auto sums = product.template get_destination_cooperative_tensor<
      metal::remove_addrspace_t<left>, metal::remove_addrspace_t<decltype(right)>, float>();
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    sums[i] = 0.0f;
  }
  auto others = sums;
  share_of_part<(count + threads - 1) / threads, (scaled + threads - 1) / threads> share;
  read_part<mode, group, bits, PART_ROWS, PART_WORDS, PART_GROUPS, threads>(
      share, matrix, transposed ? n : 0, transposed ? 0 : n, transposed ? N : K, transposed ? K : N,
      thread_index);
  for (int k = 0; k < K; k += tile_k) {
    auto of_x = tensor_rows<T, ragged>::at(product, x, k, K, max(M - m, 0));
    add_step<T, mode, group, bits, transposed, tile_k, simds_m, simds_n>(
        product, of_x, right, sums, share, words + stage * count, factors + stage * scaled,
        offsets + stage * scaled, gate ? other : matrix, n, gate ? k : k + tile_k, N, K, any,
        thread_index);
    stage = 1 - stage;
    if (gate) {
      add_step<T, mode, group, bits, transposed, tile_k, simds_m, simds_n>(
          product, of_x, right, others, share, words + stage * count, factors + stage * scaled,
          offsets + stage * scaled, matrix, n, k + tile_k, N, K, any, thread_index);
      stage = 1 - stage;
    }
  }
  write_tensor<gate>(
      sums, others, factor, bias, other_bias, residual, y, m, M, n + simd % simds_n * TENSOR_COLUMNS,
      N);
}

template <
    typename T, typename S, int mode, int group, int bits, bool transposed, int rows, int tile_k,
    int simds_m, int simds_n, bool ragged, int gate>
[[kernel]] void qmm_tensor(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    const device T* residual,
    const device uint* w1,
    const device S* scales1,
    const device S* biases1,
    const device T* bias1,
    constant int* shape,
    device T* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint words[2 * PART_ROWS * PART_WORDS];
  threadgroup float factors_of_part[2 * PART_ROWS * PART_GROUPS];
  threadgroup float offsets[mode == AFFINE ? 2 * PART_ROWS * PART_GROUPS : 1];
  packed_matrix<S> matrix = {w, scales, biases}, other = {w1, scales1, biases1};
  multiply_tensors<
      T, S, mode, group, bits, transposed, rows, tile_k, simds_m, simds_n, ragged, gate>(
      words, factors_of_part, offsets, x, matrix, other, bias, bias1, residual, 1.0f, y,
      place.x * rows * simds_m, shape[0], place.y * TENSOR_COLUMNS * simds_n, shape[1], shape[2],
      thread_index);
}
