// Kernels for the tests of the runtime.

#include <metal_stdlib>
#include "health.metal"
using namespace metal;

constant constexpr uint SIMD = 32;

// Not used by any kernel: must not be sent.
inline float unused(float x) { return x; }

template <typename T>
inline float wide(T x) {
  return float(x);
}

template <typename T>
inline float load(const device T* x, uint i) {
  return wide(x[i]); // through another helper
}

// y = a * x + b, with a scalar a and up to 7 values in b.
template <typename T, int N, bool NEGATE>
[[kernel]] void affine(
    const device T* x,
    constant float& a,
    constant float* b,
    device T* y,
    uint i [[thread_position_in_grid]]) {
  float value = a * load(x, i) + b[i % N];
  y[i] = T(NEGATE ? -value : value);
}

// Each SIMD group of a threadgroup sums one row of 32 values.
[[kernel]] void row_sums(
    const device float* x,
    device float* sums,
    uint row [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  float sum = simd_sum(x[row]);
  if (lane == 0) {
    sums[row / SIMD] = sum;
  }
}

// How often each of 16 values occurs.
[[kernel]] void histogram(
    const device uint8_t* x [[buffer(0)]],
    device atomic<uint>* counts [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(&counts[x[i]], 1, memory_order_relaxed);
}

// The square root, in two outputs: the root, and whether it is exact.
[[kernel]] void roots(
    const device float* x,
    device float* root,
    device bool* exact,
    uint3 position [[thread_position_in_grid]],
    uint3 threads_per_grid [[threads_per_grid]]) {
  uint i = position.y * threads_per_grid.x + position.x;
  health_check(x[i] >= 0, 1, x[i]);
  health_check(x[i] < 1e6f, 2, x[i]);
  if (x[i] == 0) {
    root[i] = 0;
    exact[i] = true;
    return;
  }
  root[i] = metal::sqrt(x[i]);
  exact[i] = root[i] * root[i] == x[i];
}

// Every element of a strided x, in row-major order.
template <typename T>
[[kernel]] void gather(
    const device T* x,
    const constant int* x_shape,
    const constant int64_t* x_strides,
    const constant int& x_ndim,
    device T* y,
    uint i [[thread_position_in_grid]]) {
  y[i] = x[elem_to_loc(int64_t(i), x_shape, x_strides, x_ndim)];
}

// Goes on until x[0] is zero.
[[kernel]] void spin(
    const device int* x, device int* y, uint i [[thread_position_in_grid]]) {
  const volatile device int* flag = x;
  while (flag[0] != 0) {
  }
  y[i] = 1;
}
