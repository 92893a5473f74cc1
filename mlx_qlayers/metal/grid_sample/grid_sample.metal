// Sampling of images x (N, H, W, C) and volumes (N, D, H, W, C) at the points of a grid
// (N, *out, NDIM), and the gradients of both. An output is a weighted sum of TAPS pixels along each
// axis: 1 (nearest), 2 (linear) or 4 (cubic). Coordinates and sums are float32.
//
// LANES neighbouring threads compute a run of RUN points (one on a GPU, several on a CPU, whose loads then
// overlap); each has every LANES-th vector of V channels. There is no threadgroup memory. Lanes shuffle,
// so that the grid must be whole threadgroups. Threads are numbered along x, then y: R runs take the grid
// (min(R * LANES, 2^30), as many as it takes, 1).
//
// With ONCE the threads have one vector for each channel; NEAR is for images of few channels, where one
// cache line holds both pixels of a row around a point: see neighbours.metal.
//
// grid_sample_forward            out = the sample at each point; x may have any strides.
// grid_sample_gradient_grid      LANES threads add up d_grid of one point by shuffles.
// The gradient of x: atomic_gradient.metal, and sorted_gradient.metal without atomics.

#include "neighbours.metal"

template <typename T>
bool is_aligned(const device T* data, int bytes) {
  return reinterpret_cast<ulong>(data) % bytes == 0;
}

// Whether the channels of every pixel are contiguous and aligned for vector loads.
template <typename T, int NDIM, int ALIGN>
bool has_packs(const device T* x, const constant int64_t* strides) {
  bool packs = strides[NDIM + 1] == 1 && is_aligned(x, ALIGN);
  for (int axis = 0; axis <= NDIM; axis++) {
    packs = packs && strides[axis] * long(sizeof(T)) % ALIGN == 0;
  }
  return packs;
}

// The addresses of a point's pixels; null for pixels outside, which are never read.
template <typename T, int NDIM, int TAPS>
struct point_pixels {
  const device T* at[tap_count(NDIM, TAPS)];
};

template <typename T, int NDIM, int TAPS>
point_pixels<T, NDIM, TAPS> find_pixels(
    const device T* image,
    const constant int64_t* strides,
    thread const point_taps<NDIM, TAPS>& taps) {
  point_pixels<T, NDIM, TAPS> pixels;
#pragma clang loop unroll(full)
  for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
    pixels.at[k] = is_inside(taps, k) ? image + offset_of(taps, k, strides) : nullptr;
  }
  return pixels;
}

// V channels of each pixel of a point; zeros for pixels outside. If NEAR, neighbours in a row are loaded
// together, if that is possible for all four.
template <typename T, int NDIM, int TAPS, int V, int ALIGN, bool NEAR>
void load_pixels(
    thread const point_pixels<T, NDIM, TAPS>& pixels,
    long channel,
    thread const image_rows<T>& rows,
    thread pack<T, V, ALIGN>* values) {
  if (NEAR && has_neighbours<T, V>(rows, pixels.at)) {
    neighbours<T, V> upper, lower;
    upper.load(pixels.at[0]);
    lower.load(pixels.at[2]);
    upper.take(values);
    lower.take(values + 2);
    return;
  }
#pragma clang loop unroll(full)
  for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
    if (pixels.at[k] != nullptr) {
      values[k] = *reinterpret_cast<const device pack<T, V, ALIGN>*>(pixels.at[k] + channel);
    } else {
      values[k] = pack<T, V, ALIGN>();
    }
  }
}

