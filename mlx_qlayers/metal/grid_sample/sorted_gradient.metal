// The deterministic gradient of x of grid_sample.metal, without atomics. A term is what a point adds to a
// pixel; the terms are listed first, K for each point, and then added up in a fixed order. Threads are
// numbered as in grid_sample.metal.
//
// grid_sample_list_terms         one thread lists the pixels and weights of one point's taps.
// grid_sample_gradient_x_bands   for few threads: each owns a band of pixels and scans the terms of all
//                                images that its band is part of. Grid (bands, 1, 1).
//
// For many threads, terms are sorted by pixel:
//
// grid_sample_carries            LANES threads add up, for one block of BLOCK sorted terms, those
//                                at its start that belong to the last pixel of the block before.
// grid_sample_gradient_x_sorted  LANES threads begin at one sorted term; if it is the first of its
//                                pixel they add up the pixel's terms and write d_x.

#include "taps.metal"

// The sum of a pixel with many terms is divided among threads in blocks of this size.
enum { BLOCK = 256 };

// Pixels are numbered through the batch; taps outside get -1.
template <typename G, typename I, int NDIM, int TAPS>
[[kernel]] void grid_sample_list_terms(
    const device G* grid,
    constant int* size,
    constant int* options,
    device I* pixel,
    device float* weight,
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
    ulong term = ulong(point) * tap_count(NDIM, TAPS) + k;
    bool inside = is_inside(taps, k);
    pixel[term] = inside ? I(pixel_of(taps, k, image, size)) : I(-1);
    weight[term] = weight_of(taps, k);
  }
}

template <typename T, typename I, int K>
[[kernel]] void grid_sample_gradient_x_bands(
    const device I* pixel,
    const device float* weight,
    const device T* cotangent,
    constant int* options,
    constant int64_t& pixels,
    device float* d_x,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  int channels = options[CHANNELS];
  long images = options[POINTS] / options[POINTS_PER_IMAGE];
  long terms_per_image = long(options[POINTS_PER_IMAGE]) * K, pixels_per_image = pixels / images;
  long band = (pixels + threads.x - 1) / threads.x;
  long begin = min(band * position.x, pixels), end = min(begin + band, pixels);
  for (long i = begin * channels; i < end * channels; i++) {
    d_x[i] = 0;
  }
  long first = begin / pixels_per_image, last = (end + pixels_per_image - 1) / pixels_per_image;
  for (long term = first * terms_per_image; term < last * terms_per_image; term++) {
    if (pixel[term] >= begin && pixel[term] < end) {
      const device T* row = cotangent + term / K * channels;
      device float* sum = d_x + long(pixel[term]) * channels;
      float part = weight[term];
      for (int c = 0; c < channels; c++) {
        sum[c] += part * float(row[c]);
      }
    }
  }
}

// The sum of the sorted terms of one pixel, from i to the last one or to the end of the block.
template <typename T, typename I, int K>
float sum_in_block(
    const device I* pixel,
    const device uint* order,
    const device float* weight,
    const device T* cotangent,
    ulong i,
    ulong terms,
    int channels,
    int c) {
  float sum = 0;
  I wanted = pixel[i];
  ulong end = min((i / BLOCK + 1) * BLOCK, terms);
  for (; i < end && pixel[i] == wanted; i++) {
    uint term = order[i];
    sum += weight[term] * float(cotangent[ulong(term / K) * channels + c]);
  }
  return sum;
}

template <typename T, typename I, int K, int LANES>
[[kernel]] void grid_sample_carries(
    const device I* pixel,
    const device uint* order,
    const device float* weight,
    const device T* cotangent,
    constant int* options,
    device float* carry,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  ulong index = position.x + ulong(position.y) * threads.x;
  ulong terms = ulong(options[POINTS]) * K, block = index / LANES, i = block * BLOCK;
  if (i >= terms) {
    return;
  }
  int channels = options[CHANNELS];
  bool continues = block > 0 && pixel[i] >= 0 && pixel[i] == pixel[i - 1];
  for (int c = int(index % LANES); c < channels; c += LANES) {
    carry[block * channels + c] = continues
        ? sum_in_block<T, I, K>(pixel, order, weight, cotangent, i, terms, channels, c)
        : 0.0f;
  }
}

template <typename T, typename I, int K, int LANES>
[[kernel]] void grid_sample_gradient_x_sorted(
    const device I* pixel,
    const device uint* order,
    const device float* weight,
    const device T* cotangent,
    const device float* carry,
    constant int* options,
    device T* d_x,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  ulong index = position.x + ulong(position.y) * threads.x;
  ulong terms = ulong(options[POINTS]) * K, i = index / LANES;
  if (i >= terms || pixel[i] < 0 || (i > 0 && pixel[i] == pixel[i - 1])) {
    return;
  }
  int channels = options[CHANNELS];
  for (int c = int(index % LANES); c < channels; c += LANES) {
    float sum = sum_in_block<T, I, K>(pixel, order, weight, cotangent, i, terms, channels, c);
    for (ulong next = i / BLOCK + 1; next * BLOCK < terms; next++) {
      if (pixel[next * BLOCK] != pixel[i]) {
        break;
      }
      sum += carry[next * channels + c];
    }
    d_x[ulong(pixel[i]) * channels + c] = T(sum);
  }
}
