// Products of one warp with rows of device memory, as attention/tensor_*.metal and qmm_tensor.metal
// have them. The warps of a threadgroup take the same rows at the same time, so that they copy them to
// shared memory together, the next ones while these are multiplied, by the products of tile.h.
//
// All warps take part in each product. Between two products of an operation the kernel has a barrier,
// behind which copies have arrived (simd.h) and what was multiplied before it may be overwritten; the
// left operand of rows by rows is that of the first one.
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
template <int ROWS, int WIDTH, bool WARPGROUP, typename T>
void copy_tile(T* to, const T* p, uint stride, int rows, int columns) {
  constexpr int EACH = 16 / sizeof(T), PACKS = WIDTH / EACH, STEP = MSL_GROUP_SIZE / PACKS;
  auto place = place_in_tile<T, ROWS, WIDTH, WARPGROUP>;
  if (reinterpret_cast<uint64_t>(p) % 16 == 0 && stride % EACH == 0 && columns % EACH == 0 &&
      ROWS % STEP == 0) {
    int row = threadIdx.x / PACKS, column = threadIdx.x % PACKS * EACH;
    // If the distance of eight rows is the same everywhere, offsets are constants.
    bool even = STEP % 8 == 0;
    T* at = to + place(row, column);
    const T* from = p + uint64_t(row * stride) + column;
    bool all = rows >= ROWS && columns == WIDTH;
    rows = column < columns ? rows - row : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += STEP * stride)
      copy_pack(even ? at + place(i, 0) : to + place(row + i, column), from, all || i < rows);
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * WIDTH; i += MSL_GROUP_SIZE) {
      int row = i / WIDTH, column = i % WIDTH;
      bool inside = row < rows && column < columns;
      to[place(row, column)] = inside ? p[uint64_t(row * stride) + column] : T(0.0f);
    }
  }
}

// The state of an operation between its products: the rows in flight, and its left operand.
template <uint64_t D, int PLACE>
struct shared_operand {
  static constexpr int M = D & 0xffff, N = D >> 16 & 0xffff, K = D >> 32 & 0xffff;
  static constexpr bool TRANSPOSED = D >> 49 & 1, ACCUMULATE = D >> 50 & 1;
  // Widest rows of the left operand.
  static constexpr int WIDEST = 256;
  mutable const void *here = nullptr, *coming = nullptr;
  mutable bool kept = false;
  mutable int slot = 1;
  mutable uint left[WIDEST / 16][4];

  // A tile, twice where that leaves room for others: of 64 rows in dynamic memory, at `PACK`.
  template <typename T, int ROWS, int WIDTH, int MOST, int PACK = -1>
  struct slots {
    static constexpr bool WARPGROUP = uses_warpgroup<T>(MSL_GROUP_SIZE / 32, 1, WIDTH, WIDTH);
    static constexpr int PACKS = tile_elements<T, WARPGROUP>(ROWS, WIDTH) * sizeof(T) / 16;
    static constexpr int SLOTS = PACKS > MOST / 16 ? 1 : 2;
    static T* at(int slot) {
      // All lanes have the same: said so, addresses are computed once a warp.
      int place = SLOTS == 1 ? 0 : __shfl_sync(0xffffffffu, slot, 0);
      if constexpr (PACK >= 0) {
        static_assert(PACKS * SLOTS <= 2048, "half of the dynamic memory");
        uint4* packs = reinterpret_cast<uint4*>(msl_dynamic_memory);
        return reinterpret_cast<T*>(packs + PACK + place * PACKS);
      } else {
        __shared__ tile_packs<PACKS> packs[SLOTS];
        return reinterpret_cast<T*>(packs[place].pack);
      }
    }
    static void copy(int slot, const T* p, uint64_t stride, int rows, int columns) {
      copy_tile<ROWS, WIDTH, WARPGROUP>(at(slot), p, stride, rows, columns);
    }
  };

  // These rows for all warps. Copies of the `next` rows start, if any of them exist: they have arrived after
  // the next barrier of the kernel.
  template <typename TILE, typename T, typename E, typename S>
  const T* arrived(const tensor<T, E, S>& from, const T* next, int rows, int columns) const {
    slot = 1 - slot;
    if (from.p != coming) {
      wait_for_copies<0>();
      __syncthreads();
      TILE::copy(slot, from.p, from.stride, from.extents.values[1], from.extents.values[0]);
      end_copies();
      wait_for_copies<0>();
      show_to_products();
      __syncthreads();
    }
    coming = nullptr;
    if (TILE::SLOTS > 1 && rows > 0 && columns > 0) {
      TILE::copy(1 - slot, next, from.stride, rows, columns);
      coming = next;
    }
    return TILE::at(slot);
  }
  template <typename TILE, int ROWS, typename T, typename E, typename S>
  const T* arrived_rows(const tensor<T, E, S>& from) const {
    const auto& extents = from.extents.values;
    return arrived<TILE>(from, from.p + ROWS * from.stride, extents[1] - ROWS, extents[0]);
  }

