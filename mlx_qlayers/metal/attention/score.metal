// The scores of decoding attention: scale, softcap, mask and window.
//
// Scores are logarithms to base 2. A hidden key has the score LOWEST, so that a row that sees no
// key is the mean of all values.

#include "common/power.metal"

#include <metal_stdlib>
using namespace metal;

// Values of `seen`: from BOOLEAN on the mask is an array.
#define ALL 0
#define CAUSAL 1
#define BOOLEAN 2
#define ADDITIVE 3

#define LOWEST (-3.402823466e+38f)
#define LOG2_E 1.44269504f

// The score of a key from its product with a query.
template <int seen, bool windowed, bool capped, typename M>
METAL_FUNC float score(
    float x, float scale, float cap, const device M* mask, int64_t at, int after, int window) {
  x *= scale;
  if (capped) {
    x = cap * precise::tanh(x);
  }
  bool hidden = false;
  if (seen == ADDITIVE) {
    x += float(mask[at]) * LOG2_E;
    hidden = x < LOWEST;
  } else if (seen == BOOLEAN) {
    hidden = !bool(mask[at]);
  }
  if (seen == CAUSAL || windowed) {
    hidden = hidden || after > 0;
  }
  if (windowed) {
    hidden = hidden || after <= -window;
  }
  return hidden ? LOWEST : x;
}
