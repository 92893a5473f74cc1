// Scalars, vectors, half and bfloat as the Metal Shading Language has them.
#pragma once

#include "traits.h"

namespace mlx::core::cu {

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
// MLX passes int64_t, which is long long here and long on Metal: cuda.translate spells it so.
using ulong = uint64_t;

template <bool condition>
using when = enable_if_t<condition, int>;
template <typename T>
constexpr bool is_builtin = is_integral_v<T> || is_builtin_float<T>;

// half (N = __half) and bfloat (N = __nv_bfloat16). Both widen to float by themselves; a float
// becomes a half by itself too, but a bfloat only by a cast. float op either is float.
template <typename N>
struct narrow {
  N native;

  narrow() = default;
  constexpr narrow(N n) : native(n) {}
  template <typename U, when<is_integral_v<U>> = 0>
  narrow(U x) : native(static_cast<N>(x)) {}
  template <
      typename U,
      when<is_builtin_float<U> && is_same_v<N, __half>> = 0>
  narrow(U x) : native(static_cast<float>(x)) {}
  template <
      typename U,
      when<is_builtin_float<U> && !is_same_v<N, __half>> = 0,
      int = 0>
  explicit narrow(U x) : native(static_cast<float>(x)) {}
  template <typename M, when<!is_same_v<M, N>> = 0>
  explicit narrow(narrow<M> x) : native(static_cast<float>(x)) {}

  operator float() const {
    return static_cast<float>(native);
  }
  narrow operator-() const {
    return __hneg(native);
  }
  narrow operator+() const {
    return *this;
  }
};

using half = narrow<__half>;
using bfloat = narrow<__nv_bfloat16>;
using bfloat16_t = bfloat;
using float16_t = half;

template <typename T>
constexpr bool is_narrow = false;
template <typename N>
constexpr bool is_narrow<narrow<N>> = true;
template <typename T>
constexpr bool is_scalar_v = is_builtin<T> || is_narrow<T>;
template <typename T>
constexpr bool is_floating_point_v = is_builtin_float<T> || is_narrow<T>;
template <typename T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <typename T>
constexpr bool is_arithmetic_v = is_scalar_v<T>;
template <typename T>
struct is_arithmetic : bool_constant<is_scalar_v<T>> {};

// The _rn forms are never fused into a multiply-add: half arithmetic rounds after every step.
template <typename N>
narrow<N> operator+(narrow<N> a, narrow<N> b) {
  return __hadd_rn(a.native, b.native);
}
template <typename N>
narrow<N> operator-(narrow<N> a, narrow<N> b) {
  return __hsub_rn(a.native, b.native);
}
template <typename N>
narrow<N> operator*(narrow<N> a, narrow<N> b) {
  return __hmul_rn(a.native, b.native);
}
template <typename N>
narrow<N> operator/(narrow<N> a, narrow<N> b) {
  return narrow<N>(static_cast<float>(a) / static_cast<float>(b));
}

#define MSL_NARROW_ARITHMETIC(op)                                     \
  template <typename N, typename U, when<is_builtin<U>> = 0>          \
  auto operator op(narrow<N> a, U b) {                                \
    if constexpr (is_integral_v<U>)                        \
      return a op narrow<N>(b);                                       \
    else                                                              \
      return static_cast<float>(a) op static_cast<float>(b);          \
  }                                                                   \
  template <typename N, typename U, when<is_builtin<U>> = 0>          \
  auto operator op(U a, narrow<N> b) {                                \
    if constexpr (is_integral_v<U>)                        \
      return narrow<N>(a) op b;                                       \
    else                                                              \
      return static_cast<float>(a) op static_cast<float>(b);          \
  }                                                                   \
  template <typename N, typename U, when<is_scalar_v<U>> = 0>         \
  narrow<N>& operator op##=(narrow<N>& a, U b) {                      \
    decltype(a op b) result = a op b;                                 \
    static_assert(                                                    \
        is_convertible_v<decltype(result), narrow<N>>,     \
        "a float becomes a bfloat only by a cast");                   \
    return a = result;                                                \
  }
