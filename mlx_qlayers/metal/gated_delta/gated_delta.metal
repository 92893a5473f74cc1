// The gated delta rule, with a state S (Dv, Dk) for each head.
//
// For each token S = g S, then S += beta (v - S k) k^T, then y = S q. q and k are (B, L, Hk, Dk), v is
// (B, L, H, Dv), beta (B, L, H), g (B, L, H) or for each key column (B, L, H, Dk); H / Hk neighbouring heads
// have the same q and k. A token that `mask` (B, L) hides leaves the state unchanged. If `normed`, q and k
// go through an RMS norm first, with one number each as weight.
//
// gated_delta   y (B, L, H, Dv) and state_out (B, H, Dv, Dk), float32. Rows of a state do not depend on
//               each other: `lanes` lanes hold a row, `each` elements each, in registers from the first
//               token to the last. The inputs of a token are loaded `ahead` tokens before.
//               Grid B * H * Dv * lanes threads, rounded up to threadgroups of whole SIMD groups.
//               No threadgroup memory.
//               shape: L, Hk, H, Dv, rows, and the bits of epsilon and of the weights of q and k.

#include "common/load.metal"

#include <metal_stdlib>
using namespace metal;

enum { LENGTH, KEY_HEADS, HEADS, VALUES, ROWS, EPSILON, OF_QUERIES, OF_KEYS };

template <typename T>
METAL_FUNC float element(const thread uint* words, int i) {
  return float(reinterpret_cast<const thread T*>(words)[i]);
}

// The inputs of one token that a lane needs, as they are stored.
template <typename T, typename G, bool columns, int each>
struct token_inputs {
  alignas(16) uint k[each * sizeof(T) / 4], q[each * sizeof(T) / 4];
  alignas(16) uint decays[columns ? each * sizeof(G) / 4 : 1];
  float decay, value, beta;
};

// `key` is the offset of the lane's elements of k and q, `at` that of the head's gates.
template <typename T, typename G, typename B, bool columns, int each>
METAL_FUNC void load_token(
    thread token_inputs<T, G, columns, each>& to,
    const device T* q,
    const device T* k,
    const device T* v,
    const device G* g,
    const device B* beta,
    size_t key,
    size_t at,
    size_t value,
    size_t decay) {
  load_words<each * int(sizeof(T)) / 4>(to.k, k, key);
  load_words<each * int(sizeof(T)) / 4>(to.q, q, key);
  if (columns) {
    load_words<columns ? each * int(sizeof(G)) / 4 : 1>(to.decays, g, decay);
  } else {
    to.decay = float(g[at]);
  }
  to.value = float(v[value]);
  to.beta = float(beta[at]);
}

template <
    typename T,
    typename G,
    typename B,
    bool columns,
    bool normed,
    int lanes,
    int each,
    int ahead>
[[kernel]] void gated_delta(
    const device T* q,
    const device T* k,
    const device T* v,
    const device G* g,
    const device B* beta,
    const device float* state,
    const device bool* mask,
    const device int* shape,
    device T* y,
    device float* state_out,
    uint3 id [[thread_position_in_grid]]) {
  const int L = shape[LENGTH], key_heads = shape[KEY_HEADS], H = shape[HEADS], Dv = shape[VALUES];
  const int Dk = lanes * each, column = int(id.x) % lanes * each;
  // Lanes beyond the last row repeat it, since all lanes of a SIMD group take part in sums.
  const bool writes = int(id.x) / lanes < shape[ROWS];
  const int row = min(int(id.x) / lanes, shape[ROWS] - 1), head = row / Dv % H, batch = row / Dv / H;

  float S[each];
#pragma unroll
  for (int i = 0; i < each; i++) {
    S[i] = state[size_t(row) * Dk + column + i];
  }
  const size_t first_key = (size_t(batch) * L * key_heads + head / (H / key_heads)) * Dk + column;
  const size_t first = size_t(batch) * L * H + head;
  token_inputs<T, G, columns, each> inputs[ahead];
#pragma unroll
  for (int a = 0; a < ahead; a++) {
    const size_t t = min(a, L - 1), at = first + t * H;
    load_token<T, G, B, columns, each>(
        inputs[a], q, k, v, g, beta, first_key + t * key_heads * Dk, at, at * Dv + row % Dv, at * Dk + column);
  }
  for (int from = 0; from < L; from += ahead) {
#pragma unroll
    for (int a = 0; a < ahead; a++) {
      const int t = from + a;
      if (t >= L) {
        continue;
      }
      float keys[each], queries[each], decayed[each];
#pragma unroll
      for (int i = 0; i < each; i++) {
        keys[i] = element<T>(inputs[a].k, i);
        queries[i] = element<T>(inputs[a].q, i);
        decayed[i] = S[i] * (columns ? element<G>(inputs[a].decays, i) : inputs[a].decay);
      }
      const float value = inputs[a].value, strength = inputs[a].beta;
      const size_t next = min(t + ahead, L - 1), at = first + next * H;
      load_token<T, G, B, columns, each>(
          inputs[a], q, k, v, g, beta, first_key + next * key_heads * Dk, at, at * Dv + row % Dv, at * Dk + column);
      // y = S q is computed from the decayed state and the update, so that one reduction serves all sums.
      float predicted = 0, output = 0, both = 0, of_keys = 0, of_queries = 0;
#pragma unroll
      for (int i = 0; i < each; i++) {
        predicted = fma(decayed[i], keys[i], predicted);
        output = fma(decayed[i], queries[i], output);
        both = fma(keys[i], queries[i], both);
        of_keys = normed ? fma(keys[i], keys[i], of_keys) : 0;
        of_queries = normed ? fma(queries[i], queries[i], of_queries) : 0;
      }
#pragma unroll
      for (int apart = 1; apart < lanes; apart *= 2) {
        predicted += simd_shuffle_xor(predicted, ushort(apart));
        output += simd_shuffle_xor(output, ushort(apart));
        both += simd_shuffle_xor(both, ushort(apart));
        if (normed) {
          of_keys += simd_shuffle_xor(of_keys, ushort(apart));
          of_queries += simd_shuffle_xor(of_queries, ushort(apart));
        }
      }
      // The norms are factors of the sums.
      float key_factor = 1;
      if (normed) {
        const float epsilon = as_type<float>(shape[EPSILON]);
        key_factor = as_type<float>(shape[OF_KEYS]) * precise::rsqrt(of_keys / Dk + epsilon);
        output *= as_type<float>(shape[OF_QUERIES]) * precise::rsqrt(of_queries / Dk + epsilon);
        both *= as_type<float>(shape[OF_QUERIES]) * precise::rsqrt(of_queries / Dk + epsilon) * key_factor;
        predicted *= key_factor;
      }
      const float change = (value - predicted) * strength;
      const bool hidden = mask && !mask[size_t(batch) * L + t];
#pragma unroll
      for (int i = 0; i < each; i++) {
        S[i] = hidden ? S[i] : fma(keys[i], key_factor * change, decayed[i]);
      }
      if (column == 0 && writes) {
        y[(first + size_t(t) * H) * Dv + row % Dv] = T(fma(both, change, output));
      }
    }
  }
  if (!writes) {
    return;
  }
#pragma unroll
  for (int i = 0; i < each; i++) {
    state_out[size_t(row) * Dk + column + i] = S[i];
  }
}
