// exp(x), element by element: a minimal example of a kernel of this package.
//
// exp_forward           one thread computes one element of y; grid (size, 1, 1), no threadgroup memory.
// exp_strided           the same for an x of any strides, without a copy.
// exp_gradient          one thread computes one element of dx = dy * y.

#include <metal_stdlib>
using namespace metal;

template <typename T>
[[kernel]] void exp_forward(
    const device T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  // bfloat has no exp, and half loses nothing by a conversion to float.
  y[i] = T(precise::exp(float(x[i])));
}

template <typename T>
[[kernel]] void exp_strided(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const constant int64_t* x_strides [[buffer(2)]],
    const constant int& x_ndim [[buffer(3)]],
    device T* y [[buffer(4)]],
    uint i [[thread_position_in_grid]]) {
  // Signed, since strides may be negative. elem_to_loc is in MLX's preamble.
  int64_t location = elem_to_loc(int64_t(i), x_shape, x_strides, x_ndim);
  y[i] = T(precise::exp(float(x[location])));
}

template <typename T>
[[kernel]] void exp_gradient(
    const device T* dy [[buffer(0)]],
    const device T* y [[buffer(1)]],
    device T* dx [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  dx[i] = T(float(dy[i]) * float(y[i]));
}
