// The taps of a point: its pixels and their weights. Along each axis there are 1 (nearest), 2 (linear) or
// 4 (cubic); coordinates and weights are float32.

#include <metal_stdlib>
using namespace metal;

enum padding_mode { ZEROS, BORDER, REFLECTION };
// Indices into `options` and `size`.
enum option { PADDING, ALIGN_CORNERS, POINTS, POINTS_PER_IMAGE, CHANNELS };
enum extent { WIDTH, HEIGHT, DEPTH };

// V channels of a pixel, which are loaded and stored as a vector.
template <typename T, int V, int ALIGN>
struct alignas(ALIGN) pack {
  T at[V];
};

// The taps of a point along one axis: pixels (-1 if outside), weights, and the derivatives of the weights
// with respect to the coordinate.
template <int TAPS>
struct axis_taps {
  int at[TAPS];
  float weight[TAPS];
  float slope[TAPS];
};

template <int NDIM, int TAPS>
struct point_taps {
  axis_taps<TAPS> axis[NDIM];
};

constexpr int tap_count(int ndim, int taps) {
  return ndim == 2 ? taps * taps : taps * taps * taps;
}

// The index along an axis of tap k of a point.
constexpr int tap_on_axis(int taps, int k, int axis) {
  return axis == 0 ? k % taps : axis == 1 ? k / taps % taps : k / (taps * taps);
}

// Applies the padding mode to a position outside. `sign` is the derivative: 1, -1 (reflected), or 0 (at a
// border).
template <int NDIM, bool GRADIENT>
float pad(float pixel, int size, int padding, bool align_corners, thread float& sign) {
  sign = 1;
  if (padding == ZEROS) {
    return pixel;
  }
  if (padding == REFLECTION) {
    float low = align_corners ? 0.0f : -0.5f;
    float period = 2.0f * float(align_corners ? size - 1 : size);
    float distance = abs(pixel - low);
    distance = period > 0 ? distance - floor(distance / period) * period : 0.0f;
    sign = (pixel < low) != (distance > period - distance) ? -1.0f : 1.0f;
    pixel = min(distance, period - distance) + low;
  }
  float last = float(size - 1);
  if (pixel > 0 && pixel < last) {
    return pixel;
  }
  sign = 0;
  // PyTorch sends NaN to the first pixel of an image and to the last of a volume, where it has no
  // gradient.
  if (NDIM == 3 && GRADIENT && isnan(pixel)) {
    return pixel;
  }
  bool at_end = NDIM == 2 ? pixel > 0 : !(pixel < last);
  return at_end ? last : 0.0f;
}

// Keys' cubic convolution with a = -0.75, at distances up to 1 and from there up to 2.
inline float cubic(float t, bool outer) {
  return outer ? ((-0.75f * t + 3.75f) * t - 6.0f) * t + 3.0f : (1.25f * t - 2.25f) * t * t + 1.0f;
}

inline float cubic_slope(float t, bool outer) {
  return outer ? (-2.25f * t + 7.5f) * t - 6.0f : (3.75f * t - 4.5f) * t;
}

template <int NDIM, int TAPS, bool GRADIENT>
axis_taps<TAPS> find_axis_taps(float coordinate, int size, int padding, bool align_corners) {
  float scale = 0.5f * float(align_corners ? size - 1 : size);
  float pixel = (coordinate + 1.0f) * scale;
  if (!align_corners) {
    // pixel - 0.5, but no compiler may round the product and the difference in one: ties matter.
    pixel = 0.5f * fma(pixel, 2.0f, -1.0f);
  }
  float sign = 1;
  if (TAPS != 4) {
    pixel = pad<NDIM, GRADIENT>(pixel, size, padding, align_corners, sign);
  }
  if (NDIM == 3 && !(abs(pixel) < 2147483648.0f)) {
    // As in PyTorch, a position that no integer can hold is outside of a volume; in an image NaN propagates.
    pixel = -100.0f;
  }
  float low = TAPS == 1 ? rint(pixel) : floor(pixel);
  float part = pixel - low;
  // Beyond 2^24 floats skip pixels, so positions are integers from here on. -100 is outside.
  int first = abs(low) < 2147483648.0f ? int(low) : -100;
  if (TAPS == 4) {
    first -= 1;
  } else if (padding != ZEROS) {
    first = min(first, size - 1);
  }
  axis_taps<TAPS> taps;
#pragma clang loop unroll(full)
  for (int k = 0; k < TAPS; k++) {
    bool outer = k % 3 == 0;
    float distance = abs(part - float(k - 1));
    float side = k < 2 ? 1.0f : -1.0f;
    float linear = k == 0 ? 1.0f - part : part;
    taps.weight[k] = TAPS == 1 ? 1.0f : TAPS == 2 ? linear : cubic(distance, outer);
    taps.slope[k] = TAPS == 1 ? 0.0f
        : TAPS == 2           ? (k == 0 ? -scale : scale) * sign
                              : cubic_slope(distance, outer) * side * scale;
    int at = first + k;
    if (TAPS == 4 && padding != ZEROS && uint(at) >= uint(size)) {
      float ignored;
      float back = pad<NDIM, GRADIENT>(low + float(k - 1), size, padding, align_corners, ignored);
      at = min(int(back), size - 1);
    }
    taps.at[k] = uint(at) < uint(size) ? at : -1;
  }
  return taps;
}

