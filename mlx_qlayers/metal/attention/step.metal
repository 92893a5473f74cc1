// One step of decoding, from the products of a token to its attention: q and k are turned by their
// positions, k and v become rows of new buffers, and every head attends to all keys so far. How
// many keys a buffer holds is an input, so that the same launch serves until it has to grow.
//
// One threadgroup computes one head or, split, a part of its keys. Every `lanes` lanes take a
// key: each lane eight numbers of it, `ahead` keys at once, so that their loads are on their way
// together. Scores are logarithms to base 2. The keys of a step are on their way while those before
// them are computed:
//
//   m' = max(m, scores);  p = exp2(scores - m');  sum = sum * exp2(m - m') + p       [registers]
//   o = o * exp2(m - m') + p v: eight numbers of Dv in each lane                     [registers]
//   q, k of the token;  m, sum and o of all SIMD groups                              [threadgroup]
//
// All heads that share keys read them, and what was read once comes from the device's cache. Each of
// them copies every `share`-th row to the new buffers. Rows behind the token's become zeros. Rows
// start at whole 16 bytes. Without a split the result is written; else o without its divisor, m and
// sum, all float, which attention_combine adds up.
//
// Grid (32 * simds * splits, H, B), threadgroup (32 * simds, 1, 1).

#include "kv_cache.metal"
#include "score.metal"
#include "rotary/rotary_rate.metal"

#include <metal_stdlib>
using namespace metal;

// The state of a softmax in some lanes: each holds eight numbers of the sum.
struct attended {
  float top, sum;
  float o[8];
};

template <typename T>
METAL_FUNC void eight_floats(thread float* to, const thread uint* from) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 pair = float2(plain_pair(from, i, T(0)));
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}

// Adds the state of the lanes `apart`.
template <typename T>
METAL_FUNC void merge_lanes(thread attended& state, ushort apart) {
  float other = simd_shuffle_xor(state.top, apart), highest = max(state.top, other);
  float mine = power_of_2<T>(state.top - highest), theirs = power_of_2<T>(other - highest);
  state.top = highest;
  state.sum = state.sum * mine + simd_shuffle_xor(state.sum, apart) * theirs;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    state.o[i] = state.o[i] * mine + simd_shuffle_xor(state.o[i], apart) * theirs;
  }
}

// Adds `count` keys with their scores, and values that were read as words.
template <typename T, int count, int words>
METAL_FUNC void add_keys(
    thread attended& state, const thread float* scores, const thread uint* values) {
  float highest = state.top;
#pragma unroll
  for (int u = 0; u < count; u++) {
    highest = max(highest, scores[u]);
  }
  float fade = power_of_2<T>(state.top - highest);
  state.top = highest;
  state.sum *= fade;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    state.o[i] *= fade;
  }
#pragma unroll
  for (int u = 0; u < count; u++) {
    float p = power_of_2<T>(scores[u] - highest), numbers[8];
    eight_floats<T>(numbers, values + u * words);
    state.sum += p;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      state.o[i] = fma(p, numbers[i], state.o[i]);
    }
  }
}

template <int lanes>
METAL_FUNC float sum_of_lanes(float x) {
#pragma unroll
  for (ushort apart = lanes / 2; apart > 0; apart /= 2) {
    x += simd_shuffle_xor(x, apart);
  }
  return x;
}

// The product of a query and a key of which each of `lanes` lanes holds eight numbers.
template <typename T, int lanes>
METAL_FUNC float score_of(const thread float* query, const thread uint* key) {
  float numbers[8], s = 0.0f;
  eight_floats<T>(numbers, key);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    s = fma(query[i], numbers[i], s);
  }
  return sum_of_lanes<lanes>(s);
}

// Rows of a buffer for a lane: `count` of them, `step` apart, none beyond the last. One branch for all,
// so that all of them are on their way at once.
template <int count, int words, typename T>
METAL_FUNC void read_rows(
    thread uint* to, const device T* from, int width, int row, int step, int last) {
  if (begins_odd(from)) {
#pragma unroll
    for (int u = 0; u < count; u++) {
      load_words<words>(to + u * words, from, int64_t(min(row + u * step, last)) * width);
    }
  } else {
#pragma unroll
    for (int u = 0; u < count; u++) {
      const device T* at = from + int64_t(min(row + u * step, last)) * width;
      load_packs<words>(to + u * words, reinterpret_cast<const device uint*>(at), false);
    }
  }
}

