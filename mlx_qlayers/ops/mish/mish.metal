// mish(x) = x tanh(log(1 + e^x)), element by element.
//
// mish_forward          one thread computes one element of y; grid (size, 1, 1), no threadgroup memory.
// mish_gradient         one thread computes one element of dx.

#include <metal_stdlib>
using namespace metal;

// n of tanh(log(1 + e^x)) = n / (n + 2); from 20 on that is 1.
inline float mish_ratio(float x) {
  float e = precise::exp(min(x, 20.0f));
  return e * (e + 2.0f);
}

template <typename T>
[[kernel]] void mish_forward(
    const device T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float value = float(x[i]);
  float n = mish_ratio(value);
  y[i] = T(value * (n / (n + 2.0f)));
}

template <typename T>
[[kernel]] void mish_gradient(
    const device T* dy [[buffer(0)]],
    const device T* x [[buffer(1)]],
    device T* dx [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  float value = float(x[i]);
  float n = mish_ratio(value);
  float share = n / (n + 2.0f);
  // 1 - share is 2 / (n + 2), without the digits that a difference would lose.
  float slope = 2.0f / (n + 2.0f) * (1.0f + share) / (1.0f + precise::exp(-value));
  dx[i] = T(float(dy[i]) * (share + value * slope));
}
