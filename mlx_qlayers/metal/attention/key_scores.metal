// The weights and their gradients where rows are keys and columns are queries.

#include "score_tile.metal"

// Turns products of 16 keys and a tile of queries into weights; `slopes` gets them times the softcap's
// derivative. `statistics` holds TILE floats of each kind: x of norm_of, delta, and y of norm_of.
template <typename T, int MASK, bool SOFTCAP, int COUNT, int TILE, typename M>
METAL_FUNC void make_weights_of_keys(
    thread sum_fragment* scores,
    thread sum_fragment* slopes,
    const threadgroup float2* statistics,
    int key,
    int query,
    const device M* mask,
    thread const score_rule<M>& rule,
    uint lane) {
  make_scores<MASK, SOFTCAP, true, COUNT>(scores, slopes, key, query, mask, rule, lane);
  if (!all_seen(rule, query, 8 * COUNT, key, 16)) {
    hide_unseen<true, COUNT>(scores, key, query, rule, lane);
  }
  float unit = is_raw(MASK, SOFTCAP) ? rule.scale : 1.0f;
#pragma unroll
  for (int i = 0; i < 2 * COUNT; i++) {
    int n = i / 2, p = i % 2, at = (8 * n + fragment_col(lane)) / 2;
    float2 factor = sizeof(T) == 4 ? statistics[TILE + at] : float2(1.0f);
    float2 weight = weights_of<T>(scores[n].part[p], unit, statistics[at], factor);
    scores[n].part[p] = weight;
    slopes[n].part[p] = SOFTCAP ? weight * slopes[n].part[p] : weight;
  }
}

// Turns d_weights into d_scores.
template <int COUNT, int TILE>
METAL_FUNC void make_d_scores(
    thread sum_fragment* d_weights,
    thread const sum_fragment* weights,
    const threadgroup float2* statistics,
    uint lane) {
#pragma unroll
  for (int i = 0; i < 2 * COUNT; i++) {
    int n = i / 2, p = i % 2;
    float2 delta = statistics[TILE / 2 + (8 * n + fragment_col(lane)) / 2];
    d_weights[n].part[p] = weights[n].part[p] * (d_weights[n].part[p] - delta);
  }
}
