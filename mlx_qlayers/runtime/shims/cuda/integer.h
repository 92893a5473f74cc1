// Integer functions.
#pragma once

#include "math.h"

namespace mlx::core::cu {

template <typename T, when<is_integral_v<T>> = 0>
T popcount(T x) {
  return __popcll(static_cast<make_unsigned_t<T>>(x));
}
template <typename T, when<is_integral_v<T>> = 0>
T clz(T x) {
  return __clzll(static_cast<make_unsigned_t<T>>(x)) - (64 - 8 * int(sizeof(T)));
}
template <typename T, when<is_integral_v<T>> = 0>
T ctz(T x) {
  return x == 0 ? 8 * int(sizeof(T)) : __ffsll(static_cast<make_unsigned_t<T>>(x)) - 1;
}
template <typename T, when<is_integral_v<T>> = 0>
T reverse_bits(T x) {
  return __brevll(static_cast<make_unsigned_t<T>>(x)) >> (64 - 8 * sizeof(T));
}
template <typename T, when<is_integral_v<T>> = 0>
T rotate(T x, T by) {
  using U = make_unsigned_t<T>;
  constexpr U bits = 8 * sizeof(T);
  U left = static_cast<U>(by) % bits, u = static_cast<U>(x);
  return left == 0 ? u : U(u << left) | U(u >> (bits - left));
}
template <typename T, when<is_integral_v<T>> = 0>
T mulhi(T x, T y) {
  if constexpr (sizeof(T) == 8) {
    if constexpr (is_signed_v<T>)
      return __mul64hi(x, y);
    else
      return __umul64hi(x, y);
  } else {
    using Wide = conditional_t<is_signed_v<T>, int64_t, ulong>;
    return (Wide(x) * Wide(y)) >> (8 * sizeof(T));
  }
}
template <typename T>
T madhi(T x, T y, T z) {
  return mulhi(x, y) + z;
}
inline int mul24(int x, int y) {
  return __mul24(x, y);
}
inline uint mul24(uint x, uint y) {
  return __umul24(x, y);
}
template <typename T>
T mad24(T x, T y, T z) {
  return mul24(x, y) + z;
}
template <typename T, when<is_integral_v<T>> = 0>
T addsat(T x, T y) {
  using L = numeric_limits<T>;
  if constexpr (!is_signed_v<T>)
    return x > T(L::max() - y) ? L::max() : T(x + y);
  else if (y > 0)
    return x > T(L::max() - y) ? L::max() : T(x + y);
  else
    return x < T(L::min() - y) ? L::min() : T(x + y);
}
template <typename T, when<is_integral_v<T>> = 0>
T subsat(T x, T y) {
  using L = numeric_limits<T>;
  if constexpr (!is_signed_v<T>)
    return x < y ? T(0) : T(x - y);
  else if (y < 0)
    return x > T(L::max() + y) ? L::max() : T(x - y);
  else
    return x < T(L::min() + y) ? L::min() : T(x - y);
}
template <typename T, when<is_integral_v<T>> = 0>
T hadd(T x, T y) {
  return (x >> 1) + (y >> 1) + (x & y & 1);
}
template <typename T, when<is_integral_v<T>> = 0>
T rhadd(T x, T y) {
  return (x >> 1) + (y >> 1) + ((x | y) & 1);
}
template <typename T, when<is_integral_v<T>> = 0>
make_unsigned_t<T> absdiff(T x, T y) {
  using U = make_unsigned_t<T>;
  return x > y ? U(U(x) - U(y)) : U(U(y) - U(x));
}
template <typename T, when<is_integral_v<T>> = 0>
T extract_bits(T x, uint offset, uint bits) {
  using U = make_unsigned_t<T>;
  constexpr uint all = 8 * sizeof(T);
  return bits == 0 ? T(0) : T(T(U(x) << (all - offset - bits)) >> (all - bits));
}
template <typename T, when<is_integral_v<T>> = 0>
T insert_bits(T base, T insert, uint offset, uint bits) {
  using U = make_unsigned_t<T>;
  U mask = (bits == 8 * sizeof(T) ? U(~U(0)) : U((U(1) << bits) - 1)) << offset;
  return (U(base) & U(~mask)) | (U(U(insert) << offset) & mask);
}
MSL_VECTOR_1(popcount)
MSL_VECTOR_1(clz)
MSL_VECTOR_1(ctz)
MSL_VECTOR_1(reverse_bits)
MSL_VECTOR_2(rotate)
MSL_VECTOR_2(mulhi)
MSL_VECTOR_2(addsat)
MSL_VECTOR_2(subsat)
MSL_VECTOR_2(hadd)
MSL_VECTOR_2(rhadd)
#undef MSL_VECTOR_1
#undef MSL_VECTOR_2

} // namespace mlx::core::cu
