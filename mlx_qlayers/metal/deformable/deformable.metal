// Multi-scale deformable attention: each head of a query is a weighted sum of samples of values
// (B, S, H, D), S the pixels of all levels, at locations (B, L, H, levels, POINTS, 2) with weights
// (B, L, H, levels, POINTS). Samples are bilinear, coordinates and sums float32.
//
// LANES neighbouring threads compute one head of RUN queries, one after the other; each thread has every
// LANES-th vector of V channels. There is no threadgroup memory. Groups of threads are numbered by
// batch, run of queries and head, threads along x, then y: R groups take the grid
// (min(R * LANES, 2^30), as many as it takes, 1).
//
// deformable_forward    sums a head's samples in registers, STEP points at a time, and writes it
//                       once. Threads need not fill threadgroups.
// deformable_gradient   adds a head's cotangent to the pixels' d_values, which begin as zeros: by
//                       float32 atomics or, if RUN is all queries, without. Lanes add up
//                       d_locations and d_weights by shuffles, so that the grid must be whole
//                       threadgroups.

#include "bilinear.metal"

// Indices into `options`.
enum option { GROUPS, RUN, QUERIES, HEADS, WIDTH, LEVELS, PIXELS_PER_IMAGE };

// The head and the queries of a group of threads.
struct group_of_queries {
  uint image;
  uint head;
  uint first;
};

inline group_of_queries find_group(uint group, constant int* options) {
  uint heads = uint(options[HEADS]), run = uint(options[RUN]);
  uint runs = (uint(options[QUERIES]) + run - 1) / run, block = group / heads;
  return group_of_queries{block / runs, group % heads, block % runs * run};
}

template <
    typename T, typename G, typename W, typename I, int V, int ALIGN, int LANES, int POINTS,
    int STEP, bool BORDER, bool PIXELS>
