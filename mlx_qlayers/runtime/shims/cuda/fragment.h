// The declarations of metal/fragment.metal on tensor cores; the contract is written there.
// The differences are the lane map, right operands held in pairs along the depth, and ldmatrix.
#pragma once

#include "load.h"
#include "matrix.h"

namespace mlx::core::cu {

template <typename T>
struct left_fragment {
  vec<T, 2> part[4];
};
template <typename T>
struct right_fragment {
  vec<T, 2> part[2];
};
struct sum_fragment {
  float2 part[2];
};

inline ushort right_depth(uint lane, ushort i) {
  return fragment_col(lane) + i;
}
inline ushort right_column(uint lane, ushort) {
  return fragment_row(lane);
}

inline uint from_row_lane(uint x, ushort pair, uint lane) {
  return __shfl_sync(0xffffffffu, x, pair, 4);
}

inline float fragment_row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
inline float fragment_row_max(float x) {
  x = ::fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return ::fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

inline float2 fragment_column_sum(float2 x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2)
    x += float2(__shfl_xor_sync(0xffffffffu, x.x, mask), __shfl_xor_sync(0xffffffffu, x.y, mask));
  return x;
}
inline float2 fragment_column_max(float2 x) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) {
    x.x = ::fmaxf(x.x, __shfl_xor_sync(0xffffffffu, x.x, mask));
    x.y = ::fmaxf(x.y, __shfl_xor_sync(0xffffffffu, x.y, mask));
  }
  return x;
}

