// Products with matrices a (K, R) and b (R, N) of a small rank, in float32: y + scale (x a) b and its gradients.
//
// Matrices are stored as (R, columns). A thread loads W columns side by side: 4 where the number of columns is a
// multiple of that, else 1. These kernels wait for memory: the loads of all rows of a thread are on their way at once,
// RESIDENT threadgroups fit on a multiprocessor, and sizes are those of shapes, which are launch arguments: on NVIDIA
// GPUs a small array lies in memory of the host, microseconds away.
//
// low_rank_down    low (M, R) = scale x (M, K) a. A threadgroup computes ROWS rows and BLOCK columns of low, each lane
//                  a part of all their sums over K. Grid (128 * ceil(R / BLOCK), ceil(M / ROWS)).
// low_rank_up      y (M, N) + low b, or without y the product alone. A thread computes TALL rows.
//                  Grid (128 * ceil(N / (128 * W)), ceil(M / TALL)).
// low_rank_outer   parts (ceil(M / LONG), R, K) = low^T x, each the sum over LONG rows. A threadgroup computes
//                  32 * W columns of x and BLOCK of low, its SIMD groups each a part of the rows.
//                  Grid (256 * ceil(K / (32 * W)), ceil(M / LONG), ceil(R / BLOCK)).

#include "common/load.metal"

#include <metal_stdlib>
using namespace metal;

#define BLOCK 8
#define ROWS 8
#define PARTS 4
#define TALL 16
#define LONG 512
#define SIMDS 8
#define AHEAD 8
#define HALF 4

