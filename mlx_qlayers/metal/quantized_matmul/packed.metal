// Packed matrices: decodes the words, scales and codes of MLX's quantized formats.
//
// A row of K elements is K * bits / 32 words, elements from the low bits up; `group` elements have one
// scale. In mode affine an element is scale * code + bias; in the others a code is a small float
// (E2M1 or E4M3) and a scale a byte (E8M0, in NVFP4 E4M3).

#include "common/load.metal"

#include <metal_stdlib>
using namespace metal;

#define AFFINE 0
#define MXFP4 1
#define MXFP8 2
#define NVFP4 3

// The code of element i of packed words; i is a constant once the loop around it is unrolled.
template <int bits>
METAL_FUNC uint packed_code(const thread uint* words, int i) {
  int word = i * bits / 32, shift = i * bits % 32;
  uint code = words[word] >> shift;
  if (shift + bits > 32) {
    code |= words[word + 1] << (32 - shift);
  }
  return code & ((1u << bits) - 1);
}

// Eight codes of 2 or 3 bits from element d of a row on, four in each half of a word, as those of 4 bits lie.
template <int bits, typename K>
METAL_FUNC uint spread_codes(const device K* row, int d, int span) {
  const uint half_word = (1u << 4 * bits) - 1;
  int word = d * bits / 32, shift = d * bits % 32;
  uint codes = uint(row[int64_t(word) * span]) >> shift;
  if (shift + 8 * bits > 32) {
    codes |= uint(row[int64_t(word + 1) * span]) << (32 - shift);
  }
  return (codes & half_word) | (codes >> 4 * bits & half_word) << 16;
}

// E4M3 and E2M1 are halves with fewer exponent bits: shifted into place, they are off by a power of two.
METAL_FUNC float float_from_e4m3(uint code) {
  uint magnitude = code & 0x7f;
  uint nan = (magnitude + 1) >> 7 << 14;
  return float(as_type<half>(ushort((code & 0x80) << 8 | magnitude << 7 | nan))) * 256.0f;
}
METAL_FUNC float float_from_e2m1(uint code) {
  return float(as_type<half>(ushort((code & 8) << 12 | (code & 7) << 9))) * 16384.0f;
}

// An integer below 2^23 in the mantissa of 2^23: cheaper than a conversion on Apple GPUs.
METAL_FUNC float float_from_integer(uint code) {
  return as_type<float>(code | 0x4b000000u) - 8388608.0f;
}

template <int mode>
METAL_FUNC float decoded(uint code) {
  if (mode == AFFINE) {
    return float_from_integer(code);
  }
  return mode == MXFP8 ? float_from_e4m3(code) : float_from_e2m1(code);
}

template <int mode, typename S>
METAL_FUNC float decoded_scale(S scale) {
  if (mode == AFFINE) {
    return float(scale);
  }
  uint code = uint(scale);
  if (mode == NVFP4) {
    return float_from_e4m3(code);
  }
  return as_type<float>(code == 0 ? 0x00400000u : code << 23);
}

// The same code as a float. It is masked in place, as the mantissa of the power of two whose last bit is the
// code's lowest bit, so that only halves of words are shifted: shifts are slow on Apple GPUs.
template <int bits>
METAL_FUNC float code_number(const thread uint* words, int i) {
  int word = i * bits / 32, shift = i * bits % 32;
  uint from = words[word];
  if (shift + bits > 23) {
    from >>= 16;
    if (shift + bits > 32) {
      from |= words[word + 1] << 16;
    }
    shift -= 16;
  }
  uint unit = uint(150 - shift) << 23;
  return as_type<float>((from & ((1u << bits) - 1) << shift) | unit) - as_type<float>(unit);
}

