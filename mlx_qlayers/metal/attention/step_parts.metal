// The parts of a step of decoding: the rotary embedding of q and k, the copy of the append buffer, the scores of
// the tokens' own keys, and the combination of the splits.

#include "common/arrival.metal"
#include "key_tiles.metal"
#include "rotary/rotary_rate.metal"

#include <metal_stdlib>
using namespace metal;

// Indices into `options`; the options of rotate_rows follow.
enum step_option {
  CACHE_ROWS, APPEND_ROWS, APPEND_SPLITS, SPLITS, QUERIES_PER_KV_HEAD, SCALE, MASK_OF_SEQUENCE, MASK_OF_HEAD,
  LEAST_OF_GROUP, NORM_EPSILON, ROTATION };
// The most splits that one launch combines.
#define MOST_JOINED 64

// The rows of a threadgroup: `first` and those behind it, of `all` that share a key head. The first `share` are
// the heads of the first token, the next ones those of the second.
struct step_rows {
  int first;
  int all;
  int share;
};

// The token of one of a threadgroup's rows, and the head among those that share a key head.
template <int tokens>
METAL_FUNC int token_of(step_rows rows, int row) {
  return tokens == 1 ? 0 : min(rows.first + row, rows.all - 1) / rows.share;
}
template <int tokens>
METAL_FUNC int head_of(step_rows rows, int row) {
  return min(rows.first + row, rows.all - 1) - token_of<tokens>(rows, row) * rows.share;
}

// How many heads of all tokens one of a threadgroup's rows is behind the first head of the first token.
template <int tokens>
METAL_FUNC int64_t heads_before(step_rows rows, int row, int heads) {
  return int64_t(token_of<tokens>(rows, row)) * heads + head_of<tokens>(rows, row);
}

// The position of element d of a row in the order in which lanes read a key's runs.
template <int run, int bits>
METAL_FUNC int staged_at(int d) {
  const int half_word = half_codes<bits>();
  int rest = d % (4 * run), element = rest % run;
  int pair = element / (2 * half_word) * half_word + element % half_word;
  return (d / (4 * run) * (run / 4) + pair / 2) * 16 + pair % 2 * 8 + rest / run * 2 + element / half_word % 2;
}

// Sets the scales and biases of packed rows: in arrays of their own, or `inside` the rows.
template <typename K, typename T>
METAL_FUNC void set_groups(
    thread cache_rows<K, T>& rows, const device T* scales, const device T* biases, int words, int groups, bool inside) {
  const device T* behind = reinterpret_cast<const device T*>(rows.elements + words);
  rows.scales = inside ? behind : scales;
  rows.biases = inside ? behind + groups : biases;
  rows.scale_step = rows.bias_step = inside ? rows.step * int(sizeof(K) / sizeof(T)) : groups;
  rows.scale_span = rows.bias_span = 1;
}

// Rounds half to even, as MLX does on a CPU, or half away from zero, as it does on GPUs.
METAL_FUNC float nearest(float x, bool even) {
  return even ? rint(x) : round(x);
}

// Writes `count` words that hold so many bits of each lane in turn.
template <int count>
METAL_FUNC void join_codes(device uint* to, uint codes, bool writes, uint lane) {
#pragma unroll
  for (int i = 0; i < count; i++) {
    int shift = int(lane) * count - 32 * i;
    uint word = shift >= 0 ? (shift < 32 ? codes << (shift & 31) : 0) : shift > -count ? codes >> (-shift & 31) : 0;
#pragma unroll
    for (int j = 1; j < 32; j *= 2) {
      word |= simd_shuffle_xor(word, ushort(j));
    }
    if (writes && lane == 0) {
      to[i] = word;
    }
  }
}

