// The declarations of metal/tile.metal on NVIDIA GPUs; the contract is written there. What differs:
// products of four warps at once on Hopper's tensor cores. They read a tile once for 64 rows instead
// of once for each 16, and copies into it pass no registers.
//
// Such a tile is made of panels of 64 columns. A row of a panel has 128 bytes, and its pack i of 16
// bytes lies at i ^ row % 8: what the hardware calls a swizzle of 128 bytes.
#pragma once

#include "fragment.h"

namespace mlx::core::cu {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_WARPGROUPS = true;
#else
constexpr bool HAS_WARPGROUPS = false;
#endif

template <typename T>
constexpr bool uses_warpgroup(int owners, int slices, int width, int other_width) {
  return HAS_WARPGROUPS && sizeof(T) == 2 && owners % 4 == 0 && width % (64 * slices) == 0 &&
      other_width % (64 * slices) == 0;
}
template <int COUNT>
struct alignas(1024) tile_packs {
  uint4 pack[COUNT];
};
constexpr int tile_stride(int width, int bytes) {
  return (width * bytes / 16 | 1) * 16 / bytes;
}
template <typename T, bool WARPGROUP>
constexpr int tile_elements(int rows, int width) {
  return WARPGROUP ? rows * width : rows * tile_stride(width, sizeof(T));
}
template <typename T, int ROWS, int WIDTH, bool WARPGROUP>
int place_in_tile(uint row, uint column) {
  if constexpr (WARPGROUP)
    return (column / 64 * ROWS + row) * 64 + (column / 8 ^ row) % 8 * 8 + column % 8;
  else
    return row * tile_stride(WIDTH, sizeof(T)) + column;
}

template <typename T>
void copy_pack(T* to, const T* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
      :: "r"(uint(__cvta_generic_to_shared(to))), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
inline void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LATER>
void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
}
// Tensor cores read shared memory by another way than threads write it.
inline void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The descriptor of a product's right operand: 8 rows take 1024 bytes, a panel `panel` bytes.
template <typename T>
ulong tile_operand(const T* p, uint panel) {
  uint at = __cvta_generic_to_shared(p);
  return ulong(at % (1u << 18) / 16) | ulong(panel / 16) << 16 | ulong(1024 / 16) << 32 |
      ulong(1) << 62;
}

#define MSL_SUM(n)                                          \
  "+f"(sum[n].part[0].x), "+f"(sum[n].part[0].y), "+f"(sum[n].part[1].x), "+f"(sum[n].part[1].y)
#define MSL_SUMS_2(n) MSL_SUM(n), MSL_SUM(n + 1)
#define MSL_SUMS_4(n) MSL_SUMS_2(n), MSL_SUMS_2(n + 2)
#define MSL_SUMS_8(n) MSL_SUMS_4(n), MSL_SUMS_4(n + 4)
#define MSL_SUMS_16(n) MSL_SUMS_8(n), MSL_SUMS_8(n + 8)
#define MSL_NAMES_2 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MSL_NAMES_4 MSL_NAMES_2 "," \
  "%8,%9,%10,%11,%12,%13,%14,%15"
#define MSL_NAMES_8 MSL_NAMES_4 "," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MSL_NAMES_16 MSL_NAMES_8 "," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48," \
  "%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MSL_REST_2 "{%8,%9,%10,%11}, %12, add, 1, 1, %14;"
#define MSL_ADD_2 "%13"
#define MSL_REST_4 "{%16,%17,%18,%19}, %20, add, 1, 1, %22;"
#define MSL_ADD_4 "%21"
#define MSL_REST_8 "{%32,%33,%34,%35}, %36, add, 1, 1, %38;"
#define MSL_ADD_8 "%37"
#define MSL_REST_16 "{%64,%65,%66,%67}, %68, add, 1, 1, %70;"
#define MSL_ADD_16 "%69"

// sum (64 rows of four warps by 8 COUNT columns) = left * right, or += if `add`. DOWN says that rows
// of the tile run along the depth, not along the columns.
#define MSL_TILE_PRODUCT(T, name, COUNT, N)                                                  \
  template <bool DOWN>                                                                       \
  void tile_product_##N(                                                                     \
      sum_fragment* sum, const left_fragment<T>& left, ulong right, int add) {               \
    asm volatile("{ .reg .pred add;\n setp.ne.b32 add, " MSL_ADD_##COUNT ", 0;\n"            \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name                      \
        " {" MSL_NAMES_##COUNT "}, " MSL_REST_##COUNT " }"                                   \
        : MSL_SUMS_##COUNT(0)                                                                \
        : "r"(as_type<uint>(left.part[0])), "r"(as_type<uint>(left.part[1])),                \
          "r"(as_type<uint>(left.part[2])), "r"(as_type<uint>(left.part[3])),                \
          "l"(right), "r"(add), "n"(DOWN));                                                  \
  }
#define MSL_TILE_PRODUCTS(T, name)  \
  MSL_TILE_PRODUCT(T, name, 2, 16)  \
  MSL_TILE_PRODUCT(T, name, 4, 32)  \
  MSL_TILE_PRODUCT(T, name, 8, 64)  \
  MSL_TILE_PRODUCT(T, name, 16, 128)
