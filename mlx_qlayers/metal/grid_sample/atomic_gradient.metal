// The gradient of x of grid_sample.metal by float32 atomics. Threads are counted as there.
//
// grid_sample_gradient_x         LANES threads add a point's cotangent to its pixels of d_x.
//
// In half precision d_x would be read and written once more to be rounded. If points touch few pixels, terms are
// listed as in sorted_gradient.metal, and the last term of a pixel is its owner:
//
// grid_sample_find_rows          one thread for each term: `row` is 2 * (owner + 1), plus 1 if the pixel has other
//                                terms; 0 for a pixel that no point touches.
// grid_sample_gradient_x_rows    LANES threads add a term that is no owner to the owner's sums.
// grid_sample_gradient_x_spread  LANES threads write PIXELS pixels: the owner's term plus its sums, or zeros.

#include "taps.metal"

// Lanes take neighbouring channels, so that the atomics of a SIMD group touch few cache lines.
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
  ulong index = position.x + ulong(position.y) * threads.x;
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
    place[k] = is_inside(taps, k) ? pixel_of(taps, k, image, size) * channels : -1;
    weight[k] = weight_of(taps, k);
  }
  for (int c = int(lane); c < channels; c += LANES) {
    float d_out = float(cotangent[ulong(point) * channels + c]);
#pragma clang loop unroll(full)
    for (int k = 0; k < tap_count(NDIM, TAPS); k++) {
      if (place[k] >= 0) {
        atomic_fetch_add_explicit(d_x + place[k] + c, d_out * weight[k], memory_order_relaxed);
      }
    }
  }
}

template <typename I, int K>
[[kernel]] void grid_sample_find_rows(
    const device I* pixel,
    constant int* options,
    device atomic<int>* row,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  ulong term = position.x + ulong(position.y) * threads.x;
  if (term < ulong(options[POINTS]) * K && pixel[term] >= 0) {
    device atomic<int>* own = row + pixel[term];
    if (atomic_fetch_max_explicit(own, 2 * int(term) + 2, memory_order_relaxed) != 0) {
      atomic_fetch_or_explicit(own, 1, memory_order_relaxed);
    }
  }
}

template <typename T, typename I, int K, int LANES>
[[kernel]] void grid_sample_gradient_x_rows(
    const device int* row,
    const device I* pixel,
    const device float* weight,
    const device T* cotangent,
    constant int* options,
    device atomic<float>* sums,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  ulong index = position.x + ulong(position.y) * threads.x, term = index / LANES;
  if (term >= ulong(options[POINTS]) * K || pixel[term] < 0) {
    return;
  }
  ulong owner = ulong(row[pixel[term]] / 2 - 1);
  int channels = options[CHANNELS];
  for (int c = int(index % LANES); owner != term && c < channels; c += LANES) {
    float part = weight[term] * float(cotangent[term / K * channels + c]);
    atomic_fetch_add_explicit(sums + owner * channels + c, part, memory_order_relaxed);
  }
}

// V elements at a multiple of V; `packed` if the array is aligned for vector loads.
template <typename T, int V>
pack<T, V, V * sizeof(T)> read_pack(const device T* from, bool packed) {
  using some = pack<T, V, V * sizeof(T)>;
  if (packed) {
    return *reinterpret_cast<const device some*>(from);
  }
  some x;
#pragma clang loop unroll(full)
  for (int i = 0; i < V; i++) {
    x.at[i] = from[i];
  }
  return x;
}

// The same for several pixels, whose rows are looked up at the same time.
enum { PIXELS = 4 };

template <typename T, int K, int V, int LANES>
[[kernel]] void grid_sample_gradient_x_spread(
    const device int* row,
    const device float* weight,
    const device T* cotangent,
    const device float* sums,
    constant int* options,
    constant int64_t& pixels,
    device T* d_x,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  ulong index = position.x + ulong(position.y) * threads.x, first = index / LANES * PIXELS;
  int channels = options[CHANNELS], number[PIXELS];
  float part[PIXELS];
#pragma clang loop unroll(full)
  for (int i = 0; i < PIXELS; i++) {
    number[i] = first + i < ulong(pixels) ? row[first + i] : -1;
    part[i] = number[i] > 0 ? weight[number[i] / 2 - 1] : 0.0f;
  }
  bool packed = reinterpret_cast<ulong>(cotangent) % (V * sizeof(T)) == 0;
  for (int c = int(index % LANES) * V; c < channels; c += LANES * V) {
    pack<T, V, V * sizeof(T)> own[PIXELS];
#pragma clang loop unroll(full)
    for (int i = 0; i < PIXELS; i++) {
      own[i] = {};
      if (number[i] > 0) {
        ulong point = ulong(number[i] / 2 - 1) / K;
        own[i] = read_pack<T, V>(cotangent + (point * channels + c), packed);
      }
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < PIXELS; i++) {
      pack<float, V, V * sizeof(float)> others = {};
      if (number[i] > 0 && number[i] % 2) {
        others = read_pack<float, V>(sums + (ulong(number[i] / 2 - 1) * channels + c), true);
      }
      pack<T, V, V * sizeof(T)> result;
#pragma clang loop unroll(full)
      for (int j = 0; j < V; j++) {
        result.at[j] = T(part[i] * float(own[i].at[j]) + others.at[j]);
      }
      if (number[i] >= 0) {
        *reinterpret_cast<device pack<T, V, V * sizeof(T)>*>(
            d_x + ((first + i) * channels + c)) = result;
      }
    }
  }
}
