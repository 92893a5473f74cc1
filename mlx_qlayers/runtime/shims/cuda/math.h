// Math, common, relational and geometric functions. fast:: maps to the hardware's approximations
// where they stay within a few ulp of what Metal promises; precise:: is what plain names are.
#pragma once

#include "vector.h"

namespace mlx::core::cu {

// name(x) for float, half, bfloat and their vectors.
#define MSL_MATH_1(name, expression)                 \
  inline float name(float x) {                       \
    return expression;                               \
  }                                                  \
  template <typename N>                              \
  narrow<N> name(narrow<N> x) {                      \
    return narrow<N>(name(static_cast<float>(x)));   \
  }                                                  \
  template <typename T, int N>                       \
  vec<T, N> name(vec<T, N> x) {                      \
    vec<T, N> r;                                     \
    MSL_EACH(T(name(static_cast<float>(x[i]))))      \
  }
#define MSL_MATH_2(name, expression)                                           \
  inline float name(float x, float y) {                                        \
    return expression;                                                         \
  }                                                                            \
  template <typename N>                                                        \
  narrow<N> name(narrow<N> x, narrow<N> y) {                                   \
    return narrow<N>(name(static_cast<float>(x), static_cast<float>(y)));      \
  }                                                                            \
  template <typename T, int N>                                                 \
  vec<T, N> name(vec<T, N> x, vec<T, N> y) {                                   \
    vec<T, N> r;                                                               \
    MSL_EACH(T(name(static_cast<float>(x[i]), static_cast<float>(y[i]))))      \
  }
#define MSL_MATH_3(name, expression)                                           \
  inline float name(float x, float y, float z) {                               \
    return expression;                                                         \
  }                                                                            \
  template <typename N>                                                        \
  narrow<N> name(narrow<N> x, narrow<N> y, narrow<N> z) {                      \
    return narrow<N>(                                                          \
        name(static_cast<float>(x), static_cast<float>(y), static_cast<float>(z))); \
  }                                                                            \
  template <typename T, int N>                                                 \
  vec<T, N> name(vec<T, N> x, vec<T, N> y, vec<T, N> z) {                      \
    vec<T, N> r;                                                               \
    MSL_EACH(name(x[i], y[i], z[i]))                                           \
  }

MSL_MATH_1(acos, ::acosf(x))
MSL_MATH_1(acosh, ::acoshf(x))
MSL_MATH_1(asin, ::asinf(x))
MSL_MATH_1(asinh, ::asinhf(x))
MSL_MATH_1(atan, ::atanf(x))
MSL_MATH_1(atanh, ::atanhf(x))
MSL_MATH_1(ceil, ::ceilf(x))
MSL_MATH_1(cos, ::cosf(x))
MSL_MATH_1(cosh, ::coshf(x))
MSL_MATH_1(cospi, ::cospif(x))
MSL_MATH_1(exp, ::expf(x))
MSL_MATH_1(exp2, ::exp2f(x))
MSL_MATH_1(exp10, ::exp10f(x))
MSL_MATH_1(fabs, ::fabsf(x))
MSL_MATH_1(floor, ::floorf(x))
MSL_MATH_1(fract, ::fminf(x - ::floorf(x), 0x1.fffffep-1f))
MSL_MATH_1(log, ::logf(x))
MSL_MATH_1(log1p, ::log1pf(x))
MSL_MATH_1(log2, ::log2f(x))
MSL_MATH_1(log10, ::log10f(x))
MSL_MATH_1(rint, ::rintf(x))
MSL_MATH_1(round, ::roundf(x))
MSL_MATH_1(rsqrt, ::rsqrtf(x))
MSL_MATH_1(saturate, __saturatef(x))
MSL_MATH_1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == x ? x : 0.0f)
MSL_MATH_1(sin, ::sinf(x))
MSL_MATH_1(sinh, ::sinhf(x))
MSL_MATH_1(sinpi, ::sinpif(x))
MSL_MATH_1(sqrt, ::sqrtf(x))
MSL_MATH_1(tan, ::tanf(x))
MSL_MATH_1(tanh, ::tanhf(x))
MSL_MATH_1(tanpi, ::sinpif(x) / ::cospif(x))
MSL_MATH_1(trunc, ::truncf(x))
MSL_MATH_2(atan2, ::atan2f(x, y))
MSL_MATH_2(copysign, ::copysignf(x, y))
MSL_MATH_2(divide, x / y)
MSL_MATH_2(fdim, ::fdimf(x, y))
MSL_MATH_2(fmax, ::fmaxf(x, y))
MSL_MATH_2(fmin, ::fminf(x, y))
MSL_MATH_2(fmod, ::fmodf(x, y))
MSL_MATH_2(nextafter, ::nextafterf(x, y))
MSL_MATH_2(pow, ::powf(x, y))
MSL_MATH_2(powr, x < 0.0f ? NAN : ::powf(x, y))
MSL_MATH_2(step, y < x ? 0.0f : 1.0f)
MSL_MATH_3(fma, ::fmaf(x, y, z))
MSL_MATH_3(mix, x + (y - x) * z)
inline float smooth(float t) {
  return t * t * (3.0f - 2.0f * t);
}
MSL_MATH_3(smoothstep, smooth(__saturatef((z - x) / (y - x))))
#define MSL_MATH_OF_HALVES(name)                                     \
  inline half name(half x, half y, half z) {                         \
    return __hfma(x.native, y.native, z.native);                     \
  }                                                                  \
  inline bfloat name(bfloat x, bfloat y, bfloat z) {                 \
    return __hfma(x.native, y.native, z.native);                     \
  }
