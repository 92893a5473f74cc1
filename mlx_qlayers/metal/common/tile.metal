// Tiles of rows in threadgroup memory, and products with them.
//
// WARPGROUP: four neighbouring SIMD groups, each with rows of its own, multiply with the same tile in one
// operation (see uses_warpgroup). NVIDIA's Hopper GPUs have it: there the functions of this file come from
// the CUDA shim. A tile then begins at a multiple of 1024 bytes and has a swizzled layout: use
// place_in_tile.

#include "fragment.metal"

#include <metal_stdlib>
using namespace metal;

// Whether products of rows of these widths can use a warpgroup: each of `owners` SIMD groups owns rows, and
// multiplies with one of `slices` slices of the columns.
template <typename T>
constexpr bool uses_warpgroup(int owners, int slices, int width, int other_width) {
  return false;
}

// Storage of tiles, in vectors of 16 bytes.
template <int COUNT>
struct tile_packs {
  uint4 pack[COUNT];
};
// The stride of rows: an odd number of 16-byte vectors, so that rows begin in different banks.
constexpr int tile_stride(int width, int bytes) {
  return (width * bytes / 16 | 1) * 16 / bytes;
}
// The elements of a tile with its padding, and the place of one of them; a 16-byte vector is contiguous.
template <typename T, bool WARPGROUP>
constexpr int tile_elements(int rows, int width) {
  return rows * tile_stride(width, sizeof(T));
}
template <typename T, int ROWS, int WIDTH, bool WARPGROUP>
METAL_FUNC int place_in_tile(uint row, uint column) {
  return row * tile_stride(WIDTH, sizeof(T)) + column;
}

// Copies 16 bytes from device memory, or zeros; asynchronous until wait_for_copies.
template <typename T>
METAL_FUNC void copy_pack(threadgroup T* to, const device T* from, bool inside) {
  *reinterpret_cast<threadgroup uint4*>(to) =
      inside ? *reinterpret_cast<const device uint4*>(from) : uint4(0);
}
// Commits this thread's copies as a group; waits for all groups but the LATER last ones.
METAL_FUNC void end_copies() {}
template <int LATER>
METAL_FUNC void wait_for_copies() {}
// Makes this thread's copies and writes visible to a warpgroup's products behind the next barrier.
METAL_FUNC void show_to_products() {}

// products = left * tile^T, or += if ADD: 16 rows by the tile's COUNT * 8 rows, from this column on.
template <typename T, int STEPS, int COUNT, int WIDTH, bool WARPGROUP, bool ADD = false>
METAL_FUNC void multiply_by_rows(
    thread sum_fragment* products,
    thread const left_fragment<T>* left,
    const threadgroup T* tile,
    int column,
    uint lane) {
  constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
#pragma unroll
  for (int n = 0; n < (ADD ? 0 : COUNT); n++) {
    products[n].part[0] = products[n].part[1] = float2(0.0f);
  }
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
#pragma unroll
    for (int n = 0; n < COUNT; n += 2) {
      right_fragment<T> right[2];
      load_right_transposed_pair(
          right, tile + (8 * n * STRIDE + 16 * i + column), STRIDE, lane);
      multiply_accumulate(products[n], left[i], right[0]);
      multiply_accumulate(products[n + 1], left[i], right[1]);
    }
  }
}

// sums += weights * tile: 16 rows by COUNT * 8 columns, over the tile's DEPTH rows.
template <typename T, int DEPTH, int COUNT, int WIDTH, bool WARPGROUP>
METAL_FUNC void add_weighted_rows(
    thread sum_fragment* sums,
    thread const sum_fragment* weights,
    const threadgroup T* tile,
    int column,
    uint lane) {
  constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
#pragma unroll
  for (int i = 0; i < DEPTH / 16; i++) {
    left_fragment<T> left;
    left_from_sums(left, weights[2 * i], weights[2 * i + 1]);
    right_fragment<T> right[2];
    const threadgroup T* at = tile + (16 * i * STRIDE + column);
#pragma unroll
    for (int n = 0; n < COUNT / 2 * 2; n += 2) {
      load_right_pair(right, at + 8 * n, STRIDE, lane);
      multiply_accumulate(sums[n], left, right[0]);
      multiply_accumulate(sums[n + 1], left, right[1]);
    }
    if (COUNT % 2) {
      load_right(right[0], at + 8 * (COUNT - 1), STRIDE, lane);
      multiply_accumulate(sums[COUNT - 1], left, right[0]);
    }
  }
}