template <typename T, int NDIM, int TAPS, int V, int ALIGN, int LANES, bool ONCE, bool NEAR>
void sample(
    const device T* image,
    const constant int64_t* strides,
    thread const point_taps<NDIM, TAPS>& taps,
    thread const image_rows<T>& rows,
    device T* out,
    int channels,
    uint lane) {
  point_pixels<T, NDIM, TAPS> pixels = find_pixels<T, NDIM, TAPS>(image, strides, taps);
  float weight[tap_count(NDIM, TAPS)];
#pragma clang loop unroll(full)
  for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
    // A NaN or infinite coordinate makes the weights NaN, and then the zeros outside are NaN too.
    weight[k] = weight_of(taps, k);
  }
  for (int c = int(lane) * V; c < channels; c = ONCE ? channels : c + LANES * V) {
    pack<T, V, ALIGN> values[tap_count(NDIM, TAPS)];
    load_pixels<T, NDIM, TAPS, V, ALIGN, NEAR>(
        pixels, c * long(strides[NDIM + 1]), rows, values);
    float sum[V] = {};
#pragma clang loop unroll(full)
    for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
#pragma clang loop unroll(full)
      for (int i = 0; i < V; i++) {
        sum[i] += weight[k] * float(values[k].at[i]);
      }
    }
    pack<T, V, ALIGN> result;
#pragma clang loop unroll(full)
    for (int i = 0; i < V; i++) {
      result.at[i] = T(sum[i]);
    }
    *reinterpret_cast<device pack<T, V, ALIGN>*>(out + c) = result;
  }
}

template <
    typename T,
    typename G,
    int NDIM,
    int TAPS,
    int V,
    int ALIGN,
    int LANES,
    int RUN,
    bool ONCE,
    bool NEAR>
[[kernel]] void grid_sample_forward(
    const device T* x,
    const constant int64_t* x_strides,
    const device G* grid,
    constant int* size,
    constant int* options,
    device T* out,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]],
    uint simd_lane [[thread_index_in_simdgroup]]) {
  ulong index = position.x + ulong(position.y) * threads.x;
  ulong first = index / LANES * RUN, points = ulong(options[POINTS]);
  if (first >= points) {
    return;
  }
  uint lane = uint(index % LANES);
  int channels = options[CHANNELS];
  point_taps<NDIM, TAPS> taps[RUN];
#pragma clang loop unroll(full)
  for (int i = 0; i < RUN && first + i < points; i++) {
    taps[i] =
        find_taps<G, NDIM, TAPS, LANES, false>(grid, uint(first + i), simd_lane, size, options);
  }
  bool packs = V == 1 || (has_packs<T, NDIM, ALIGN>(x, x_strides) && is_aligned(out, ALIGN));
  image_rows<T> rows = rows_of_images<T, V>(x, x_strides, size, options);
#pragma clang loop unroll(full)
  for (int i = 0; i < RUN && first + i < points; i++) {
    uint point = uint(first + i);
    const device T* image = x + (point / uint(options[POINTS_PER_IMAGE])) * long(x_strides[0]);
    device T* row = out + ulong(point) * channels;
    if (packs) {
      sample<T, NDIM, TAPS, V, ALIGN, LANES, ONCE, NEAR>(
          image, x_strides, taps[i], rows, row, channels, lane);
    } else {
      sample<T, NDIM, TAPS, 1, sizeof(T), LANES, false, false>(
          image, x_strides, taps[i], rows, row, channels, lane);
    }
  }
}

