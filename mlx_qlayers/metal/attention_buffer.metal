// Attention of a few new tokens to the buffer of a cache and to themselves: the rows of the new keys
// and values are not in the buffer yet, and how many keys it holds is an input.
//
// One threadgroup computes one row of one head (or, split, one stretch of its keys). Every `lanes`
// lanes take a key: each lane eight numbers of it, `ahead` keys at once, so that their loads are on
// their way together. Scores are logarithms to base 2; sums and outputs are merged at the end:
//
//   m' = max(m, scores);  p = exp2(scores - m');  sum = sum * exp2(m - m') + p       [registers]
//   o = o * exp2(m - m') + p v: eight numbers of Dv in each lane                     [registers]
//   m, sum and o of all SIMD groups                                                  [threadgroup]
//
// All heads that share keys read them; what was read once comes from the cache of the device. Rows
// start at whole 16 bytes. Without a split the result is written; else o without its divisor, m
// and sum, all float, which attention_combine adds up.
//
// Grid (32 * simds * stretches, H, B * L), threadgroup (32 * simds, 1, 1).

#include "attention_cache.metal"
#include "attention_score.metal"

#include <metal_stdlib>
using namespace metal;

// Eight numbers of a row as floats; zeros outside of it.
template <typename T, int words>
METAL_FUNC void eight_floats(thread float* to, const thread uint* from) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 pair = float2(plain_pair(from, i, T(0)));
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}

// Adds what other lanes found to a sum whose exponents are relative to `top`.
METAL_FUNC void merge_lanes(thread float& top, thread float& sum, thread float* o, ushort apart) {
  float other = simd_shuffle_xor(top, apart), highest = max(top, other);
  float mine = fast::exp2(top - highest), theirs = fast::exp2(other - highest);
  top = highest;
  sum = sum * mine + simd_shuffle_xor(sum, apart) * theirs;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    o[i] = o[i] * mine + simd_shuffle_xor(o[i], apart) * theirs;
  }
}

// options: L, S, the scale as bits, and the steps of the mask from a sequence, head and row on.
template <
    typename T,
    int D,
    int Dv,
    int share,
    bool masked,
    int simds,
    int ahead,
    typename P,
    bool split>
[[kernel]] void attention_in_buffer(
    const device T* q,
    const device T* k,
    const device T* v,
    const device T* k_buffer,
    const device T* v_buffer,
    constant int& length,
    const device bool* mask,
    constant int* options,
    device P* out,
    uint3 place [[threadgroup_position_in_grid]],
    uint3 places [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int widest = D > Dv ? D : Dv;
  const int lanes = widest > 128 ? 32 : widest > 64 ? 16 : widest > 32 ? 8 : 4;
  const int words = 2 * sizeof(T), step = simds * (32 / lanes);
  threadgroup float shares[simds][Dv];
  threadgroup float2 tops[simds];

  int L = options[0], S = options[1], row = int(place.z) % L, batch = int(place.z) / L;
  int at = int(lane) % lanes * 8, kv_head = batch * (int(places.y) / share) + int(place.y) / share;
  int64_t out_row = int64_t(place.z) * places.y + place.y;
  k += int64_t(kv_head) * L * D + at;
  v += int64_t(kv_head) * L * Dv + at;
  k_buffer += int64_t(kv_head) * S * D + at;
  v_buffer += int64_t(kv_head) * S * Dv + at;
  if (masked) {
    mask += int64_t(batch) * options[3] + int(place.y) * options[4] + row * options[5];
  }
  bool in_key = D == 8 * lanes || at < D, in_value = Dv == 8 * lanes || at < Dv;

  alignas(16) uint raw[words] = {};
  float query[8], top = LOWEST, sum = 0.0f, o[8] = {};
  if (in_key) {
    q += ((int64_t(batch) * places.y + place.y) * L + row) * D + at;
    load_words<words>(raw, reinterpret_cast<const device uint*>(q));
  }
  eight_floats<T, words>(query, raw);

  int keys = length + row + 1, stretch = (keys + int(places.x) - 1) / int(places.x);
  int start = split ? int(place.x) * stretch : 0, stop = split ? min(start + stretch, keys) : keys;
  for (int base = start + int(simd) * (32 / lanes); base < stop; base += ahead * step) {
    alignas(16) uint key[ahead][words] = {}, value[ahead][words] = {};
#pragma unroll
    for (int u = 0; u < ahead; u++) {
      int j = min(base + u * step + int(lane) / lanes, stop - 1);
      if (in_key) {
        load_words<words>(
            key[u],
            reinterpret_cast<const device uint*>(
                j < length ? k_buffer + int64_t(j) * D : k + (j - length) * D));
      }
      if (in_value) {
        load_words<words>(
            value[u],
            reinterpret_cast<const device uint*>(
                j < length ? v_buffer + int64_t(j) * Dv : v + (j - length) * Dv));
      }
    }
    float s[ahead], highest = top;
#pragma unroll
    for (int u = 0; u < ahead; u++) {
      float numbers[8];
      eight_floats<T, words>(numbers, key[u]);
      s[u] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        s[u] = fma(query[i], numbers[i], s[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < ahead; u++) {
#pragma unroll
      for (ushort apart = lanes / 2; apart > 0; apart /= 2) {
        s[u] += simd_shuffle_xor(s[u], apart);
      }
      int j = base + u * step + int(lane) / lanes;
      s[u] *= as_type<float>(options[2]);
      s[u] = masked && !mask[min(j, stop - 1)] ? LOWEST : s[u];
      s[u] = j < stop ? s[u] : -INFINITY;
      highest = max(highest, s[u]);
    }
    float fade = fast::exp2(top - highest);
    top = highest;
    sum *= fade;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      o[i] *= fade;
    }
#pragma unroll
    for (int u = 0; u < ahead; u++) {
      float p = fast::exp2(s[u] - top), numbers[8];
      eight_floats<T, words>(numbers, value[u]);
      sum += p;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        o[i] = fma(p, numbers[i], o[i]);
      }
    }
  }

#pragma unroll
  for (ushort apart = lanes; apart < 32; apart *= 2) {
    merge_lanes(top, sum, o, apart);
  }
  if (lane < lanes && in_value) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      shares[simd][at + i] = o[i];
    }
  }
  if (lane == 0) {
    tops[simd] = float2(top, sum);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int g = 0; g < simds; g++) {
    top = max(top, tops[g].x);
  }
  out += split ? (out_row * places.x + place.x) * (Dv + 2) : out_row * Dv;
  for (int d = thread_index; d < Dv; d += 32 * simds) {
    float total = 0.0f, divisor = 0.0f;
    for (int g = 0; g < simds; g++) {
      float factor = fast::exp2(tops[g].x - top);
      total += factor * shares[g][d];
      divisor += factor * tops[g].y;
    }
    out[d] = P(split ? total : total / divisor);
    if (split && d == 0) {
      out[Dv] = P(top);
      out[Dv + 1] = P(divisor);
    }
  }
}