// N 8 x 8 parts of 16-bit elements from shared memory; lane l points at row l % 8 of part l / 8.
template <int N, bool transpose, typename T>
void load_parts(vec<T, 2>* part, const T* row) {
  uint at = __cvta_generic_to_shared(row), r[4];
  if constexpr (N == 4 && !transpose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
  else if constexpr (N == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
  else if constexpr (!transpose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
#pragma unroll
  for (int k = 0; k < N; k++)
    part[k] = as_type<vec<T, 2>>(r[k]);
}
// Whether p is known to lie in shared memory; the compiler drops the other branch.
template <typename T>
bool by_matrix(const T* p) {
  return sizeof(T) == 2 && __isShared(p);
}
template <typename T>
vec<T, 2> pair_at(const T* p) {
  return *reinterpret_cast<const vec<T, 2>*>(p);
}

template <typename T>
void load_left(left_fragment<T>& f, const T* p, uint stride, uint lane) {
  if constexpr (sizeof(T) == 2)
    if (by_matrix(p))
      return load_parts<4, false>(f.part, p + (lane % 16) * stride + lane / 16 * 8);
  p += fragment_row(lane) * stride + fragment_col(lane);
#pragma unroll
  for (int k = 0; k < 4; k++)
    f.part[k] = pair_at(p + 8 * (k % 2) * stride + 8 * (k / 2));
}
template <typename T>
void load_left_transposed(left_fragment<T>& f, const T* p, uint stride, uint lane) {
  if constexpr (sizeof(T) == 2)
    if (by_matrix(p))
      return load_parts<4, true>(
          f.part, p + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
  p += fragment_col(lane) * stride + fragment_row(lane);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const T* at = p + 8 * (k / 2) * stride + 8 * (k % 2);
    f.part[k] = vec<T, 2>(at[0], at[stride]);
  }
}
template <typename T>
void load_right(right_fragment<T>& f, const T* p, uint stride, uint lane) {
  if constexpr (sizeof(T) == 2)
    if (by_matrix(p))
      return load_parts<2, true>(f.part, p + (lane % 16) * stride);
  p += fragment_col(lane) * stride + fragment_row(lane);
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const T* at = p + 8 * k * stride;
    f.part[k] = vec<T, 2>(at[0], at[stride]);
  }
}
template <typename T>
void load_right_transposed(right_fragment<T>& f, const T* p, uint stride, uint lane) {
  if constexpr (sizeof(T) == 2)
    if (by_matrix(p))
      return load_parts<2, false>(f.part, p + (lane % 8) * stride + lane / 8 % 2 * 8);
  p += fragment_row(lane) * stride + fragment_col(lane);
#pragma unroll
  for (int k = 0; k < 2; k++)
    f.part[k] = pair_at(p + 8 * k);
}

template <typename T>
void load_right_pair(right_fragment<T>* f, const T* p, uint stride, uint lane) {
  if constexpr (sizeof(T) == 2)
    if (by_matrix(p))
      return load_parts<4, true>(f[0].part, p + (lane % 16) * stride + lane / 16 * 8);
  load_right(f[0], p, stride, lane);
  load_right(f[1], p + 8, stride, lane);
}
template <typename T>
void load_right_transposed_pair(right_fragment<T>* f, const T* p, uint stride, uint lane) {
  if constexpr (sizeof(T) == 2)
    if (by_matrix(p))
      return load_parts<4, false>(
          f[0].part, p + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
  load_right_transposed(f[0], p, stride, lane);
  load_right_transposed(f[1], p + 8 * stride, stride, lane);
}

template <typename T, int count>
struct loaded_run {
  alignas(16) uint words[2 * count];
};
// An array may be a slice that is not aligned to 16 bytes.
template <int pairs, typename T, int count>
void load_run(
    loaded_run<T, count>& run,
    const T* p,
    int offset,
    uint stride,
    uint step,
    uint columns,
    uint lane) {
  static_assert(sizeof(T) == 2, "16-bit elements are woven");
  constexpr int n = count % 2 ? 2 : 4;
  struct alignas(4 * n) words {
    uint word[n];
  };
  run = {};
  if (fragment_row(lane) >= columns)
    return;
  const T* at = p + offset + int(fragment_row(lane) * stride + fragment_col(lane) / 2 * step);
  if (reinterpret_cast<size_t>(p) % 16 == 0) {
#pragma unroll
    for (int k = 0; k < 2 * count; k += n)
      *reinterpret_cast<words*>(run.words + k) = *reinterpret_cast<const words*>(at + 2 * k);
  } else {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(at);
#pragma unroll
    for (int k = 0; k < 2 * count; k++)
      run.words[k] = from[2 * k] | uint(from[2 * k + 1]) << 16;
  }
}
template <int pairs, typename T, int count>
void interleave(right_fragment<T>* f, loaded_run<T, count>& run) {
  // Lest the compiler choose between loaded and zero words by halves.
#pragma unroll
  for (int k = 0; k < 2 * count; k++)
    asm volatile("" : "+r"(run.words[k]));
#pragma unroll
  for (int k = 0; k < count; k++) {
    int from = k / (pairs / 2) * pairs + k % (pairs / 2);
    uint low = run.words[from], high = run.words[from + pairs / 2];
    f[k].part[0] = as_type<vec<T, 2>>(__byte_perm(low, high, 0x5410));
    f[k].part[1] = as_type<vec<T, 2>>(__byte_perm(low, high, 0x7632));
  }
}
// Into the very word, whose old value counts as read: any other way the compiler moves what it has
// read from one register to another, and waits for it, long before it is needed.
template <typename S>
void load_bits(uint& to, const S* from, bool inside) {
  if constexpr (sizeof(S) == 2)
    asm("{.reg .pred p;setp.ne.u32 p,%2,0;@!p mov.u32 %0,0;@p ld.global.nc.u16 %0,[%1];}"
        : "+r"(to) : "l"(from), "r"(uint(inside)));
  else
    asm("{.reg .pred p;setp.ne.u32 p,%2,0;@!p mov.u32 %0,0;@p ld.global.nc.u8 %0,[%1];}"
        : "+r"(to) : "l"(from), "r"(uint(inside)));
}
#define BYTE_PARTS 2
inline uint masked_or(uint x, uint mask, uint bits) {
  uint r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "r"(mask), "r"(bits));
  return r;
}
inline __half2 product_of_pairs(__half2 a, __half2 b) {
  return __hmul2(a, b);
}
inline __nv_bfloat162 product_of_pairs(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __hmul2(a, b);
}
// Tensor cores take subnormal halves as they are: what codes lack is left to the sums.
template <int shift>
half2 scaled_up(half2 x) {
  return x;
}
template <int shift>
float scale_left() {
  return float(1 << shift);
}
// A code is a number of either type with a smaller exponent: 2^14 or 2^126 times too small.
template <typename T>
vec<T, 2> scaled_e2m1_pair(uint codes, int i, float scale) {
  constexpr bool wide = is_same_v<T, bfloat>;
  constexpr int place = wide ? 6 : 9;
  int from = 4 * i;
  uint magnitude = place > from ? codes << (place - from) : codes >> (from - place);
  uint pair = masked_or(codes << (12 - from), 0x80008000u, magnitude & (7 * 0x10001u << place));
  if constexpr (wide)
    return as_type<vec<T, 2>>(
        __hmul2(as_type<__nv_bfloat162>(pair), __float2bfloat162_rn(scale * 0x1p112f)));
  else
    return as_type<vec<T, 2>>(__hmul2(as_type<__half2>(pair), __float2half2_rn(scale)));
}
template <typename T>
right_fragment<T> multiply_elements(right_fragment<T> a, right_fragment<T> b) {
  using pair = conditional_t<is_same_v<T, half>, __half2, __nv_bfloat162>;
#pragma unroll
  for (int k = 0; k < 2; k++)
    a.part[k] = as_type<vec<T, 2>>(
        product_of_pairs(as_type<pair>(a.part[k]), as_type<pair>(b.part[k])));
  return a;
}

// A product with ones is one instruction where sums and shuffles would be many.
template <int count, typename T>
void sum_columns(sum_fragment& sum, const right_fragment<T>* f) {
  left_fragment<T> ones;
#pragma unroll
  for (int k = 0; k < 4; k++)
    ones.part[k] = vec<T, 2>(T(1.0f), T(1.0f));
  sum.part[0] = sum.part[1] = float2(0.0f);
#pragma unroll
  for (int k = 0; k < count; k++)
    tensor_core_16(sum.part, ones.part, f[k].part);
}

// A right operand is a left one transposed, lane by lane: on the diagonals are squares. Both halves
// of the depth fill the rows of one left operand, so that no register is copied.
struct square_sums {
  float2 low[2], high[2];
};
template <typename T>
void add_squares(square_sums& sums, right_fragment<T> x) {
  tensor_core_8(sums.low, x.part, &x.part[0]);
  tensor_core_8(sums.high, x.part, &x.part[1]);
}
inline void store_squares(float* p, square_sums sums, uint lane) {
  uint column = fragment_row(lane);
  float2 both = sums.low[0] + sums.high[1];
  if (fragment_col(lane) / 2 == column / 2)
    p[column] = column % 2 ? both.y : both.x;
}

template <typename T>
vec<T, 2> fused_pair(vec<T, 2> x, vec<T, 2> y, vec<T, 2> z) {
  return fma(x, y, z);
}

template <typename T>
void left_from_sums(left_fragment<T>& f, sum_fragment low, sum_fragment high) {
  f.part[0] = vec<T, 2>(low.part[0]);
  f.part[1] = vec<T, 2>(low.part[1]);
  f.part[2] = vec<T, 2>(high.part[0]);
  f.part[3] = vec<T, 2>(high.part[1]);
}

template <typename T>
void multiply_accumulate(sum_fragment& sum, left_fragment<T> left, right_fragment<T> right) {
  tensor_core_16(sum.part, left.part, right.part);
}

template <typename T>
void multiply(sum_fragment& sum, left_fragment<T> left, right_fragment<T> right) {
  sum.part[0] = sum.part[1] = float2(0.0f);
  tensor_core_16(sum.part, left.part, right.part);
}

template <typename T>
void store_sum(sum_fragment f, T* p, uint stride, uint lane) {
  p += fragment_row(lane) * stride + fragment_col(lane);
#pragma unroll
  for (int k = 0; k < 2; k++)
    *reinterpret_cast<vec<T, 2>*>(p + 8 * k * stride) = vec<T, 2>(f.part[k]);
}

} // namespace mlx::core::cu
