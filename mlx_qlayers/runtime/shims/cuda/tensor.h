// Metal 4's tensors on NVIDIA GPUs: what metal/int8 uses of them, and in warp_tensor.h what
// quantized_matmul/qmm_tensor.metal does. An operand of metal/int8 in device memory of 8-bit
// integers goes by asynchronous copies through shared memory, four steps of 128 bytes deep at a time,
// to products of four warps at once, which keep 64 x 256 sums in registers.
//
// The elements of a cooperative tensor lie where Hopper's tensor cores leave them: in each lane two
// neighbours of a row, then those eight rows below.
#pragma once

#include "tile_products.h"

namespace mlx::core::cu {

constexpr uint64_t dynamic_extent = ~0ull;
struct tensor_inline {};
template <typename T, int N>
struct index_array {
  T values[N];
  T operator[](int i) const {
    return values[i];
  }
};
template <typename T, int N>
using array = index_array<T, N>;
template <typename I, int R>
struct dextents {
  I values[R];
  template <typename... E>
  explicit dextents(E... extents) : values{I(extents)...} {}
};
template <typename T, typename E, typename D>
struct tensor {
  using element = T;
  T* p;
  E extents;
  int stride;
  // The copy of these rows in shared memory that an operation left there, and its row stride.
  mutable const T* tile = nullptr;
  mutable int tile_width = 0;
  tensor(T* from, E given) : p(from), extents(given), stride(given.values[0]) {}
  tensor(T* from, E given, index_array<int, 2> strides)
      : p(from), extents(given), stride(strides.values[1]) {}
  tensor slice(int column, int row) const {
    tensor part = *this;
    part.p += int64_t(row) * stride + column;
    part.extents.values[0] -= column;
    part.extents.values[1] -= row;
    part.tile_width = 0;
    return part;
  }
};
// PLACE is the scope that the text of a one-warp operation names: see keywords.h.
template <int N, int PLACE = 0>
struct execution_simdgroups {
  static constexpr int COUNT = N;
};
template <typename T>
using remove_addrspace_t = T;

// Eight warps, 128 x 256: of the first four the upper half.
struct sums_of_bytes {
  static constexpr int COUNT = 128;
  static index_array<int, 2> at(int i) {
    int thread = threadIdx.x, lane = thread % 32;
    return {{i / 4 * 8 + lane % 4 * 2 + i % 2, thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8}};
  }
};
template <typename T, typename LAYOUT>
struct cooperative_tensor;
template <typename T, typename LAYOUT>
struct element_iterator {
  cooperative_tensor<T, LAYOUT>* of;
  int i;
  T& operator*() const {
    return of->elements[i];
  }
  void operator++(int) {
    i++;
  }
  bool operator!=(element_iterator other) const {
    return i != other.i;
  }
  int operator-(element_iterator other) const {
    return i - other.i;
  }
  constexpr bool is_valid_element() const {
    return true;
  }
  index_array<int, 2> get_multidimensional_index() const {
    return LAYOUT::at(i);
  }
};
template <typename T, typename LAYOUT>
struct cooperative_tensor {
  T elements[LAYOUT::COUNT];
  element_iterator<T, LAYOUT> begin() {
    return {this, 0};
  }
  element_iterator<T, LAYOUT> end() {
    return {this, LAYOUT::COUNT};
  }
  // That of a row, from an iterator of a matrix.
  template <typename E, typename OTHER>
  element_iterator<T, LAYOUT> map_iterator(element_iterator<E, OTHER> other) {
    return {this, OTHER::row(other.i)};
  }
  constexpr ushort get_capacity() const {
    return LAYOUT::COUNT;
  }
  constexpr bool is_valid_element(int) const {
    return true;
  }
  index_array<int, 2> get_multidimensional_index(int i) const {
    return LAYOUT::at(i);
  }
  T& operator[](int i) {
    return elements[i];
  }
};

#define MSL_INT(n) "+r"(sum[n])
#define MSL_INTS_4(n) MSL_INT(n), MSL_INT(n + 1), MSL_INT(n + 2), MSL_INT(n + 3)
#define MSL_INTS_16(n) MSL_INTS_4(n), MSL_INTS_4(n + 4), MSL_INTS_4(n + 8), MSL_INTS_4(n + 12)
#define MSL_INTS_64(n) MSL_INTS_16(n), MSL_INTS_16(n + 16), MSL_INTS_16(n + 32), MSL_INTS_16(n + 48)
#define MSL_INT_NAMES \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// sum (64 x 256 of four warps) = left (64 x 32) * right (256 x 32), or += if `add`.
inline void product_of_bytes(int* sum, ulong left, ulong right, int add) {
  asm volatile("{ .reg .pred add;\n setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" MSL_INT_NAMES "}, %128, %129, add; }"
      : MSL_INTS_64(0), MSL_INTS_64(64)
      : "l"(left), "l"(right), "r"(add));
}
inline void pin_integers(int* sum) {
  asm volatile("" : MSL_INTS_64(0), MSL_INTS_64(64) :: "memory");
}
#undef MSL_INT

// A step of 128 bytes of `rows` rows, as panels whose packs of 16 bytes are swizzled; zeros where
// there is nothing. A view may begin at any byte, and asynchronous copies at multiples of 16 alone.
template <int ROWS, int THREADS>
void copy_bytes(unsigned char* to, const int8_t* from, int k, int K, int rows) {
  int thread = threadIdx.x, pack = thread % 8;
  bool inside = k + pack * 16 < K;
  if (reinterpret_cast<uint64_t>(from) % 16 != 0) {
#pragma unroll 1
    for (int i = thread; i < ROWS * 128; i += THREADS) {
      int row = i / 128, column = i % 128;
      to[row * 128 + (column / 16 ^ row % 8) * 16 + column % 16] =
          row < rows && k + column < K ? from[uint64_t(row) * K + k + column] : 0;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < ROWS * 8 / THREADS; i++) {
    int row = thread / 8 + i * (THREADS / 8);
    bool there = inside && row < rows;
    copy_pack(
        to + row * 128 + (pack ^ row % 8) * 16,
        reinterpret_cast<const unsigned char*>(from) + (there ? uint64_t(row) * K + k + pack * 16 : 0),
        there);
  }
}

// sum (128 x 256) = left (rows, K) * right (columns, K)^T.
inline void multiply_bytes(
    int* sum, const int8_t* left, const int8_t* right, int rows, int columns, int K) {
  constexpr int STAGES = 4, THREADS = 256, LEFT = 128 * 128, STAGE = LEFT + 256 * 128;
  int group = threadIdx.x / 128, steps = (K + 127) / 128;
  auto fetch = [&](int step) {
    if (step < steps) {
      unsigned char* to = msl_dynamic_memory + step % STAGES * STAGE;
      copy_bytes<128, THREADS>(to, left, step * 128, K, rows);
      copy_bytes<256, THREADS>(to + LEFT, right, step * 128, K, columns);
    }
    end_copies();
  };
  // The overwritten rows were multiplied two steps ago, by all warps before the last barrier.
  for (int step = 0; step < STAGES - 2; step++)
    fetch(step);
  for (int step = 0; step < steps; step++) {
    wait_for_copies<STAGES - 3>();
    show_to_products();
    __syncthreads();
    fetch(step + STAGES - 2);
    unsigned char* at = msl_dynamic_memory + step % STAGES * STAGE;
    ulong a = tile_operand(at + group * (64 * 128), 0), b = tile_operand(at + LEFT, 0);
    pin_integers(sum);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4; i++)
      product_of_bytes(sum, a + 2 * i, b + 2 * i, step + i);
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 1;" ::: "memory");
    pin_integers(sum);
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin_integers(sum);
}

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, accumulate;
  constexpr matmul2d_descriptor(
      int m, int n, int k = -1, bool left = false, bool right = false, bool relaxed = false,
      mode how = mode::multiply)
      : m(m), n(n), k(k), transpose_left(left), transpose_right(right),
        accumulate(how == mode::multiply_accumulate) {}
  // The depth is 0 where it is that of the operands.
  constexpr operator uint64_t() const {
    return uint64_t(m) | uint64_t(n) << 16 | uint64_t(k < 0 ? 0 : k) << 32 |
        uint64_t(transpose_left) << 48 | uint64_t(transpose_right) << 49 |
        uint64_t(accumulate) << 50;
  }
};

template <uint64_t D, typename SCOPE>
struct matmul2d {
  template <typename L, typename R, typename C>
  cooperative_tensor<C, sums_of_bytes> get_destination_cooperative_tensor() const {
    static_assert(
        is_same_v<typename L::element, int8_t> && is_same_v<typename R::element, int8_t> &&
            is_same_v<C, int> && D == (128 | 256 << 16 | 1ull << 49) && SCOPE::COUNT == 8,
        "on CUDA: 8-bit integers, 128 x 256 of any depth, the right operand transposed, or one warp");
    return {};
  }
  template <typename L, typename R, typename C>
  void run(const L& left, const R& right, C& to) const {
    multiply_bytes(
        to.elements, left.p, right.p, left.extents.values[1], right.extents.values[1],
        left.extents.values[0]);
  }
};

} // namespace mpp::tensor_ops

} // namespace mlx::core::cu
