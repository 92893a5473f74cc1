// K tiles of rows, loaded from device memory and stored in threadgroup memory as right operands.
//
// A K tile is 8 rows of 4 * run elements; `run` and `pairs` are those of load_run. A SIMD group loads it
// and, when its memory is free, stores it: operands 2 t and 2 t + 1 of a lane are at t * 32 + lane, in
// the order of their parts. If WARPGROUP it becomes 8 of the ROWS rows of a tile (see tile.metal).

#include "tile.metal"

#include <metal_stdlib>
using namespace metal;

// Whether subnormal numbers are multiplied exactly: Apple GPUs flush some of them to zero.
#define EXACT_BELOW_NORMAL false

template <typename T, int run>
struct row_k_tile {
  loaded_run<T, run / 4> rows;
};

// Elements k to k + 4 * run of `count` rows of K elements; zeros beyond K, undefined beyond the rows.
template <int pairs, typename T, int run>
METAL_FUNC void load_row_k_tile(
    thread row_k_tile<T, run>& k_tile, const device T* x, int k, int K, int count, uint lane) {
  int depth = right_depth(lane, 0) % 8 / 2 * run;
  load_run<pairs>(k_tile.rows, x, k, K, run, k + depth < K ? max(count, 0) : 0, lane);
}

// Stores the K tile as rows from `first` on.
template <int pairs, int ROWS, bool WARPGROUP, typename T, int run>
METAL_FUNC void place_row_k_tile(
    threadgroup uint4* to, int first, thread row_k_tile<T, run>& k_tile, uint lane) {
  right_fragment<T> values[run / 4];
  interleave<pairs>(values, k_tile.rows);
#pragma unroll
  for (int t = 0; t < run / 8; t++) {
    to[(first / 8 * (run / 8) + t) * 32 + lane] = uint4(
        as_type<uint>(values[2 * t].part[0]),
        as_type<uint>(values[2 * t].part[1]),
        as_type<uint>(values[2 * t + 1].part[0]),
        as_type<uint>(values[2 * t + 1].part[1]));
  }
}

// A barrier of the threadgroup's memory for SIMD groups simds * part to simds * (part + 1). All parts must
// reach it equally often: most GPUs have barriers of one SIMD group or of all only.
template <int simds>
METAL_FUNC void barrier_of_some(int part) {
  if (simds == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
