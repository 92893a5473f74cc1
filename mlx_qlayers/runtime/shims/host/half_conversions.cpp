// Conversions to and from half and bfloat, for which clang calls the compiler's own library on
// processors that lack an instruction.
#include <stdint.h>
#include <string.h>

template <typename To, typename From>
static To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "equal sizes");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

// Rounds to odd, so that a second rounding to a much narrower type is as good as one.
static float to_odd(double x) {
  float y = (float)x;
  if ((double)y == x || y != y) return y;
  uint32_t b = bits<uint32_t>(y);
  double magnitude = x < 0 ? -x : x, rounded = y < 0 ? -(double)y : (double)y;
  if (rounded > magnitude) b--;
  return bits<float>(b | 1);
}

static uint16_t half_of(float x) {
  uint32_t b = bits<uint32_t>(x), sign = b >> 16 & 0x8000, a = b & 0x7fffffff;
  if (a > 0x7f800000) return sign | 0x7e00;
  if (a >= 0x477ff000) return sign | 0x7c00;
  if (a < 0x38800000) {
    // Adding 0.5 leaves the subnormal's bits, rounded, at the low end.
    return sign | (bits<uint32_t>(bits<float>(a) + 0.5f) - 0x3f000000);
  }
  return sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13);
}

static float from_half(uint16_t h) {
  uint32_t a = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
  if (a < 0x400) return bits<float>(bits<uint32_t>((float)a * 0x1p-24f) | sign);
  uint32_t b = (a << 13) + (a >= 0x7c00 ? 0x70000000 : 0x38000000);
  return bits<float>(b | sign);
}

static uint16_t bfloat_of(float x) {
  uint32_t b = bits<uint32_t>(x);
  if ((b & 0x7fffffff) > 0x7f800000) return b >> 16 | 0x40;
  return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}

#define QK_LIBRARY extern "C" __attribute__((weak))
QK_LIBRARY _Float16 __truncsfhf2(float x) { return bits<_Float16>(half_of(x)); }
QK_LIBRARY _Float16 __truncdfhf2(double x) { return bits<_Float16>(half_of(to_odd(x))); }
QK_LIBRARY float __extendhfsf2(_Float16 x) { return from_half(bits<uint16_t>(x)); }
QK_LIBRARY __bf16 __truncsfbf2(float x) { return bits<__bf16>(bfloat_of(x)); }
QK_LIBRARY __bf16 __truncdfbf2(double x) { return bits<__bf16>(bfloat_of(to_odd(x))); }
