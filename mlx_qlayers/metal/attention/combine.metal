// Combines the splits of attention_decode (flash decoding).

#include "score.metal"

#include <metal_stdlib>
using namespace metal;

// parts (B, L, H, splits, Dv + 2) to out (B, L, H, Dv). A threadgroup computes a row; each SIMD group
// takes every simds-th split. Grid (32 * simds, H, B * L), threadgroup (32 * simds, 1, 1).
template <typename T, typename N, int Dv, int simds, bool sinking>
[[kernel]] void attention_combine(
    const device float* parts,
    const constant int* parts_shape,
    const device N* sinks,
    device T* out,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int each = (Dv + 31) / 32;
  threadgroup float shares[simds][32 * each];
  threadgroup float sums[simds];
  int splits = parts_shape[3];
  int64_t row = int64_t(group.z) * groups.y + group.y;
  parts += row * splits * (Dv + 2);

  float top = LOWEST, sink = 0.0f;
  for (int i = lane; i < splits; i += 32) {
    top = max(top, parts[i * (Dv + 2) + Dv]);
  }
  top = simd_max(top);
  if (sinking) {
    sink = float(sinks[group.y]) * LOG2_E;
    top = max(top, sink);
  }
  float o[each] = {}, sum = 0.0f;
#pragma unroll 4
  for (int i = simd; i < splits; i += simds) {
    const device float* part = parts + i * (Dv + 2);
    float factor = power_of_2<T>(part[Dv] - top);
    sum += factor * part[Dv + 1];
#pragma unroll
    for (int j = 0; j < each; j++) {
      int d = 32 * j + lane;
      o[j] += Dv % 32 == 0 || d < Dv ? factor * part[d] : 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < each; j++) {
    shares[simd][32 * j + lane] = o[j];
  }
  if (lane == 0) {
    sums[simd] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float divisor = sinking ? power_of_2<T>(sink - top) : 0.0f;
  for (int g = 0; g < simds; g++) {
    divisor += sums[g];
  }
  for (int d = thread_index; d < Dv; d += 32 * simds) {
    float total = 0.0f;
    for (int g = 0; g < simds; g++) {
      total += shares[g][d];
    }
    out[row * Dv + d] = T(total / divisor);
  }
}
