// Products with matrices a (K, R) and b (R, N) of a small rank, in float32: y + scale (x a) b and its gradients.
//
// shape: rows, columns. A matrix is stored as (columns, R), or transposed as (R, columns). A thread loads W columns
// side by side: 4 where the number of columns is a multiple of that, else 1. Threads have at most 32 sums, so that
// RESIDENT threadgroups fit on a multiprocessor: these kernels wait for memory.
//
// low_rank_down    low (M, R) = x (M, K) a. A threadgroup computes ROWS rows and BLOCK columns of low, its SIMD groups
//                  each a part of the sum over K, and eight lanes of these each a part of that for two columns.
//                  Grid (256 * ceil(R / BLOCK), ceil(M / ROWS)).
// low_rank_up      y (M, N) + low (scale b), or without y the product alone. A thread computes TILES times TALL rows,
//                  and reads y ahead, as no load passes a store that may be to its address.
//                  Grid (256 * ceil(N / (256 * W)), ceil(M / (TILES * TALL))).
// low_rank_outer   parts (ceil(M / LONG), K, R) = scale x^T low, each the sum over LONG rows. A threadgroup computes
//                  32 * W columns of x and BLOCK of low, its SIMD groups each a part of the rows.
//                  Grid (256 * ceil(K / (32 * W)), ceil(M / LONG), ceil(R / BLOCK)).

#include "common/load.metal"

#include <metal_stdlib>
using namespace metal;

#define THREADS 256
#define SIMDS 8
#define ROWS 16
#define BLOCK 8
#define PAIR 2
#define TALL 8
#define TILES 4
#define LONG 128
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

