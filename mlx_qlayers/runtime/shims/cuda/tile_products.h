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

#define MSL_BOTH_4 "%16, %17, add, 1, 1, %19, %20;"
#define MSL_BOTH_ADD_4 "%18"
#define MSL_BOTH_8 "%32, %33, add, 1, 1, %35, %36;"
#define MSL_BOTH_ADD_8 "%34"
#define MSL_BOTH_16 "%64, %65, add, 1, 1, %67, %68;"
#define MSL_BOTH_ADD_16 "%66"

// As tile_product, with both operands in tiles.
#define MSL_TILES_PRODUCT(T, name, COUNT, N)                                       \
  template <bool LEFT_DOWN, bool DOWN>                                             \
  void tiles_product_##N(sum_fragment* sum, T, ulong left, ulong right, int add) { \
    asm volatile("{ .reg .pred add;\n setp.ne.b32 add, " MSL_BOTH_ADD_##COUNT ", 0;\n"  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name            \
        " {" MSL_NAMES_##COUNT "}, " MSL_BOTH_##COUNT " }"                         \
        : MSL_SUMS_##COUNT(0)                                                      \
        : "l"(left), "l"(right), "r"(add), "n"(LEFT_DOWN), "n"(DOWN));                \
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

template <typename T, int COUNT, bool LEFT_DOWN, bool DOWN>
void tiles_product(sum_fragment* sum, ulong left, ulong right, int add) {
  if constexpr (COUNT == 4)
    tiles_product_32<LEFT_DOWN, DOWN>(sum, T(), left, right, add);
  else if constexpr (COUNT == 8)
    tiles_product_64<LEFT_DOWN, DOWN>(sum, T(), left, right, add);
  else
    tiles_product_128<LEFT_DOWN, DOWN>(sum, T(), left, right, add);
}
template <typename T, int STEPS, int COUNT, int ROWS, int OTHERS, int WIDTH, bool WARPGROUP>
void begin_rows_by_rows(
    sum_fragment* products, const T* left, int row, const T* tile, uint lane) {
  if constexpr (WARPGROUP) {
    constexpr int PART = product_size<COUNT>();
    // Offsets that are added to a descriptor count packs of 16 bytes.
    ulong rows = tile_operand(left + row / 64 * (64 * 64), 0), first = tile_operand(tile, 0);
    begin_products<COUNT>(products);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int n = 0; n < COUNT; n += PART)
        tiles_product<T, PART, false, false>(
            products + n,
            rows + (i / 4 * ROWS * 64 + i % 4 * 16) / 8,
            first + ((i / 4 * OTHERS + 8 * n) * 64 + i % 4 * 16) / 8,
            i > 0);
    go_on();
  } else {
    constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
    left_fragment<T> rows[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      load_left(rows[i], left + (row * STRIDE + 16 * i), STRIDE, lane);
    multiply_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP>(products, rows, tile, 0, lane);
  }
}

template <typename T, int DEPTH, int COUNT, int LEFT, int WIDTH, bool WARPGROUP, bool DOWN>
void begin_by_tile(
    sum_fragment* sums, const T* left, int from, const T* tile, int column, uint lane) {
  if constexpr (WARPGROUP) {
    constexpr int PART = product_size<COUNT>();
    ulong rows = tile_operand(left + from / 64 * 64 * (DOWN ? DEPTH : 64), DOWN ? DEPTH * 128 : 0);
    ulong first = tile_operand(tile + column / 64 * (64 * DEPTH) + column % 64, DEPTH * 128);
    begin_products<COUNT>(sums);
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
#pragma unroll
      for (int n = 0; n < COUNT; n += PART)
        tiles_product<T, PART, DOWN, true>(
            sums + n,
            rows + (DOWN ? 16 * i * 64 : i / 4 * LEFT * 64 + i % 4 * 16) / 8,
            first + ((n / 8 * DEPTH + 16 * i) * 64 + n % 8 * 8) / 8,
            !DOWN || i > 0);
    go_on();
  } else {
    constexpr int STRIDE = tile_stride(DOWN ? LEFT : DEPTH, sizeof(T));
    auto rows = [&](int i) {
      left_fragment<T> one;
      if constexpr (DOWN)
        load_left_transposed(one, left + (16 * i * STRIDE + from), STRIDE, lane);
      else
        load_left(one, left + (from * STRIDE + 16 * i), STRIDE, lane);
      return one;
    };
#pragma unroll
    for (int n = 0; n < (DOWN ? COUNT : 0); n++)
      sums[n].part[0] = sums[n].part[1] = float2(0.0f);
    add_rows_by<tile_stride(WIDTH, sizeof(T)), DEPTH, COUNT>(sums, rows, tile + column, lane);
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

template <typename T, int ROWS, int WIDTH, bool WARPGROUP>
void store_left(const left_fragment<T>& f, T* tile, uint row, uint column, uint lane) {
  if constexpr (WARPGROUP) {
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

template <int COUNT>
void add_block(atomic<float>* to, const sum_fragment* sums, float factor, uint lane) {
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    float2 x = sums[n].part[0] * factor, y = sums[n].part[1] * factor;
    float* at = &to[128 * n + 4 * lane].value;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
        :: "l"(at), "f"(x.x), "f"(x.y), "f"(y.x), "f"(y.y) : "memory");
#else
    atomicAdd(at, x.x);
    atomicAdd(at + 1, x.y);
    atomicAdd(at + 2, y.x);
    atomicAdd(at + 3, y.y);
#endif
  }
}

inline uint address_of(const ulong* split_barrier) {
  return __cvta_generic_to_shared(split_barrier);
}
inline void start_split_barrier(ulong* split_barrier, int count, uint thread_index) {
  if (thread_index == 0)
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(address_of(split_barrier)), "r"(count));
}
inline void arrive_at(ulong* split_barrier) {
  asm volatile("{ .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0]; }"
      :: "r"(address_of(split_barrier)) : "memory");
}
inline void wait_for(ulong* split_barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  uint there;
  do {
    asm volatile("{ .reg .pred there;\n"
        "mbarrier.try_wait.parity.shared.b64 there, [%1], %2;\n selp.b32 %0, 1, 0, there; }"
        : "=r"(there) : "r"(address_of(split_barrier)), "r"(parity) : "memory");
  } while (there == 0);
#endif
}

} // namespace mlx::core::cu