template <int words, typename T>
METAL_FUNC void write_row(device T* to, const thread uint* from) {
#pragma unroll
  for (int i = 0; i < words; i += 4) {
    *(reinterpret_cast<device uint4*>(to) + i / 4) = uint4(from[i], from[i + 1], from[i + 2], from[i + 3]);
  }
}

// The token's row of a buffer and zeros behind it, eight at a time: this thread's share of them.
template <int width, typename T, typename From>
METAL_FUNC void write_end(device T* to, From row, int rows_behind, int sharer, int sharers) {
  for (int d = sharer; d < width; d += sharers) {
    to[d] = row[d];
  }
  const uint zeros[2 * sizeof(T)] = {};
  int64_t end = int64_t(rows_behind + 1) * width;
  for (int64_t i = width + int64_t(sharer) * 8; i < end; i += int64_t(sharers) * 8) {
    write_row<2 * sizeof(T)>(to + i, zeros);
  }
}

// A pair of numbers, turned.
template <typename T>
METAL_FUNC void turn_pair(
    threadgroup T* to, const device T* from, int first, int second, float2 cosine_sine) {
  float a = float(from[first]), b = float(from[second]), c = cosine_sine.x, s = cosine_sine.y;
  to[first] = T(a * c - b * s);
  to[second] = T(a * s + b * c);
}

// q and k of the token, turned, by all threads. rates, bits of two floats each: the scale of
// positions, one that is not used, and the rate of each pair.
template <typename T, int D, int dims, bool traditional, bool listed>
METAL_FUNC void turn_rows(
    threadgroup T* q_to,
    threadgroup T* k_to,
    const device T* q,
    const device T* k,
    const device float* freqs,
    const device int* rates,
    float position,
    uint thread_index,
    uint threads) {
  for (int i = thread_index; i < D - dims / 2; i += threads) {
    if (i >= dims / 2) {
      int d = i + dims / 2;
      q_to[d] = q[d];
      k_to[d] = k[d];
      continue;
    }
    int at = listed ? 0 : 4 + 2 * i;
    float2 number = float2(as_type<float>(rates[at]), as_type<float>(rates[at + 1]));
    float2 rate = listed ? listed_rate(freqs[i], number) : number;
    float2 cosine_sine = rotation_at(position, rate);
    int first = traditional ? 2 * i : i, second = traditional ? first + 1 : i + dims / 2;
    turn_pair(q_to, q, first, second, cosine_sine);
    turn_pair(k_to, k, first, second, cosine_sine);
  }
}

// What the SIMD groups of a threadgroup add up to: the result, or that of one split.
template <typename T, int Dv, int simds, bool split, typename P>
METAL_FUNC void write_sums(
    device P* out, const threadgroup float* shares, const threadgroup float2* tops, uint thread_index) {
  float top = LOWEST;
#pragma unroll
  for (int g = 0; g < simds; g++) {
    top = max(top, tops[g].x);
  }
  for (int d = thread_index; d < Dv; d += 32 * simds) {
    float total = 0.0f, divisor = 0.0f;
    for (int g = 0; g < simds; g++) {
      float factor = power_of_2<T>(tops[g].x - top);
      total += factor * shares[g * Dv + d];
      divisor += factor * tops[g].y;
    }
    out[d] = P(split ? total : total / divisor);
    if (split && d == 0) {
      out[Dv] = P(top);
      out[Dv + 1] = P(divisor);
    }
  }
}

// positions: keys in the buffer, then the position of each sequence. options: S, bits of the scale,
// the steps of the mask from a sequence and head on, and what turn_rows takes.
template <
    typename T,
    int D,
    int Dv,
    int share,
    bool masked,
    int dims,
    bool traditional,
    bool listed,
    int simds,
    int ahead,
    typename P,
    bool split>
