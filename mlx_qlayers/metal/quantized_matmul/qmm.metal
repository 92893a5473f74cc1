// Product of many rows with a quantized matrix: y (M, N) = x (M, K) * w + bias, in tiles.
//
// w is packed (see packed.metal), transposed (N, K) or not (K, N). One threadgroup computes tile_m x tile_n
// of y, each of its simds_m x simds_n SIMD groups a rectangle. In each step of tile_k it dequantizes a tile of
// w and copies one of x to threadgroup memory, through registers that are loaded while the previous step
// is multiplied:
//
//   grid (ceil(M / tile_m) * threads, ceil(N / tile_n), parts), threadgroup (threads, 1, 1) with
//   threads = 32 * simds_m * simds_n; threadgroup memory stages * (tiles with their padding).
//
// The threadgroups of one column of tiles are neighbours in the grid, so that w is read from device memory
// once. With split-K into `parts`, part z takes `depth` elements of K from z * depth on and writes its sums
// to plane z of y, in float32, for qmm_sum to add. The run of elements that one thread dequantizes has one
// group. Elements beyond M, N or K are zeros and are not read.

#include "common/fragment.metal"
#include "packed_runs.metal"

#include <metal_stdlib>
using namespace metal;

// The threadgroup's tile of x at (m, k), 16 bytes at a time.
template <typename T, int tile_m, int tile_k, int threads, bool aligned>
METAL_FUNC void fetch_rows(
    thread uint4* held, const device T* x, int m, int k, int M, int K, int thread_index) {
  constexpr int width = 16 / sizeof(T), across = tile_k / width;
#pragma unroll
  for (int i = 0; i < PIECES_PER_THREAD(tile_m * across, threads); i++) {
    int piece = thread_index + i * threads, row = m + piece / across;
    int column = k + piece % across * width;
    held[i] = uint4(0);
    if (IS_PIECE(tile_m * across, threads) && row < M && column < K) {
      size_t at = size_t(row) * K + column;
      if (aligned) {
        load_words<4>(reinterpret_cast<thread uint*>(held + i), x, at);
      } else {
        alignas(16) T values[width];
#pragma unroll
        for (int j = 0; j < width; j++) {
          values[j] = column + j < K ? x[at + j] : T(0);
        }
        held[i] = *reinterpret_cast<thread uint4*>(values);
      }
    }
  }
}

template <typename T, int tile_m, int tile_k, int threads>
METAL_FUNC void place_rows(threadgroup T* tile, const thread uint4* held, int thread_index) {
  constexpr int width = 16 / sizeof(T), across = tile_k / width;
#pragma unroll
  for (int i = 0; i < PIECES_PER_THREAD(tile_m * across, threads); i++) {
    int piece = thread_index + i * threads;
    int at = piece / across * (tile_k + PADDING) + piece % across * width;
    if (IS_PIECE(tile_m * across, threads)) {
      *reinterpret_cast<threadgroup uint4*>(tile + at) = held[i];
    }
  }
}

// sums += x * w for a SIMD group's part of two tiles; a row of sums has `columns` fragments.
template <typename T, bool transposed, int tile_k, int rows, int columns, int stride>
METAL_FUNC void multiply_tiles(
    thread sum_fragment* sums, const threadgroup T* x, const threadgroup T* w, uint lane) {
#pragma unroll
  for (int k = 0; k < tile_k; k += 16) {
    left_fragment<T> left[rows];
    right_fragment<T> right[columns];
#pragma unroll
    for (int i = 0; i < rows; i++) {
      load_left(left[i], x + i * 16 * (tile_k + PADDING) + k, tile_k + PADDING, lane);
    }
#pragma unroll
    for (int j = 0; j < columns; j++) {
      if (transposed) {
        load_right_transposed(right[j], w + j * 8 * stride + k, stride, lane);
      } else {
        load_right(right[j], w + k * stride + j * 8, stride, lane);
      }
    }
#pragma unroll
    for (int i = 0; i < rows; i++) {
#pragma unroll
      for (int j = 0; j < columns; j++) {
        multiply_accumulate(sums[i * columns + j], left[i], right[j]);
      }
    }
  }
}

