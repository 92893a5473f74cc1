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

// One 8-deep step in TF32; a lane's pair along the summed dimension fills the slots t and t + 4.
inline void tf32_step(float2* sum, const uint2* left, uint2 right) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0].x), "+f"(sum[0].y), "+f"(sum[1].x), "+f"(sum[1].y)
      : "r"(left[0].x), "r"(left[1].x), "r"(left[0].y), "r"(left[1].y), "r"(right.x), "r"(right.y));
}
inline uint to_tf32(float x) {
  uint r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// x = high + low in TF32. `finite` is high, or 0 where it is not finite, for the mixed products:
// infinity times a low part of 0 would be NaN.
struct tf32_pair {
  uint2 high, low, finite;
  tf32_pair() = default;
  explicit tf32_pair(float2 x) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      high[i] = to_tf32(x[i]);
      float h = __uint_as_float(high[i]);
      bool ok = ::fabsf(h) < INFINITY;
      finite[i] = ok ? high[i] : 0u;
      low[i] = ok ? to_tf32(x[i] - h) : 0u;
    }
  }
};
// Three TF32 products give float32's precision. They start from zero and are added outside:
// the tensor core's own running sum truncates.
template <int steps>
void split_product(float2* sum, const float2* left, const float2* right) {
  float2 part[2] = {float2(0.0f), float2(0.0f)};
#pragma unroll
  for (int depth = 0; depth < steps; depth++) {
    tf32_pair a0(left[2 * depth]), a1(left[2 * depth + 1]), b(right[depth]);
    uint2 high[2] = {a0.high, a1.high}, low[2] = {a0.low, a1.low};
    uint2 finite[2] = {a0.finite, a1.finite};
    tf32_step(part, low, b.finite);
    tf32_step(part, finite, b.low);
    tf32_step(part, high, b.high);
  }
  sum[0] += part[0];
  sum[1] += part[1];
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