// Quantizes a row as mx.quantize does, and replaces it by its dequantized elements. A SIMD group
// computes a quantization group; the maximum of a group is at least `least`.
template <int D, int group_size, int bits, int whole, int run, bool staged, int simds, typename K, typename T>
METAL_FUNC void pack_row(
    device K* out, threadgroup T* row, bool writes, float least, uint simd, uint lane) {
  const int each = bits > 0 ? group_size / 32 : 1;
  const int sharing = bits > 0 ? 32 / bits / each : 1;
  const int words = D * bits / 32, groups = D / group_size, used = words + groups * int(sizeof(T)) / 2;
  const float levels = float((1 << bits) - 1);
  bool even = least < 0.0f;
  device uint* to = reinterpret_cast<device uint*>(out);
  device T* scales = reinterpret_cast<device T*>(to + words);
  for (int g = simd; g < groups; g += simds) {
    float x[each], low = INFINITY, high = least;
#pragma unroll
    for (int i = 0; i < each; i++) {
      int d = g * group_size + int(lane) * each + i;
      x[i] = float(row[staged ? staged_at<run, bits>(d) : d]);
      low = min(low, x[i]);
      high = max(high, x[i]);
    }
    low = simd_min(low);
    high = simd_max(high);
    float scale = max((high - low) / levels, 1e-7f);
    bool below = abs(low) > abs(high);
    scale = below ? scale : -scale;
    float edge = below ? low : high, steps = nearest(edge / scale, even);
    scale = steps == 0.0f ? scale : edge / steps;
    float bias = steps == 0.0f ? 0.0f : edge;
    uint word = 0;
#pragma unroll
    for (int i = 0; i < each; i++) {
      int d = g * group_size + int(lane) * each + i;
      float code = clamp(nearest((x[i] - bias) / scale, even), 0.0f, levels);
      word |= uint(code) << bits * (bits == 3 ? i : d % (32 / max(bits, 1)));
      T number = fused_pair(
          metal::vec<T, 2>(T(code), T(0)), metal::vec<T, 2>(T(scale), T(0)), metal::vec<T, 2>(T(bias), T(0))).x;
      row[staged ? staged_at<run, bits>(d) : d] = number;
    }
    if (bits == 3) {
      join_codes<3 * each>(to + g * 3 * each, word, writes, lane);
    } else {
#pragma unroll
      for (int i = 1; i < sharing; i *= 2) {
        word |= simd_shuffle_xor(word, ushort(i));
      }
      if (writes && int(lane) % sharing == 0) {
        to[(g * group_size + int(lane) * each) * bits / 32] = word;
      }
    }
    if (writes && lane == 0) {
      scales[g] = T(scale);
      scales[groups + g] = T(bias);
    }
  }
  for (int i = used + int(simd * 32 + lane); writes && i < whole; i += 32 * simds) {
    to[i] = 0;
  }
}

// Copies this thread's part of the append buffer, all rows but the tokens', eight elements at a time.
template <int width, int tokens, typename T>
METAL_FUNC void copy_append(
    device T* to, const device T* from, int held, int rows, int copy_thread, int copy_threads) {
  const int words = 2 * sizeof(T);
  for (int i = copy_thread; i < rows * (width / 8); i += copy_threads) {
    int row = i / (width / 8);
    alignas(16) uint pack[words] = {};
    if (row < held) {
      load_words<words>(pack, from, int64_t(i) * 8);
    }
    if (row < held || row >= held + tokens) {
#pragma unroll
      for (int j = 0; j < words; j += 4) {
        *(reinterpret_cast<device uint4*>(to + int64_t(i) * 8) + j / 4) =
            uint4(pack[j], pack[j + 1], pack[j + 2], pack[j + 3]);
      }
    }
  }
}

// The RMS norm factors of the threadgroup's rows of q, and from index `count` on of the first `keys` rows of k.
template <typename T, int D, int tokens, int count, int simds>
METAL_FUNC void norm_rows(
    threadgroup float* factors,
    const device T* q,
    const device T* k,
    float epsilon,
    step_rows rows,
    int heads,
    int kv_heads,
    int keys,
    uint simd,
    uint lane) {
  int own = min(rows.all - rows.first, count);
  for (int row = simd; row < own + keys; row += simds) {
    const device T* from =
        row < own ? q + heads_before<tokens>(rows, row, heads) * D : k + int64_t(row - own) * kv_heads * D;
    float square = 0.0f;
    for (int d = lane; d < D; d += 32) {
      square = fma(float(from[d]), float(from[d]), square);
    }
    square = simd_sum(square);
    if (lane == 0) {
      factors[row < own ? row : count + row - own] = precise::rsqrt(square / D + epsilon);
    }
  }
}

// Applies the rotary embedding to `count` rows of q (the last one is repeated) and to `keys` rows of k behind
// them, and stages them in threadgroup memory; if `normed`, rows are multiplied by RMS norm factors and weights
// first. `rates` holds pairs of floats as bits: the scale of positions, an unused one, and the frequency of each
// pair of elements. A thread computes an angle once for the neighbouring rows of a token.
template <
    typename T,
    int D,
    int bits,
    int dims,
    bool traditional,
    bool listed,
    bool normed,
    int tokens,
    int run,
    int step,
    int padded,
    int count,
    int threads>
