// Products of one warp with rows of device memory, as attention/tensor_*.metal has them. The warps of
// a threadgroup take the same rows at the same time, so that they copy them to shared memory together,
// the next ones while these are multiplied, by the products of tile.h.
//
// All warps take part in each product, and a kernel has two or more of them by turns.
#pragma once

#include "tensor.h"

namespace mlx::core::cu {

template <typename T>
constexpr bool is_tensor = false;
template <typename T, typename E, typename S>
constexpr bool is_tensor<tensor<T, E, S>> = true;

// Sums 16 x N, as sum_fragment has them, and what there is one of for each row.
template <int N>
struct row_sums {
  static constexpr int COUNT = N / 2;
  static int row(int i) {
    return i / 2 % 2;
  }
  static index_array<int, 2> at(int i) {
    int lane = threadIdx.x % 32;
    return {{i / 4 * 8 + lane % 4 * 2 + i % 2, lane / 4 + row(i) * 8}};
  }
};
struct row_statistics {
  static constexpr int COUNT = 2;
  static index_array<int, 2> at(int i) {
    return {{int(threadIdx.x) % 32 / 4 + i * 8, 0}};
  }
};

// Copies ROWS rows from p on to a tile of WIDTH columns; zeros beyond those that there are.
template <int ROWS, int WIDTH, bool TOGETHER, typename T>
void copy_tile(T* to, const T* p, uint stride, int rows, int columns) {
  constexpr int EACH = 16 / sizeof(T), PACKS = WIDTH / EACH, STEP = MSL_GROUP_SIZE / PACKS;
  auto place = place_in_tile<T, ROWS, WIDTH, TOGETHER>;
  if (reinterpret_cast<uint64_t>(p) % 16 == 0 && stride % EACH == 0 && columns % EACH == 0 &&
      ROWS % STEP == 0) {
    int row = threadIdx.x / PACKS, column = threadIdx.x % PACKS * EACH;
    // Where eight rows on lie as far everywhere, offsets are constants.
    bool even = STEP % 8 == 0;
    T* at = to + place(row, column);
    const T* from = p + uint64_t(row * stride) + column;
    rows = column < columns ? rows - row : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += STEP * stride)
      copy_pack(even ? at + place(i, 0) : to + place(row + i, column), i < rows ? from : p, i < rows);
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * WIDTH; i += MSL_GROUP_SIZE) {
      int row = i / WIDTH, column = i % WIDTH;
      bool inside = row < rows && column < columns;
      to[place(row, column)] = inside ? p[uint64_t(row * stride) + column] : T(0.0f);
    }
  }
}

// What an operation keeps between its products: which rows are coming, and its left operand.
template <uint64_t D, int PLACE>
struct shared_operand {
  static constexpr int M = D & 0xffff, N = D >> 16 & 0xffff, K = D >> 32 & 0xffff;
  static constexpr bool TRANSPOSED = D >> 49 & 1, ACCUMULATE = D >> 50 & 1;
  // Widest rows of the left operand.
  static constexpr int WIDEST = 256;
  mutable const void *coming = nullptr, *kept = nullptr;
  mutable int slot = 0;
  mutable uint left[WIDEST / 16][4];

  template <typename T, int ROWS, int WIDTH>
  struct slots {
    static constexpr bool TOGETHER = products_together<T>(MSL_GROUP_SIZE / 32, 1, WIDTH, WIDTH);
    static constexpr int PACKS = tile_elements<T, TOGETHER>(ROWS, WIDTH) * sizeof(T) / 16;
    static constexpr int SLOTS = PACKS > 512 ? 1 : 2;
    static T* at(int slot) {
      __shared__ tile_packs<PACKS> packs[SLOTS];
      return reinterpret_cast<T*>(packs[slot % SLOTS].pack);
    }
    static void copy(int slot, const T* p, uint64_t stride, int rows, int columns) {
      copy_tile<ROWS, WIDTH, TOGETHER>(at(slot), p, stride, rows, columns);
    }
  };