MSL_TILE_PRODUCTS(half, "f16")
MSL_TILE_PRODUCTS(bfloat, "bf16")
#undef MSL_TILE_PRODUCTS
#undef MSL_TILE_PRODUCT

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

// Products run beside the warps: nothing may move sums into the time between these two.
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
inline void go_on() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LATER, int COUNT>
void finish_products(sum_fragment* sums) {
  if constexpr (HAS_WARPGROUPS)
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LATER) : "memory");
  pin<COUNT>(sums);
}
template <int COUNT>
constexpr int product_size() {
  return COUNT % 16 == 0 ? 16 : COUNT % 8 == 0 ? 8 : COUNT % 4 == 0 ? 4 : 2;
}

template <typename T, int STEPS, int COUNT, int WIDTH, bool WARPGROUP, bool ADD = false, int MOST = 16>
void begin_by_rows(
    sum_fragment* products, const left_fragment<T>* left, const T* tile, int column, uint lane) {
  if constexpr (WARPGROUP) {
    constexpr int PART = product_size<COUNT>() < MOST ? product_size<COUNT>() : MOST;
    // Offsets that are added to a descriptor count packs of 16 bytes.
    ulong first = tile_operand(tile + column * 8 * COUNT, 0);
    begin_products<COUNT>(products);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int n = 0; n < COUNT; n += PART)
        tile_product<PART, false>(
            products + n,
            left[i],
            first + ((i / 4 * COUNT + n) * 8 * 64 + i % 4 * 16) / 8,
            ADD || i > 0);
    go_on();
  } else {
    constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
#pragma unroll
    for (int n = 0; n < COUNT && !ADD; n++)
      products[n].part[0] = products[n].part[1] = float2(0.0f);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
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
template <typename T, int STEPS, int COUNT, int WIDTH, bool WARPGROUP, bool ADD = false, int MOST = 16>
void multiply_by_rows(
    sum_fragment* products,
    const left_fragment<T>* left,
    const T* tile,
    int column,
    uint lane) {
  begin_by_rows<T, STEPS, COUNT, WIDTH, WARPGROUP, ADD, MOST>(products, left, tile, column, lane);
  if constexpr (WARPGROUP)
    finish_products<0, COUNT>(products);
}

template <int STRIDE, int DEPTH, int COUNT, typename T, typename F>
void add_rows_by(sum_fragment* sums, F&& left, const T* tile, uint lane) {
#pragma unroll
  for (int i = 0; i < DEPTH / 16; i++) {
    const T* at = tile + 16 * i * STRIDE;
    left_fragment<T> rows = left(i);
    right_fragment<T> right[2];
#pragma unroll
    for (int n = 0; n < COUNT / 2 * 2; n += 2) {
      load_right_pair(right, at + 8 * n, STRIDE, lane);
      multiply_accumulate(sums[n], rows, right[0]);
      multiply_accumulate(sums[n + 1], rows, right[1]);
    }
    if constexpr (COUNT % 2) {
      load_right(right[0], at + 8 * (COUNT - 1), STRIDE, lane);
      multiply_accumulate(sums[COUNT - 1], rows, right[0]);
    }
  }
}
template <
    typename T, int DEPTH, int COUNT, int WIDTH, bool WARPGROUP, int PART = product_size<COUNT>()>
void begin_weighted_rows(
    sum_fragment* sums, const left_fragment<T>* weights, const T* tile, int column, uint lane) {
  if constexpr (WARPGROUP) {
    ulong first = tile_operand(tile + column * DEPTH, DEPTH * 128);
    begin_products<COUNT>(sums);
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
#pragma unroll
      for (int n = 0; n < COUNT; n += PART)
        tile_product<PART, true>(
            sums + n, weights[i], first + ((n / 8 * DEPTH + 16 * i) * 64 + n % 8 * 8) / 8, 1);
    go_on();
  } else {
    add_rows_by<tile_stride(WIDTH, sizeof(T)), DEPTH, COUNT>(
        sums, [&](int i) { return weights[i]; }, tile + column, lane);
  }
}
template <typename T, int DEPTH, int COUNT, int WIDTH, bool WARPGROUP>
void add_weighted_rows(
    sum_fragment* sums,
    const sum_fragment* weights,
    const T* tile,
    int column,
    uint lane) {
  left_fragment<T> left[DEPTH / 16];
#pragma unroll
  for (int i = 0; i < DEPTH / 16; i++)
    left_from_sums(left[i], weights[2 * i], weights[2 * i + 1]);
  // Their size differs from that of the products that made the weights: if both have the same number and
  // size, ptxas 13.0 gives the left operands of both the same registers.
  constexpr int WHOLE = product_size<COUNT>(), PART = DEPTH == 8 * COUNT ? WHOLE / 2 : WHOLE;
  begin_weighted_rows<T, DEPTH, COUNT, WIDTH, WARPGROUP, PART>(sums, left, tile, column, lane);
  if constexpr (WARPGROUP)
    finish_products<0, COUNT>(sums);
}

} // namespace mlx::core::cu
