// Keys and values as attention reads them: runs of contiguous elements, plain or quantized.
//
// A run stays packed in registers until it is used: whole words and, for quantized elements (affine,
// `bits` > 0), the scale and bias of their group. Codes of 2 and 3 bits are held as those of 4. Rows may have
// any strides (a cache is a slice of a larger buffer); if they are aligned, a run is read by one vector load.

#include "common/fragment.metal"
#include "quantized_matmul/packed.metal"

#include <metal_stdlib>
using namespace metal;

// The keys or the values of one head. A step is the stride of rows, a span that of elements.
template <typename K, typename S>
struct cache_rows {
  const device K* elements;
  const device S* scales;
  const device S* biases;
  int step, span, scale_step, scale_span, bias_step, bias_span;
  bool aligned;
};

template <typename S, int words>
struct cache_run {
  alignas(16) uint word[words];
  S scale, bias;
};

// `aligned` says whether every run is. Without bits there are no scales and biases.
template <int bits, typename K, typename S>
METAL_FUNC cache_rows<K, S> rows_of_head(
    const device K* elements,
    const constant int64_t* strides,
    const device S* scales,
    const constant int64_t* scale_strides,
    const device S* biases,
    const constant int64_t* bias_strides,
    int batch,
    int head,
    int run) {
  cache_rows<K, S> rows;
  rows.elements = elements + batch * strides[0] + head * strides[1];
  rows.step = strides[2];
  rows.span = strides[3];
  if (bits > 0) {
    rows.scales = scales + batch * scale_strides[0] + head * scale_strides[1];
    rows.biases = biases + batch * bias_strides[0] + head * bias_strides[1];
    rows.scale_step = scale_strides[2];
    rows.scale_span = scale_strides[3];
    rows.bias_step = bias_strides[2];
    rows.bias_span = bias_strides[3];
  }
  rows.aligned = rows.span == 1 && rows.step % run == 0 &&
      reinterpret_cast<size_t>(rows.elements) % (run * sizeof(K)) == 0;
  return rows;
}

// The bits that an element takes in a run.
template <typename T, int bits>
constexpr int held_bits() {
  return bits == 0 ? 8 * int(sizeof(T)) : bits < 4 ? 4 : bits;
}
// The codes in half a word of a run.
template <int bits>
constexpr int half_codes() {
  return bits == 0 ? 1 : bits < 4 ? 4 : 16 / bits;
}

template <int words, typename K>
METAL_FUNC void gather_words(thread uint* to, const device K* from, int span) {
  const int each = 4 / sizeof(K);
  for (int i = 0; i < words; i++) {
    alignas(4) K elements[each];
    for (int j = 0; j < each; j++) {
      elements[j] = from[int64_t(i * each + j) * span];
    }
    to[i] = *reinterpret_cast<thread uint*>(elements);
  }
}

// Runs of a lane in blocks of 16 rows: `each` rows of a block, `steps` runs of a row, one every `apart`
// elements from `at` on. Rows beyond `last` repeat it; elements from `limit` (if any) on are zeros.
template <
    int bits,
    int group,
    int blocks,
    int each,
    int steps,
    int apart,
    int limit,
    bool aligned,
    typename K,
    typename S,
    int words>
METAL_FUNC void read_runs(
    thread cache_run<S, words>* to, cache_rows<K, S> rows, int row, int last, int at) {
  const int width = bits == 0 ? 8 * sizeof(K) : bits;
#pragma unroll
  for (int i = 0; i < blocks * each; i++) {
    int n = i % each, offset = each == 2 ? 8 * n : n / 2 * 8 + n % 2;
    int key = min(row + i / each * 16 + offset, last);
#pragma unroll
    for (int j = 0; j < steps; j++) {
      thread cache_run<S, words>& run = to[i * steps + j];
      int d = at + apart * j;
      if (limit == 0 || d < limit) {
        int64_t first = int64_t(key) * rows.step, along = d * width / int(8 * sizeof(K));
        if (bits == 2 || bits == 3) {
#pragma unroll
          for (int k = 0; k < words; k++) {
            run.word[k] = spread_codes<bits == 3 ? 3 : 2>(rows.elements + first, d + 8 * k, rows.span);
          }
        } else if (aligned) {
          const device K* from = rows.elements + (first + along);
          load_packs<words>(run.word, reinterpret_cast<const device uint*>(from), false);
        } else {
          gather_words<words>(run.word, rows.elements + (first + along * rows.span), rows.span);
        }
        if (bits > 0) {
          run.scale = rows.scales[int64_t(key) * rows.scale_step + d / group * rows.scale_span];
          run.bias = rows.biases[int64_t(key) * rows.bias_step + d / group * rows.bias_span];
        }
      } else {
#pragma unroll
        for (int k = 0; k < words; k++) {
          run.word[k] = 0;
        }
        run.scale = run.bias = S(0);
      }
    }
  }
}