// Through float the sum would be rounded twice.
MSL_MATH_OF_HALVES(fma)
#undef MSL_MATH_OF_HALVES
template <typename N>
vec<narrow<N>, 2> fma(vec<narrow<N>, 2> x, vec<narrow<N>, 2> y, vec<narrow<N>, 2> z) {
  return as_type<vec<narrow<N>, 2>>(__hfma2(as_pair(x), as_pair(y), as_pair(z)));
}
template <typename T, int N, typename U, when<is_scalar_v<U>> = 0>
vec<T, N> mix(vec<T, N> x, vec<T, N> y, U a) {
  return mix(x, y, vec<T, N>(a));
}

// Relational functions give bool, or a vector of bool.
#define MSL_RELATION(name, expression)                        \
  template <typename T, when<is_floating_point_v<T>> = 0>     \
  bool name(T value) {                                        \
    float x = value;                                          \
    return expression;                                        \
  }                                                           \
  template <typename T, int N>                                \
  vec<bool, N> name(vec<T, N> x) {                            \
    vec<bool, N> r;                                           \
    MSL_EACH(name(x[i]))                                      \
  }
MSL_RELATION(isnan, x != x)
MSL_RELATION(isinf, ::fabsf(x) == INFINITY)
MSL_RELATION(isfinite, ::fabsf(x) < INFINITY)
MSL_RELATION(
    isnormal,
    ::fabsf(x) < INFINITY && ::fabsf(x) >= static_cast<float>(numeric_limits<T>::min()))
MSL_RELATION(signbit, __float_as_int(x) < 0)
#undef MSL_RELATION

template <int N>
bool all(vec<bool, N> x) {
  bool r = true;
  for (int i = 0; i < N; i++)
    r = r && x[i];
  return r;
}
template <int N>
bool any(vec<bool, N> x) {
  return !all(!x);
}
template <typename T, when<is_scalar_v<T>> = 0>
T select(T a, T b, bool c) {
  return c ? b : a;
}
template <typename T, int N>
vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r;
  MSL_EACH(c[i] ? b[i] : a[i])
}
template <typename T, int N>
vec<T, N> select(vec<T, N> a, vec<T, N> b, bool c) {
  return c ? b : a;
}

