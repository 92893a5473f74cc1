// Products of few rows with up to three quantized matrices, on the matrix units:
//
//   y_i (M, N_i) = norm(x) (M, K) * w_i^T + bias_i,   or   gate(y_0) * y_1,   or   y_0 + residual
//
// The packed weights are the left operand, 16 rows of w to a tile, and the rows of x are columns of
// the right one: 8 rows cost what one costs. A threadgroup computes `tiles` tiles; its `simds` SIMD
// groups share K and add their sums in threadgroup memory.
//
//   grid (32 * simds * ceil(tiles in all / tiles), 1, 1), threadgroup (32 * simds, 1, 1)
//
// Codes are multiplied as they are, with an offset that unpacking leaves in them; scale, bias and
// offset are applied to float32 sums of a group. The four lanes that share a row of w take `run`
// elements each, of `slots` groups side by side: zeros in x send their sums to columns of their own.
// `fragments` right operands of 8 columns hold the rows of x times slots. run divides K, and where
// `ahead` is more than one, 4 * run * ahead does.
// In NVFP4, with groups of 16, the scale is multiplied into the code instead, which is exact.

#include "epilogue.metal"
#include "fragment.metal"
#include "packed_pairs.metal"

#include <metal_stdlib>
using namespace metal;

// What a lane holds of a tile: `ahead` runs, one step behind the other, of row fragment_row(lane)
// and the eighth below, their scales and the next ones.
template <typename S, int mode, int bits, int run, int ahead>
struct packed_tile {
  packed_matrix<S> matrix;
  uint words_at[2], scales_at[2];
  alignas(16) uint words[ahead][2][run * bits / 32];
  alignas(8) S scales[2][mode == NVFP4 ? run / 16 : ahead];
  alignas(8) S biases[2][ahead];
  alignas(8) S next_scales[2][mode == NVFP4 ? run / 16 : ahead];
  alignas(8) S next_biases[2][ahead];
};

template <typename S, int mode, int bits, int run, int ahead>
METAL_FUNC void load_words_of(
    thread packed_tile<S, mode, bits, run, ahead>& tile, int d, int k, bool inside) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (inside) {
      load_once<run * bits / 32>(
          tile.words[d][i], tile.matrix.w + (tile.words_at[i] + k / 32 * bits));
    }
  }
}

// Every slots-th of `count` scales; neighbours come in one load.
template <int slots, int count, typename S>
METAL_FUNC void load_scales(thread S* to, const device S* from) {
  const int width = slots > 1 || count % 2 ? 1 : count % 4 ? 2 : 4;
#pragma unroll
  for (int i = 0; i < count; i += width) {
    if (width == 1) {
      to[i] = from[i * slots];
    } else {
      const int n = width == 4 ? 4 : 2;
      *reinterpret_cast<thread metal::vec<S, n>*>(to + i) =
          *reinterpret_cast<const device metal::vec<S, n>*>(from + i);
    }
  }
}
// Beyond K the scales of NVFP4 are zero; other sums are left out.
template <int group, int slots, typename S, int mode, int bits, int run, int ahead>
METAL_FUNC void load_scales_of(
    thread packed_tile<S, mode, bits, run, ahead>& tile, int k, bool inside) {
  const int count = mode == NVFP4 ? run / 16 : ahead;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (inside) {
      uint at = tile.scales_at[i] + k / group;
      load_scales<slots, count>(tile.next_scales[i], tile.matrix.scales + at);
      if (mode == AFFINE) {
        load_scales<slots, count>(tile.next_biases[i], tile.matrix.biases + at);
      }
    } else if (mode == NVFP4) {
#pragma unroll
      for (int s = 0; s < count; s++) {
        tile.next_scales[i][s] = S(0);
      }
    }
  }
}
template <typename S, int mode, int bits, int run, int ahead>
METAL_FUNC void take_next_scales(thread packed_tile<S, mode, bits, run, ahead>& tile) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int s = 0; s < (mode == NVFP4 ? run / 16 : ahead); s++) {
      tile.scales[i][s] = tile.next_scales[i][s];
    }
#pragma unroll
    for (int s = 0; s < ahead; s++) {
      tile.biases[i][s] = tile.next_biases[i][s];
    }
  }
}

// sums += a tile's run d times x; without mode NVFP4, sums = their product.
template <typename T, int fragments, typename S, int mode, int bits, int run, int ahead>
METAL_FUNC void multiply_tile(
    thread sum_fragment* sums,
    thread packed_tile<S, mode, bits, run, ahead>& tile,
    int d,
    const thread right_fragment<T>* x) {
  const int span = SPAN(bits), pairs = PAIRS(bits);
#pragma unroll
  for (int s = 0; s < run / (2 * pairs); s++) {
    uint halves[2][span];
    float scales[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      pair_halves<span>(halves[i], tile.words[d][i] + s * span);
      if (mode == NVFP4) {
        scales[i] = decoded_scale<mode>(tile.scales[i][s * 2 * pairs / 16]);
      }
    }
#pragma unroll
    for (int j = 0; j < pairs / 2; j++) {
#pragma unroll
      for (int part = 0; part < PARTS(T, mode, bits); part++) {
        left_fragment<T> left;
#pragma unroll
        for (int p = 0; p < 4; p++) {
          left.part[p] =
              weight_pair<T, mode, bits>(halves[p % 2], 2 * j + p / 2, part, scales[p % 2]);
        }
#pragma unroll
        for (int f = 0; f < fragments; f++) {
          right_fragment<T> right = x[f * (run / 4) + s * pairs / 2 + j];
          if (mode != NVFP4 && s + j + part == 0) {
            multiply(sums[f], left, right);
          } else {
            multiply_accumulate(sums[f], left, right);
          }
        }
      }
    }
  }
}

