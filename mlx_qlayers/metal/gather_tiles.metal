// Products of rows, sorted by the quantized matrix that each chose among E, in tiles.
//
// gather_qmm_list    lists the tiles: matrix, first row and end of up to `tile` rows that chose the
//                    same one. right (P,) holds the sorted choices of blocks of M rows; shape is
//                    P, E, M, tile and the length of the list, the rest of which is empty rows.
//                    One threadgroup of `threads` threads, a power of two.
// gather_qmm_tiles   y (R, N) = x (R, K) * w^T, or x * w, by the list: as quantized_matmul_tiles in
//                    quantized_tiles.metal, with the same memory. shape is N, K.
//                    Grid (threads * tiles in the list, ceil(N / tile_n), 1).

#include "quantized_tiles.metal"

#include <metal_stdlib>
using namespace metal;

// Where in the sorted list the choices from `matrix` on begin.
METAL_FUNC int first_choice(const device uint* right, int pairs, uint matrix) {
  int low = 0, high = pairs;
  while (low < high) {
    int middle = (low + high) / 2;
    if (right[middle] < matrix) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <int threads>
[[kernel]] void gather_qmm_list(
    const device uint* right,
    constant int* shape,
    device uint* list,
    uint id [[thread_index_in_threadgroup]]) {
  threadgroup int counted[threads];
  int pairs = shape[0], matrices = shape[1], tile = shape[3];
  int each = (matrices + threads - 1) / threads;
  int first = int(id) * each, last = min(first + each, matrices), tiles = 0;
  for (int e = first; e < last; e++) {
    int rows = (first_choice(right, pairs, e + 1) - first_choice(right, pairs, e)) * shape[2];
    tiles += (rows + tile - 1) / tile;
  }
  counted[id] = tiles;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int step = 1; step < threads; step *= 2) {
    int before = int(id) >= step ? counted[id - step] : 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    counted[id] += before;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  int at = counted[id] - tiles;
  for (int e = first; e < last; e++) {
    int end = first_choice(right, pairs, e + 1) * shape[2];
    for (int row = first_choice(right, pairs, e) * shape[2]; row < end; row += tile, at++) {
      list[3 * at] = e;
      list[3 * at + 1] = row;
      list[3 * at + 2] = min(row + tile, end);
    }
  }
  for (int i = counted[threads - 1] + int(id); i < shape[4]; i += threads) {
    list[3 * i] = list[3 * i + 1] = list[3 * i + 2] = 0;
  }
}

template <
    typename T,
    typename S,
    int mode,
    int group,
    int bits,
    bool transposed,
    int tile_m,
    int tile_n,
    int tile_k,
    int simds_m,
    int simds_n,
    int run,
    int stages,
    bool aligned,
    bool scaled>
[[kernel]] void gather_qmm_tiles(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device float* factors,
    const device uint* list,
    constant int* shape,
    device T* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int threads = 32 * simds_m * simds_n, pieces = tile_m * tile_k / threads;
  constexpr int across = (transposed ? tile_k : tile_n) / run;
  constexpr int count = tile_n * tile_k / run / threads;
  constexpr int stride = across * run + PADDING, x_stride = tile_k + PADDING;
  constexpr int x_size = tile_m * x_stride, w_size = (transposed ? tile_n : tile_k) * stride;
  constexpr int rows = tile_m / simds_m / 16, columns = tile_n / simds_n / 8;
  threadgroup T x_tiles[stages * x_size];
  threadgroup T w_tiles[stages * w_size];

  int N = shape[0], K = shape[1];
  uint matrix = list[3 * place.x];
  int m = list[3 * place.x + 1], M = list[3 * place.x + 2], n = place.y * tile_n, stage = 0;
  if (m == M) {
    return;
  }
  int w_rows = transposed ? N : K, w_columns = transposed ? K : N;
  size_t all_rows = size_t(matrix) * w_rows;
  w += all_rows * (size_t(w_columns) * bits / 32);
  scales += all_rows * (w_columns / group);
  biases += all_rows * (w_columns / group);
  int row = int(simd) / simds_n * rows * 16, column = int(simd) % simds_n * columns * 8;
  sum_fragment sums[rows * columns];
#pragma unroll
  for (int i = 0; i < rows * columns; i++) {
    sums[i].part[0] = 0.0f;
    sums[i].part[1] = 0.0f;
  }

  for (int k = -tile_k; k < K; k += tile_k) {
    int next = k + tile_k;
    uint4 x_held[pieces * sizeof(T) / 16];
    packed_run<S, run * bits / 32> w_held[count];
    if (next < K) {
      fetch_rows<T, tile_m, tile_k, threads, aligned>(x_held, x, m, next, M, K, thread_index);
      fetch_runs<mode, group, bits, run, count, across, threads>(
          w_held, w, scales, biases, transposed ? n : next, transposed ? next : n,
          w_rows, w_columns, thread_index);
    }
    if (k >= 0) {
      const threadgroup T* w_part =
          w_tiles + stage * w_size + (transposed ? column * stride : column);
      multiply_tiles<T, transposed, tile_k, rows, columns, stride>(
          sums, x_tiles + stage * x_size + row * x_stride, w_part, lane);
    }
    if (stages == 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      stage = 1 - stage;
    }
    if (next < K) {
      place_rows<T, tile_m, tile_k, threads>(x_tiles + stage * x_size, x_held, thread_index);
      place_runs<T, mode, bits, run, count, across, threads>(
          w_tiles + stage * w_size, w_held, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (scaled) {
    float2 factor = factors[matrix];
#pragma unroll
    for (int i = 0; i < rows * columns; i++) {
      sums[i].part[0] *= factor;
      sums[i].part[1] *= factor;
    }
  }
  write_sums<T, T, rows, columns, false>(sums, x, y, m + row, n + column, M, N, lane);
}
