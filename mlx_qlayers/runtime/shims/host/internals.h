// The internal names of Apple's library by which MLX's headers reach the functions of this one.
#pragma once
#define __metal_acos(x, mode) metal::acos(x)
#define __metal_acosh(x, mode) metal::acosh(x)
#define __metal_asin(x, mode) metal::asin(x)
#define __metal_asinh(x, mode) metal::asinh(x)
#define __metal_atan(x, mode) metal::atan(x)
#define __metal_atanh(x, mode) metal::atanh(x)
#define __metal_ceil(x, mode) metal::ceil(x)
#define __metal_cos(x, mode) metal::cos(x)
#define __metal_cosh(x, mode) metal::cosh(x)
#define __metal_cospi(x, mode) metal::cospi(x)
#define __metal_exp(x, mode) metal::exp(x)
#define __metal_exp10(x, mode) metal::exp10(x)
#define __metal_exp2(x, mode) metal::exp2(x)
#define __metal_fabs(x, mode) metal::fabs(x)
#define __metal_floor(x, mode) metal::floor(x)
#define __metal_fract(x, mode) metal::fract(x)
#define __metal_log(x, mode) metal::log(x)
#define __metal_log10(x, mode) metal::log10(x)
#define __metal_log2(x, mode) metal::log2(x)
#define __metal_rint(x, mode) metal::rint(x)
#define __metal_round(x, mode) metal::round(x)
#define __metal_rsqrt(x, mode) metal::rsqrt(x)
#define __metal_sin(x, mode) metal::sin(x)
#define __metal_sinh(x, mode) metal::sinh(x)
#define __metal_sinpi(x, mode) metal::sinpi(x)
#define __metal_sqrt(x, mode) metal::sqrt(x)
#define __metal_tan(x, mode) metal::tan(x)
#define __metal_tanh(x, mode) metal::tanh(x)
#define __metal_tanpi(x, mode) metal::tanpi(x)
#define __metal_trunc(x, mode) metal::trunc(x)
#define __metal_saturate(x, mode) metal::saturate(x)
#define __metal_atan2(x, y, mode) metal::atan2(x, y)
#define __metal_fdim(x, y, mode) metal::fdim(x, y)
#define __metal_fmax(x, y, mode) metal::fmax(x, y)
#define __metal_fmin(x, y, mode) metal::fmin(x, y)
#define __metal_fmod(x, y, mode) metal::fmod(x, y)
#define __metal_pow(x, y, mode) metal::pow(x, y)
#define __metal_powr(x, y, mode) metal::powr(x, y)
#define __metal_divide(x, y, mode) metal::divide(x, y)
#define __metal_copysign(x, y, mode) metal::copysign(x, y)
#define __metal_nextafter metal::nextafter
#define __metal_fma metal::fma
#define __metal_fmax3(x, y, z, mode) metal::max3(x, y, z)
#define __metal_fmin3(x, y, z, mode) metal::min3(x, y, z)
#define __metal_fmedian3(x, y, z, mode) metal::median3(x, y, z)
#define __metal_frexp(x, e) metal::frexp(x, *(e))
#define __metal_ldexp(x, k, mode) metal::ldexp(x, k)
#define __metal_get_simdgroup_size(x) ((ushort)32)
#define __metal_get_thread_index_in_simdgroup(x) ((ushort)qk_self()->lane)
#define __metal_simd_broadcast metal::simd_broadcast
#define __metal_simd_shuffle metal::simd_shuffle
#define __metal_simd_shuffle_xor metal::simd_shuffle_xor
#define __metal_simd_shuffle_up metal::simd_shuffle_up
#define __metal_simd_shuffle_down metal::simd_shuffle_down
#define __metal_simd_shuffle_rotate_up metal::simd_shuffle_rotate_up
#define __metal_simd_shuffle_rotate_down metal::simd_shuffle_rotate_down
#define __metal_simd_shuffle_and_fill_up metal::simd_shuffle_and_fill_up
#define __metal_simd_shuffle_and_fill_down metal::simd_shuffle_and_fill_down
#define __metal_simd_sum metal::simd_sum
#define __metal_simd_product metal::simd_product
#define __metal_simd_max metal::simd_max
#define __metal_simd_min metal::simd_min
#define __metal_simd_xor(x) metal::simd_xor(metal::qk_bits_of(x))
#define __metal_simd_prefix_inclusive_sum metal::simd_prefix_inclusive_sum
#define __metal_simd_prefix_exclusive_sum metal::simd_prefix_exclusive_sum
#define __metal_simd_prefix_inclusive_product metal::simd_prefix_inclusive_product
#define __metal_simd_prefix_exclusive_product metal::simd_prefix_exclusive_product

namespace metal {
METAL_FUNC uint qk_bits_of(float x) { return as_type<uint>(x); }
} // namespace metal
