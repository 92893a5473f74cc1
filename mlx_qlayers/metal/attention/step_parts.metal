// The parts of a step of decoding: the rotary embedding of q and k, the copy of the append buffer, the score of
// the token's own key, and the combination of the splits.

#include "common/arrival.metal"
#include "key_tiles.metal"
#include "rotary/rotary_rate.metal"

#include <metal_stdlib>
using namespace metal;

// Indices into `options`; the options of rotate_rows follow.
enum step_option {
  CACHE_ROWS, APPEND_ROWS, APPEND_SPLITS, SPLITS, ROWS_PER_KV_HEAD, SCALE, MASK_OF_SEQUENCE, MASK_OF_HEAD,
  LEAST_OF_GROUP, NORM_EPSILON, ROTATION };
// The most splits that one launch combines.
#define MOST_JOINED 64

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

// Copies this thread's part of the append buffer, all rows but the token's, eight elements at a time.
template <int width, typename T>
METAL_FUNC void copy_append(
    device T* to, const device T* from, int held, int rows, int copy_thread, int copy_threads) {
  const int words = 2 * sizeof(T);
  for (int i = copy_thread; i < rows * (width / 8); i += copy_threads) {
    int row = i / (width / 8);
    alignas(16) uint pack[words] = {};
    if (row < held) {
      load_words<words>(pack, from, int64_t(i) * 8);
    }
    if (row != held) {
#pragma unroll
      for (int j = 0; j < words; j += 4) {
        *(reinterpret_cast<device uint4*>(to + int64_t(i) * 8) + j / 4) =
            uint4(pack[j], pack[j + 1], pack[j + 2], pack[j + 3]);
      }
    }
  }
}

// The RMS norm factors of `rows` rows of q, at most `count`, followed from index `count` on by those of k.
template <typename T, int D, int count, int simds>
METAL_FUNC void norm_rows(
    threadgroup float* factors,
    const device T* q,
    const device T* k,
    float epsilon,
    int rows,
    uint simd,
    uint lane) {
  int own = min(rows, count);
  for (int row = simd; row <= own; row += simds) {
    const device T* from = row == own ? k : q + int64_t(row) * D;
    float square = 0.0f;
    for (int d = lane; d < D; d += 32) {
      square = fma(float(from[d]), float(from[d]), square);
    }
    square = simd_sum(square);
    if (lane == 0) {
      factors[row == own ? count : row] = precise::rsqrt(square / D + epsilon);
    }
  }
}

// Applies the rotary embedding to `count` rows of q (the last one is repeated) and to k, the row behind them,
// and stages them in threadgroup memory; if `normed`, rows are multiplied by RMS norm factors and weights first.
// `rates` holds pairs of floats as bits: the scale of positions, an unused one, and the frequency of each pair
// of elements. A thread computes each angle once for all of its rows.
template <
    typename T,
    int D,
    int bits,
    int dims,
    bool traditional,
    bool listed,
    bool normed,
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
    float position,
    int rows,
    uint thread_index) {
  const int items = D - dims / 2, teams = threads > items ? threads / items : 1;
  for (int index = thread_index; index < items * teams; index += threads) {
    int i = index % items, first = i + dims / 2, second = first;
    float2 cosine_sine = float2(1.0f, 0.0f);
    if (i < dims / 2) {
      int at = listed ? 0 : 4 + 2 * i;
      float2 number = float2(as_type<float>(rates[at]), as_type<float>(rates[at + 1]));
      cosine_sine = rotation_at(position, listed ? listed_rate(freqs[i], number) : number);
      first = traditional ? 2 * i : i;
      second = traditional ? first + 1 : i + dims / 2;
    }
    for (int row = index / items; row <= count; row += teams) {
      int own = row == count ? count : min(row, rows - 1);
      const device T* from = row == count ? k : q + int64_t(own) * D;
      threadgroup T* staged = to + row * step;
      T one = from[first], other = from[second];
      if (normed) {
        const device T* weight = row == count ? k_norm : q_norm;
        one = T(float(one) * factors[own] * float(weight[first]));
        other = T(float(other) * factors[own] * float(weight[second]));
      }
      float a = float(one), b = float(other), c = cosine_sine.x, s = cosine_sine.y;
      staged[staged_at<run, bits>(first)] = i < dims / 2 ? T(a * c - b * s) : one;
      if (i < dims / 2) {
        staged[staged_at<run, bits>(second)] = T(a * s + b * c);
      }
    }
  }
  for (int i = thread_index; i < (padded - D) * (count + 1); i += threads) {
    to[i % (count + 1) * step + staged_at<run, bits>(D + i / (count + 1))] = T(0);
  }
}

// The scores of the token's own key; a SIMD group computes a row.
template <typename T, bool masked, int padded, int step, int count, int simds>
METAL_FUNC void own_scores(
    threadgroup float* scores,
    const threadgroup T* staged,
    float scale,
    const device bool* mask,
    int first_row,
    int rows,
    int mask_step,
    uint simd,
    uint lane) {
  const threadgroup T* k = staged + count * step;
  for (int row = simd; row < count; row += simds) {
    float s = 0.0f;
    for (int i = lane; i < padded; i += 32) {
      s = fma(float(staged[row * step + i]), float(k[i]), s);
    }
    s = simd_sum(s) * scale;
    if (lane == 0) {
      bool seen = !masked || mask[min(first_row + row, rows - 1) * mask_step];
      scores[row] = seen ? s : LOWEST;
    }
  }
}

// Combines all splits of some rows, by a whole threadgroup: parts (rows, splits, Dv) with their m and sum to
// out (rows, Dv). The weights of the splits are in threadgroup memory.
template <typename T, int Dv, int most, int simds>
METAL_FUNC void add_splits(
    device T* out,
    const device T* parts,
    const device float2* sums,
    threadgroup float* weights,
    int rows,
    int splits,
    uint thread_index,
    uint simd,
    uint lane) {
  for (int row = simd; row < rows; row += simds) {
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
  for (int item = thread_index; item < rows * (Dv / 8); item += 32 * simds) {
    int row = item / (Dv / 8);
    int64_t first = int64_t(row) * splits * Dv + item % (Dv / 8) * 8;
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
      out[int64_t(item) * 8 + j] = T(o[j]);
    }
  }
}