// One branch for all runs, so that all their loads are in flight at once.
template <
    int bits,
    int group,
    int blocks,
    int each,
    int steps,
    int apart,
    int limit,
    typename K,
    typename S,
    int words>
METAL_FUNC void read_tile(
    thread cache_run<S, words>* to, cache_rows<K, S> rows, int row, int last, int at) {
  if (rows.aligned) {
    read_runs<bits, group, blocks, each, steps, apart, limit, true>(to, rows, row, last, at);
  } else {
    read_runs<bits, group, blocks, each, steps, apart, limit, false>(to, rows, row, last, at);
  }
}

// Words are decoded in pairs: of neighbours, or of codes half a word apart. The index of element i of pair j.
template <int bits>
METAL_FUNC int pair_element(int j, int i) {
  const int half_word = half_codes<bits>();
  return j / half_word * 2 * half_word + j % half_word + i * half_word;
}

// The last argument of these selects the type.
template <typename T>
METAL_FUNC metal::vec<T, 2> plain_pair(const thread uint* words, int j, T) {
  return as_type<metal::vec<T, 2>>(words[j]);
}
METAL_FUNC float2 plain_pair(const thread uint* words, int j, float) {
  return float2(as_type<float>(words[2 * j]), as_type<float>(words[2 * j + 1]));
}

// Codes at bits 0 and 16 as exact floats: an integer in the mantissa of 2^10 (half) or 2^7 (bfloat) is offset
// by that power. bfloat's mantissa has 7 bits, so the eighth bit of a code is added apart.
template <int bits>
METAL_FUNC half2 code_pair(uint codes, half) {
  const uint mask = ((1u << bits) - 1) * 0x10001u;
  return as_type<half2>(masked_or(codes, mask, 0x64006400u)) - half2(1024.0h);
}
template <int bits>
METAL_FUNC bfloat2 code_pair(uint codes, bfloat) {
  const uint mask = ((1u << min(bits, 7)) - 1) * 0x10001u;
  bfloat2 low = as_type<bfloat2>(masked_or(codes, mask, 0x43004300u));
  if (bits < 8) {
    return low - bfloat2(bfloat(128.0f));
  }
  bfloat2 high = as_type<bfloat2>(masked_or(codes, 0x00800080u, 0x43004300u));
  return low - bfloat2(bfloat(256.0f)) + high;
}
template <int bits>
METAL_FUNC float2 code_pair(uint codes, float) {
  const uint mask = (1u << bits) - 1;
  return float2(float_from_integer(codes & mask), float_from_integer(codes >> 16 & mask));
}

// The elements of a run, in pairs.
template <typename T, int bits, int count, typename S, int words>
METAL_FUNC void unpack(thread metal::vec<T, 2>* to, const thread cache_run<S, words>& run) {
  const int width = bits == 0 ? 16 : bits, each = half_codes<bits>();
#pragma unroll
  for (int j = 0; j < count / 2; j++) {
    if (bits == 0) {
      to[j] = plain_pair(run.word, j, T(0));
    } else {
      metal::vec<T, 2> codes = code_pair<width>(run.word[j / each] >> j % each * width, T(0));
      to[j] = fused_pair(
          codes, metal::vec<T, 2>(T(run.scale)), metal::vec<T, 2>(T(run.bias)));
    }
  }
}
