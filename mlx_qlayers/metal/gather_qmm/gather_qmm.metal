// Products of rows, sorted by the quantized matrix that each chose among E, in tiles.
//
// gather_qmm_list    lists the tiles: matrix, first row and end of up to `tile` rows that chose the
//                    same one. right (P,) holds the sorted choices of blocks of M rows; shape: P, E, M,
//                    tile and the length of the list, which is padded with empty tiles.
//                    One threadgroup of `threads` threads, a power of two.
// gather_qmm_tiles   y (R, N) = x (R, K) * w^T, or x * w, by the list: as qmm in
//                    quantized_matmul/qmm.metal, with the same memory. shape: N, K.
//                    Grid (threads * tiles in the list, ceil(N / tile_n), 1).

#include "quantized_matmul/qmm.metal"

#include <metal_stdlib>
using namespace metal;

// The index in the sorted list at which the choices from `matrix` on begin.
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
    bool ahead,
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
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int rows = tile_m / simds_m / 16, columns = tile_n / simds_n / 8;
  // uint4, since an array of T would not be aligned for vectors of 16 bytes.
  threadgroup uint4 x_packs[stages * X_TILE * sizeof(T) / 16];
  threadgroup uint4 w_packs[stages * W_TILE * sizeof(T) / 16];
  threadgroup T* x_tiles = reinterpret_cast<threadgroup T*>(x_packs);
  threadgroup T* w_tiles = reinterpret_cast<threadgroup T*>(w_packs);
  int N = shape[0], K = shape[1], n = place.y * tile_n;
  uint matrix = list[3 * place.x];
  int m = list[3 * place.x + 1], M = list[3 * place.x + 2];
  if (m == M) {
    return;
  }
  int w_columns = transposed ? K : N;
  size_t w_rows = size_t(matrix) * (transposed ? N : K), groups = w_rows * (w_columns / group);
  sum_fragment sums[rows * columns];
  sum_tiles<
      T, mode, group, bits, transposed, tile_m, tile_n, tile_k, simds_m, simds_n, run, stages,
      ahead, aligned>(
      sums, x_tiles, w_tiles, x, w + w_rows * (size_t(w_columns) * bits / 32), scales + groups,
      biases + groups, m, M, n, N, 0, K, K, thread_index, lane);
  if (scaled) {
    float2 factor = factors[matrix];
#pragma unroll
    for (int i = 0; i < rows * columns; i++) {
      sums[i].part[0] *= factor;
      sums[i].part[1] *= factor;
    }
  }
  m += int(thread_index) / 32 / simds_n * rows * 16;
  n += int(thread_index) / 32 % simds_n * columns * 8;
  write_sums<T, T, rows, columns, false>(sums, x, y, m, n, M, N, lane);
}