MSL_NARROW_ARITHMETIC(+)
MSL_NARROW_ARITHMETIC(-)
MSL_NARROW_ARITHMETIC(*)
MSL_NARROW_ARITHMETIC(/)
#undef MSL_NARROW_ARITHMETIC

#define MSL_NARROW_COMPARISON(op)                                     \
  template <typename N>                                               \
  bool operator op(narrow<N> a, narrow<N> b) {                        \
    return static_cast<float>(a) op static_cast<float>(b);            \
  }                                                                   \
  template <typename N, typename U, when<is_builtin<U>> = 0>          \
  bool operator op(narrow<N> a, U b) {                                \
    return static_cast<float>(a) op static_cast<float>(b);            \
  }                                                                   \
  template <typename N, typename U, when<is_builtin<U>> = 0>          \
  bool operator op(U a, narrow<N> b) {                                \
    return static_cast<float>(a) op static_cast<float>(b);            \
  }
MSL_NARROW_COMPARISON(==)
MSL_NARROW_COMPARISON(!=)
MSL_NARROW_COMPARISON(<)
MSL_NARROW_COMPARISON(>)
MSL_NARROW_COMPARISON(<=)
MSL_NARROW_COMPARISON(>=)
#undef MSL_NARROW_COMPARISON

template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename N>
struct numeric_limits<narrow<N>> {
  using native_limits = numeric_limits<N>;
  static narrow<N> min() {
    return native_limits::min();
  }
  static narrow<N> max() {
    return native_limits::max();
  }
  static narrow<N> lowest() {
    return native_limits::lowest();
  }
  static narrow<N> epsilon() {
    return native_limits::epsilon();
  }
  static narrow<N> infinity() {
    return native_limits::infinity();
  }
  static narrow<N> quiet_NaN() {
    return native_limits::quiet_NaN();
  }
  static narrow<N> denorm_min() {
    return native_limits::denorm_min();
  }
};

// The function that MLX's own Metal preamble offers under this name; keywords.h renames it.
template <typename T>
struct MetalLimits {
  static constexpr T max = numeric_limits<T>::max();
  static constexpr T min = numeric_limits<T>::min();
  static constexpr T finite_max = max;
  static constexpr T finite_min = min;
};
template <>
struct MetalLimits<bool> {
  static constexpr bool max = true;
  static constexpr bool min = false;
};
template <>
struct MetalLimits<float> {
  static constexpr float max = numeric_limits<float>::infinity();
  static constexpr float min = -numeric_limits<float>::infinity();
  static constexpr float finite_max = 3.402823466e+38f;
  static constexpr float finite_min = -3.402823466e+38f;
};
template <>
struct MetalLimits<half> {
  static constexpr half max = __half(__half_raw{0x7c00});
  static constexpr half min = __half(__half_raw{0xfc00});
  static constexpr half finite_max = __half(__half_raw{0x7bff});
  static constexpr half finite_min = __half(__half_raw{0xfbff});
};
template <>
struct MetalLimits<bfloat> {
  static constexpr bfloat max = __nv_bfloat16(__nv_bfloat16_raw{0x7f80});
  static constexpr bfloat min = __nv_bfloat16(__nv_bfloat16_raw{0xff80});
  static constexpr bfloat finite_max = __nv_bfloat16(__nv_bfloat16_raw{0x7f7f});
  static constexpr bfloat finite_min = __nv_bfloat16(__nv_bfloat16_raw{0xff7f});
};

template <typename T, typename U>
T ceildiv(T a, U b) {
  return (a + b - 1) / b;
}

} // namespace mlx::core::cu

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
#endif
#define HUGE_VALF INFINITY
#define MAXFLOAT 3.402823466e+38f
#undef FLT_MAX
#undef FLT_MIN
#undef FLT_EPSILON
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(6.103515625e-05f)
#define HALF_EPSILON half(9.765625e-04f)
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