// Element k of the rows of x and those behind, of each row in its columns, times the norm's weight.
template <int per, int fragments, int run, int bits, typename T>
METAL_FUNC void load_rows(
    thread right_fragment<T>* values,
    const device T* x,
    const device T* norm_weight,
    int k,
    int row,
    int filled,
    int K,
    uint lane) {
  const int pairs = PAIRS(bits);
#pragma unroll
  for (int s = 0; s < run / (2 * pairs); s++) {
    int at = k + s * 2 * pairs, first = s * pairs / 2;
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      load_right_woven<pairs>(
          values + f * (run / 4) + first,
          x,
          (row + f * per) * K + at,
          K,
          run,
          max(filled - f * per, 0),
          lane);
    }
    if (norm_weight) {
      right_fragment<T> weight[pairs / 2] = {};
      load_right_woven<pairs>(weight, norm_weight, at, 0, run, max(filled, 0), lane);
#pragma unroll
      for (int j = 0; j < fragments * pairs / 2; j++) {
        int to = j / (pairs / 2) * (run / 4) + first + j % (pairs / 2);
        values[to] = multiply_elements(values[to], weight[j % (pairs / 2)]);
      }
    }
  }
}

// The sums of x over a group, for the biases.
template <int fragments, int run, typename T>
METAL_FUNC void sum_rows(
    thread sum_fragment* added, left_fragment<T> ones, const thread right_fragment<T>* values) {
#pragma unroll
  for (int f = 0; f < fragments; f++) {
    multiply(added[f], ones, values[f * (run / 4)]);
#pragma unroll
    for (int j = 1; j < run / 4; j++) {
      multiply_accumulate(added[f], ones, values[f * (run / 4) + j]);
    }
  }
}

// totals += scale * sums + bias * added, without the offset of the codes.
template <typename T, int fragments, typename S, int mode, int bits, int run, int ahead>
METAL_FUNC void add_scaled(
    thread sum_fragment* totals,
    const thread sum_fragment* sums,
    const thread sum_fragment* added,
    thread packed_tile<S, mode, bits, run, ahead>& tile,
    int d) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float scale = decoded_scale<mode>(tile.scales[i][d]);
    float bias = fma(-code_offset<T, bits>(), scale, float(tile.biases[i][d]));
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      totals[f].part[i] = fma(float2(scale), sums[f].part[i], totals[f].part[i]);
      if (mode == AFFINE) {
        totals[f].part[i] = fma(float2(bias), added[f].part[i], totals[f].part[i]);
      }
    }
  }
}

// A SIMD group's share of the sums of squares of the rows.
template <typename T>
METAL_FUNC void sum_squares(
    threadgroup float* to, const device T* x, int M, int K, int first, int threads, uint lane) {
  for (int m = 0; m < M; m++) {
    float sum = 0;
    for (int i = first; i < K; i += threads) {
      float value = float(x[m * K + i]);
      sum = fma(value, value, sum);
    }
    sum = simd_sum(sum);
    if (lane == 0) {
      to[m] = sum;
    }
  }
}

template <
    typename T,
    typename S,
    int mode,
    int group,
    int bits,
    int gate,
    int fragments,
    int run,
    int tiles,
    int stacks,
    int simds,
    int ahead>
