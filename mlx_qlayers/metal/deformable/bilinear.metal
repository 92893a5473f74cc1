// The four pixels around a location of one level, their weights, and the weights' derivatives.

#include <metal_stdlib>
using namespace metal;

// V channels, which are loaded and stored as a vector.
template <typename T, int V, int ALIGN>
struct alignas(ALIGN) pack {
  T at[V];
};

// Along one axis: the first of two pixels, the weight of the second, and the derivative of that weight.
// A location beyond both ends has first = -2.
struct bilinear_axis {
  int first;
  float part;
  float slope;
};

// A location goes from 0 to 1 between the outer edges of the pixels, or counts their centres.
template <bool BORDER, bool PIXELS>
bilinear_axis find_axis(float location, int size) {
  bilinear_axis axis;
  float pixel = PIXELS ? location : fma(location, float(size), -0.5f), last = float(size - 1);
  axis.slope = PIXELS ? 1.0f : float(size);
  if (BORDER && !(pixel > 0 && pixel < last)) {
    pixel = pixel > 0 ? last : 0.0f;
    axis.slope = 0;
  }
  float low = floor(pixel);
  axis.part = pixel - low;
  // The position of the last pixel may be rounded up.
  axis.first = low >= -1 && low <= last ? min(int(low), size - 1) : -2;
  return axis;
}

// Offsets of the pixels from the first of all levels, -1 for those outside, and their weights.
template <typename I>
struct bilinear_taps {
  bilinear_axis x;
  bilinear_axis y;
  I at[4];
  float weight[4];
};

// `level` holds the height, the width and the first pixel; a pixel takes `stride` numbers.
template <typename I, typename G, bool BORDER, bool PIXELS>
bilinear_taps<I> find_taps(const device G* location, const device int* level, int stride) {
  int height = level[0], width = level[1], start = level[2];
  bilinear_taps<I> taps;
  taps.x = find_axis<BORDER, PIXELS>(float(location[0]), width);
  taps.y = find_axis<BORDER, PIXELS>(float(location[1]), height);
#pragma clang loop unroll(full)
  for (int k = 0; k < 4; k++) {
    int x = taps.x.first + k % 2, y = taps.y.first + k / 2;
    bool inside = uint(x) < uint(width) && uint(y) < uint(height);
    taps.at[k] = inside ? I(start + y * width + x) * stride : I(-1);
    taps.weight[k] =
        (k % 2 ? taps.x.part : 1.0f - taps.x.part) * (k / 2 ? taps.y.part : 1.0f - taps.y.part);
  }
  return taps;
}
