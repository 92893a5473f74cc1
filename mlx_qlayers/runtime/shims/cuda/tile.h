// Products of four warps with one tile of rows in shared memory, on Hopper's tensor cores: the tile is read once
// for 64 rows instead of once for each 16, and rows arrive without a way through registers.
//
// A tile is made of panels of 64 columns; a row of a panel has 128 bytes, its 16-byte packs in the order
// that the hardware calls the 128-byte swizzle: pack i of row r is at i ^ r % 8.
#pragma once

#include "fragment.h"

namespace mlx::core::cu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(MSL_NO_TILE)
constexpr bool HAS_TILE_PRODUCTS = true;
#else
constexpr bool HAS_TILE_PRODUCTS = false;
#endif

template <int PACKS>
struct alignas(1024) tile_packs {
  uint4 pack[PACKS];
};

template <typename T>
constexpr bool products_together(int owners, int slices, int width, int width_v) {
  return HAS_TILE_PRODUCTS && sizeof(T) == 2 && owners % 4 == 0 && width % (64 * slices) == 0 &&
      width_v % (64 * slices) == 0;
}
template <int ROWS>
int shared_place(int row, int column) {
  return (column / 64 * ROWS + row) * 64 + (column / 8 ^ row) % 8 * 8 + column % 8;
}
template <typename T>
void copy_pack(T* to, const T* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
      :: "r"(uint(__cvta_generic_to_shared(to))), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
// Until copies are there and the tensor cores will see them.
inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;\n fence.proxy.async.shared::cta;" ::: "memory");
}

// Where a product finds its right operand: groups of 8 rows are 1024 bytes apart, panels `panel`.
template <typename T>
ulong tile_operand(const T* p, uint panel) {
  uint at = __cvta_generic_to_shared(p);
  return ulong(at % (1u << 18) / 16) | ulong(panel / 16) << 16 | ulong(1024 / 16) << 32 | 1ull << 62;
}

#define MSL_SUM(n) "+f"(sum[n].part[0].x), "+f"(sum[n].part[0].y), "+f"(sum[n].part[1].x), "+f"(sum[n].part[1].y)
#define MSL_SUMS_2(n) MSL_SUM(n), MSL_SUM(n + 1)
#define MSL_SUMS_4(n) MSL_SUMS_2(n), MSL_SUMS_2(n + 2)
#define MSL_SUMS_8(n) MSL_SUMS_4(n), MSL_SUMS_4(n + 4)
#define MSL_SUMS_16(n) MSL_SUMS_8(n), MSL_SUMS_8(n + 8)
#define MSL_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MSL_OPERANDS_16 "{%8,%9,%10,%11}, %12, p, 1, 1, %14;"
#define MSL_FLAG_16 "%13"
#define MSL_NAMES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MSL_OPERANDS_32 "{%16,%17,%18,%19}, %20, p, 1, 1, %22;"
#define MSL_FLAG_32 "%21"
#define MSL_NAMES_64 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MSL_OPERANDS_64 "{%32,%33,%34,%35}, %36, p, 1, 1, %38;"
#define MSL_FLAG_64 "%37"
#define MSL_NAMES_128 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MSL_OPERANDS_128 "{%64,%65,%66,%67}, %68, p, 1, 1, %70;"
#define MSL_FLAG_128 "%69"

// sum (64 x N over four warps) += or, FIRST, = left (64 x 16) * right; DOWN: a row of the tile is a depth.
#define MSL_TILE_PRODUCT(T, name, N, COUNT)                                               \
  template <bool DOWN>                                                                    \
  void tile_product_##N(sum_fragment* sum, const left_fragment<T>& left, ulong right, int add) { \
    asm volatile("{ .reg .pred p;\n setp.ne.b32 p, " MSL_FLAG_##N ", 0;\n"                       \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" MSL_NAMES_##N "}, "   \
        MSL_OPERANDS_##N "\n}"                                                            \
        : MSL_SUMS_##COUNT(0)                                                             \
        : "r"(as_type<uint>(left.part[0])), "r"(as_type<uint>(left.part[1])),             \
          "r"(as_type<uint>(left.part[2])), "r"(as_type<uint>(left.part[3])),             \
          "l"(right), "r"(add), "n"(DOWN));                                               \
  }
#define MSL_TILE_PRODUCTS(T, name)  \
  MSL_TILE_PRODUCT(T, name, 16, 2)  \
  MSL_TILE_PRODUCT(T, name, 32, 4)  \
  MSL_TILE_PRODUCT(T, name, 64, 8)  \
  MSL_TILE_PRODUCT(T, name, 128, 16)
MSL_TILE_PRODUCTS(half, "f16")
MSL_TILE_PRODUCTS(bfloat, "bf16")

template <int COUNT, bool DOWN, typename T>
void tile_product(sum_fragment* sum, const left_fragment<T>& left, ulong right, int add) {
  if constexpr (COUNT == 2)
    tile_product_16<DOWN>(sum, left, right, add);
  else if constexpr (COUNT == 4)
    tile_product_32<DOWN>(sum, left, right, add);
  else if constexpr (COUNT == 8)
    tile_product_64<DOWN>(sum, left, right, add);
  else
    tile_product_128<DOWN>(sum, left, right, add);
}

// Sums must not move across the beginning and the end of products.
template <int COUNT>
void pin(sum_fragment* sum) {
#pragma unroll
  for (int n = 0; n < COUNT; n++)
    asm volatile("" : MSL_SUM(n) :: "memory");
}
template <int COUNT>
void begin_products(sum_fragment* sum) {
  pin<COUNT>(sum);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int COUNT>
void end_products(sum_fragment* sum) {
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin<COUNT>(sum);
}
constexpr int part_of(int count) {
  return count % 16 == 0 ? 16 : count % 8 == 0 ? 8 : count % 4 == 0 ? 4 : 2;
}

template <typename T, int STEPS, int COUNT>
void shared_multiply_by_rows(sum_fragment* products, const left_fragment<T>* left, const T* tile) {
  if constexpr (HAS_TILE_PRODUCTS && sizeof(T) == 2) {
    constexpr int PART = part_of(COUNT);
    begin_products<COUNT>(products);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int n = 0; n < COUNT; n += PART)
        tile_product<PART, false>(
            products + n, left[i], tile_operand(tile + (i / 4 * 8 * COUNT + 8 * n) * 64 + i % 4 * 16, 0), i > 0);
    end_products<COUNT>(products);
  }
}
template <typename T, int DEPTH, int COUNT>
void shared_add_weighted_rows(sum_fragment* sums, const sum_fragment* weights, const T* tile) {
  if constexpr (HAS_TILE_PRODUCTS && sizeof(T) == 2) {
    #ifndef MSL_PART
#define MSL_PART 16
#endif
    constexpr int PART = COUNT < MSL_PART ? 8 : MSL_PART;
    left_fragment<T> left[DEPTH / 16];
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
      left_from_sums(left[i], weights[2 * i], weights[2 * i + 1]);
    begin_products<COUNT>(sums);
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
#pragma unroll
      for (int n = 0; n < COUNT; n += PART)
        tile_product<PART, true>(
            sums + n, left[i], tile_operand(tile + (n / 8 * DEPTH + 16 * i) * 64, DEPTH * 128), 1);
    end_products<COUNT>(sums);
  }
}

} // namespace mlx::core::cu
