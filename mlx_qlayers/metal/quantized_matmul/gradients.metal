// Gradients of the scales and biases of quantized matrices, without the gradient of the matrix.
//
// w is (E, R, C) packed, with one scale for `group` elements of a row. With G = left^T * right (R, C), where
// left (M, R) and right (M, C) are the rows that matrix e was multiplied with:
//
//   d_scales (E, R, C / group) = sum over a group of code * G
//   d_biases (E, R, C / group) = sum over a group of G
//
// A tile of G is summed over M in registers (float32) before it is multiplied by the codes. If `gathered`,
// matrix e has the rows listed in left_rows and right_rows from offsets[e] to offsets[e + 1], else all
// rows. shape: M, R, C.
//
// quantized_gradients_tiles   for SIMD groups: a threadgroup of 128 threads computes ROWS x COLUMNS
//                             of G. Grid (128 * ceil(C / COLUMNS), ceil(R / ROWS), E); threadgroup
//                             memory for 64 bytes of depth, twice.
// quantized_gradients_groups  for CPUs, without SIMD groups: each thread computes `outputs`
//                             rows of one group. Grid (ceil(R / outputs), C / group, E).

#include "common/fragment.metal"
#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

#define ROWS 64
#define COLUMNS 128
#define THREADS 128

// A code wherever it lies in its row.
template <int bits>
METAL_FUNC float code_at(const device uint* row, int i) {
  int word = i * bits / 32, shift = i * bits % 32;
  uint code = row[word] >> shift;
  if (32 % bits != 0 && shift + bits > 32) {
    code |= row[word + 1] << (32 - shift);
  }
  return float_from_integer(code & ((1u << bits) - 1));
}

// The range of rows of a matrix.
template <bool gathered>
METAL_FUNC int2 rows_of(const device uint* offsets, int matrix, int rows) {
  return gathered ? int2(offsets[matrix], offsets[matrix + 1]) : int2(0, rows);
}
template <bool gathered>
METAL_FUNC size_t row_at(const device uint* list, int i) {
  return gathered ? size_t(list[i]) : size_t(i);
}

// Loads `depth` rows of up to `width` elements, with zeros beyond the last.
template <typename T, int depth, int width, bool wide, bool gathered>
METAL_FUNC void stage(
    threadgroup T* to,
    const device T* from,
    const device uint* list,
    int row,
    int end,
    int column,
    int columns,
    uint thread_index) {
  const int step = wide ? 16 / sizeof(T) : 1, stride = width + 16 / sizeof(T);
  for (int i = thread_index * step; i < depth * width; i += THREADS * step) {
    int y = i / width, x = i % width;
    bool inside = row + y < end && column + x < columns;
    size_t at = inside ? row_at<gathered>(list, row + y) * columns + column + x : 0;
    if (wide) {
      uint4 four = uint4(0);
      if (inside) {
        load_words<4>(reinterpret_cast<thread uint*>(&four), from, at);
      }
      *reinterpret_cast<threadgroup uint4*>(to + y * stride + x) = four;
    } else {
      to[y * stride + x] = inside ? from[at] : T(0);
    }
  }
}