void attend(
    const device T* image,
    const device G* location,
    const device W* weight,
    const device int* levels,
    constant int* options,
    device T* out,
    uint lane) {
  int width = options[WIDTH], stride = options[HEADS] * width;
  for (int c = int(lane) * V; c < width; c += LANES * V) {
    float sum[V] = {};
    for (int from = 0; from < options[LEVELS] * POINTS; from += STEP) {
      bilinear_taps<I> taps[STEP];
      pack<T, V, ALIGN> values[STEP][4];
#pragma clang loop unroll(full)
      for (int s = 0; s < STEP; s++) {
        const device int* level = levels + from / POINTS * 3;
        taps[s] =
            find_taps<I, G, BORDER, PIXELS>(location + (from + s) * 2, level, stride);
#pragma clang loop unroll(full)
        for (int k = 0; k < 4; k++) {
          if (taps[s].at[k] >= 0) {
            values[s][k] =
                *reinterpret_cast<const device pack<T, V, ALIGN>*>(image + taps[s].at[k] + c);
          } else {
            values[s][k] = pack<T, V, ALIGN>();
          }
        }
      }
#pragma clang loop unroll(full)
      for (int s = 0; s < STEP; s++) {
        float factor = float(weight[from + s]);
#pragma clang loop unroll(full)
        for (int k = 0; k < 4; k++) {
          // A NaN or infinite location makes the weights NaN, and then the zeros outside are NaN too.
          float tap_weight = factor * taps[s].weight[k];
#pragma clang loop unroll(full)
          for (int i = 0; i < V; i++) {
            sum[i] += tap_weight * float(values[s][k].at[i]);
          }
        }
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
    typename T, typename G, typename W, typename I, int V, int ALIGN, int LANES, int POINTS,
    int STEP, bool BORDER, bool PIXELS>
[[kernel]] void deformable_forward(
    const device T* values,
    const device G* locations,
    const device W* weights,
    const device int* levels,
    constant int* options,
    device T* out,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  ulong index = position.x + ulong(position.y) * threads.x;
  if (index / LANES >= ulong(options[GROUPS])) {
    return;
  }
  uint lane = uint(index % LANES);
  group_of_queries group = find_group(uint(index / LANES), options);
  ulong heads = ulong(options[HEADS]), queries = ulong(options[QUERIES]);
  ulong width = ulong(options[WIDTH]), samples = ulong(options[LEVELS] * POINTS);
  const device T* image =
      values + (group.image * ulong(options[PIXELS_PER_IMAGE]) * heads + group.head) * width;
  bool packs = V == 1 || reinterpret_cast<ulong>(values) % ALIGN == 0;
  ulong last = min(ulong(group.first) + ulong(options[RUN]), queries);
  for (ulong query = group.first; query < last; query++) {
    ulong row = (group.image * queries + query) * heads + group.head;
    const device G* location = locations + row * samples * 2;
    const device W* weight = weights + row * samples;
    device T* result = out + row * width;
    if (packs) {
      attend<T, G, W, I, V, ALIGN, LANES, POINTS, STEP, BORDER, PIXELS>(
          image, location, weight, levels, options, result, lane);
    } else {
      attend<T, G, W, I, 1, sizeof(T), LANES, POINTS, STEP, BORDER, PIXELS>(
          image, location, weight, levels, options, result, lane);
    }
  }
}

template <int V, bool ATOMIC, typename T>
void add(device float* sums, float tap_weight, pack<T, V, sizeof(T)> terms) {
  pack<float, V, 4> found;
  if (!ATOMIC) {
    found = *reinterpret_cast<device pack<float, V, 4>*>(sums);
  }
#pragma clang loop unroll(full)
  for (int v = 0; v < V; v++) {
    float term = tap_weight * float(terms.at[v]);
    if (ATOMIC) {
      device atomic<float>* sum = reinterpret_cast<device atomic<float>*>(sums + v);
      atomic_fetch_add_explicit(sum, term, memory_order_relaxed);
    } else {
      found.at[v] += term;
    }
  }
  if (!ATOMIC) {
    *reinterpret_cast<device pack<float, V, 4>*>(sums) = found;
  }
}

template <int LANES>
float sum_of_lanes(float part) {
  if (LANES > 1) {
#pragma clang loop unroll(full)
    for (ushort other = LANES / 2; other > 0; other /= 2) {
      part += simd_shuffle_xor(part, other);
    }
  }
  return part;
}

template <
    typename T, typename G, typename W, typename I, int V, int LANES, int POINTS, bool BORDER,
    bool PIXELS, bool ATOMIC>
[[kernel]] void deformable_gradient(
    const device T* values,
    const device G* locations,
    const device W* weights,
    const device T* cotangent,
    const device int* levels,
    constant int* options,
    device float* d_values,
    device float* d_locations,
    device float* d_weights,
    uint3 position [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  ulong index = position.x + ulong(position.y) * threads.x;
  // Threads beyond the last group repeat it without adding, since all lanes take part in the sums.
  bool there = index / LANES < ulong(options[GROUPS]);
  int lane = int(index % LANES), width = options[WIDTH], stride = options[HEADS] * width;
  uint number = uint(min(index / LANES, ulong(options[GROUPS]) - 1));
  group_of_queries group = find_group(number, options);
  ulong heads = ulong(options[HEADS]), queries = ulong(options[QUERIES]);
  ulong first = (group.image * ulong(options[PIXELS_PER_IMAGE]) * heads + group.head) * width;
  int samples = options[LEVELS] * POINTS;
  for (int i = 0; i < options[RUN]; i++) {
    bool active = there && group.first + i < queries;
    ulong query = min(ulong(group.first) + i, queries - 1);
    ulong row = (group.image * queries + query) * heads + group.head;
    const device T* d_out = cotangent + row * width;
    for (int sample = 0; sample < samples; sample++) {
      ulong at = row * samples + sample;
      const device int* level = levels + sample / POINTS * 3;
      bilinear_taps<I> taps =
          find_taps<I, G, BORDER, PIXELS>(locations + at * 2, level, stride);
      float weight = float(weights[at]), dots[4] = {};
#pragma clang loop unroll(full)
      for (int k = 0; k < 4; k++) {
        if (taps.at[k] < 0) {
          continue;
        }
        float parts[V] = {}, tap_weight = weight * taps.weight[k];
        const device T* pixel = values + first + taps.at[k];
        device float* d_pixel = d_values + first + taps.at[k];
        for (int c = lane * V; c < width; c += LANES * V) {
          auto value = *reinterpret_cast<const device pack<T, V, sizeof(T)>*>(pixel + c);
          auto dy = *reinterpret_cast<const device pack<T, V, sizeof(T)>*>(d_out + c);
#pragma clang loop unroll(full)
          for (int v = 0; v < V; v++) {
            parts[v] += float(dy.at[v]) * float(value.at[v]);
          }
          if (active) {
            add<V, ATOMIC>(d_pixel + c, tap_weight, dy);
          }
        }
#pragma clang loop unroll(full)
        for (int v = 0; v < V; v++) {
          dots[k] += parts[v];
        }
      }
      // Pixels outside are zeros, which a NaN weight turns into NaN.
      float across = (dots[1] - dots[0]) * (1.0f - taps.y.part) + (dots[3] - dots[2]) * taps.y.part;
      float along = (dots[2] - dots[0]) * (1.0f - taps.x.part) + (dots[3] - dots[1]) * taps.x.part;
      float total = 0;
#pragma clang loop unroll(full)
      for (int k = 0; k < 4; k++) {
        total += dots[k] * taps.weight[k];
      }
      across = sum_of_lanes<LANES>(across);
      along = sum_of_lanes<LANES>(along);
      total = sum_of_lanes<LANES>(total);
      if (active && lane == 0) {
        d_locations[at * 2] = across * weight * taps.x.slope;
        d_locations[at * 2 + 1] = along * weight * taps.y.slope;
        d_weights[at] = total;
      }
    }
  }
}