  // Waits until these rows are there, for all warps.
  template <typename TILE, typename T, typename E, typename S>
  T* wait_for(const tensor<T, E, S>& from) const {
    if (from.p != coming) {
      wait_for_copies<0>();
      __syncthreads();
      TILE::copy(slot, from.p, from.stride, from.extents.values[1], from.extents.values[0]);
      end_copies();
      wait_for_copies<0>();
    } else {
      // The other product's copies may still be under way.
      wait_for_copies<1>();
    }
    show_to_products();
    __syncthreads();
    return TILE::at(slot);
  }
  // The rows behind these begin to come, where nobody reads any more.
  template <typename TILE, int ROWS, typename T, typename E, typename S>
  void begin_next(const tensor<T, E, S>& from) const {
    if constexpr (TILE::SLOTS == 1)
      __syncthreads();
    slot = 1 - slot;
    coming = nullptr;
    if (from.extents.values[1] > ROWS) {
      const T* next = from.p + ROWS * from.stride;
      TILE::copy(slot, next, from.stride, from.extents.values[1] - ROWS, from.extents.values[0]);
      coming = next;
    }
    end_copies();
  }

  // Rows of memory that all products have on their left, in registers.
  template <int WIDTH, typename T, typename E, typename S>
  void keep(const tensor<T, E, S>& from) const {
    int lane = threadIdx.x % 32, depth = from.extents.values[0];
    kept = from.p;
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        int row = lane / 4 + k % 2 * 8, column = i * 16 + lane % 4 * 2 + k / 2 * 8;
        const T* p = from.p + row * from.stride + column;
        bool there = row < from.extents.values[1];
        left[i][k] = as_type<uint>(vec<T, 2>(
            there && column < depth ? p[0] : T(0.0f),
            there && column + 1 < depth ? p[1] : T(0.0f)));
      }
  }

  template <int WIDTH, typename T, typename E, typename S>
  void by_rows(const tensor<T, E, S>& rows, const tensor<T, E, S>& right, float* to) const {
    using tile = slots<T, N, WIDTH>;
    if (rows.p != kept)
      keep<WIDTH>(rows);
    const T* at = wait_for<tile>(right);
    left_fragment<T> operand[WIDTH / 16];
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        operand[i].part[k] = as_type<vec<T, 2>>(left[i][k]);
    sum_fragment sums[N / 8];
    multiply_by_rows<T, WIDTH / 16, N / 8, WIDTH, tile::TOGETHER>(
        sums, operand, at, 0, threadIdx.x % 32);
    begin_next<tile, N>(right);
    put_sums(to, sums);
  }
  template <int COUNT>
  static void put_sums(float* to, const sum_fragment (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < 4 * COUNT; i++)
      to[i] = sums[i / 4].part[i / 2 % 2][i % 2];
  }
  template <int COUNT>
  static void take_sums(sum_fragment (&sums)[COUNT], const float* from) {
#pragma unroll
    for (int i = 0; i < 2 * COUNT; i++)
      sums[i / 2].part[i % 2] = float2(from[2 * i], from[2 * i + 1]);
  }

  // to (16 x N) = rows * right^T, over all of their depth.
  template <typename T, typename E, typename S>
  void multiply_rows(const tensor<T, E, S>& rows, const tensor<T, E, S>& right, float* to) const {
    static_assert(
        TRANSPOSED && !ACCUMULATE && K == 0 && M == 16 && sizeof(T) == 2,
        "on CUDA: 16 rows of half precision by rows, or weights of rows that are added");
    int depth = rows.extents.values[0];
    if (depth <= 64)
      by_rows<64>(rows, right, to);
    else if (depth <= 128)
      by_rows<128>(rows, right, to);
    else if (depth <= 192)
      by_rows<192>(rows, right, to);
    else if (depth <= WIDEST)
      by_rows<WIDEST>(rows, right, to);
    else
      __trap();
  }
  // to (16 x N) += weights (16 x K) * right.
  template <typename W, typename T, typename E, typename S>
  void add_weighted(const W& weights, const tensor<T, E, S>& right, float* to) const {
    static_assert(!TRANSPOSED && ACCUMULATE && M == 16 && sizeof(T) == 2, "on CUDA: added");
    constexpr int WIDTH = (N + 63) / 64 * 64;
    using tile = slots<T, K, WIDTH>;
    const T* at = wait_for<tile>(right);
    sum_fragment of_weights[K / 8], sums[N / 8];
    take_sums(of_weights, weights.elements);
    take_sums(sums, to);
    add_weighted_rows<T, K, N / 8, WIDTH, tile::TOGETHER>(
        sums, of_weights, at, 0, threadIdx.x % 32);
    begin_next<tile, K>(right);
    put_sums(to, sums);
  }
};

} // namespace mlx::core::cu