  // Rows of memory that all products have on their left, in registers: by whole words if they can be.
  template <int WIDTH, bool WORDS, typename T, typename E, typename S>
  void keep(const tensor<T, E, S>& from) const {
    int lane = threadIdx.x % 32, depth = from.extents.values[0];
    kept = true;
#pragma unroll
    for (int i = 0; i < WIDTH / 4; i++) {
      int row = lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8;
      const T* p = from.p + int64_t(row) * from.stride + column;
      bool there = row < from.extents.values[1] && column < depth, both = column + 1 < depth;
      if constexpr (WORDS)
        left[i / 4][i % 4] = there ? *reinterpret_cast<const uint*>(p) : 0;
      else
        left[i / 4][i % 4] = as_type<uint>(
            vec<T, 2>(there ? p[0] : T(0.0f), there && both ? p[1] : T(0.0f)));
    }
  }

  template <int WIDTH, typename T, typename E, typename S>
  void by_rows(const tensor<T, E, S>& rows, const tensor<T, E, S>& right, float* to) const {
    using tile = slots<T, N, WIDTH, N == 64 ? 16384 : 8192, N == 64 ? 2048 : -1>;
    if (!kept) {
      uint64_t bytes = reinterpret_cast<uint64_t>(rows.p) | uint(rows.stride * 2);
      if (bytes % 4 == 0 && rows.extents.values[0] % 2 == 0)
        keep<WIDTH, true>(rows);
      else
        keep<WIDTH, false>(rows);
    }
    const T* at = arrived_rows<tile, N>(right);
    left_fragment<T> operand[WIDTH / 16];
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        operand[i].part[k] = as_type<vec<T, 2>>(left[i][k]);
    sum_fragment sums[N / 8];
    // Two such products of one size would get the same registers for their left operands from
    // ptxas 13.0: those named in adjacent lines differ.
    constexpr int MOST = PLACE % 2 ? 16 : 2;
    multiply_by_rows<T, WIDTH / 16, N / 8, WIDTH, tile::WARPGROUP, false, MOST>(
        sums, operand, at, 0, threadIdx.x % 32);
    if (tile::SLOTS > 1) {
      right.tile = at;
      right.tile_width = WIDTH;
    }
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
        MSL_LOCKSTEP && TRANSPOSED && !ACCUMULATE && K == 0 && M == 16 && sizeof(T) == 2,
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
    static_assert(MSL_LOCKSTEP && !TRANSPOSED && ACCUMULATE && M == 16 && sizeof(T) == 2, "on CUDA: added");
    constexpr int WIDTH = (N + 63) / 64 * 64;
    using tile = slots<T, K, WIDTH, 16384, K == 64 ? 0 : -1>;
    // Rows that another operation was given are there still.
    bool there = right.tile_width == WIDTH;
    const T* at = there ? right.tile : arrived_rows<tile, K>(right);
    sum_fragment of_weights[K / 8], sums[N / 8];
    take_sums(of_weights, weights.elements);
    take_sums(sums, to);
    add_weighted_rows<T, K, N / 8, WIDTH, tile::WARPGROUP>(
        sums, of_weights, at, 0, threadIdx.x % 32);
    put_sums(to, sums);
  }

  // Sums of their transpose, to (M x N) += rows (M x K) * decoded weights.
  template <typename T, typename E, typename S>
  void add_decoded(const tensor<T, E, S>& rows, const T* weights, float* to) const {
    using tile = slots<T, M, K, 16384>;
    const auto& extents = rows.extents.values;
    // A gate's second matrix is multiplied with the same rows again.
    if (rows.p != here)
      arrived<tile>(rows, rows.p + K, extents[1], extents[0] - K);
    here = rows.p;
    const T* at = tile::at(slot);
    left_fragment<T> operand[N / 16][K / 16];
#pragma unroll
    for (int i = 0; i < N * K / 64; i++) {
      int t = i / (K / 4), part = i % (K / 4);
      const T* pair = weights + (2 * t + part % 2) * (K / 4) + part / 4 * 4 + part / 2 % 2 * 2;
      uint both = as_type<uint>(vec<T, 2>(pair[0], pair[1]));
      // Decoded before products begin, which would wait for each other otherwise.
      asm volatile("" : "+r"(both));
      operand[t][part / 4].part[part % 4] = as_type<vec<T, 2>>(both);
    }
#pragma unroll
    for (int t = 0; t < N / 16; t++) {
      sum_fragment sums[M / 8];
#pragma unroll
      for (int i = 0; i < M / 2; i++)
        sums[i / 4].part[i / 2 % 2][i % 2] = to[(i / 4 * (N / 16) + t) * 4 + i % 4];
      multiply_by_rows<T, K / 16, M / 8, K, tile::WARPGROUP, true>(
          sums, operand[t], at, 0, threadIdx.x % 32);
#pragma unroll
      for (int i = 0; i < M / 2; i++)
        to[(i / 4 * (N / 16) + t) * 4 + i % 4] = sums[i / 4].part[i / 2 % 2][i % 2];
    }
  }
};

} // namespace mlx::core::cu
