// The dense matrix that a packed one stands for: y (rows, columns) = scale * code + bias, rounded once.
//
// A thread unpacks `run` neighbouring elements, which lie in one group, of `count` rows.
// Grid (columns / run, ceil(rows / count), 1), any threadgroup; no threadgroup memory.

#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

template <typename T, typename S, int mode, int group, int bits, int run, int count>
[[kernel]] void dequantize_matrix(
    const device uint* w,
    const device S* scales,
    const device S* biases,
    constant int* shape,
    device T* y,
    uint2 id [[thread_position_in_grid]]) {
  int rows = shape[0], columns = shape[1], column = int(id.x) * run;
  size_t words = size_t(columns) * bits / 32, groups = columns / group;
#pragma unroll
  for (int i = 0; i < count; i++) {
    size_t row = id.y * count + i;
    if (int(row) >= rows) {
      return;
    }
    size_t at = row * groups + column / group;
    float values[run];
    dequantize<mode, bits, run>(
        values,
        w + row * words + column * bits / 32,
        decoded_scale<mode>(scales[at]),
        mode == AFFINE ? float(biases[at]) : 0.0f);
#pragma unroll
    for (int j = 0; j < run; j += 16 / sizeof(T)) {
      *reinterpret_cast<device uint4*>(y + row * columns + column + j) = rounded<T>(values + j);
    }
  }
}
