// By which angle a rotary embedding turns a pair of numbers.
//
// Positions grow to hundreds of thousands, where the last bit of a float is far from nothing: what a
// pair turns by from one position to the next, and so the angle, is the sum of two floats.

#include <metal_stdlib>
using namespace metal;

// Out of a reciprocal, for positions that are scaled.
METAL_FUNC float2 listed_rate(float reciprocal, float2 scale) {
  float rate = scale.x / reciprocal;
  return float2(rate, (fma(-rate, reciprocal, scale.x) + scale.y) / reciprocal);
}

// The cosine and the sine; what the float nearest to the angle lacks is small.
METAL_FUNC float2 rotation_at(float position, float2 rate) {
  float angle = position * rate.x;
  float rest = fma(position, rate.x, -angle) + position * rate.y, half_square = 0.5f * rest * rest;
  float c = precise::cos(angle), s = precise::sin(angle);
  return float2(c - fma(rest, s, half_square * c), s + fma(rest, c, -half_square * s));
}
