// The gradient of x of grid_sample.metal by float32 atomics. Threads are counted as there.
//
// grid_sample_gradient_x         LANES threads add a point's cotangent to its pixels of d_x.
//
// In half precision d_x would be read and written once more to be rounded. Where points touch few
// pixels, only these get sums, in rows side by side:
//
// grid_sample_find_rows          one thread a point: the last tap of a pixel is its row. `row` has 1
//                                more than its number; 0 is a pixel that nothing touches.
// grid_sample_gradient_x_rows    as grid_sample_gradient_x, into these rows.
// grid_sample_gradient_x_spread  LANES threads round the rows of PIXELS pixels, or write zeros.

#include "taps.metal"

// Lanes take neighbouring channels, so that one SIMD group's atomics fall into few cache lines.
template <typename T, typename G, int NDIM, int TAPS, int LANES, bool ROWS>
void add_to_pixels(
    const device int* row,
    const device G* grid,
    const device T* cotangent,
    constant int* size,
    constant int* options,
    device atomic<float>* sums,
    ulong index,
    uint simd_lane) {
  uint point = uint(index / LANES), lane = uint(index % LANES);
  if (point >= uint(options[POINTS])) {
    return;
  }
  int channels = options[CHANNELS];
  uint image = point / uint(options[POINTS_PER_IMAGE]);
  point_taps<NDIM, TAPS> taps =
      find_taps<G, NDIM, TAPS, LANES, true>(grid, point, simd_lane, size, options);
  long place[tap_count(NDIM, TAPS)];
  float weight[tap_count(NDIM, TAPS)];
#pragma clang loop unroll(full)
  for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
    place[k] = -1;
    if (is_inside(taps, k)) {
      long pixel = pixel_of(taps, k, image, size);
      place[k] = (ROWS ? long(row[pixel] - 1) : pixel) * channels;
    }
    weight[k] = weight_of(taps, k);
  }
  for (int c = int(lane); c < channels; c += LANES) {
    float d_out = float(cotangent[ulong(point) * channels + c]);
#pragma clang loop unroll(full)
    for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
      if (place[k] >= 0) {
        atomic_fetch_add_explicit(sums + place[k] + c, d_out * weight[k], memory_order_relaxed);
      }
    }
  }
}

template <typename T, typename G, int NDIM, int TAPS, int LANES>
[[kernel]] void grid_sample_gradient_x(
    const device G* grid,
    const device T* cotangent,
    constant int* size,
    constant int* options,
    device atomic<float>* d_x,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]],
    uint simd_lane [[thread_index_in_simdgroup]]) {
  add_to_pixels<T, G, NDIM, TAPS, LANES, false>(
      nullptr,
      grid,
      cotangent,
      size,
      options,
      d_x,
      position.x + ulong(position.y) * threads.x,
      simd_lane);
}

template <typename G, int NDIM, int TAPS>
[[kernel]] void grid_sample_find_rows(
    const device G* grid,
    constant int* size,
    constant int* options,
    device atomic<int>* row,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  ulong index = position.x + ulong(position.y) * threads.x;
  if (index >= ulong(options[POINTS])) {
    return;
  }
  uint point = uint(index), image = point / uint(options[POINTS_PER_IMAGE]);
  point_taps<NDIM, TAPS> taps = find_taps<G, NDIM, TAPS, 1, true>(grid, point, 0, size, options);
#pragma clang loop unroll(full)
  for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
    if (is_inside(taps, k)) {
      int number = int(point) * tap_count(NDIM, TAPS) + k + 1;
      atomic_fetch_max_explicit(
          row + pixel_of(taps, k, image, size), number, memory_order_relaxed);
    }
  }
}

template <typename T, typename G, int NDIM, int TAPS, int LANES>
[[kernel]] void grid_sample_gradient_x_rows(
    const device int* row,
    const device G* grid,
    const device T* cotangent,
    constant int* size,
    constant int* options,
    device atomic<float>* sums,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]],
    uint simd_lane [[thread_index_in_simdgroup]]) {
  add_to_pixels<T, G, NDIM, TAPS, LANES, true>(
      row,
      grid,
      cotangent,
      size,
      options,
      sums,
      position.x + ulong(position.y) * threads.x,
      simd_lane);
}

// Of as many pixels, whose rows are then looked up together.
enum { PIXELS = 4 };

template <typename T, int V, int LANES>
[[kernel]] void grid_sample_gradient_x_spread(
    const device int* row,
    const device float* sums,
    constant int* options,
    constant int64_t& pixels,
    device T* d_x,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  constexpr int ALIGN = V % 4 == 0 ? 4 : V % 2 == 0 ? 2 : 1;
  ulong index = position.x + ulong(position.y) * threads.x, first = index / LANES * PIXELS;
  int channels = options[CHANNELS], number[PIXELS];
#pragma clang loop unroll(full)
  for (int i = 0; i < PIXELS; i++) {
    number[i] = first + i < ulong(pixels) ? row[first + i] : -1;
  }
  for (int c = int(index % LANES) * V; c < channels; c += LANES * V) {
    pack<float, V, ALIGN * 4> sum[PIXELS];
#pragma clang loop unroll(full)
    for (int i = 0; i < PIXELS; i++) {
      sum[i] = pack<float, V, ALIGN * 4>();
      if (number[i] > 0) {
        sum[i] = *reinterpret_cast<const device pack<float, V, ALIGN * 4>*>(
            sums + (ulong(number[i] - 1) * channels + c));
      }
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < PIXELS; i++) {
      pack<T, V, ALIGN * sizeof(T)> result;
#pragma clang loop unroll(full)
      for (int j = 0; j < V; j++) {
        result.at[j] = T(sum[i].at[j]);
      }
      if (number[i] >= 0) {
        *reinterpret_cast<device pack<T, V, ALIGN * sizeof(T)>*>(
            d_x + ((first + i) * channels + c)) = result;
      }
    }
  }
}
