// A gated linear unit: y = gate / (1 + exp(-gate)) * x, element by element, rounded once.
//
// swiglu_forward        one thread computes COUNT contiguous elements of y, 1 or whole vectors of 16 bytes.
//                       Grid (size / COUNT, 1, 1), no threadgroup memory.
// swiglu_gradient       the same of the gradients of gate and x, from dy.

#include "common/load.metal"

#include <metal_stdlib>
using namespace metal;

METAL_FUNC float share(float gate) {
  return 1 / (1 + precise::exp(-gate));
}

METAL_FUNC float gated(float gate, float x) {
  return gate / (1 + precise::exp(-gate)) * x;
}

// The factors that may be tiny come first: the others' product may be more than a float holds.
METAL_FUNC float gate_slope(float up, float gate, float x, float s) {
  return up * (x * (s * (1 + gate * (1 - s))));
}

template <typename T, int COUNT>
[[kernel]] void swiglu_forward(
    const device T* gate [[buffer(0)]],
    const device T* x [[buffer(1)]],
    device T* y [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  if (COUNT == 1) {
    y[i] = T(gated(float(gate[i]), float(x[i])));
    return;
  }
  constexpr int words = (COUNT * int(sizeof(T)) + 3) / 4;
  alignas(16) uint first[words], second[words];
  size_t at = size_t(i) * COUNT;
  load_words<words>(first, gate, at);
  load_words<words>(second, x, at);
  thread T* gates = reinterpret_cast<thread T*>(first);
  thread T* factors = reinterpret_cast<thread T*>(second);
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    factors[n] = T(gated(float(gates[n]), float(factors[n])));
  }
#pragma unroll
  for (int n = 0; n < words / 4; n++) {
    reinterpret_cast<device uint4*>(y + at)[n] = reinterpret_cast<thread uint4*>(second)[n];
  }
}

template <typename T, int COUNT>
[[kernel]] void swiglu_gradient(
    const device T* dy [[buffer(0)]],
    const device T* gate [[buffer(1)]],
    const device T* x [[buffer(2)]],
    device T* dgate [[buffer(3)]],
    device T* dx [[buffer(4)]],
    uint i [[thread_position_in_grid]]) {
  if (COUNT == 1) {
    float up = float(dy[i]), g = float(gate[i]), s = share(g);
    dgate[i] = T(gate_slope(up, g, float(x[i]), s));
    dx[i] = T(up * (g * s));
    return;
  }
  constexpr int words = (COUNT * int(sizeof(T)) + 3) / 4;
  alignas(16) uint first[words], second[words], third[words];
  size_t at = size_t(i) * COUNT;
  load_words<words>(first, dy, at);
  load_words<words>(second, gate, at);
  load_words<words>(third, x, at);
  const thread T* slopes = reinterpret_cast<const thread T*>(first);
  thread T* gates = reinterpret_cast<thread T*>(second);
  thread T* factors = reinterpret_cast<thread T*>(third);
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    float up = float(slopes[n]), g = float(gates[n]), s = share(g);
    gates[n] = T(gate_slope(up, g, float(factors[n]), s));
    factors[n] = T(up * (g * s));
  }
#pragma unroll
  for (int n = 0; n < words / 4; n++) {
    reinterpret_cast<device uint4*>(dgate + at)[n] = reinterpret_cast<thread uint4*>(second)[n];
    reinterpret_cast<device uint4*>(dx + at)[n] = reinterpret_cast<thread uint4*>(third)[n];
  }
}