// Loads BLOCK ranks of W columns of a matrix.
template <int R, bool transposed, int W, bool odd, typename A>
METAL_FUNC void load_block(thread float* to, const device A* matrix, int columns, int column, int rank) {
  if (!transposed) {
#pragma unroll
    for (int i = 0; i < W; i++) {
      load_ranks<R, odd>(to + i * BLOCK, matrix, column + i, rank);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < BLOCK; j++) {
    float some[W];
    load_floats<W, odd>(some, matrix, size_t(min(rank + j, R - 1)) * columns + column);
#pragma unroll
    for (int i = 0; i < W; i++) {
      to[i * BLOCK + j] = some[i];
    }
  }
}

// The sums of PAIR ranks of ROWS rows, over the columns of a lane.
template <int R, bool transposed, int W, bool odd, typename T, typename A>
METAL_FUNC void add_columns(
    thread float* sums, const device T* x, const device A* a, int rows, int columns, int row, int rank, int part) {
#pragma unroll 2
  for (int k = part * W; k < columns; k += SIMDS * 8 * W) {
    float own[PAIR][W], values[ROWS][W];
#pragma unroll
    for (int j = 0; j < PAIR; j++) {
      int r = min(rank + j, R - 1);
      if (transposed) {
        load_floats<W, odd>(own[j], a, size_t(r) * columns + k);
      } else {
#pragma unroll
        for (int w = 0; w < W; w++) {
          own[j][w] = float(a[size_t(k + w) * R + r]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      load_floats<W, odd>(values[i], x, size_t(min(row + i, rows - 1)) * columns + k);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int w = 0; w < W; w++) {
#pragma unroll
        for (int j = 0; j < PAIR; j++) {
          sums[i * PAIR + j] = fma(values[i][w], own[j][w], sums[i * PAIR + j]);
        }
      }
    }
  }
}

template <typename T, typename A, int R, bool transposed, int W, int RESIDENT>
[[kernel]] void low_rank_down(
    const device T* x,
    const device A* a,
    const constant int* shape,
    device float* low,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[SIMDS * ROWS * BLOCK];
  int rows = shape[0], columns = shape[1], row = group.y * ROWS, rank = group.x * BLOCK;
  // Lanes 8 apart have the same columns of x, and other ranks.
  int pair = int(lane) / 8 * PAIR, part = int(simd) * 8 + int(lane) % 8;
  float sums[ROWS * PAIR] = {};
  if (begins_odd(x) || begins_odd(a)) {
    add_columns<R, transposed, W, true>(sums, x, a, rows, columns, row, rank + pair, part);
  } else {
    add_columns<R, transposed, W, false>(sums, x, a, rows, columns, row, rank + pair, part);
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
#pragma unroll
    for (int j = 0; j < PAIR; j++) {
      float total = sums[i * PAIR + j];
#pragma unroll
      for (ushort step = 1; step < 8; step *= 2) {
        total += simd_shuffle_xor(total, step);
      }
      if (lane % 8 == 0) {
        parts[(simd * ROWS + i) * BLOCK + pair + j] = total;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int i = int(thread_index) / BLOCK, j = int(thread_index) % BLOCK;
  if (i < ROWS && row + i < rows && rank + j < R) {
    float total = 0.0f;
    for (int s = 0; s < SIMDS; s++) {
      total += parts[(s * ROWS + i) * BLOCK + j];
    }
    low[size_t(row + i) * R + rank + j] = total;
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

// TILES times TALL rows of W columns, from row `first` on.
template <int R, bool transposed, bool added, int W, bool odd, typename T, typename A>
METAL_FUNC void add_ranks(
    device T* out,
    const device T* y,
    const device float* low,
    const device A* b,
    float factor,
    int rows,
    int columns,
    int first,
    int column) {
  float own[W * BLOCK];
  int end = min(first + TILES * TALL, rows);
  for (int row = first; row < end; row += TALL) {
    float sums[TALL][W] = {};
    if (added) {
#pragma unroll
      for (int m = 0; m < TALL; m++) {
        load_floats<W, odd>(sums[m], y, size_t(min(row + m, rows - 1)) * columns + column);
      }
    }
#pragma unroll 1
    for (int rank = 0; rank < R; rank += BLOCK) {
      if (R > BLOCK || row == first) {  // else it is there
        load_block<R, transposed, W, odd>(own, b, columns, column, rank);
#pragma unroll
        for (int i = 0; i < W * BLOCK; i++) {
          own[i] = rank + i % BLOCK < R ? factor * own[i] : 0.0f;
        }
      }
#pragma unroll
      for (int m = 0; m < TALL; m++) {
        float values[BLOCK];
        load_ranks<R, false>(values, low, min(row + m, rows - 1), rank);
#pragma unroll
        for (int w = 0; w < W; w++) {
#pragma unroll
          for (int j = 0; j < BLOCK; j++) {
            sums[m][w] = fma(values[j], own[w * BLOCK + j], sums[m][w]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < TALL; m++) {
      if (row + m < rows) {
        store_rounded<W>(out + size_t(row + m) * columns + column, sums[m]);
      }
    }
  }
}

template <typename T, typename A, int R, bool transposed, bool added, int W, int RESIDENT>
[[kernel]] void low_rank_up(
    const device T* y,
    const device float* low,
    const device A* b,
    const constant int* shape,
    const constant float* scale,
    device T* out,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  int rows = shape[0], columns = shape[1];
  int row = group.y * (TILES * TALL), column = (group.x * THREADS + thread_index) * W;
  if (column >= columns) {
    return;
  }
  if ((added && begins_odd(y)) || begins_odd(b)) {
    add_ranks<R, transposed, added, W, true>(out, y, low, b, scale[0], rows, columns, row, column);
  } else {
    add_ranks<R, transposed, added, W, false>(out, y, low, b, scale[0], rows, columns, row, column);
  }
}

// The sums of BLOCK ranks times W columns, over rows.
template <int R, int W, bool odd, typename T>
METAL_FUNC void add_rows(
    thread float* sums,
    const device T* x,
    const device float* low,
    int columns,
    int first,
    int end,
    int column,
    int rank) {
#pragma unroll 4
  for (int row = first; row < end; row++) {
    float own[BLOCK], values[W];
    load_ranks<R, false>(own, low, row, rank);
    load_floats<W, odd>(values, x, size_t(row) * columns + column);
#pragma unroll
    for (int w = 0; w < W; w++) {
#pragma unroll
      for (int j = 0; j < BLOCK; j++) {
        sums[w * BLOCK + j] = fma(values[w], own[j], sums[w * BLOCK + j]);
      }
    }
  }
}

template <typename T, int R, bool transposed, int W, int RESIDENT>
[[kernel]] void low_rank_outer(
    const device T* x,
    const device float* low,
    const constant int* shape,
    const constant float* scale,
    device float* parts,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float of_simds[SIMDS][HALF][32 * W];
  int rows = shape[0], columns = shape[1], first = group.x * 32 * W, rank = group.z * BLOCK;
  int column = min(first + int(lane) * W, columns - W);
  int row = group.y * LONG + simd * (LONG / SIMDS), end = min(row + LONG / SIMDS, rows);
  float sums[W * BLOCK] = {};
  if (begins_odd(x)) {
    add_rows<R, W, true>(sums, x, low, columns, row, end, column, rank);
  } else {
    add_rows<R, W, false>(sums, x, low, columns, row, end, column, rank);
  }
  parts += size_t(group.y) * columns * R;
  // In halves of the ranks, which fit into threadgroup memory.
#pragma unroll
  for (int half_of = 0; half_of < BLOCK; half_of += HALF) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int w = 0; w < W; w++) {
#pragma unroll
      for (int j = 0; j < HALF; j++) {
        of_simds[simd][j][lane * W + w] = sums[w * BLOCK + half_of + j];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < HALF * 32 * W; i += THREADS) {
      int j = i / (32 * W), k = i % (32 * W), r = rank + half_of + j;
      float total = 0.0f;
#pragma unroll
      for (int s = 0; s < SIMDS; s++) {
        total += of_simds[s][j][k];
      }
      k += first;
      if (k < columns && r < R) {
        parts[transposed ? size_t(r) * columns + k : size_t(k) * R + r] = scale[0] * total;
      }
    }
  }
}