[[kernel]] void attention_step(
    const device T* q,
    const device T* k,
    const device T* v,
    const device T* k_buffer,
    const device T* v_buffer,
    const device int* positions,
    const device bool* mask,
    const device float* freqs,
    const device int* options,
    device P* out,
    device T* k_out,
    device T* v_out,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int widest = D > Dv ? D : Dv;
  const int lanes = widest > 128 ? 32 : widest > 64 ? 16 : widest > 32 ? 8 : 4;
  const int words = 2 * sizeof(T), side = 32 / lanes, step = simds * side, threads = 32 * simds;
  threadgroup T turned[2 * D];
  threadgroup float shares[simds][Dv];
  threadgroup float2 tops[simds];

  int S = options[0], length = positions[0], head = group.y, own = head % share;
  int kv_head = int(group.z) * (int(groups.y) / share) + head / share;
  int at = int(lane) % lanes * 8, sub = int(lane) / lanes;
  bool in_key = D == 8 * lanes || at < D, in_value = Dv == 8 * lanes || at < Dv;
  // Lanes beyond a row read its start, and what they find is not used.
  int k_at = in_key ? at : 0, v_at = in_value ? at : 0;
  const device T* keys = k_buffer + int64_t(kv_head) * S * D + k_at;
  const device T* values = v_buffer + int64_t(kv_head) * S * Dv + v_at;
  k += int64_t(kv_head) * D;
  v += int64_t(kv_head) * Dv;
  k_out += int64_t(kv_head) * S * D;
  v_out += int64_t(kv_head) * S * Dv;
  if (masked) {
    mask += int64_t(group.z) * options[2] + head * options[3];
  }

  int split_keys = (length + int(groups.x) - 1) / int(groups.x);
  int start = split ? int(group.x) * split_keys : 0;
  int stop = split ? min(start + split_keys, length) : length;
  int row = start + int(simd) * side + sub, last = max(stop - 1, 0);
  alignas(16) uint key[ahead * words], value[ahead * words];
  read_rows<ahead, words>(key, keys, D, row, step, last);
  read_rows<ahead, words>(value, values, Dv, row, step, last);

  turn_rows<T, D, dims, traditional, listed>(
      turned, turned + D, q + (int64_t(group.z) * groups.y + head) * D, k, freqs, options + 4,
      float(positions[1 + group.z]), thread_index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float query[8], scale = as_type<float>(options[1]);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    query[i] = in_key ? float(turned[k_at + i]) * scale : 0.0f;
  }

  attended state;
  state.top = LOWEST;
  state.sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    state.o[i] = 0.0f;
  }
  for (int base = start + int(simd) * side; base < stop; base += ahead * step) {
    float s[ahead];
#pragma unroll
    for (int u = 0; u < ahead; u++) {
      int j = base + u * step + sub;
      s[u] = score_of<T, lanes>(query, key + u * words);
      s[u] = masked && !mask[min(j, last)] ? LOWEST : s[u];
      s[u] = j < stop ? s[u] : -INFINITY;
      if (j < stop && j % share == own) {
        if (in_key) {
          write_row<words>(k_out + int64_t(j) * D + at, key + u * words);
        }
        if (in_value) {
          write_row<words>(v_out + int64_t(j) * Dv + at, value + u * words);
        }
      }
    }
    if (base + ahead * step < stop) {
      read_rows<ahead, words>(key, keys, D, base + ahead * step + sub, step, last);
    }
    add_keys<T, ahead, words>(state, s, value);
    if (base + ahead * step < stop) {
      read_rows<ahead, words>(value, values, Dv, base + ahead * step + sub, step, last);
    }
  }

  // The token's own key comes last, in the first split.
  if (group.x == 0 && simd == 0) {
    alignas(16) T own_key[8];
    alignas(16) uint own_value[words];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      own_key[i] = turned[D + k_at + i];
    }
    load_words<words>(own_value, v, v_at);
    float s = score_of<T, lanes>(query, reinterpret_cast<const thread uint*>(own_key));
    s = masked && !mask[length] ? LOWEST : s;
    s = sub == 0 ? s : -INFINITY;
    add_keys<T, 1, words>(state, &s, own_value);
  }
  int sharer = (int(group.x) * share + own) * threads + int(thread_index);
  int sharers = int(groups.x) * share * threads;
  write_end<D>(k_out + int64_t(length) * D, turned + D, S - length - 1, sharer, sharers);
  write_end<Dv>(v_out + int64_t(length) * Dv, v, S - length - 1, sharer, sharers);

#pragma unroll
  for (ushort apart = lanes; apart < 32; apart *= 2) {
    merge_lanes<T>(state, apart);
  }
  if (sub == 0 && in_value) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      shares[simd][at + i] = state.o[i];
    }
  }
  if (lane == 0) {
    tops[simd] = float2(state.top, state.sum);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out += ((int64_t(group.z) * groups.y + head) * groups.x + group.x) * (split ? Dv + 2 : Dv);
  write_sums<T, Dv, simds, split>(out, &shares[0][0], tops, thread_index);
}
