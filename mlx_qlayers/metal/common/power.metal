// The exponential of attention's weights.

#include <metal_stdlib>
using namespace metal;

// 2^x. The error of the fast version is below the rounding of a 16-bit type, but not of float32.
template <typename T>
METAL_FUNC float power_of_2(float x) {
  return sizeof(T) == 4 ? precise::exp2(x) : fast::exp2(x);
}
template <typename T>
METAL_FUNC float2 powers_of_2(float2 x) {
  return sizeof(T) == 4 ? precise::exp2(x) : fast::exp2(x);
}
