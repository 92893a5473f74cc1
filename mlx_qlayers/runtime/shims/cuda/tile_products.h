// The declarations of metal/common/tile_products.metal on NVIDIA GPUs; the contract is written there.
#pragma once

#include "atomic.h"
#include "tile.h"

namespace mlx::core::cu {

extern __shared__ __align__(1024) unsigned char msl_dynamic_memory[];

constexpr int product_columns() {
  return HAS_WARPGROUPS ? 64 : 16;
}

constexpr int declared_packs(int) {
  return 1;
}
template <int COUNT>
uint4* all_packs(tile_packs<COUNT>&) {
  return reinterpret_cast<uint4*>(msl_dynamic_memory);
}

#define MSL_BOTH_4 "%16, %17, add, 1, 1, 0, 0;"
#define MSL_BOTH_ADD_4 "%18"
#define MSL_BOTH_8 "%32, %33, add, 1, 1, 0, 0;"
#define MSL_BOTH_ADD_8 "%34"
#define MSL_BOTH_16 "%64, %65, add, 1, 1, 0, 0;"
#define MSL_BOTH_ADD_16 "%66"

// As tile_product, with both operands in tiles whose rows are along the depth.
#define MSL_TILES_PRODUCT(T, name, COUNT, N)                                       \
  inline void tiles_product_##N(sum_fragment* sum, T, ulong left, ulong right, int add) { \
    asm volatile("{ .reg .pred add;\n setp.ne.b32 add, " MSL_BOTH_ADD_##COUNT ", 0;\n"  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name            \
        " {" MSL_NAMES_##COUNT "}, " MSL_BOTH_##COUNT " }"                         \
        : MSL_SUMS_##COUNT(0)                                                      \
        : "l"(left), "l"(right), "r"(add));                \
  }
#define MSL_TILES_PRODUCTS(T, name)  \
  MSL_TILES_PRODUCT(T, name, 4, 32)  \
  MSL_TILES_PRODUCT(T, name, 8, 64)  \
  MSL_TILES_PRODUCT(T, name, 16, 128)
MSL_TILES_PRODUCTS(half, "f16")
MSL_TILES_PRODUCTS(bfloat, "bf16")
#undef MSL_TILES_PRODUCTS
#undef MSL_TILES_PRODUCT
#undef MSL_SUM

template <typename T, int COUNT>
void tiles_product(sum_fragment* sum, ulong left, ulong right, int add) {
  if constexpr (COUNT == 4)
    tiles_product_32(sum, T(), left, right, add);
  else if constexpr (COUNT == 8)
    tiles_product_64(sum, T(), left, right, add);
  else
    tiles_product_128(sum, T(), left, right, add);
}
template <typename T, int STEPS, int COUNT, int ROWS, int WIDTH, bool TOGETHER>
void begin_rows_by_rows(
    sum_fragment* products, const T* left, int row, const T* tile, uint lane) {
  if constexpr (TOGETHER) {
    constexpr int PART = product_size<COUNT>();
    // What is added to an operand counts packs of 16 bytes.
    ulong rows = tile_operand(left + row / 64 * (64 * 64), 0), first = tile_operand(tile, 0);
    begin_products<COUNT>(products);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int n = 0; n < COUNT; n += PART)
        tiles_product<T, PART>(
            products + n,
            rows + (i / 4 * ROWS * 64 + i % 4 * 16) / 8,
            first + ((i / 4 * COUNT + n) * 8 * 64 + i % 4 * 16) / 8,
            i > 0);
    go_on();
  } else {
    constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
    left_fragment<T> rows[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      load_left(rows[i], left + (row * STRIDE + 16 * i), STRIDE, lane);
    multiply_by_rows<T, STEPS, COUNT, WIDTH, TOGETHER>(products, rows, tile, 0, lane);
  }
}