template <typename T, typename S, int group, int bits, bool wide, bool gathered>
[[kernel]] void quantized_gradients_tiles(
    const device T* left,
    const device T* right,
    const device uint* w,
    const device uint* left_rows,
    const device uint* right_rows,
    const device uint* offsets,
    constant int* shape,
    device S* d_scales,
    device S* d_biases,
    uint3 tile [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  // A SIMD group has `down` x `across` fragments: whole groups, 16 sum fragments in registers.
  constexpr int across = group > 64 ? 16 : 8, down = 16 / across;
  constexpr int depth = 64 / sizeof(T), pad = 16 / sizeof(T);
  threadgroup uint4 memory[4 * (ROWS + pad + COLUMNS + pad)];
  threadgroup T* left_tile = reinterpret_cast<threadgroup T*>(memory);
  threadgroup T* right_tile = left_tile + depth * (ROWS + pad);
  int R = shape[1], C = shape[2];
  int row = tile.y * ROWS, column = tile.x * COLUMNS;
  int simd_row = simd_index * across * 8 / COLUMNS * 16 * down;
  int simd_column = simd_index * across * 8 % COLUMNS;
  int2 rows = rows_of<gathered>(offsets, tile.z, shape[0]);

  sum_fragment sums[down][across];
#pragma unroll
  for (int i = 0; i < down; i++) {
#pragma unroll
    for (int j = 0; j < across; j++) {
      sums[i][j].part[0] = sums[i][j].part[1] = float2(0);
    }
  }
  for (int m = rows[0]; m < rows[1]; m += depth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<T, depth, ROWS, wide, gathered>(
        left_tile, left, left_rows, m, rows[1], row, R, thread_index);
    stage<T, depth, COLUMNS, true, gathered>(
        right_tile, right, right_rows, m, rows[1], column, C, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int k = 0; k < depth; k += 16) {
      left_fragment<T> a[down];
#pragma unroll
      for (int i = 0; i < down; i++) {
        load_left_transposed(
            a[i], left_tile + k * (ROWS + pad) + simd_row + 16 * i, ROWS + pad, lane);
      }
#pragma unroll
      for (int j = 0; j < across; j++) {
        right_fragment<T> b;
        load_right(
            b, right_tile + k * (COLUMNS + pad) + simd_column + 8 * j, COLUMNS + pad, lane);
#pragma unroll
        for (int i = 0; i < down; i++) {
          multiply_accumulate(sums[i][j], a[i], b);
        }
      }
    }
  }

  size_t words = size_t(C) * bits / 32, groups = C / group;
#pragma unroll
  for (int i = 0; i < down; i++) {
#pragma unroll
    for (int part = 0; part < 2; part++) {
      int r = row + simd_row + 16 * i + 8 * part + fragment_row(lane);
      size_t at = size_t(tile.z) * R + min(r, R - 1);
#pragma unroll
      for (int first = 0; first < across * 8; first += group) {
        int c = column + simd_column + first;
        bool inside = r < R && c < C;
        float scale = 0, bias = 0;
#pragma unroll
        for (int j = 0; j < group / 8; j++) {
          float2 sum = sums[i][first / 8 + j].part[part];
          int k = inside ? c + 8 * j + fragment_col(lane) : 0;
          scale = fma(sum.x, code_at<bits>(w + at * words, k), scale);
          scale = fma(sum.y, code_at<bits>(w + at * words, k + 1), scale);
          bias += sum.x + sum.y;
        }
        scale = fragment_row_sum(scale);
        bias = fragment_row_sum(bias);
        if (inside && fragment_col(lane) == 0) {
          d_scales[at * groups + c / group] = S(scale);
          d_biases[at * groups + c / group] = S(bias);
        }
      }
    }
  }
}

template <typename T, typename S, int group, int bits, int outputs, bool gathered>
[[kernel]] void quantized_gradients_groups(
    const device T* left,
    const device T* right,
    const device uint* w,
    const device uint* left_rows,
    const device uint* right_rows,
    const device uint* offsets,
    constant int* shape,
    device S* d_scales,
    device S* d_biases,
    uint3 id [[thread_position_in_grid]]) {
  int R = shape[1], C = shape[2];
  int row = id.x * outputs, column = id.y * group;
  int2 rows = rows_of<gathered>(offsets, id.z, shape[0]);
  alignas(64) float sums[outputs][group] = {};
  for (int m = rows[0]; m < rows[1]; m++) {
    const device T* a = left + row_at<gathered>(left_rows, m) * R;
    const device T* b = right + row_at<gathered>(right_rows, m) * C + column;
    alignas(64) float values[group];
#pragma unroll
    for (int i = 0; i < group; i++) {
      values[i] = float(b[i]);
    }
#pragma unroll
    for (int n = 0; n < outputs; n++) {
      float factor = float(a[min(row + n, R - 1)]);
#pragma unroll
      for (int i = 0; i < group; i++) {
        sums[n][i] = fma(factor, values[i], sums[n][i]);
      }
    }
  }
  size_t words = size_t(C) * bits / 32, groups = C / group;
  for (int n = 0; n < outputs && row + n < R; n++) {
    size_t at = size_t(id.z) * R + row + n;
    float scale = 0, bias = 0;
    for (int i = 0; i < group; i++) {
      scale = fma(sums[n][i], code_at<bits>(w + at * words, column + i), scale);
      bias += sums[n][i];
    }
    d_scales[at * groups + id.y] = S(scale);
    d_biases[at * groups + id.y] = S(bias);
  }
}
