// The dense matrix that a packed one stands for: y (rows, columns) = scale * code + bias, rounded once.
//
// A thread unpacks `run` neighbouring elements of one row, which lie in one group.
// Grid (columns / run, rows, 1), any threadgroup; no threadgroup memory.

#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

template <typename T, typename S, int mode, int group, int bits, int run>
[[kernel]] void dequantize_matrix(
    const device uint* w,
    const device S* scales,
    const device S* biases,
    constant int& columns,
    device T* y,
    uint2 id [[thread_position_in_grid]]) {
  int column = int(id.x) * run;
  size_t row = id.y, at = row * (columns / group) + column / group;
  float values[run];
  dequantize<mode, bits, run>(
      values,
      w + row * (size_t(columns) * bits / 32) + column * bits / 32,
      decoded_scale<mode>(scales[at]),
      mode == AFFINE ? float(biases[at]) : 0.0f);
  y += row * columns + column;
#pragma unroll
  for (int i = 0; i < run; i += 16 / sizeof(T)) {
    *reinterpret_cast<device uint4*>(y + i) = rounded<T>(values + i);
  }
}
