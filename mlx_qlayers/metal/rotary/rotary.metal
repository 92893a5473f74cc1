// Rotary embedding of the queries and keys of a decoding step, in one launch.
//
// q (B, L, H, D) and k (B, L, Hkv, D) are stored as (B, H, L, D) and (B, Hkv, L, D), as attention and the
// caches take them. One thread rotates the same pair of elements of several heads, which have one angle,
// and copies its part of the elements that are not rotated. Grid (dims / 2, heads of q and k / heads of a
// thread, B * L), any threadgroup, no threadgroup memory.
//
//   rotary_at     one position offset for all sequences.
//   rotary_each   one for each sequence.

#include "rotary_rate.metal"

#include <metal_stdlib>
using namespace metal;

// sizes: L, H, Hkv, D, dims, heads of a thread. rates, two floats each: the scale of positions and,
// unless reciprocals are listed, the rate of each pair.
template <typename T, bool traditional, bool listed>
METAL_FUNC void rotate_pairs(
    const device T* q,
    const device T* k,
    const device float* freqs,
    const constant int* sizes,
    const device float* rates,
    int offset,
    device T* q_out,
    device T* k_out,
    uint3 at) {
  int length = sizes[0], heads = sizes[1], width = sizes[3], dims = sizes[4];
  int pair = at.x, batch = at.z / length, row = at.z % length;
  float2 rate = listed ? listed_rate(freqs[pair], float2(rates[0], rates[1]))
                       : float2(rates[2 + 2 * pair], rates[3 + 2 * pair]);
  float2 cosine_sine = rotation_at(float(offset + row), rate);
  float c = cosine_sine.x, s = cosine_sine.y;
  int first = traditional ? 2 * pair : pair;
  int second = traditional ? first + 1 : pair + dims / 2;

  int end = min(int(at.y + 1) * sizes[5], heads + sizes[2]);
  for (int i = at.y * sizes[5]; i < end; i++) {
    bool is_key = i >= heads;
    int head = is_key ? i - heads : i, count = is_key ? sizes[2] : heads;
    const device T* x = (is_key ? k : q) + (size_t(at.z) * count + head) * width;
    device T* y = (is_key ? k_out : q_out) + ((size_t(batch) * count + head) * length + row) * width;
    float a = float(x[first]), b = float(x[second]);
    y[first] = T(a * c - b * s);
    y[second] = T(a * s + b * c);
    for (int j = dims + pair; j < width; j += dims / 2) {
      y[j] = x[j];
    }
  }
}

template <typename T, bool traditional, bool listed>
[[kernel]] void rotary_at(
    const device T* q,
    const device T* k,
    constant int& offset,
    const device float* freqs,
    const constant int* sizes,
    const device float* rates,
    device T* q_out,
    device T* k_out,
    uint3 at [[thread_position_in_grid]]) {
  rotate_pairs<T, traditional, listed>(q, k, freqs, sizes, rates, offset, q_out, k_out, at);
}

template <typename T, bool traditional, bool listed>
[[kernel]] void rotary_each(
    const device T* q,
    const device T* k,
    const device int* offset,
    const device float* freqs,
    const constant int* sizes,
    const device float* rates,
    device T* q_out,
    device T* k_out,
    uint3 at [[thread_position_in_grid]]) {
  int start = offset[int(at.z) / sizes[0]];
  rotate_pairs<T, traditional, listed>(q, k, freqs, sizes, rates, start, q_out, k_out, at);
}
