// Codes in pairs of 16 bits, for matrix units.
//
// `span` words are one stream of 2 * span halves; half i and half i + span are combined in one word, so
// that one shift and one mask extract elements i and i + pairs. For widths that do not divide a word, span is
// the number of words that begin and end with an element. Shorter runs begin within a word: their lanes
// load the words around them, and shift.

#include "common/fragment.metal"
#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

#define SPAN(bits) ((bits) == 5 ? 5 : (bits) % 3 == 0 ? 3 : 1)
#define WHOLE(bits, run) ((run) * (bits) % 32 == 0)
// The words that a lane reads for a run; the distance between the elements of a pair; the halves of a stream.
#define RUN_WORDS(bits, run) \
  (WHOLE(bits, run) ? (run) * (bits) / 32 : ((run) * (bits) + ((run) * (bits) % 16 ? 55 : 47)) / 32)
#define PAIRS(bits, run) (WHOLE(bits, run) ? 16 * SPAN(bits) / (bits) : (run) / 2)
#define RUN_SPAN(bits, run) (WHOLE(bits, run) ? SPAN(bits) : ((run) / 2 * (bits) + 15) / 16)

// The first word that a lane reads for its run, one of the four runs of a step.
template <int bits, int run>
METAL_FUNC int first_word(int quarter) {
  return WHOLE(bits, run) ? quarter * (run * bits / 32)
                          : min(quarter * run * bits / 32, run * bits / 8 - RUN_WORDS(bits, run));
}

template <int span>
METAL_FUNC void pair_halves(thread uint* to, const thread uint* words) {
#pragma unroll
  for (int i = 0; i < span; i++) {
    uint low = words[i / 2], high = words[(i + span) / 2];
    to[i] = span == 1 ? low : i % 2 == 0 ? (low & 0xffff) | (high & 0xffff0000) : low >> 16 | high << 16;
  }
}

// 16 bits of words, from bit `at` on; higher bits are undefined.
METAL_FUNC uint half_at(const thread uint* words, int at) {
  uint low = words[at / 32] >> at % 32;
  return at % 32 > 16 ? low | words[at / 32 + 1] << (32 - at % 32) : low;
}
// The same of a run that begins within a word.
template <int bits, int run>
METAL_FUNC void pair_short_run(thread uint* to, const thread uint* read, int quarter) {
  const int count = RUN_WORDS(bits, run), whole = (run * bits + 31) / 32;
  int shift = quarter * run * bits - 32 * first_word<bits, run>(quarter);
  uint words[whole];
#pragma unroll
  for (int i = 0; i < whole; i++) {
    uint low = read[i], high = i + 1 < count ? read[i + 1] : 0;
    if (run * bits % 16 == 0) {
      words[i] = shift ? low >> 16 | high << 16 : low;
    } else {
      low = shift < 32 ? low : high;
      words[i] = low >> shift % 32 | high << 1 << (31 - shift % 32);
    }
  }
#pragma unroll
  for (int i = 0; i < RUN_SPAN(bits, run); i++) {
    to[i] = (half_at(words, 16 * i) & 0xffff) | half_at(words, run / 2 * bits + 16 * i) << 16;
  }
}

METAL_FUNC uint shifted_down(uint x, int by) {
  return by >= 0 ? x >> by : x << -by;
}

// Bits first..first + bits of both streams, shifted left by `place`, combined with `offset`.
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

// bfloat has no room for a code of 8 bits and an offset: the code is converted, or split in two parts.
#define BFLOAT_BYTES(T, mode, bits) (mode == AFFINE && bits == 8 && is_same_v<T, bfloat>)
#define PARTS(T, mode, bits) (BFLOAT_BYTES(T, mode, bits) ? BYTE_PARTS : 1)

// Two weights of a row as operands. Codes keep the offset of their exponent: 2^7 (bfloat) or 2^10 (half), times
// the value of their lowest bit.
template <typename T, int bits>
METAL_FUNC float code_offset() {
  if (is_same_v<T, bfloat>) {
    return bits != 8 ? 128.0f : BYTE_PARTS == 2 ? 2176.0f : 0.0f;
  }
  return bits == 8 ? 256.0f : 64.0f;
}
template <typename T, int mode, int bits>
METAL_FUNC metal::vec<T, 2> weight_pair(const thread uint* halves, int i, int part, float scale) {
  if (BFLOAT_BYTES(T, mode, bits) && BYTE_PARTS == 1) {
    // The low 16 bits of these floats are zero.
    float2 pair = float2(byte_pair(halves[0], i));
    return as_type<metal::vec<T, 2>>(as_type<uint>(pair.x) >> 16 | as_type<uint>(pair.y));
  }
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
// The factor that weight_pair leaves out of codes, besides their offset.
template <typename T, int mode, int bits>
METAL_FUNC float byte_factor() {
  return BFLOAT_BYTES(T, mode, bits) && BYTE_PARTS == 1 ? pair_factor<mode>() : 1.0f;
}
// The factor that weight_pair leaves out of sums.
template <int mode>
METAL_FUNC float sum_factor() {
  return mode == AFFINE ? 1.0f : mode == MXFP8 ? scale_left<8>() : scale_left<14>();
}