template <typename T, int DEPTH, int COUNT, int LEFT, int WIDTH, bool TOGETHER>
void begin_columns_by_tile(
    sum_fragment* products,
    left_fragment<T>* held,
    const T* left,
    int from,
    const T* tile,
    int column,
    uint lane) {
  if constexpr (TOGETHER) {
    // Through registers: what threads wrote lately, products see behind a fence that waits for all.
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
      load_parts<4, true>(
          held[i].part,
          left + place_in_tile<T, DEPTH, LEFT, true>(
              16 * i + lane % 8 + lane / 16 * 8, from + lane / 8 % 2 * 8));
    constexpr int PART = product_size<COUNT>();
    ulong first = tile_operand(tile + column / 64 * (64 * DEPTH) + column % 64, DEPTH * 128);
    begin_products<COUNT>(products);
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
#pragma unroll
      for (int n = 0; n < COUNT; n += PART)
        tile_product<PART, true>(
            products + n,
            held[i],
            first + ((n / 8 * DEPTH + 16 * i) * 64 + n % 8 * 8) / 8,
            i > 0);
    go_on();
  } else {
    constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
    constexpr int LEFT_STRIDE = tile_stride(LEFT, sizeof(T));
#pragma unroll
    for (int n = 0; n < COUNT; n++)
      products[n].part[0] = products[n].part[1] = float2(0.0f);
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
      load_left_transposed(held[i], left + (16 * i * LEFT_STRIDE + from), LEFT_STRIDE, lane);
    add_rows_by<STRIDE, DEPTH, COUNT>(
        products, [&](int i) { return held[i]; }, tile + column, lane);
  }
}

// ptxas moves waits ahead of arithmetic, but not out of a block.
inline void complete(float x) {
  if (x < 0.0f)
    asm volatile("nanosleep.u32 0;" ::: "memory");
}
template <typename T, int COUNT>
void release_operands(left_fragment<T>* operands) {
#pragma unroll
  for (int i = 0; i < COUNT; i++)
#pragma unroll
    for (int p = 0; p < 4; p++)
      asm volatile("" : "+r"(reinterpret_cast<uint&>(operands[i].part[p])) :: "memory");
}

template <typename T, int ROWS, int WIDTH, bool TOGETHER>
void store_left(const left_fragment<T>& f, T* tile, uint row, uint column, uint lane) {
  if constexpr (TOGETHER) {
    // Lane l points at row l % 8 of part l / 8.
    uint r = row + lane % 16, c = column + lane / 16 * 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
        :: "r"(uint(__cvta_generic_to_shared(tile + place_in_tile<T, ROWS, WIDTH, true>(r, c)))),
           "r"(as_type<uint>(f.part[0])), "r"(as_type<uint>(f.part[1])),
           "r"(as_type<uint>(f.part[2])), "r"(as_type<uint>(f.part[3])) : "memory");
  } else {
#pragma unroll
    for (int p = 0; p < 4; p++) {
      uint r = row + fragment_row(lane) + p % 2 * 8, c = column + fragment_col(lane) + p / 2 * 8;
      *reinterpret_cast<vec<T, 2>*>(tile + place_in_tile<T, ROWS, WIDTH, false>(r, c)) = f.part[p];
    }
  }
}

// Offsets are part of the instruction.
template <int OFFSET>
void add_pair(float* to, float2 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0 + %3], {%1, %2};"
      :: "l"(to), "f"(x.x), "f"(x.y), "n"(4 * OFFSET) : "memory");
#else
  atomicAdd(to + OFFSET, x.x);
  atomicAdd(to + OFFSET + 1, x.y);
#endif
}
template <int COUNT, int n = 0>
void add_pairs(atomic<float>* to, const sum_fragment* sums, int p, float factor, int columns) {
  if constexpr (n < COUNT) {
    if (8 * n < columns)
      add_pair<8 * n>(&to->value, sums[n].part[p] * factor);
    add_pairs<COUNT, n + 1>(to, sums, p, factor, columns);
  }
}

} // namespace mlx::core::cu
