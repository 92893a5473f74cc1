// A gated linear unit: y = gate / (1 + exp(-gate)) * x, element by element, rounded once.
//
// swiglu_forward        one thread computes COUNT elements of y, each GROUP behind the one before: a GPU has the loads
//                       of all on their way at once. Grid (size / COUNT, 1, 1), no threadgroup memory.
// swiglu_gradient       the same of the gradients of gate and x, from dy.

#include <metal_stdlib>
using namespace metal;

// Threads of a threadgroup.
#define GROUP 256

template <typename T, int COUNT>
[[kernel]] void swiglu_forward(
    const device T* gate [[buffer(0)]],
    const device T* x [[buffer(1)]],
    device T* y [[buffer(2)]],
    uint thread_index [[thread_position_in_grid]]) {
  uint i = thread_index / GROUP * GROUP * COUNT + thread_index % GROUP;
#pragma unroll
  for (int n = 0; n < COUNT; n++, i += GROUP) {
    float g = float(gate[i]);
    y[i] = T(g / (1 + precise::exp(-g)) * float(x[i]));
  }
}

template <typename T, int COUNT>
[[kernel]] void swiglu_gradient(
    const device T* dy [[buffer(0)]],
    const device T* gate [[buffer(1)]],
    const device T* x [[buffer(2)]],
    device T* dgate [[buffer(3)]],
    device T* dx [[buffer(4)]],
    uint thread_index [[thread_position_in_grid]]) {
  uint i = thread_index / GROUP * GROUP * COUNT + thread_index % GROUP;
#pragma unroll
  for (int n = 0; n < COUNT; n++, i += GROUP) {
    float up = float(dy[i]), g = float(gate[i]);
    float s = 1 / (1 + precise::exp(-g));
    // The factors that may be tiny come first: the others' product may be more than a float holds.
    dgate[i] = T(up * (float(x[i]) * (s * (1 + g * (1 - s)))));
    dx[i] = T(up * (g * s));
  }
}
