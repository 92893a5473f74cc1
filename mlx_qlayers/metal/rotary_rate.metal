// By which angle a rotary embedding turns a pair of numbers from one position to the next.

#include <metal_stdlib>
using namespace metal;

// By the reciprocals in `freqs`, or as a geometric series. Positions grow to hundreds of thousands:
// the angle needs every bit of a float.
template <bool listed>
METAL_FUNC float rotary_rate(const device float* freqs, float log2_base, int pair, int dims) {
  return listed ? 1.0f / freqs[pair]
                : precise::exp2(-log2_base * (float(2 * pair) / float(dims)));
}
