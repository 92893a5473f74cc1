// Sums of the rows of x (M, K): y (M). The kernel on which the moves of the tuner are explained.
//
// A SIMD group reads `unroll` neighbours a lane and step, of `upcast` rows; `group` SIMD groups share
// those rows and add their parts up in threadgroup memory. A threadgroup is `local` such teams:
//
//   grid (32 * group * local, ceil(M / (upcast * local)), 1), one row of threadgroups;
//   group * local * upcast floats of threadgroup memory.
//
// Team mates take turns (interleaved) or, with `blocked`, a part each. Where K is not a multiple of
// a turn of all of them, `padded` checks each element; without it K must be.

#include <metal_stdlib>
using namespace metal;

template <typename T, int upcast, int unroll, int local, int group, bool blocked, bool padded>
[[kernel]] void row_sum(
    const device T* x,
    constant int* shape,
    device float* y,
    uint3 position [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[local * group * upcast];
  int M = shape[0], K = shape[1];
  int mate = simd % group, row = (position.y * local + simd / group) * upcast;
  const int turn = 32 * unroll;
  int turns = (K + turn - 1) / turn, share = (turns + group - 1) / group;
  int first = blocked ? mate * share : mate;
  int last = blocked ? min(first + share, turns) : turns;

  float sums[upcast] = {};
  for (int t = first; t < last; t += blocked ? 1 : group) {
    int k = t * turn + lane * unroll;
#pragma unroll
    for (int r = 0; r < upcast; r++) {
      const device T* from = x + size_t(min(row + r, M - 1)) * K + k;
#pragma unroll
      for (int i = 0; i < unroll; i++) {
        sums[r] += !padded || k + i < K ? float(from[i]) : 0.0f;
      }
    }
  }

#pragma unroll
  for (int r = 0; r < upcast; r++) {
    float sum = simd_sum(sums[r]);
    if (lane == 0) {
      parts[simd * upcast + r] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (mate == 0 && int(lane) < upcast && row + int(lane) < M) {
    float sum = 0;
    for (int i = 0; i < group; i++) {
      sum += parts[(simd + i) * upcast + lane];
    }
    y[row + lane] = sum;
  }
}