// Stores a SIMD group's sums to y (M, N), from (m, n) on.
template <typename T, typename O, int rows, int columns, bool biased>
METAL_FUNC void write_sums(
    const thread sum_fragment* sums,
    const device T* bias,
    device O* y,
    int m,
    int n,
    int M,
    int N,
    uint lane) {
  m += fragment_row(lane);
  n += fragment_col(lane);
#pragma unroll
  for (int j = 0; j < columns; j++) {
    int column = n + 8 * j;
    float2 added = float2(0);
    if (biased) {
      added.x = column < N ? float(bias[column]) : 0.0f;
      added.y = column + 1 < N ? float(bias[column + 1]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2 * rows; i++) {
      float2 sum = sums[i / 2 * columns + j].part[i % 2] + added;
      int row = m + 8 * i;
      device O* to = y + size_t(row) * N + column;
      if (row < M && column + 1 < N && N % 2 == 0) {
        *reinterpret_cast<device metal::vec<O, 2>*>(to) = metal::vec<O, 2>(sum);
      } else if (row < M && column < N) {
        to[0] = O(sum.x);
        if (column + 1 < N) {
          to[1] = O(sum.y);
        }
      }
    }
  }
}

// Elements of the tiles of x and of w, with their padding.
#define X_TILE ((tile_m) * (tile_k + PADDING))
#define W_TILE (transposed ? tile_n * (tile_k + PADDING) : tile_k * (tile_n + PADDING))

// A SIMD group's part of x (M, K) * w (K, N) from row m and column n on, over first..end of K.
template <
    typename T,
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
    typename S>
METAL_FUNC void sum_tiles(
    thread sum_fragment* sums,
    threadgroup T* x_tiles,
    threadgroup T* w_tiles,
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    int m,
    int M,
    int n,
    int N,
    int first,
    int end,
    int K,
    int thread_index,
    uint lane) {
  constexpr int threads = 32 * simds_m * simds_n;
  constexpr int across = (transposed ? tile_k : tile_n) / run;
  constexpr int x_pieces = tile_m * tile_k * sizeof(T) / 16, w_pieces = tile_n * tile_k / run;
  constexpr int stride = across * run + PADDING, x_stride = tile_k + PADDING;
  constexpr int rows = tile_m / simds_m / 16, columns = tile_n / simds_n / 8;
  int simd = thread_index / 32, stage = 0;
  int w_rows = transposed ? N : K, w_columns = transposed ? K : N;
  int row = simd / simds_n * rows * 16, column = simd % simds_n * columns * 8;
#pragma unroll
  for (int i = 0; i < rows * columns; i++) {
    sums[i].part[0] = 0.0f;
    sums[i].part[1] = 0.0f;
  }

  for (int k = first - tile_k; k < end; k += tile_k) {
    int next = k + tile_k;
    uint4 x_held[PIECES_PER_THREAD(x_pieces, threads)];
    packed_run<S, run * bits / 32> w_held[PIECES_PER_THREAD(w_pieces, threads)];
    if (next < end) {
      fetch_rows<T, tile_m, tile_k, threads, aligned>(
          x_held, x, m, next, M, K, thread_index);
      int w_row = transposed ? n : next, w_column = transposed ? next : n;
      if (begins_odd(w)) {
        fetch_runs<mode, group, bits, run, w_pieces, across, threads, ahead>(
            w_held, w, scales, biases, w_row, w_column, w_rows, w_columns, thread_index, true);
      } else {
        fetch_runs<mode, group, bits, run, w_pieces, across, threads, ahead>(
            w_held, w, scales, biases, w_row, w_column, w_rows, w_columns, thread_index, false);
      }
    }
    if (k >= first) {
      const threadgroup T* w_part =
          w_tiles + stage * W_TILE + (transposed ? column * stride : column);
      multiply_tiles<T, transposed, tile_k, rows, columns, stride>(
          sums, x_tiles + stage * X_TILE + row * x_stride, w_part, lane);
    }
    if (stages == 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      stage = 1 - stage;
    }
    if (next < end) {
      place_rows<T, tile_m, tile_k, threads>(x_tiles + stage * X_TILE, x_held, thread_index);
      place_runs<T, mode, bits, run, w_pieces, across, threads>(
          w_tiles + stage * W_TILE, w_held, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template <
    typename T,
    typename O,
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
    bool biased>
[[kernel]] void qmm(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    constant int* shape,
    device O* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int rows = tile_m / simds_m / 16, columns = tile_n / simds_n / 8;
  // uint4, since an array of T would not be aligned for vectors of 16 bytes.
  threadgroup uint4 x_packs[stages * X_TILE * sizeof(T) / 16];
  threadgroup uint4 w_packs[stages * W_TILE * sizeof(T) / 16];
  threadgroup T* x_tiles = reinterpret_cast<threadgroup T*>(x_packs);
  threadgroup T* w_tiles = reinterpret_cast<threadgroup T*>(w_packs);
  int M = shape[0], N = shape[1], K = shape[2], depth = shape[3];
  int m = place.x * tile_m, n = place.y * tile_n, first = place.z * depth;
  sum_fragment sums[rows * columns];
  sum_tiles<
      T, mode, group, bits, transposed, tile_m, tile_n, tile_k, simds_m, simds_n, run, stages,
      ahead, aligned>(
      sums, x_tiles, w_tiles, x, w, scales, biases, m, M, n, N, first, min(first + depth, K), K,
      thread_index, lane);
  m += int(thread_index) / 32 / simds_n * rows * 16;
  n += int(thread_index) / 32 % simds_n * columns * 8;
  write_sums<T, O, rows, columns, biased>(
      sums, bias, y + place.z * size_t(M) * N, m, n, M, N, lane);
}

// y = the sum of the planes of `parts`, and the bias; a thread computes one element.
template <typename T, bool biased>
[[kernel]] void qmm_sum(
    const device float* parts,
    const device T* bias,
    constant int* shape,
    device T* y,
    uint id [[thread_position_in_grid]]) {
  int count = shape[0], N = shape[1], planes = shape[2];
  float sum = biased ? float(bias[int(id) % N]) : 0.0f;
  for (int z = 0; z < planes; z++) {
    sum += parts[size_t(z) * count + id];
  }
  y[id] = T(sum);
}