// A thread's part of the gradient of one point: for each axis the sample with the weights' derivatives in
// place of weights, times the cotangent.
template <typename T, int NDIM, int TAPS, int V, int ALIGN, int LANES, bool ONCE, bool NEAR>
void add_slopes(
    const device T* image,
    const constant int64_t* strides,
    thread const point_taps<NDIM, TAPS>& taps,
    thread const image_rows<T>& rows,
    const device T* cotangent,
    int channels,
    uint lane,
    thread float* d_point) {
  point_pixels<T, NDIM, TAPS> pixels = find_pixels<T, NDIM, TAPS>(image, strides, taps);
  pack<T, V, ALIGN> values[tap_count(NDIM, TAPS)];
  float sums[NDIM][V] = {};
  for (int c = int(lane) * V; c < channels; c = ONCE ? channels : c + LANES * V) {
    load_pixels<T, NDIM, TAPS, V, ALIGN, NEAR>(
        pixels, c * long(strides[NDIM + 1]), rows, values);
    pack<T, V, ALIGN> d_out = *reinterpret_cast<const device pack<T, V, ALIGN>*>(cotangent + c);
#pragma clang loop unroll(full)
    for (int axis = 0; axis < NDIM; axis++) {
      float change[V] = {};
#pragma clang loop unroll(full)
      for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
        float slope = is_inside(taps, k) ? slope_of(taps, k, axis) : 0.0f;
#pragma clang loop unroll(full)
        for (int i = 0; i < V; i++) {
          change[i] += slope * float(values[k].at[i]);
        }
      }
#pragma clang loop unroll(full)
      for (int i = 0; i < V; i++) {
        sums[axis][i] += float(d_out.at[i]) * change[i];
      }
    }
  }
#pragma clang loop unroll(full)
  for (int axis = 0; axis < NDIM; axis++) {
#pragma clang loop unroll(full)
    for (int i = 0; i < V; i++) {
      d_point[axis] += sums[axis][i];
    }
#pragma clang loop unroll(full)
    for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
      // Pixels outside are zeros, which a NaN derivative turns into NaN.
      d_point[axis] += is_inside(taps, k) ? 0.0f : 0.0f * slope_of(taps, k, axis);
    }
  }
}

template <
    typename T,
    typename G,
    int NDIM,
    int TAPS,
    int V,
    int ALIGN,
    int LANES,
    int RUN,
    bool ONCE,
    bool NEAR>
[[kernel]] void grid_sample_gradient_grid(
    const device T* x,
    const constant int64_t* x_strides,
    const device G* grid,
    const device T* cotangent,
    constant int* size,
    constant int* options,
    device G* d_grid,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]],
    uint simd_lane [[thread_index_in_simdgroup]]) {
  ulong index = position.x + ulong(position.y) * threads.x;
  ulong first = index / LANES * RUN, last = ulong(options[POINTS]) - 1;
  uint lane = uint(index % LANES);
  int channels = options[CHANNELS];
  point_taps<NDIM, TAPS> taps[RUN];
#pragma clang loop unroll(full)
  for (int i = 0; i < RUN; i++) {
    // Threads beyond the last point repeat it, since all lanes take part in the sums.
    uint point = uint(min(first + i, last));
    taps[i] = find_taps<G, NDIM, TAPS, LANES, true>(grid, point, simd_lane, size, options);
  }
  bool packs = V == 1 || (has_packs<T, NDIM, ALIGN>(x, x_strides) && is_aligned(cotangent, ALIGN));
  image_rows<T> rows = rows_of_images<T, V>(x, x_strides, size, options);
#pragma clang loop unroll(full)
  for (int i = 0; i < RUN; i++) {
    ulong point = min(first + i, last);
    const device T* image =
        x + (uint(point) / uint(options[POINTS_PER_IMAGE])) * long(x_strides[0]);
    const device T* row = cotangent + point * channels;
    float d_point[NDIM] = {};
    if (packs) {
      add_slopes<T, NDIM, TAPS, V, ALIGN, LANES, ONCE, NEAR>(
          image, x_strides, taps[i], rows, row, channels, lane, d_point);
    } else {
      add_slopes<T, NDIM, TAPS, 1, sizeof(T), LANES, false, false>(
          image, x_strides, taps[i], rows, row, channels, lane, d_point);
    }
#pragma clang loop unroll(full)
    for (int axis = 0; axis < NDIM; axis++) {
      if (LANES > 1) {
#pragma clang loop unroll(full)
        for (ushort other = LANES / 2; other > 0; other /= 2) {
          d_point[axis] += simd_shuffle_xor(d_point[axis], other);
        }
      }
      if (lane == 0) {
        d_grid[point * NDIM + axis] = G(d_point[axis]);
      }
    }
  }
}