// Elements i and i + 16 / bits of a word as halves, exactly: codes of 8 bits 2^24 times too small,
// E4M3 2^8 and E2M1 2^14 times.
METAL_FUNC half2 byte_pair(uint word, int i) {
  return as_type<half2>(word >> 8 * i & 0x00ff00ffu);
}
METAL_FUNC half2 e4m3_pair(uint word, int i) {
  uint codes = word >> 8 * i & 0x00ff00ffu, magnitude = codes & 0x007f007fu;
  uint nan = (magnitude + 0x00010001u) & 0x00800080u;
  return as_type<half2>((codes & 0x00800080u) << 8 | magnitude << 7 | nan << 7);
}
METAL_FUNC half2 e2m1_pair(uint word, int i) {
  uint magnitude = i < 3 ? word << (9 - 4 * i) : word >> (4 * i - 9);
  return as_type<half2>((magnitude & 0x0e000e00u) | (word << (12 - 4 * i) & 0x80008000u));
}
template <int mode>
METAL_FUNC float pair_factor() {
  return mode == AFFINE ? 16777216.0f : mode == MXFP8 ? 256.0f : 16384.0f;
}

// `count` codes as floats, without scale, bias and `code_factor`. For x in float32 that factor is applied
// here, since products with elements below 2^-100 would underflow.
template <typename T, int mode, int bits>
METAL_FUNC float code_factor() {
  return sizeof(T) == 4 || (mode == AFFINE && bits != 8) ? 1.0f : pair_factor<mode>();
}
template <typename T, int mode, int bits, int count>
METAL_FUNC void decode_codes(thread float* to, const thread uint* words) {
  const int apart = 16 / bits;
#pragma unroll
  for (int i = 0; i < count; i++) {
    if (mode == AFFINE && (bits != 8 || sizeof(T) == 4)) {
      to[i] = code_number<bits>(words, i);
    } else if (i / apart % 2 == 0) {
      uint word = words[i / (2 * apart)];
      float2 pair = float2(mode == AFFINE       ? byte_pair(word, i % apart)
                               : mode == MXFP8 ? e4m3_pair(word, i % apart)
                                               : e2m1_pair(word, i % apart));
      to[i] = sizeof(T) == 4 ? pair.x * pair_factor<mode>() : pair.x;
      to[i + apart] = sizeof(T) == 4 ? pair.y * pair_factor<mode>() : pair.y;
    }
  }
}

// Four contiguous elements of an array that may begin at any element.
METAL_FUNC float4 four_floats(const device half* from) {
  return float4(half4(*reinterpret_cast<const device packed_half4*>(from)));
}
METAL_FUNC float4 four_floats(const device bfloat* from) {
  return float4(bfloat4(*reinterpret_cast<const device packed_bfloat4*>(from)));
}
METAL_FUNC float4 four_floats(const device float* from) {
  return float4(*reinterpret_cast<const device packed_float4*>(from));
}

// Dequantizes `count` elements of one group, from word `at` of w on.
template <int mode, int bits, int count>
METAL_FUNC void dequantize(
    thread float* to, const device uint* w, size_t at, float scale, float bias) {
  alignas(16) uint words[count * bits / 32];
  load_words<count * bits / 32>(words, w, at);
#pragma unroll
  for (int i = 0; i < count; i++) {
    to[i] = fma(scale, decoded<mode>(packed_code<bits>(words, i)), bias);
  }
}

// The same from words in registers, for a result in T. A code in the mantissa of 2^7 (2^8 for 8 bits) needs no
// subtraction: the error of bias - 2^7 * scale is below the rounding to half precision.
template <typename T, int mode, int bits, int count>
METAL_FUNC void decode_run(
    thread float* to, const thread uint* words, float scale, float bias) {
  constexpr int place = bits == 8 ? 15 : 16;
  if (mode == AFFINE && sizeof(T) == 2) {
    float moved = fma(scale, bits == 8 ? -256.0f : -128.0f, bias);
#pragma unroll
    for (int i = 0; i < count; i++) {
      uint code = packed_code<bits>(words, i) << place | (bits == 8 ? 0x43800000u : 0x43000000u);
      to[i] = fma(scale, as_type<float>(code), moved);
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; i++) {
      to[i] = fma(scale, decoded<mode>(packed_code<bits>(words, i)), bias);
    }
  }
}

// As many elements as fill 16 bytes, rounded to T.
template <typename T>
METAL_FUNC uint4 rounded(const thread float* values) {
  const int count = 16 / sizeof(T);
  alignas(16) metal::vec<T, 2> pairs[count / 2];
#pragma unroll
  for (int i = 0; i < count; i += 2) {
    pairs[i / 2] = metal::vec<T, 2>(float2(values[i], values[i + 1]));
  }
  return *reinterpret_cast<thread uint4*>(pairs);
}
