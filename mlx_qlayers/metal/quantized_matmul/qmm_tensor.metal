// Product of many rows with a quantized matrix by Metal 4's tensor operations:
//
//   y (M, N) = x (M, K) * w + bias,   or   gate(x * w + bias) * (x * w1 + bias1),   or   + residual
//
// packed.metal says how w is packed, transposed (N, K) or not (K, N).
//
// A threadgroup computes rows * simds_m x 32 * simds_n of y, each SIMD group rows x 32, in steps of
// tile_k. If `staged`, the threadgroup dequantizes w once, see tensor_staged.metal. Else it copies packed
// words and scales of w to threadgroup memory, through registers that are loaded while the previous step
// is multiplied; each SIMD group dequantizes them into its cooperative right input and multiplies with
// rows of x in device memory. Sums are in a cooperative destination, one for each matrix of a gate, whose
// steps alternate. Layouts of cooperative tensors are queried, never assumed.
//
//   grid (ceil(M / (rows * simds_m)) * threads, ceil(N / (32 * simds_n)), parts), threadgroup
//   (threads, 1, 1) with threads = 32 * simds_m * simds_n; threadgroup memory 2 * (words, scales
//   and biases of a step), or 2 * (the unpacked part of a step).
//
// With split-K into `parts`, part z takes `depth` elements of K from z * depth on, a multiple of
// tile_k, and writes its sums to plane z of y, in float32, for qmm_sum to add.
//
// If tile_k does not divide K, the product is `ragged`: then x is a cooperative input too, or the last step
// is clipped.
// Needs Metal 4, macOS 26.2; never run on the hardware that it is for.

#include "tensor_staged.metal"

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
using namespace metal;

// The part of w that a threadgroup needs for a step: its rows and columns as they are packed.
#define PART_ROWS (transposed ? TENSOR_COLUMNS * simds_n : tile_k)
#define PART_COLUMNS (transposed ? tile_k : TENSOR_COLUMNS * simds_n)
#define PART_WORDS (PART_COLUMNS * bits / 32)
#define PART_GROUPS (PART_COLUMNS > group ? PART_COLUMNS / group : 1)
#define PART_SIZE(of_row) (staged ? 1 : 2 * PART_ROWS * (of_row))

// A thread's words, scales and biases of a part.
template <typename S, int words, int groups>
struct held_part {
  uint word[words];
  S factor[groups], offset[groups];
};

// Loads the part at (row, column) of a matrix (rows, columns), with zeros beyond it.
template <
    int mode, int group, int bits, int part_rows, int part_words, int part_groups, int threads,
    typename S, typename H>
METAL_FUNC void fetch_part(
    thread H& held,
    thread const packed_matrix<S>& from,
    int row,
    int column,
    int rows,
    int columns,
    int thread_index) {
  int row_words = columns * bits / 32, row_groups = columns / group;
  // If `even`, all words of a thread belong to one column.
  constexpr bool even = threads % part_words == 0;
  int first_row = thread_index / part_words, first_word = thread_index % part_words;
#pragma unroll
  for (int j = 0; j < PIECES_PER_THREAD(part_rows * part_words, threads); j++) {
    int i = thread_index + j * threads;
    int r = row + (even ? first_row + j * (threads / part_words) : i / part_words);
    int c = column * bits / 32 + (even ? first_word : i % part_words);
    bool inside = i < part_rows * part_words && r < rows && c < row_words;
    held.word[j] = 0;
    if (inside) {
      load_packs<1, READ_AHEAD>(held.word + j, from.w + (size_t(r) * row_words + c), true);
    }
  }
#pragma unroll
  for (int j = 0; j < PIECES_PER_THREAD(part_rows * part_groups, threads); j++) {
    int i = thread_index + j * threads;
    int r = row + i / part_groups, c = column / group + i % part_groups;
    bool inside = i < part_rows * part_groups && r < rows && c < row_groups;
    size_t at = size_t(r) * row_groups + c;
    held.factor[j] = inside ? load_ahead(from.scales + at) : S(0);
    if (mode == AFFINE) {
      held.offset[j] = inside ? load_ahead(from.biases + at) : S(0);
    }
  }
}

