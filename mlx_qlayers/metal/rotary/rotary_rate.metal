// The angle by which a rotary embedding rotates a pair of elements.
//
// At positions of hundreds of thousands a float's rounding error is a large part of a turn, so that the
// frequency of a pair, and the angle, are sums of two floats.

#include <metal_stdlib>
using namespace metal;

// The frequency from its reciprocal, for scaled positions.
METAL_FUNC float2 listed_rate(float reciprocal, float2 scale) {
  float rate = scale.x / reciprocal;
  return float2(rate, (fma(-rate, reciprocal, scale.x) + scale.y) / reciprocal);
}

// The cosine and the sine, with a first-order correction for the low float of the angle.
METAL_FUNC float2 rotation_at(float position, float2 rate) {
  float angle = position * rate.x;
  float rest = fma(position, rate.x, -angle) + position * rate.y, half_square = 0.5f * rest * rest;
  float c = precise::cos(angle), s = precise::sin(angle);
  return float2(c - fma(rest, s, half_square * c), s + fma(rest, c, -half_square * s));
}