METAL_FUNC void rotate_rows(
    threadgroup T* to,
    const device T* q,
    const device T* k,
    const threadgroup float* factors,
    const device T* q_norm,
    const device T* k_norm,
    const device float* freqs,
    const device int* rates,
    int position,
    step_rows rows,
    int heads,
    int kv_heads,
    int keys,
    uint thread_index) {
  const int items = D - dims / 2, teams = threads > items ? threads / items : 1;
  int own = min(rows.all - rows.first, count);
  for (int index = thread_index; index < items * teams; index += threads) {
    int i = index % items, first = i + dims / 2, second = first, turned = -1;
    float2 number = float2(0.0f, 0.0f), cosine_sine = float2(1.0f, 0.0f);
    if (i < dims / 2) {
      int at = listed ? 0 : 4 + 2 * i;
      number = float2(as_type<float>(rates[at]), as_type<float>(rates[at + 1]));
      number = listed ? listed_rate(freqs[i], number) : number;
      first = traditional ? 2 * i : i;
      second = traditional ? first + 1 : i + dims / 2;
    }
    for (int row = index / items; row < count + keys; row += teams) {
      bool is_key = row >= count;
      int token = is_key ? row - count : token_of<tokens>(rows, row);
      if (i < dims / 2 && token != turned) {
        cosine_sine = rotation_at(float(position + token), number);
        turned = token;
      }
      const device T* from =
          is_key ? k + int64_t(token) * kv_heads * D : q + heads_before<tokens>(rows, row, heads) * D;
      threadgroup T* staged = to + row * step;
      T one = from[first], other = from[second];
      if (normed) {
        const device T* weight = is_key ? k_norm : q_norm;
        float factor = factors[is_key ? row : min(row, own - 1)];
        one = T(float(one) * factor * float(weight[first]));
        other = T(float(other) * factor * float(weight[second]));
      }
      float a = float(one), b = float(other), c = cosine_sine.x, s = cosine_sine.y;
      staged[staged_at<run, bits>(first)] = i < dims / 2 ? T(a * c - b * s) : one;
      if (i < dims / 2) {
        staged[staged_at<run, bits>(second)] = T(a * s + b * c);
      }
    }
  }
  for (int i = thread_index; i < (padded - D) * (count + keys); i += threads) {
    to[i % (count + keys) * step + staged_at<run, bits>(D + i / (count + keys))] = T(0);
  }
}

// The scores of the tokens' own keys, (count, tokens): each row's own and those before it; a SIMD group computes
// one score at a time.
template <typename T, bool masked, int tokens, int padded, int step, int count, int simds>
METAL_FUNC void own_scores(
    threadgroup float* scores,
    const threadgroup T* staged,
    float scale,
    const device bool* mask,
    step_rows rows,
    int mask_step,
    uint simd,
    uint lane) {
  for (int i = simd; i < count * tokens; i += simds) {
    int row = i / tokens, token = i % tokens;
    const threadgroup T* k = staged + (count + token) * step;
    float s = 0.0f;
    for (int d = lane; d < padded; d += 32) {
      s = fma(float(staged[row * step + d]), float(k[d]), s);
    }
    s = simd_sum(s) * scale;
    if (lane == 0) {
      bool seen = token <= token_of<tokens>(rows, row);
      if (masked) {
        seen = seen && mask[head_of<tokens>(rows, row) * mask_step + token];
      }
      scores[i] = seen ? s : LOWEST;
    }
  }
}

// Combines all splits of a threadgroup's rows, by all of it: parts (rows, splits, Dv) with their m and sum, to
// rows of out (tokens, heads, Dv). The weights of the splits are in threadgroup memory.
template <typename T, int Dv, int tokens, int most, int simds>
METAL_FUNC void add_splits(
    device T* out,
    const device T* parts,
    const device float2* sums,
    threadgroup float* weights,
    step_rows rows,
    int count,
    int heads,
    int splits,
    uint thread_index,
    uint simd,
    uint lane) {
  for (int row = simd; row < count; row += simds) {
    float2 own[most / 32];
    float top = LOWEST, total = 0.0f;
#pragma unroll
    for (int i = 0; i < most / 32; i++) {
      int at = 32 * i + lane;
      own[i] = at < splits ? sums[row * splits + at] : float2(LOWEST, 0.0f);
      top = max(top, own[i].x);
    }
    top = simd_max(top);
#pragma unroll
    for (int i = 0; i < most / 32; i++) {
      own[i].y *= power_of_2<T>(own[i].x - top);
      total += own[i].y;
    }
    total = simd_sum(total);
#pragma unroll
    for (int i = 0; i < most / 32; i++) {
      weights[row * most + 32 * i + lane] = own[i].y / total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int words = 2 * sizeof(T);
  for (int item = thread_index; item < count * (Dv / 8); item += 32 * simds) {
    int row = item / (Dv / 8), column = item % (Dv / 8) * 8;
    int64_t first = int64_t(row) * splits * Dv + column;
    device T* to = out + heads_before<tokens>(rows, row, heads) * Dv + column;
    float o[8] = {};
#pragma unroll 8
    for (int i = 0; i < splits; i++) {
      alignas(16) uint pack[words];
      load_packs<words>(pack, reinterpret_cast<const device uint*>(parts + first + i * Dv), false);
      float weight = weights[row * most + i];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        metal::vec<T, 2> pair = plain_pair(pack, j, T(0));
        o[2 * j] = fma(weight, float(pair.x), o[2 * j]);
        o[2 * j + 1] = fma(weight, float(pair.y), o[2 * j + 1]);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      to[j] = T(o[j]);
    }
  }
}