// min and max of floats are fmin and fmax: the other argument where one is NaN.
template <typename T, when<is_scalar_v<T>> = 0>
T min(T x, T y) {
  if constexpr (is_floating_point_v<T>)
    return fmin(x, y);
  else
    return y < x ? y : x;
}
template <typename T, when<is_scalar_v<T>> = 0>
T max(T x, T y) {
  if constexpr (is_floating_point_v<T>)
    return fmax(x, y);
  else
    return x < y ? y : x;
}
template <typename T, when<is_scalar_v<T>> = 0>
T abs(T x) {
  if constexpr (is_floating_point_v<T>)
    return fabs(x);
  else
    return x < T(0) ? -x : x;
}
#define MSL_VECTOR_2(name)                                            \
  template <typename T, int N>                                        \
  vec<T, N> name(vec<T, N> x, vec<T, N> y) {                          \
    vec<T, N> r;                                                      \
    MSL_EACH(name(x[i], y[i]))                                        \
  }                                                                   \
  template <typename T, int N, typename U, when<is_scalar_v<U>> = 0>  \
  vec<T, N> name(vec<T, N> x, U y) {                                  \
    return name(x, vec<T, N>(y));                                     \
  }
#define MSL_VECTOR_1(name)          \
  template <typename T, int N>      \
  vec<T, N> name(vec<T, N> x) {     \
    vec<T, N> r;                    \
    MSL_EACH(name(x[i]))            \
  }
MSL_VECTOR_2(min)
MSL_VECTOR_2(max)
MSL_VECTOR_1(abs)
template <typename T>
T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <typename T, int N, typename U, when<is_scalar_v<U>> = 0>
vec<T, N> clamp(vec<T, N> x, U low, U high) {
  return min(max(x, low), high);
}
template <typename T>
T min3(T x, T y, T z) {
  return min(x, min(y, z));
}
template <typename T>
T max3(T x, T y, T z) {
  return max(x, max(y, z));
}
template <typename T>
T median3(T x, T y, T z) {
  return max(min(x, y), min(max(x, y), z));
}
template <typename T>
T fmin3(T x, T y, T z) {
  return min3(x, y, z);
}
template <typename T>
T fmax3(T x, T y, T z) {
  return max3(x, y, z);
}
template <typename T>
T fmedian3(T x, T y, T z) {
  return median3(x, y, z);
}

inline float sincos(float x, float& cosine) {
  float sine;
  ::sincosf(x, &sine, &cosine);
  return sine;
}
inline float modf(float x, float& whole) {
  return ::modff(x, &whole);
}
inline float frexp(float x, int& exponent) {
  return ::frexpf(x, &exponent);
}
inline float ldexp(float x, int exponent) {
  return ::ldexpf(x, exponent);
}
inline int ilogb(float x) {
  return ::ilogbf(x);
}

template <typename T, int N>
T dot(vec<T, N> x, vec<T, N> y) {
  T sum = x[0] * y[0];
#pragma unroll
  for (int i = 1; i < N; i++)
    sum = sum + x[i] * y[i];
  return sum;
}
template <typename T, int N>
T length_squared(vec<T, N> x) {
  return dot(x, x);
}
template <typename T, int N>
T length(vec<T, N> x) {
  return sqrt(dot(x, x));
}
template <typename T, int N>
T distance(vec<T, N> x, vec<T, N> y) {
  return length(x - y);
}
template <typename T, int N>
vec<T, N> normalize(vec<T, N> x) {
  return x * rsqrt(dot(x, x));
}
template <typename T>
vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}

namespace precise = ::mlx::core::cu;

namespace fast {
using namespace ::mlx::core::cu;

inline float approximate_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
inline float approximate_sqrt(float x) {
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
MSL_MATH_1(cos, __cosf(x))
MSL_MATH_1(exp, __expf(x))
MSL_MATH_1(exp2, approximate_exp2(x))
MSL_MATH_1(exp10, __exp10f(x))
MSL_MATH_1(log, __logf(x))
MSL_MATH_1(log2, __log2f(x))
MSL_MATH_1(log10, __log10f(x))
MSL_MATH_1(sin, __sinf(x))
MSL_MATH_1(sqrt, approximate_sqrt(x))
MSL_MATH_1(tan, __tanf(x))
MSL_MATH_2(divide, __fdividef(x, y))
MSL_MATH_2(pow, __powf(x, y))
MSL_MATH_2(powr, __powf(x, y))
} // namespace fast

#undef MSL_MATH_1
#undef MSL_MATH_2
#undef MSL_MATH_3

} // namespace mlx::core::cu
