// Codes in pairs of 16 bits, for matrix units.
//
// `span` words are one stream of 2 * span halves; half i and half i + span are put side by side, so
// that a shift and a mask take element i and element i + pairs out of them at once. Widths that do
// not divide a word take as many words as begin and end with an element.

#include "common/fragment.metal"
#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

#define SPAN(bits) ((bits) == 5 ? 5 : (bits) % 3 == 0 ? 3 : 1)
#define PAIRS(bits) (16 * SPAN(bits) / (bits))

template <int span>
METAL_FUNC void pair_halves(thread uint* to, const thread uint* words) {
#pragma unroll
  for (int i = 0; i < span; i++) {
    uint low = words[i / 2], high = words[(i + span) / 2];
    to[i] = span == 1 ? low : i % 2 == 0 ? (low & 0xffff) | (high & 0xffff0000) : low >> 16 | high << 16;
  }
}

METAL_FUNC uint shifted_down(uint x, int by) {
  return by >= 0 ? x >> by : x << -by;
}

// Bits first..first + bits of both streams, moved up by `place`, in front of `offset`.
template <int bits>
METAL_FUNC uint code_pair(const thread uint* halves, int first, int place, uint offset) {
  int at = first / 16, from = first % 16, rest = from + bits - 16;
  uint whole = ((1u << bits) - 1) * 0x10001u, part = whole;
  if (rest > 0) {
    part = ((1u << (bits - rest)) - 1) * 0x10001u;
    offset = masked_or(
        shifted_down(halves[at + 1], from - place - 16), (whole - part) << place, offset);
  }
  return masked_or(shifted_down(halves[at], from - place), part << place, offset);
}

// Two E4M3 codes shifted into halves: 2^8 times too small.
METAL_FUNC half2 e4m3_pair(uint halves, int i) {
  uint codes = halves >> 8 * i & 0x00ff00ffu, magnitude = codes & 0x007f007fu;
  uint nan = (magnitude + 0x00010001u) & 0x00800080u;
  return as_type<half2>((codes & 0x00800080u) << 8 | magnitude << 7 | nan << 7);
}

// bfloat holds a code of 8 bits in two parts.
#define PARTS(T, mode, bits) (mode == AFFINE && bits == 8 && is_same_v<T, bfloat> ? 2 : 1)

// Two weights of a row, as they are multiplied: 2^7 (bfloat) or 2^10 (half) over the place of the
// lowest bit is left in a code.
template <typename T, int bits>
METAL_FUNC float code_offset() {
  if (is_same_v<T, bfloat>) {
    return bits == 8 ? 2176.0f : 128.0f;
  }
  return bits == 8 ? 256.0f : 64.0f;
}
template <typename T, int mode, int bits>
METAL_FUNC metal::vec<T, 2> weight_pair(const thread uint* halves, int i, int part, float scale) {
  if (mode == AFFINE) {
    uint code;
    if (is_same_v<T, bfloat>) {
      code = bits == 8 ? code_pair<4>(halves, 8 * i + 4 * part, 0, part ? 0x45004500u : 0x43004300u)
                       : code_pair<bits>(halves, bits * i, 0, 0x43004300u);
    } else {
      code = bits == 8 ? code_pair<8>(halves, 8 * i, 2, 0x5c005c00u)
                       : code_pair<bits>(halves, bits * i, 4, 0x54005400u);
    }
    return as_type<metal::vec<T, 2>>(code);
  }
  if (mode != MXFP8) {
    return scaled_e2m1_pair<T>(halves[0], i, scale);
  }
  half2 pair = scaled_up<8>(e4m3_pair(halves[0], i));
  return is_same_v<T, half> ? as_type<metal::vec<T, 2>>(pair) : metal::vec<T, 2>(float2(pair));
}
// What the sums of weights of weight_pair lack.
template <int mode>
METAL_FUNC float sum_factor() {
  return mode == AFFINE ? 1.0f : mode == MXFP8 ? scale_left<8>() : scale_left<14>();
}