// LANES neighbouring threads of a SIMD group have the same point; one of them reads each coordinate.
template <typename G, int NDIM, int TAPS, int LANES, bool GRADIENT>
point_taps<NDIM, TAPS> find_taps(
    const device G* grid, uint point, uint lane, constant int* size, constant int* options) {
  point_taps<NDIM, TAPS> taps;
#pragma clang loop unroll(full)
  for (int axis = 0; axis < NDIM; axis++) {
    uint reader = axis % LANES, first = lane / LANES * LANES;
    float coordinate = 0;
    if (lane == first + reader) {
      coordinate = float(grid[ulong(point) * NDIM + axis]);
    }
    if (LANES > 1) {
      coordinate = simd_shuffle(coordinate, ushort(first + reader));
    }
    taps.axis[axis] = find_axis_taps<NDIM, TAPS, GRADIENT>(
        coordinate, size[axis], options[PADDING], options[ALIGN_CORNERS] != 0);
  }
  return taps;
}

template <int NDIM, int TAPS>
bool is_inside(thread const point_taps<NDIM, TAPS>& taps, int k) {
  bool inside = true;
#pragma clang loop unroll(full)
  for (int axis = 0; axis < NDIM; axis++) {
    inside = inside && taps.axis[axis].at[tap_on_axis(TAPS, k, axis)] >= 0;
  }
  return inside;
}

template <int NDIM, int TAPS>
float weight_of(thread const point_taps<NDIM, TAPS>& taps, int k) {
  float weight = 1;
#pragma clang loop unroll(full)
  for (int axis = 0; axis < NDIM; axis++) {
    weight *= taps.axis[axis].weight[tap_on_axis(TAPS, k, axis)];
  }
  return weight;
}

// The derivative of the weight of tap k with respect to one coordinate.
template <int NDIM, int TAPS>
float slope_of(thread const point_taps<NDIM, TAPS>& taps, int k, int along) {
  float slope = 1;
#pragma clang loop unroll(full)
  for (int axis = 0; axis < NDIM; axis++) {
    int tap = tap_on_axis(TAPS, k, axis);
    slope *= axis == along ? taps.axis[axis].slope[tap] : taps.axis[axis].weight[tap];
  }
  return slope;
}

// The offset of tap k from the start of its image, by these strides.
template <int NDIM, int TAPS>
long offset_of(
    thread const point_taps<NDIM, TAPS>& taps, int k, const constant int64_t* strides) {
  long offset = 0;
#pragma clang loop unroll(full)
  for (int axis = 0; axis < NDIM; axis++) {
    offset += long(taps.axis[axis].at[tap_on_axis(TAPS, k, axis)]) * long(strides[NDIM - axis]);
  }
  return offset;
}

// The index of tap k's pixel in the whole batch.
template <int NDIM, int TAPS>
long pixel_of(
    thread const point_taps<NDIM, TAPS>& taps, int k, uint image, constant int* size) {
  long pixel = image;
#pragma clang loop unroll(full)
  for (int axis = NDIM - 1; axis >= 0; axis--) {
    pixel = pixel * size[axis] + taps.axis[axis].at[tap_on_axis(TAPS, k, axis)];
  }
  return pixel;
}