[[kernel]] void quantized_matmul_matrix(
    const device T* x,
    const device T* norm_weight,
    constant float* epsilon,
    const device T* residual,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    const device uint* w1,
    const device S* scales1,
    const device S* biases1,
    const device T* bias1,
    const device uint* w2,
    const device S* scales2,
    const device S* biases2,
    const device T* bias2,
    constant int* shape,
    device T* y,
    device T* y1,
    device T* y2,
    uint threadgroup_index [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int slots = mode == NVFP4 ? 1 : 4 * run / group, per = 8 / slots, columns = 8 * fragments;
  const int step = 4 * run, stride = simds * ahead * step;
  const int M = shape[0], K = shape[1];
  const int all = stacks * tiles;
  threadgroup float parts[simds * all * 16 * columns];
  threadgroup float squares[stacks * simds * 16];

  const int quarter = fragment_col(lane) / 2;
  int k = int(simd % simds) * ahead * step, above = simd / simds * tiles;
  packed_tile<S, mode, bits, run, ahead> tile[tiles] = {};
  sum_fragment totals[tiles][fragments] = {};
#pragma unroll
  for (int r = 0; r < tiles; r++) {
    tile_place place =
        place_of_tile<gate, 16>(threadgroup_index * all + above + r, shape + 2, w1, w2);
    int m = place.matrix;
    tile[r].matrix.w = m == 0 ? w : m == 1 ? w1 : w2;
    tile[r].matrix.scales = m == 0 ? scales : m == 1 ? scales1 : scales2;
    tile[r].matrix.biases = m == 0 ? biases : m == 1 ? biases1 : biases2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // At the edge of a matrix its last row stands in.
      uint row = min(place.first + fragment_row(lane) + 8 * i, shape[2 + m] - 1);
      tile[r].words_at[i] = row * (K / 16 * bits / 2) + quarter * (run * bits / 32);
      tile[r].scales_at[i] = row * (K / group) + quarter * run / group;
    }
#pragma unroll
    for (int d = 0; d < ahead; d++) {
      load_words_of(tile[r], d, k + d * step, k + d * step + quarter * run < K);
    }
    load_scales_of<group, slots>(tile[r], k, k + quarter * run < K);
    take_next_scales(tile[r]);
  }
  // Which of its columns a lane fills with x: those of the slot that its depths are in.
  const int depth = right_depth(lane, 0) % 8 / 2 * run, column = right_column(lane, 0);
  const int row = column % per - column;
  const int filled = column / per == depth / (step / slots) ? M - row : 0;
  right_fragment<T> values[fragments * run / 4] = {};
  // Broadcast, lest NVIDIA's compiler copy one register to four before each product.
  left_fragment<T> ones;
#pragma unroll
  for (ushort p = 0; p < 4; p++) {
    ones.part[p] = as_type<metal::vec<T, 2>>(
        simd_broadcast(as_type<uint>(metal::vec<T, 2>(T(1.0f), T(1.0f))), p));
  }

  for (; k < K; k += stride) {
#pragma unroll
    for (int r = 0; ahead > 1 && r < tiles; r++) {
      load_scales_of<group, slots>(tile[r], k + stride, k + stride + quarter * run < K);
    }
#pragma unroll
    for (int d = 0; d < ahead; d++) {
      int now = k + d * step, next = now + stride;
      load_rows<per, fragments, run, bits>(
          values, x, norm_weight, now, row, now + depth < K ? filled : 0, K, lane);
      sum_fragment added[fragments];
      if (mode == AFFINE) {
        sum_rows<fragments, run>(added, ones, values);
      }
#pragma unroll
      for (int r = 0; r < tiles; r++) {
        if (mode == NVFP4) {
          multiply_tile<T, fragments>(totals[r], tile[r], d, values);
        } else {
          sum_fragment sums[fragments];
          multiply_tile<T, fragments>(sums, tile[r], d, values);
          if (now + quarter * run < K) {
            add_scaled<T, fragments>(totals[r], sums, added, tile[r], d);
          }
        }
        load_words_of(tile[r], d, next, next + quarter * run < K);
        if (ahead == 1) {
          load_scales_of<group, slots>(tile[r], next, next + quarter * run < K);
        }
        if (d == ahead - 1) {
          take_next_scales(tile[r]);
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < tiles; r++) {
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      threadgroup float* to = parts + (int(simd % simds) * all + above + r) * 16 * columns + 8 * f;
      store_sum<float>(totals[r][f], to, columns, lane);
    }
  }
  const int thread_index = simd * 32 + lane, threads = stacks * simds * 32;
  if (epsilon) {
    sum_squares(squares + simd * 16, x, M, K, thread_index, threads, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // A thread finishes an element: row n of the tiles, or of every other where two make one.
  const int height = gate ? 8 * all : 16 * all, joined = gate ? 2 : 1;
  for (int i = thread_index; i < height * M; i += threads) {
    int n = i % height, m = i / height, r = n / 16 * joined;
    float factor = sum_factor<mode>(), sums[2] = {0, 0};
    if (epsilon) {
      float mean = 0;
      for (int s = 0; s < stacks * simds; s++) {
        mean += squares[s * 16 + m] / float(K);
      }
      factor *= metal::precise::rsqrt(mean + epsilon[0]);
    }
    for (int j = 0; j < simds * slots * joined; j++) {
      int from = (j / slots % simds * all + r + j / (slots * simds)) * 16 + n % 16;
      sums[j / (slots * simds)] +=
          factor * parts[from * columns + m / per * 8 + m % per + j % slots * per];
    }
    tile_place place = place_of_tile<gate, 16>(threadgroup_index * all + r, shape + 2, w1, w2);
    int to = place.first + n % 16, which = place.matrix, N = shape[2 + which];
    if (to < N) {
      device T* out = which == 0 ? y : which == 1 ? y1 : y2;
      size_t at = size_t(m) * N + to;
      out[at] = finished<T, gate>(
          sums[0],
          sums[1],
          to,
          at,
          which == 0 ? bias : which == 1 ? bias1 : bias2,
          bias1,
          residual);
    }
  }
}
