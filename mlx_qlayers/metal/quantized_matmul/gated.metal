// The gate of a gated linear unit, for two products that are concatenated in rows of x (M, 2 N):
// y (M, N) = activation(x[:, :N]) * x[:, N:], rounded once. N is a multiple of 8.
//
// A thread computes 8 contiguous elements; grid (at least M * N / 8, 1, 1), any threadgroup, no threadgroup
// memory. shape: N / 8, M * N / 8.

#include "epilogue.metal"
#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

template <typename T, int gate>
[[kernel]] void gated_rows(
    const device T* x, constant int* shape, device T* y, uint i [[thread_position_in_grid]]) {
  constexpr int length = 8 * sizeof(T) / 4, fit = 16 / sizeof(T);
  int runs = shape[0];
  if (int(i) >= shape[1]) {
    return;
  }
  alignas(16) uint first[length], second[length];
  size_t at = (size_t(int(i) / runs) * 2 * runs + int(i) % runs) * 8;
  load_words<length>(first, x, at);
  load_words<length>(second, x, at + size_t(runs) * 8);
  const thread T* a = reinterpret_cast<const thread T*>(first);
  const thread T* b = reinterpret_cast<const thread T*>(second);
  float values[8];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    values[j] = activation<gate>(float(a[j])) * float(b[j]);
  }
#pragma unroll
  for (int j = 0; j < 8; j += fit) {
    *reinterpret_cast<device uint4*>(y + size_t(i) * 8 + j) = rounded<T>(values + j);
  }
}
