// Matrix products of one warp on the tensor cores, and the lane layout that they share.
//
// An 8 x 8 part lies in a warp as in Metal: a row of two adjacent columns in each lane. Which
// lane holds which row is the hardware's: row lane / 4, columns 2 * (lane % 4) and the next.
#pragma once

#include "simd.h"

namespace mlx::core::cu {

inline ushort fragment_row(uint lane) {
  return lane / 4;
}
inline ushort fragment_col(uint lane) {
  return lane % 4 * 2;
}

// sum (16 x 8) += left (16 x 16 or 16 x 8) * right (16 x 8 or 8 x 8): parts of the left operand
// one row block after the other, then deeper; right parts hold pairs along the depth.
#define MSL_TENSOR_CORE(T, name)                                                          \
  inline void tensor_core_16(float2* sum, const vec<T, 2>* left, const vec<T, 2>* right) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                    \
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                           \
        : "+f"(sum[0].x), "+f"(sum[0].y), "+f"(sum[1].x), "+f"(sum[1].y)                  \
        : "r"(as_type<uint>(left[0])), "r"(as_type<uint>(left[1])),                       \
          "r"(as_type<uint>(left[2])), "r"(as_type<uint>(left[3])),                       \
          "r"(as_type<uint>(right[0])), "r"(as_type<uint>(right[1])));                    \
  }                                                                                       \
  inline void tensor_core_8(float2* sum, const vec<T, 2>* left, const vec<T, 2>* right) {  \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." name "." name ".f32 "                     \
        "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"                                    \
        : "+f"(sum[0].x), "+f"(sum[0].y), "+f"(sum[1].x), "+f"(sum[1].y)                  \
        : "r"(as_type<uint>(left[0])), "r"(as_type<uint>(left[1])),                       \
          "r"(as_type<uint>(right[0])));                                                  \
  }
MSL_TENSOR_CORE(half, "f16")
MSL_TENSOR_CORE(bfloat, "bf16")
#undef MSL_TENSOR_CORE

// x = high + middle + low, pairs of bfloat. `finite` is high, or 0 where it is not finite, for the
// mixed products: infinity times another part of 0 would be NaN.
struct bfloat_parts {
  uint high, middle, low, finite;
  bfloat_parts() = default;
  explicit bfloat_parts(float2 x) {
    high = pack(x);
    float2 rest = x - unpack(high);
    finite = high;
    if (!(::fabsf(unpack(high).x) < INFINITY))
      rest.x = 0.0f, finite &= 0xffff0000u;
    if (!(::fabsf(unpack(high).y) < INFINITY))
      rest.y = 0.0f, finite &= 0xffffu;
    middle = pack(rest);
    low = pack(rest - unpack(middle));
  }
  static uint pack(float2 x) {
    uint r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(x.y), "f"(x.x));
    return r;
  }
  static float2 unpack(uint pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
};
// float operands: six products of parts give what float32 does, the three smallest are left out.
// They start from zero and are added outside: the tensor core's own running sum truncates.
template <int steps>
void split_product(float2* sum, const float2* left, const float2* right) {
  using part = uint bfloat_parts::*;
  constexpr part high = &bfloat_parts::high, middle = &bfloat_parts::middle;
  constexpr part low = &bfloat_parts::low, finite = &bfloat_parts::finite;
  bfloat_parts a[2 * steps], b[steps];
#pragma unroll
  for (int i = 0; i < 2 * steps; i++)
    a[i] = bfloat_parts(left[i]);
#pragma unroll
  for (int i = 0; i < steps; i++)
    b[i] = bfloat_parts(right[i]);
  auto add = [&](float2* to, part x, part y) {
    vec<bfloat, 2> p[2 * steps], q[steps];
#pragma unroll
    for (int i = 0; i < 2 * steps; i++)
      p[i] = as_type<vec<bfloat, 2>>(a[i].*x);
#pragma unroll
    for (int i = 0; i < steps; i++)
      q[i] = as_type<vec<bfloat, 2>>(b[i].*y);
    if constexpr (steps == 2)
      tensor_core_16(to, p, q);
    else
      tensor_core_8(to, p, q);
  };
  float2 most[2] = {float2(0.0f), float2(0.0f)}, rest[2] = {float2(0.0f), float2(0.0f)};
  add(rest, middle, middle);
  add(rest, finite, low);
  add(rest, low, finite);
  add(rest, finite, middle);
  add(rest, middle, finite);
  add(most, high, high);
  sum[0] += most[0] + rest[0];
  sum[1] += most[1] + rest[1];
}
inline void tensor_core_16(float2* sum, const float2* left, const float2* right) {
  split_product<2>(sum, left, right);
}
inline void tensor_core_8(float2* sum, const float2* left, const float2* right) {
  split_product<1>(sum, left, right);
}

// The transpose of an 8 x 8 part.
template <typename T>
vec<T, 2> transposed(vec<T, 2> part) {
  if constexpr (sizeof(T) == 2) {
    uint r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(as_type<uint>(part)));
    return as_type<vec<T, 2>>(r);
  } else {
    uint lane = lane_index(), row = fragment_row(lane), from = fragment_col(lane) * 4 + row / 2;
    vec<T, 2> a(from_lane(part.x, from), from_lane(part.y, from));
    vec<T, 2> b(from_lane(part.x, from + 4), from_lane(part.y, from + 4));
    return {a[row % 2], b[row % 2]};
  }
}

} // namespace mlx::core::cu