// Stores a thread's part to threadgroup memory; `moved` times the scales are subtracted from the offsets.
template <int mode, int part_rows, int part_words, int part_groups, int threads, typename H>
METAL_FUNC void place_part(
    threadgroup uint* words,
    threadgroup float* factors,
    threadgroup float* offsets,
    thread const H& held,
    float moved,
    int thread_index) {
#pragma unroll
  for (int j = 0; j < PIECES_PER_THREAD(part_rows * part_words, threads); j++) {
    int i = thread_index + j * threads;
    if (i < part_rows * part_words) {
      words[i] = held.word[j];
    }
  }
#pragma unroll
  for (int j = 0; j < PIECES_PER_THREAD(part_rows * part_groups, threads); j++) {
    int i = thread_index + j * threads;
    if (i < part_rows * part_groups) {
      factors[i] = decoded_scale<mode>(held.factor[j]);
      if (mode == AFFINE) {
        offsets[i] = fma(factors[i], moved, float(held.offset[j]));
      }
    }
  }
}

// One element of a part, decoded.
template <int mode, int group, int bits, int part_words, int part_groups, bool in_mantissa>
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
  float value = in_mantissa ? as_type<float>(code << (bits == 8 ? 15 : 16) |
                                             (bits == 8 ? 0x43800000u : 0x43000000u))
                            : decoded<mode>(code);
  return fma(factors[of_group], value, mode == AFFINE ? offsets[of_group] : 0.0f);
}

// The left operand of a SIMD group: rows of x in device memory or, if `ragged`, a cooperative input.
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
  template <typename C>
  METAL_FUNC static void fill(thread C& part, const device T* x, int k, int K, int M) {}
};
template <typename T>
struct tensor_rows<T, true> {
  template <typename P>
  METAL_FUNC static auto at(thread const P& product, const device T* x, int k, int K, int M) {
    return product.template get_left_input_cooperative_tensor<T, T, float>();
  }
  template <typename C>
  METAL_FUNC static void fill(thread C& part, const device T* x, int k, int K, int M) {
    for (ushort i = 0; i < part.get_capacity(); i++) {
      if (part.is_valid_element(i)) {
        auto index = part.get_multidimensional_index(i);
        bool inside = index[0] + k < K && index[1] < M;
        part[i] = inside ? x[size_t(index[1]) * K + k + index[0]] : T(0);
      }
    }
  }
};

// sums += x * w for a step whose part of w is in `stage`. Meanwhile the part of `next` from k on is copied to
// the other stage, which was last read before the barrier of the previous step.
template <
    typename T, int mode, int group, int bits, bool transposed, int tile_k, int simds_m, int simds_n,
    typename S, typename P, typename L, typename R, typename C>
