// half, bfloat, vectors, integers and bit patterns.
#include <metal_stdlib>
using namespace metal;

#define ROW(r, value) out[(r) * n + i] = value

// Arithmetic in T (half or bfloat) rounds after every step.
template <typename T>
[[kernel]] void narrow_arithmetic(
    const device T* x, const device T* y, device T* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  T a = x[i], b = y[i];
  ROW(0, a + b);
  ROW(1, a - b);
  ROW(2, a * b);
  ROW(3, a / b);
  ROW(4, -a);
  T c = a;
  c += b;
  c *= b;
  ROW(5, c);
  ROW(6, a < b ? a : b);
  ROW(7, T(a == a) + T(a != b) + T(a <= b));
  ROW(8, T(float(a) * float(b) + 1.0f));
  ROW(9, T(a * 0.1f));
  ROW(10, T(int(a)) + T(3));
  ROW(11, as_type<T>(ushort(as_type<ushort>(a) ^ 0x8000)));
}

// A half or a bfloat with a float gives a float; stored here unrounded.
template <typename T>
[[kernel]] void narrow_widening(
    const device T* x, const device float* y, device float* out,
    uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  ROW(0, x[i] + y[i]);
  ROW(1, y[i] * x[i]);
  ROW(2, y[i] - x[i]);
  ROW(3, x[i] / y[i]);
  float sum = y[i];
  sum += x[i];
  ROW(4, sum);
  ROW(5, float(x[i]));
  ROW(6, float(T(y[i])));
  ROW(7, float(x[i] < y[i]));
}

[[kernel]] void half_alone(
    const device half* x, device half* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  half a = x[i];
  half b = 0.1;
  half c = 1.5h;
  ROW(0, a + b);
  ROW(1, a * c);
  a += 1.0f;
  ROW(2, a);
  half4 v = half4(a, b, c, x[i]);
  // By powers of two, whose products are exact: a sum that is fused with them is the same.
  v = v * half4(2.0h, 4.0h, 0.5h, 1.0h) + c;
  ROW(3, v.x + v.y);
  ROW(4, v.z);
  ROW(5, max(a, c));
  ROW(6, fma(a, b, c));
  ROW(7, abs(a));
}

[[kernel]] void vectors(
    const device float* x, device float* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  float4 v = ((const device float4*)x)[i];
  ROW(0, v.x + v.y * v.z - v.w);
  float2 low = v.xy;
  float3 three = v.zyx;
  ROW(1, low.y + 2.0f * three.x + 4.0f * three.z);
  float4 w = float4(low, v.w, 1.0f);
  w.zw = v.yx;
  w.xy += low;
  ROW(2, w.x + 3.0f * w.y);
  ROW(3, w.z + 3.0f * w.w);
  ROW(4, dot(v, w));
  ROW(5, cross(v.xyz, w.yzw).y);
  ROW(6, dot(float3(1.0f), abs(v.xyz)));
  float4 picked = select(v, w, v < w);
  ROW(7, picked.x - picked.w);
  ROW(8, float(all(v == v)) + 2.0f * any(v > 100.0f) + 4.0f * any(v.xy != w.xy));
  v[2] = 7.0f;
  v *= 2.0f;
  v -= float4(0.5f, 1.5f, 2.5f, 3.5f);
  ROW(9, v.x + v.y + v.z + v.w);
  int4 k = int4(w);
  k = (k << 2) | (k & 3);
  ROW(10, float(k.x + k.y * 3));
  uchar4 bytes = as_type<uchar4>(0x01020304u + i);
  ROW(11, float(bytes.x) + 256.0f * float(bytes.w));
  ROW(12, min(v, w).y + max(v, w).z + clamp(v, 0.0f, 1.0f).w);
  packed_float3 packed = packed_float3(three);
  ROW(13, float3(packed).y + float(sizeof(packed_float3)) + float(sizeof(float3)));
  metal::vec<float, 2> both = metal::vec<float, 2>(v.x, w.x) / 4.0f;
  ROW(14, both.x - both.y);
  ROW(15, (-w).x + float2(int2(3, 4)).y);
}

template <typename T>
[[kernel]] void integers(
    const device T* x, const device T* y, device T* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  T a = x[i], b = y[i];
  ROW(0, popcount(a));
  ROW(1, clz(a));
  ROW(2, ctz(a));
  ROW(3, reverse_bits(a));
  ROW(4, rotate(a, T(b & 15)));
  ROW(5, mulhi(a, b));
  ROW(6, madhi(a, b, T(5)));
  ROW(7, addsat(a, b));
  ROW(8, subsat(a, b));
  ROW(9, hadd(a, b));
  ROW(10, rhadd(a, b));
  ROW(11, T(absdiff(a, b)));
  ROW(12, min(a, b));
  ROW(13, max(a, b));
  ROW(14, clamp(a, T(3), T(50)));
  ROW(15, extract_bits(a, 3, 5));
  ROW(16, insert_bits(a, b, 2, 6));
  ROW(17, select(a, b, a > b));
  ROW(18, median3(a, b, T(7)));
  ROW(19, T(a * b + (a ^ b) - (a | b) + (~a & b)));
}

[[kernel]] void integers_24(
    const device int* x, const device int* y, device int* out,
    uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  int a = x[i] % 2000, b = y[i] % 2000;
  ROW(0, mul24(a, b));
  ROW(1, mad24(a, b, 17));
  ROW(2, a / (b == 0 ? 1 : b));
  ROW(3, a % (b == 0 ? 1 : b));
  ROW(4, abs(a));
  ROW(5, a >> 3);
}

[[kernel]] void bit_patterns(
    const device uint* x, device uint* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  uint a = x[i];
  ROW(0, as_type<uint>(as_type<float>(a)));
  ushort2 halves = as_type<ushort2>(a);
  ROW(1, uint(halves.y) << 16 | halves.x);
  uchar4 bytes = as_type<uchar4>(a);
  ROW(2, bytes.x + bytes.y + bytes.z + bytes.w);
  ROW(3, as_type<uint>(as_type<int>(a) >> 4));
  ROW(4, uint(as_type<ulong>(uint2(a, 1u)) >> 1));
  ROW(5, uint(isnan(as_type<float>(a))) + 2 * uint(isinf(as_type<float>(a))));
  ROW(6, uint(signbit(as_type<float>(a))) + 2 * uint(isfinite(as_type<float>(a))));
}
