// Attention of a token to latent rows: out = softmax((q c^T + r p^T) scale) c, as DeepSeek-V3 decodes.
//
// Keys are rows c (B, 1, S, D), concatenated with rows p (B, 1, S, R) that have the rotary embedding; values
// are c again. q (B, H, 1, D) and r (B, H, 1, R) may have any strides. Rows behind `last`, and those that
// `mask` (B or 1, 1, 1, S) hides, do not count.
//
// A threadgroup computes `heads` heads and a split of the rows, a SIMD group the softmax of a head:
//
//   for each tile of 32 rows of the split:
//     scores of 32 / heads rows for all heads, each lane every 32nd run            [registers]
//     m' = max(m, scores); p = exp2(scores - m'); sum = sum * exp2(m - m') + p     [threadgroup]
//     out = out * exp2(m - m') + p c: D / threads columns in each thread           [registers]
//
// With one split the result is written; else the unnormalized out, m and sum, all float, which
// attention_combine combines. options: the bits of scale * log2(e), splits, H, S, and whether each
// sequence has a mask of its own.
// Grid (32 * heads * splits, H / heads, B), threadgroup (32 * heads, 1, 1).

#include "common/load.metal"
#include "score.metal"

#include <metal_stdlib>
using namespace metal;

enum { SCALE, SPLITS, HEADS, LENGTH, MASKS };

// This lane's elements of a row at `at`: one run of `run` in every 32 * run.
template <int count, int run, typename T>
METAL_FUNC void lane_elements(thread float* to, const device T* array, size_t at, int lane) {
#pragma unroll
  for (int i = 0; i < count / 32; i += run) {
    const size_t from = at + 32 * i + lane * run;
    if (run * sizeof(T) % 4 != 0) {
      to[i] = float(array[from]);
      continue;
    }
    alignas(16) uint words[(run * sizeof(T) + 3) / 4];
    load_words<(run * int(sizeof(T)) + 3) / 4>(words, array, from);
#pragma unroll
    for (int j = 0; j < run; j++) {
      to[i + j] = float(reinterpret_cast<const thread T*>(words)[j]);
    }
  }
}

// Contiguous elements of a row.
template <int count, typename T>
METAL_FUNC void columns(thread float* to, const device T* array, size_t at) {
  lane_elements<32 * count, count>(to, array, at, 0);
}

template <typename T, typename O, int D, int R, int heads, bool masked>
[[kernel]] void latent_step(
    const device T* q,
    const constant int64_t* q_strides,
    const device T* r,
    const constant int64_t* r_strides,
    const device T* c,
    const device T* p,
    constant int& last,
    const device bool* mask,
    constant int* options,
    device O* out,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int run = D % 256 == 0 ? 8 : D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1, run_r = R % 64 == 0 ? 2 : 1;
  const int tile = 32, each = D / (32 * heads);
  threadgroup float weights[tile][heads];
  threadgroup float factors[heads];

  const int splits = options[SPLITS], H = options[HEADS], S = options[LENGTH];
  const int batch = group.z, first_head = int(group.y) * heads, counted = min(last + 1, S);
  const int per_split = ((counted + splits - 1) / splits + tile - 1) / tile * tile;
  const int start = int(group.x) * per_split, stop = min(start + per_split, counted);
  const float scale = as_type<float>(options[SCALE]);

  float queries[heads][D / 32], rotated[heads][R / 32];
#pragma unroll
  for (int h = 0; h < heads; h++) {
    const int head = min(first_head + h, H - 1);
    const device T* own = q + batch * q_strides[0] + head * q_strides[1];
    const device T* own_rotated = r + batch * r_strides[0] + head * r_strides[1];
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      queries[h][i] = float(own[((i / run * 32 + lane) * run + i % run) * q_strides[3]]);
    }
#pragma unroll
    for (int i = 0; i < R / 32; i++) {
      rotated[h][i] = float(own_rotated[((i / run_r * 32 + lane) * run_r + i % run_r) * r_strides[3]]);
    }
  }
  float top = LOWEST, sum = 0, sums[heads][each] = {};
  for (int base = start; base < stop; base += tile) {
#pragma unroll 2
    for (int i = 0; i < tile / heads; i++) {
      const int row = min(base + int(simd) * (tile / heads) + i, stop - 1);
      float key[D / 32], key_rotated[R / 32];
      lane_elements<D, run>(key, c, (size_t(batch) * S + row) * D, lane);
      lane_elements<R, run_r>(key_rotated, p, (size_t(batch) * S + row) * R, lane);
      float score[heads];
#pragma unroll
      for (int h = 0; h < heads; h++) {
        score[h] = 0;
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
          score[h] = fma(queries[h][j], key[j], score[h]);
        }
#pragma unroll
        for (int j = 0; j < R / 32; j++) {
          score[h] = fma(rotated[h][j], key_rotated[j], score[h]);
        }
        score[h] = simd_sum(score[h]);
      }
#pragma unroll
      for (int h = 0; h < heads; h++) {
        if (int(lane) == h) {
          weights[int(simd) * (tile / heads) + i][h] = score[h] * scale;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int row = base + lane;
    bool shown = row < stop;
    if (masked) {
      shown = shown && mask[(options[MASKS] ? size_t(batch) * S : 0) + min(row, S - 1)];
    }
    const float score = shown ? weights[lane][simd] : LOWEST;
    const float higher = max(top, simd_max(score)), factor = fast::exp2(top - higher);
    const float weight = shown ? fast::exp2(score - higher) : 0.0f;
    sum = sum * factor + simd_sum(weight);
    top = higher;
    weights[lane][simd] = weight;
    if (lane == 0) {
      factors[simd] = factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int h = 0; h < heads; h++) {
#pragma unroll
      for (int j = 0; j < each; j++) {
        sums[h][j] *= factors[h];
      }
    }
    const int rows = min(tile, stop - base);
#pragma unroll 4
    for (int i = 0; i < rows; i++) {
      alignas(16) float value[each];
      columns<each>(value, c, (size_t(batch) * S + base + i) * D + int(thread_index) * each);
#pragma unroll
      for (int h = 0; h < heads; h++) {
#pragma unroll
        for (int j = 0; j < each; j++) {
          sums[h][j] = fma(weights[i][h], value[j], sums[h][j]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (lane == 0) {
    factors[simd] = splits == 1 ? 1 / sum : 1.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int h = 0; h < heads; h++) {
    const int head = first_head + h, width = splits == 1 ? D : D + 2;
    if (head >= H) {
      continue;
    }
    device O* to = out + ((size_t(batch) * H + head) * splits + group.x) * width;
#pragma unroll
    for (int j = 0; j < each; j++) {
      to[int(thread_index) * each + j] = O(sums[h][j] * factors[h]);
    }
    if (splits > 1 && int(simd) == h && lane == 0) {
      to[D] = O(top);
      to[D + 1] = O(sum);
    }
  }
}