METAL_FUNC void add_step(
    thread const P& product,
    thread L& left,
    thread R& right,
    thread C& sums,
    threadgroup uint* words,
    threadgroup float* factors,
    threadgroup float* offsets,
    int stage,
    thread const packed_matrix<S>& next,
    int n,
    int k,
    int end,
    int N,
    int K,
    bool any,
    int thread_index) {
  constexpr int count = PART_ROWS * PART_WORDS, scaled = PART_ROWS * PART_GROUPS;
  constexpr int threads = 32 * simds_m * simds_n;
  // As in decode_run: the error of a code in a mantissa is below the rounding to half precision.
  constexpr bool in_mantissa = mode == AFFINE && sizeof(T) == 2;
  constexpr float moved = in_mantissa ? (bits == 8 ? -256.0f : -128.0f) : 0.0f;
  held_part<S, PIECES_PER_THREAD(count, threads), PIECES_PER_THREAD(scaled, threads)> held;
  if (k < end) {
    fetch_part<mode, group, bits, PART_ROWS, PART_WORDS, PART_GROUPS, threads>(
        held, next, transposed ? n : k, transposed ? k : n, transposed ? N : K, transposed ? K : N,
        thread_index);
  }
  if (any) {
    int column = thread_index / 32 % simds_n * TENSOR_COLUMNS;
#pragma unroll
    for (ushort i = 0; i < right.get_capacity(); i++) {
      if (right.is_valid_element(i)) {
        auto index = right.get_multidimensional_index(i);
        right[i] = T(part_element<mode, group, bits, PART_WORDS, PART_GROUPS, in_mantissa>(
            words + stage * count, factors + stage * scaled, offsets + stage * scaled,
            index[1] + (transposed ? column : 0), index[0] + (transposed ? 0 : column)));
      }
    }
    product.run(left, right, sums);
  }
  if (k < end) {
    stage = 1 - stage;
    place_part<mode, PART_ROWS, PART_WORDS, PART_GROUPS, threads>(
        words + stage * count, factors + stage * scaled, offsets + stage * scaled, held, moved,
        thread_index);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Computes y from (m, n) on for a threadgroup, over `depth` elements of K from `first` on; x, y and M are
// those of one matrix.
template <
    typename T, typename O, typename S, int mode, int group, int bits, bool transposed, int rows,
    int tile_k, int simds_m, int simds_n, bool ragged, bool staged, int gate>
METAL_FUNC void multiply_tensors(
    threadgroup uint* words,
    threadgroup float* factors,
    threadgroup float* offsets,
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
  if constexpr (staged) {
    multiply_staged<
        T, O, S, mode, group, bits, transposed, rows, tile_k, simds_m, simds_n, ragged, gate>(
        tiles, x, matrix, other, bias, other_bias, residual, factor, y, m, M, n, N, first, depth, K, thread_index);
  } else {
    constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
        rows, TENSOR_COLUMNS, tile_k, false, transposed, sizeof(T) == 2,
        mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
    mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> product;
    int simd = thread_index / 32, stage = 0, end = min(first + depth, K);
    m += simd / simds_n * rows;
    x += size_t(m) * K;
    bool any = m < M;

    auto right = product.template get_right_input_cooperative_tensor<T, T, float>();
    using left = decltype(tensor_rows<T, ragged>::at(product, x, 0, K, 0));
    auto sums = product.template get_destination_cooperative_tensor<
        metal::remove_addrspace_t<left>, metal::remove_addrspace_t<decltype(right)>, float>();
    auto others = product.template get_destination_cooperative_tensor<
        metal::remove_addrspace_t<left>, metal::remove_addrspace_t<decltype(right)>, float>();
    clear_sums(sums);
    clear_sums(others);
    // The step before the first one only loads its part.
    for (int k = first - tile_k; k < end; k += tile_k) {
      bool begun = k >= first;
      int at = max(k, first), rows_left = begun ? max(M - m, 0) : 0;
      auto of_x = tensor_rows<T, ragged>::at(product, x, at, K, rows_left);
      tensor_rows<T, ragged>::fill(of_x, x, at, K, rows_left);
      if (gate && begun) {
        add_step<T, mode, group, bits, transposed, tile_k, simds_m, simds_n>(
            product, of_x, right, sums, words, factors, offsets, stage, other, n, k, end, N, K, any,
            thread_index);
        stage = 1 - stage;
      }
      add_step<T, mode, group, bits, transposed, tile_k, simds_m, simds_n>(
          product, of_x, right, gate ? others : sums, words, factors, offsets, stage, matrix, n,
          k + tile_k, end, N, K, any && begun, thread_index);
      stage = 1 - stage;
    }
    write_tensor<gate>(
        sums, others, factor, bias, other_bias, residual, y, m, M, n + simd % simds_n * TENSOR_COLUMNS,
        N);
  }
}

template <
    typename T, typename O, typename S, int mode, int group, int bits, bool transposed, int rows,
    int tile_k, int simds_m, int simds_n, bool ragged, bool staged, int gate, int RESIDENT,
    bool LOCKSTEP>
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
    device O* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint words[PART_SIZE(PART_WORDS)];
  threadgroup float factors_of_part[PART_SIZE(PART_GROUPS)];
  threadgroup float offsets[mode == AFFINE ? PART_SIZE(PART_GROUPS) : 1];
  threadgroup uint4 packs[STAGED_PACKS];
  packed_matrix<S> matrix = {w, scales, biases}, other = {w1, scales1, biases1};
  int M = shape[0], N = shape[1], depth = shape[3];
  multiply_tensors<
      T, O, S, mode, group, bits, transposed, rows, tile_k, simds_m, simds_n, ragged, staged, gate>(
      words, factors_of_part, offsets, reinterpret_cast<threadgroup T*>(packs), x, matrix, other, bias, bias1, residual, 1.0f,
      y + place.z * size_t(M) * N, place.x * rows * simds_m, M,
      place.y * TENSOR_COLUMNS * simds_n, N, place.z * depth, depth, shape[2], thread_index);
}
