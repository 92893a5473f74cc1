// Dequantizes up to three matrices of K columns into one: y (N0 + N1 + N2, K) = scale * code + bias,
// rounded once.
//
// A thread dequantizes `run` contiguous elements of one group in each of `count` rows, so that several
// loads are in flight:
//
//   grid (threads * blocks of columns * blocks of rows, 1, 1), threadgroup (threads, 1, 1), where
//   `threads` runs are a block of columns and `count` rows a block of rows; no threadgroup memory.
//
// shape: K, the rows of the result, and the first rows of the second and third matrix.

#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

template <typename T, typename S, int mode, int group, int bits, int run, int count, int threads>
[[kernel]] void dequantize_matrices(
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device uint* w1,
    const device S* scales1,
    const device S* biases1,
    const device uint* w2,
    const device S* scales2,
    const device S* biases2,
    constant int* shape,
    device T* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr int length = run * bits / 32;
  int columns = shape[0], rows = shape[1], across = (columns + threads * run - 1) / (threads * run);
  int first = int(place.x) / across * count;
  int column = (int(place.x) % across * threads + int(thread_index)) * run;
  if (column >= columns) {
    return;
  }
  alignas(16) uint words[count][length];
  S held_scale[count], held_bias[count];
#pragma unroll
  for (int i = 0; i < count; i++) {
    int row = min(first + i, rows - 1);
    const device uint* from = w;
    const device S* scale = scales;
    const device S* bias = biases;
    if (w2 && row >= shape[3]) {
      row -= shape[3];
      from = w2, scale = scales2, bias = biases2;
    } else if (w1 && row >= shape[2]) {
      row -= shape[2];
      from = w1, scale = scales1, bias = biases1;
    }
    size_t at = size_t(row) * (columns / group) + column / group;
    load_words<length>(
        words[i], from, size_t(row) * (size_t(columns) * bits / 32) + column * bits / 32);
    held_scale[i] = scale[at];
    held_bias[i] = mode == AFFINE ? bias[at] : S(0);
  }
#pragma unroll
  for (int i = 0; i < count; i++) {
    float values[run];
    decode_run<T, mode, bits, run>(
        values, words[i], decoded_scale<mode>(held_scale[i]), float(held_bias[i]));
    device T* to = y + size_t(first + i) * columns + column;
#pragma unroll
    for (int j = 0; j < run; j += 16 / sizeof(T)) {
      if (first + i < rows) {
        *reinterpret_cast<device uint4*>(to + j) = rounded<T>(values + j);
      }
    }
  }
}

// Dequantizes rows of one matrix by their indices, as an embedding does: y (count, K). Negative indices
// count from the end. shape: K and the rows of the matrix.
//
//   grid (threads * blocks of columns, count, 1), threadgroup (threads, 1, 1)
template <typename T, typename S, int mode, int group, int bits, int run, int threads>
[[kernel]] void dequantize_rows(
    const device int* numbers,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    constant int* shape,
    device T* y,
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr int length = run * bits / 32;
  int columns = shape[0], row = numbers[place.y];
  int column = (int(place.x) * threads + int(thread_index)) * run;
  row += row < 0 ? shape[1] : 0;
  if (column >= columns) {
    return;
  }
  alignas(16) uint words[length];
  float values[run];
  size_t at = size_t(row) * (columns / group) + column / group;
  load_words<length>(words, w, size_t(row) * (size_t(columns) * bits / 32) + column * bits / 32);
  decode_run<T, mode, bits, run>(
      values, words, decoded_scale<mode>(scales[at]), mode == AFFINE ? float(biases[at]) : 0.0f);
  device T* to = y + size_t(place.y) * columns + column;
#pragma unroll
  for (int j = 0; j < run; j += 16 / sizeof(T)) {
    *reinterpret_cast<device uint4*>(to + j) = rounded<T>(values + j);
  }
}
