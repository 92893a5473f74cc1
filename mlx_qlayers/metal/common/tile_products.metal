// Products that are asynchronous where the GPU can do that, and sums of many threadgroups.
//
// Between the begin of a product and finish_products its sums must not be accessed, nor its operands
// changed. On NVIDIA GPUs the functions of this file come from the CUDA shim.

#include "tile.metal"

#include <metal_stdlib>
using namespace metal;

// The number of columns of a tile that are multiplied; the last ones may be padding.
constexpr int product_columns() {
  return 16;
}

// The storage that a kernel declares, and the address of all of it: CUDA has dynamic shared memory.
constexpr int declared_packs(int count) {
  return count;
}
template <int COUNT>
METAL_FUNC threadgroup uint4* all_packs(threadgroup tile_packs<COUNT>& tiles) {
  return tiles.pack;
}

// products = left * tile^T: 16 rows by COUNT * 8 rows, over STEPS * 16 columns from this one on.
template <typename T, int STEPS, int COUNT, int WIDTH, bool WARPGROUP>
METAL_FUNC void begin_by_rows(
    thread sum_fragment* products,
    thread const left_fragment<T>* left,
    const threadgroup T* tile,
    int column,
    uint lane) {
  multiply_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(products, left, tile, column, lane);
}

// The same over all columns, of rows `row` to `row` + 15 of a tile of ROWS rows with rows of a tile of OTHERS. The
// rows of the four SIMD groups of a WARPGROUP are contiguous.
template <typename T, int STEPS, int COUNT, int ROWS, int OTHERS, int WIDTH, bool WARPGROUP>
METAL_FUNC void begin_rows_by_rows(
    thread sum_fragment* products,
    const threadgroup T* left,
    int row,
    const threadgroup T* tile,
    uint lane) {
  left_fragment<T> rows[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
    load_left(rows[i], left + (row * STRIDE + 16 * i), STRIDE, lane);
  }
  multiply_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(products, rows, tile, 0, lane);
}

// sums += weights * tile: 16 rows by COUNT * 8 columns from this one on, over the tile's DEPTH rows.
template <typename T, int DEPTH, int COUNT, int WIDTH, bool WARPGROUP>
METAL_FUNC void begin_weighted_rows(
    thread sum_fragment* sums,
    thread const left_fragment<T>* weights,
    const threadgroup T* tile,
    int column,
    uint lane) {
  constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
#pragma unroll
  for (int i = 0; i < DEPTH / 16; i++) {
#pragma unroll
    for (int n = 0; n < COUNT; n += 2) {
      right_fragment<T> right[2];
      load_right_pair(right, tile + (16 * i * STRIDE + column + 8 * n), STRIDE, lane);
      multiply_accumulate(sums[n], weights[i], right[0]);
      multiply_accumulate(sums[n + 1], weights[i], right[1]);
    }
  }
}

// DOWN: products = left^T * tile, columns `from` to `from` + 15 of a tile of LEFT columns by COUNT * 8 columns from
// this column on, over the DEPTH rows of both. Else sums += left * tile by rows `from` to `from` + 15 of a tile of
// LEFT rows, over its DEPTH columns.
template <typename T, int DEPTH, int COUNT, int LEFT, int WIDTH, bool WARPGROUP, bool DOWN>
METAL_FUNC void begin_by_tile(
    thread sum_fragment* sums,
    const threadgroup T* left,
    int from,
    const threadgroup T* tile,
    int column,
    uint lane) {
  constexpr int STRIDE = tile_stride(DOWN ? LEFT : DEPTH, sizeof(T));
  left_fragment<T> rows[DEPTH / 16];
#pragma unroll
  for (int i = 0; i < DEPTH / 16; i++) {
    if (DOWN) {
      load_left_transposed(rows[i], left + (16 * i * STRIDE + from), STRIDE, lane);
    } else {
      load_left(rows[i], left + (from * STRIDE + 16 * i), STRIDE, lane);
    }
  }
#pragma unroll
  for (int n = 0; n < (DOWN ? COUNT : 0); n++) {
    sums[n].part[0] = sums[n].part[1] = float2(0.0f);
  }
  begin_weighted_rows<T, DEPTH, COUNT, WIDTH, WARPGROUP>(sums, rows, tile, column, lane);
}

// Waits for all products that were begun but the LATER last ones; then these sums are valid.
template <int LATER, int COUNT>
METAL_FUNC void finish_products(thread sum_fragment* sums) {}
// Orders the following code after the computation of x, which is not negative.
METAL_FUNC void complete(float x) {}
// From here on their left operands may change.
template <typename T, int COUNT>
METAL_FUNC void release_operands(thread left_fragment<T>* operands) {}

// Stores 16 x 16 elements to a tile of ROWS rows.
template <typename T, int ROWS, int WIDTH, bool WARPGROUP>
METAL_FUNC void store_left(
    left_fragment<T> f, threadgroup T* tile, uint row, uint column, uint lane) {
#pragma unroll
  for (int p = 0; p < 4; p++) {
    uint r = row + fragment_row(lane) + p % 2 * 8, c = column + fragment_col(lane) + p / 2 * 8;
    *reinterpret_cast<threadgroup metal::vec<T, 2>*>(
        tile + place_in_tile<T, ROWS, WIDTH, WARPGROUP>(r, c)) = f.part[p];
  }
}

// Adds 16 rows of COUNT * 8 columns atomically to 128 * COUNT sums in device memory, in the order of lanes.
template <int COUNT>
METAL_FUNC void add_block(
    device atomic<float>* to, thread const sum_fragment* sums, float factor, uint lane) {
#pragma unroll
  for (int i = 0; i < 4 * COUNT; i++) {
    float x = sums[i / 4].part[i / 2 % 2][i % 2] * factor;
    atomic_fetch_add_explicit(to + (i / 4 * 128 + lane * 4 + i % 4), x, memory_order_relaxed);
  }
}

// A split barrier (arrive and wait) of `count` threads, which is initialised before an ordinary barrier. Waits
// alternate between parity 0 and 1.
METAL_FUNC void start_split_barrier(threadgroup ulong* split_barrier, int count, uint thread_index) {}
METAL_FUNC void arrive_at(threadgroup ulong* split_barrier) {}
METAL_FUNC void wait_for(threadgroup ulong* split_barrier, int parity) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