// Loads `count` elements, of which 4 or 8 lie at a multiple of their number. Whether the array is odd is asked once:
// loads between branches would wait for each other.
template <int count, bool odd, typename T>
METAL_FUNC void load_floats(thread float* to, const device T* array, size_t at) {
  if (count % 4 == 0 && !odd) {
    alignas(16) uint words[(count * sizeof(T) + 3) / 4];
    load_packs<(count * int(sizeof(T)) + 3) / 4>(words, reinterpret_cast<const device uint*>(array + at), false);
    const thread T* values = reinterpret_cast<const thread T*>(words);
#pragma unroll
    for (int i = 0; i < count; i++) {
      to[i] = float(values[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; i++) {
      to[i] = float(array[at + i]);
    }
  }
}

// Loads a row of BLOCK of R numbers; those beyond the last are the last.
template <int R, bool odd, typename T>
METAL_FUNC void load_ranks(thread float* to, const device T* rows, size_t row, int rank) {
  if (R % BLOCK == 0) {
    load_floats<BLOCK, odd>(to, rows, row * R + rank);
    return;
  }
#pragma unroll
  for (int j = 0; j < BLOCK; j++) {
    to[j] = float(rows[row * R + min(rank + j, R - 1)]);
  }
}

// Loads W columns of ROWS rows, of which the last is repeated.
template <int W, bool odd, typename T>
METAL_FUNC void load_rows(thread float* values, const device T* x, int rows, int columns, int row, int k) {
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    load_floats<W, odd>(values + i * W, x, size_t(min(row + i, rows - 1)) * columns + k);
  }
}

// The sums of BLOCK ranks of ROWS rows, over the columns of a lane.
template <int R, int W, bool odd, typename T, typename A>
METAL_FUNC void add_columns(
    thread float* sums, const device T* x, const device A* a, int rows, int columns, int row, int rank, int first) {
  float values[ROWS * W], next[ROWS * W];
  if (first * W < columns) {
    load_rows<W, odd>(values, x, rows, columns, row, first * W);
  }
#pragma unroll 1
  for (int k = first * W; k < columns; k += PARTS * 32 * W) {
    load_rows<W, odd>(next, x, rows, columns, row, k + PARTS * 32 * W < columns ? k + PARTS * 32 * W : k);
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
      float own[W];
      load_floats<W, odd>(own, a, size_t(min(rank + j, R - 1)) * columns + k);
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int w = 0; w < W; w++) {
          sums[i * BLOCK + j] = fma(values[i * W + w], own[w], sums[i * BLOCK + j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS * W; i++) {
      values[i] = next[i];
    }
  }
}

// Adds numbers of two lanes, `step` apart, of which each keeps its half.
template <int half_of, int step>
METAL_FUNC void add_pair(thread float* sums, uint lane) {
  bool upper = (lane & step) != 0;
#pragma unroll
  for (int i = 0; i < half_of; i++) {
    float own = upper ? sums[half_of + i] : sums[i], other = upper ? sums[i] : sums[half_of + i];
    sums[i] = own + simd_shuffle_xor(other, ushort(step));
  }
}

// Adds up `count` numbers over 32 lanes; each keeps count / 32 of the sums, in turn.
template <int count>
METAL_FUNC void add_lanes(thread float* sums, uint lane) {
  add_pair<count / 2, 16>(sums, lane);
  add_pair<count / 4, 8>(sums, lane);
  add_pair<count / 8, 4>(sums, lane);
  add_pair<count / 16, 2>(sums, lane);
  add_pair<count / 32, 1>(sums, lane);
}

template <typename T, typename A, int R, int W, int RESIDENT>
[[kernel]] void low_rank_down(
    const device T* x,
    const constant int* x_shape,
    const device A* a,
    const constant float* scale,
    device float* low,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[PARTS][ROWS * BLOCK];
  int rows = x_shape[0], columns = x_shape[1], row = group.y * ROWS, rank = group.x * BLOCK;
  float sums[ROWS * BLOCK] = {}, factor = scale[0];
  if (begins_odd(x) || begins_odd(a)) {
    add_columns<R, W, true>(sums, x, a, rows, columns, row, rank, thread_index);
  } else {
    add_columns<R, W, false>(sums, x, a, rows, columns, row, rank, thread_index);
  }
  add_lanes<ROWS * BLOCK>(sums, lane);
#pragma unroll
  for (int i = 0; i < ROWS * BLOCK / 32; i++) {
    parts[simd][lane * (ROWS * BLOCK / 32) + i] = sums[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int i = int(thread_index) / BLOCK, j = int(thread_index) % BLOCK;
  if (i < ROWS && row + i < rows && rank + j < R) {
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < PARTS; s++) {
      total += parts[s][thread_index];
    }
    low[size_t(row + i) * R + rank + j] = factor * total;
  }
}

// Stores W sums, rounded.
template <int W, typename T>
METAL_FUNC void store_rounded(device T* to, const thread float* sums) {
  alignas(16) T rounded[4];
#pragma unroll
  for (int w = 0; w < W; w++) {
    rounded[w] = T(sums[w]);
  }
  if (W == 1) {
    to[0] = rounded[0];
  } else if (sizeof(T) == 2) {
    *reinterpret_cast<device uint2*>(to) = *reinterpret_cast<thread uint2*>(rounded);
  } else {
    *reinterpret_cast<device uint4*>(to) = *reinterpret_cast<thread uint4*>(rounded);
  }
}

// TALL rows of W columns, from row `first` on.
template <int R, bool added, int W, bool odd, typename T, typename A>
METAL_FUNC void add_ranks(
    device T* out,
    const device T* y,
    const device float* low,
    const device A* b,
    int rows,
    int columns,
    int first,
    int column) {
  float sums[TALL][W] = {};
  if (added) {
#pragma unroll
    for (int m = 0; m < TALL; m++) {
      load_floats<W, odd>(sums[m], y, size_t(min(first + m, rows - 1)) * columns + column);
    }
  }
#pragma unroll 1
  for (int rank = 0; rank < R; rank += BLOCK) {
    float own[BLOCK][W];
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
      load_floats<W, odd>(own[j], b, size_t(min(rank + j, R - 1)) * columns + column);
#pragma unroll
      for (int w = 0; w < W; w++) {
        own[j][w] = rank + j < R ? own[j][w] : 0.0f;
      }
    }
#pragma unroll
    for (int m = 0; m < TALL; m++) {
      float values[BLOCK];
      load_ranks<R, false>(values, low, min(first + m, rows - 1), rank);
#pragma unroll
      for (int w = 0; w < W; w++) {
#pragma unroll
        for (int j = 0; j < BLOCK; j++) {
          sums[m][w] = fma(values[j], own[j][w], sums[m][w]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < TALL; m++) {
    if (first + m < rows) {
      store_rounded<W>(out + size_t(first + m) * columns + column, sums[m]);
    }
  }
}

template <typename T, typename A, int R, bool added, int W, int RESIDENT>
[[kernel]] void low_rank_up(
    const device T* y,
    const device float* low,
    const constant int* low_shape,
    const device A* b,
    const constant int* b_shape,
    device T* out,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 place [[thread_position_in_grid]]) {
  int rows = low_shape[0], columns = b_shape[1], row = group.y * TALL, column = place.x * W;
  if (column >= columns) {
    return;
  }
  if ((added && begins_odd(y)) || begins_odd(b)) {
    add_ranks<R, added, W, true>(out, y, low, b, rows, columns, row, column);
  } else {
    add_ranks<R, added, W, false>(out, y, low, b, rows, columns, row, column);
  }
}

// Adds BLOCK ranks times W columns of `count` rows, every SIMDS-th from `row` on.
template <int count, int R, int W, bool odd, typename T>
METAL_FUNC void add_rows(
    thread float* sums, const device T* x, const device float* low, int columns, int row, int column, int rank) {
  float values[count][W];
#pragma unroll
  for (int i = 0; i < count; i++) {
    load_floats<W, odd>(values[i], x, size_t(row + i * SIMDS) * columns + column);
  }
#pragma unroll
  for (int i = 0; i < count; i++) {
    float own[BLOCK];
    load_ranks<R, false>(own, low, row + i * SIMDS, rank);
#pragma unroll
    for (int w = 0; w < W; w++) {
#pragma unroll
      for (int j = 0; j < BLOCK; j++) {
        sums[w * BLOCK + j] = fma(values[i][w], own[j], sums[w * BLOCK + j]);
      }
    }
  }
}

// The same of all rows up to `end`, AHEAD of them at a time.
template <int R, int W, bool odd, typename T>
METAL_FUNC void add_rows_to(
    thread float* sums,
    const device T* x,
    const device float* low,
    int columns,
    int row,
    int end,
    int column,
    int rank) {
#pragma unroll 1
  for (; row + (AHEAD - 1) * SIMDS < end; row += AHEAD * SIMDS) {
    add_rows<AHEAD, R, W, odd>(sums, x, low, columns, row, column, rank);
  }
#pragma unroll 1
  for (; row < end; row += SIMDS) {
    add_rows<1, R, W, odd>(sums, x, low, columns, row, column, rank);
  }
}

template <typename T, int R, int W, int RESIDENT>
[[kernel]] void low_rank_outer(
    const device T* x,
    const constant int* x_shape,
    const device float* low,
    device float* parts,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  // Of 32 * W columns; four of a lane are stored at once, which banks of memory take without conflicts.
  threadgroup float4 of_simds[SIMDS][HALF][8 * W];
  int rows = x_shape[0], columns = x_shape[1], first = group.x * 32 * W, rank = group.z * BLOCK;
  int column = min(first + int(lane) * W, columns - W);
  int row = group.y * LONG + simd, end = min(int(group.y + 1) * LONG, rows);
  float sums[W * BLOCK] = {};
  if (begins_odd(x)) {
    add_rows_to<R, W, true>(sums, x, low, columns, row, end, column, rank);
  } else {
    add_rows_to<R, W, false>(sums, x, low, columns, row, end, column, rank);
  }
  parts += size_t(group.y) * columns * R;
  // In halves of the ranks, which fit into threadgroup memory.
#pragma unroll
  for (int half_of = 0; half_of < BLOCK; half_of += HALF) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int j = 0; j < HALF; j++) {
      float4 own = float4(0.0f);
#pragma unroll
      for (int w = 0; w < W; w++) {
        own[w] = sums[w * BLOCK + half_of + j];
      }
      if (W == 4) {
        of_simds[simd][j][lane] = own;
      } else {
        reinterpret_cast<threadgroup float*>(of_simds[simd][j])[lane] = own[0];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < HALF * 32 * W; i += SIMDS * 32) {
      int j = i / (32 * W), k = i % (32 * W), r = rank + half_of + j;
      float total = 0.0f;
#pragma unroll
      for (int s = 0; s < SIMDS; s++) {
        total += reinterpret_cast<const threadgroup float*>(of_simds[s][j])[k];
      }
      k += first;
      if (k < columns && r < R) {
        parts[size_t(r) * columns + k] = total;
      }
    }
  }
}
