// Math functions: plain (as precise as the compiler makes them), precise:: and fast::.
#include <metal_stdlib>
using namespace metal;

#define ROW(r, value) out[(r) * n + i] = value

// x in (-2, 2), y in (0.1, 4).
[[kernel]] void math_plain(
    const device float* x, const device float* y, device float* out,
    uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  float a = x[i], b = y[i];
  ROW(0, exp(a));
  ROW(1, exp2(a));
  ROW(2, exp10(a));
  ROW(3, log(b));
  ROW(4, log2(b));
  ROW(5, log10(b));
  ROW(6, sin(a));
  ROW(7, cos(a));
  ROW(8, tan(a));
  ROW(9, sinh(a));
  ROW(10, cosh(a));
  ROW(11, tanh(a));
  ROW(12, asin(a / 2.0f));
  ROW(13, acos(a / 2.0f));
  ROW(14, atan(a));
  ROW(15, asinh(a));
  ROW(16, acosh(b + 1.0f));
  ROW(17, atanh(a / 2.1f));
  ROW(18, atan2(a, b));
  ROW(19, pow(b, a));
  ROW(20, powr(b, a));
  ROW(21, sqrt(b));
  ROW(22, rsqrt(b));
  ROW(23, sinpi(a));
  ROW(24, cospi(a));
  ROW(25, a / b);
  ROW(26, fmod(a, b));
}

[[kernel]] void math_precise(
    const device float* x, const device float* y, device float* out,
    uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  float a = x[i], b = y[i];
  ROW(0, precise::exp(a));
  ROW(1, precise::exp2(a));
  ROW(2, precise::log(b));
  ROW(3, precise::log2(b));
  ROW(4, precise::sin(a));
  ROW(5, precise::cos(a));
  ROW(6, precise::tanh(a));
  ROW(7, precise::sqrt(b));
  ROW(8, precise::rsqrt(b));
  ROW(9, precise::pow(b, a));
  ROW(10, precise::divide(a, b));
}

[[kernel]] void math_fast(
    const device float* x, const device float* y, device float* out,
    uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  float a = x[i], b = y[i];
  ROW(0, fast::exp(a));
  ROW(1, fast::exp2(a));
  ROW(2, fast::log(b));
  ROW(3, fast::log2(b));
  ROW(4, fast::sin(a));
  ROW(5, fast::cos(a));
  ROW(6, fast::tanh(a));
  ROW(7, fast::sqrt(b));
  ROW(8, fast::rsqrt(b));
  ROW(9, fast::pow(b, a));
  ROW(10, fast::divide(a, b));
}

// Results that have one right answer.
[[kernel]] void math_exact(
    const device float* x, const device float* y, device float* out,
    uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  float a = x[i], b = y[i];
  ROW(0, floor(a));
  ROW(1, ceil(a));
  ROW(2, trunc(a));
  ROW(3, rint(a));
  ROW(4, round(a));
  ROW(5, fabs(a));
  ROW(6, sign(a));
  ROW(7, fract(a));
  ROW(8, copysign(b, a));
  ROW(9, fdim(a, b));
  ROW(10, fmin(a, b));
  ROW(11, fmax(a, b));
  ROW(12, min(a, b));
  ROW(13, max(a, b));
  ROW(14, clamp(a, -1.0f, 1.0f));
  ROW(15, saturate(a));
  ROW(16, step(b, a));
  ROW(17, fma(a, b, 1.0f));
  ROW(18, ldexp(a, 3));
  ROW(19, min3(a, b, 1.0f));
  ROW(20, max3(a, b, 1.0f));
  ROW(21, median3(a, b, 1.0f));
  float whole;
  float rest = modf(a, whole);
  ROW(22, rest);
  ROW(23, whole);
  int exponent;
  float mantissa = frexp(a, exponent);
  ROW(24, mantissa);
  ROW(25, float(exponent));
  ROW(26, float(ilogb(b)));
  ROW(27, nextafter(a, b));
  ROW(28, mix(a, b, 0.5f));
  ROW(29, select(a, b, a < b));
}

// Where infinities and NaN go.
[[kernel]] void math_special(
    const device float* x, device float* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  float a = x[i];
  ROW(0, exp(a));
  ROW(1, fast::exp(a));
  ROW(2, tanh(a));
  ROW(3, max(a, 1.0f));
  ROW(4, min(a, 1.0f));
  ROW(5, float(isnan(a)) + 2.0f * float(isinf(a)) + 4.0f * float(isfinite(a)));
  ROW(6, a * 0.0f);
  ROW(7, fast::exp2(a));
  ROW(8, sqrt(a));
  ROW(9, 1.0f / a);
}
