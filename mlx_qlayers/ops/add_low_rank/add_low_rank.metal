// Products with matrices a (K, R) and b (R, N) of a small rank, in float32: y + scale (x a) b and its gradients.
//
// shape: rows, columns. A matrix is stored as (columns, R), or transposed as (R, columns).
//
// low_rank_down    low (M, R) = x (M, K) a. A threadgroup computes ROWS rows and BLOCK columns of low, and its SIMD
//                  groups each a part of the sum over K. Grid (256 * ceil(R / BLOCK), ceil(M / ROWS)).
// low_rank_up      y (M, N) + low (scale b), or without y the product alone. A thread computes EACH columns of TALL
//                  rows, and reads y first, as no load passes a store that may be to its address. Grid (256 * ceil(N / (256 * EACH)), ceil(M / TALL)).
// low_rank_outer   parts (ceil(M / LONG), K, R) = scale x^T low, each the sum over LONG rows. A thread computes EACH
//                  columns of x and BLOCK of low. Grid (256 * ceil(K / (256 * EACH)), ceil(M / LONG), ceil(R / BLOCK)).

#include <metal_stdlib>
using namespace metal;

#define THREADS 256
#define SIMDS 8
#define ROWS 8
#define BLOCK 8
#define EACH 4
#define TALL 16
#define LONG 128

template <typename T, typename A, int R, bool transposed>
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
  float sums[ROWS][BLOCK] = {};
#pragma unroll 4
  for (int k = thread_index; k < columns; k += THREADS) {
    float own[BLOCK];
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
      int r = min(rank + j, R - 1);
      own[j] = float(a[transposed ? size_t(r) * columns + k : size_t(k) * R + r]);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      float value = float(x[size_t(min(row + i, rows - 1)) * columns + k]);
#pragma unroll
      for (int j = 0; j < BLOCK; j++) {
        sums[i][j] = fma(value, own[j], sums[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
      float total = simd_sum(sums[i][j]);
      if (lane == 0) {
        parts[(simd * ROWS + i) * BLOCK + j] = total;
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

template <typename T, typename A, int R, bool transposed, bool added>
[[kernel]] void low_rank_up(
    const device T* y,
    const device float* low,
    const device A* b,
    const constant int* shape,
    const constant float* scale,
    device T* out,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  int rows = shape[0], columns = shape[1], row = group.y * TALL, first = group.x * THREADS * EACH + thread_index;
  low += size_t(row) * R;
  int count = min(TALL, rows - row);
  float sums[TALL][EACH] = {};
  if (added) {
    y += size_t(row) * columns;
#pragma unroll
    for (int m = 0; m < TALL; m++) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        sums[m][i] = float(y[size_t(min(m, count - 1)) * columns + min(first + i * THREADS, columns - 1)]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    float own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int n = min(first + i * THREADS, columns - 1);
      own[i] = scale[0] * float(b[transposed ? size_t(n) * R + r : size_t(r) * columns + n]);
    }
#pragma unroll
    for (int m = 0; m < TALL; m++) {
      float value = low[min(m, count - 1) * R + r];
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        sums[m][i] = fma(value, own[i], sums[m][i]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < TALL; m++) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int n = first + i * THREADS;
      if (m < count && n < columns) {
        out[size_t(row + m) * columns + n] = T(sums[m][i]);
      }
    }
  }
}

template <typename T, int R, bool transposed>
[[kernel]] void low_rank_outer(
    const device T* x,
    const device float* low,
    const constant int* shape,
    const constant float* scale,
    device float* parts,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  int rows = shape[0], columns = shape[1], first = group.x * THREADS * EACH + thread_index, rank = group.z * BLOCK;
  int end = min(int(group.y + 1) * LONG, rows);
  float sums[EACH][BLOCK] = {};
#pragma unroll 8
  for (int row = group.y * LONG; row < end; row++) {
    float own[BLOCK];
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
      own[j] = low[size_t(row) * R + min(rank + j, R - 1)];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float value = float(x[size_t(row) * columns + min(first + i * THREADS, columns - 1)]);
#pragma unroll
      for (int j = 0; j < BLOCK; j++) {
        sums[i][j] = fma(value, own[j], sums[i][j]);
      }
    }
  }
  parts += size_t(group.y) * columns * R;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
      int k = first + i * THREADS, r = rank + j;
      if (k < columns && r < R) {
        parts[transposed ? size_t(r) * columns + k : size_t(k) * R + r] = scale[0] * sums[i][j];
      }
    }
  }
}
