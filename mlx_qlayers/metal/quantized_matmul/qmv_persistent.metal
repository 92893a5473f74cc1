// qmv of few rows on the matrix units, as in qmv_matrix.metal, by persistent threadgroups:
//
//   y_i (M, N_i) = norm(x) (M, K) * w_i^T + bias_i,   or   gate(y_0) * y_1,   or   y_0 + residual
//
//   grid (32 * simds_k * ceil(all tiles / tiles), 1, 1), threadgroup (32 * simds_k, 1, 1)
//
// Tiles, or pairs of them with a gate, are interleaved among threadgroups, so that these read neighbouring
// memory at the same time. A SIMD group makes operands of one step of x and multiplies that step of all
// `tiles` tiles of its threadgroup with them, one after the other: `ahead` tiles are always in flight, and
// nothing else is read between them. There are as many SIMD groups as steps; their sums are added in
// threadgroup memory at the end. The other parameters are those of qmv_matrix.

#include "qmv_matrix_steps.metal"
#include "common/fragment.metal"
#include "packed_tile.metal"

#include <metal_stdlib>
using namespace metal;

// Starts to load a step of the 16 rows of tile `at`, counted through all matrices, from a given matrix if that
// is `known`.
template <int gate, int mode, int group, typename S, int bits, int run, int count>
METAL_FUNC void fetch_tile(
    thread packed_tile<S, bits, run, 1, count>& tile,
    const thread packed_matrix<S>* matrices,
    const thread int* sizes,
    int at,
    int known,
    int step,
    int K,
    bool inside,
    bool odd,
    int quarter,
    uint lane) {
  tile_place place = place_of_tile<gate, 16>(at, sizes, matrices[1].w, matrices[2].w);
  int m = known < 0 ? place.matrix : known, size = m == 0 ? sizes[0] : m == 1 ? sizes[1] : sizes[2];
  tile.matrix = m == 0 ? matrices[0] : m == 1 ? matrices[1] : matrices[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    // Beyond the edge of a matrix its last row is repeated.
    uint row = min(place.first + fragment_row(lane) + 8 * i, size - 1);
    tile.words_at[i] = row * (K / 16 * bits / 2) + first_word<bits, run>(quarter);
    tile.numbers_at[i] = row * (K / group);
  }
  int first = step * (4 * run / group);
  first += mode == NVFP4 ? quarter * (run / 16) : quarter % max(4 * run / group, 1);
  load_words_of(tile, 0, step, inside && step * 4 * run + quarter * run < K, odd);
  load_numbers_of<mode>(tile, first, inside && first < K / group);
}

METAL_FUNC float of_other_lane(float x, int pair, uint lane) {
  return as_type<float>(from_row_lane(as_type<uint>(x), pair, lane));
}

// Adds up the columns of each of M rows of x, and stores the sums: 16 floats for each row of x, `stride`
// apart. In a butterfly, lanes exchange first the sums of another row of the tile, then those of another
// row of x.
template <int slots, int fragments>
METAL_FUNC void store_sums(
    threadgroup float* to,
    const thread sum_fragment* totals,
    int stride,
    int M,
    int quarter,
    uint lane) {
  const bool high = quarter / 2, odd = quarter % 2;
#pragma unroll
  for (int f = 0; f < fragments; f++) {
    float2 sums[2] = {totals[f].part[0], totals[f].part[1]};
    if (slots == 8) {
      sums[0].x += sums[0].y;
      sums[1].x += sums[1].y;
    }
    if (slots > 1) {
      float2 given = high ? sums[0] : sums[1];
      sums[0] = high ? sums[1] : sums[0];
      sums[0].x += of_other_lane(given.x, quarter ^ 2, lane);
      sums[0].y += slots == 8 ? 0 : of_other_lane(given.y, quarter ^ 2, lane);
    }
    if (slots > 2) {
      bool second = slots == 4 && odd;
      float given = slots == 8 || second ? sums[0].x : sums[0].y;
      sums[0].x = (second ? sums[0].y : sums[0].x) + of_other_lane(given, quarter ^ 1, lane);
    }
#pragma unroll
    for (int p = 0; p < (slots > 1 ? 1 : 2); p++) {
#pragma unroll
      for (int i = 0; i < (slots > 2 ? 1 : 2); i++) {
        int n = fragment_row(lane) + 8 * (slots > 1 ? int(high) : p);
        int m = f * (8 / slots) + (slots > 2 ? int(odd) : fragment_col(lane) % (8 / slots) + i);
        if (m < M && !(slots == 8 && odd)) {
          to[m * stride + n] = i == 0 ? sums[p].x : sums[p].y;
        }
      }
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
    bool normed,
    int epsilon,
    int fragments,
    int run,
    int tiles,
    int simds_k,
    int ahead,
    int RESIDENT>
[[kernel]] void qmv_persistent(
    const device T* x,
    const constant int* x_shape,
    const constant int& x_ndim,
    const device T* norm_weight,
    const device float* partial_squares,
    const device T* residual,
    const device T* deferred_weight,
    const device uint* w,
    const constant int* w_shape,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    const device uint* w1,
    const constant int* w1_shape,
    const device S* scales1,
    const device S* biases1,
    const device T* bias1,
    const device uint* w2,
    const constant int* w2_shape,
    const device S* scales2,
    const device S* biases2,
    const device T* bias2,
    device T* y,
    device T* y1,
    device T* y2,
    device T* scaled,
    device float* scaled_squares,
    uint threadgroup_index [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int slots = mode == NVFP4 ? 1 : 4 * run / group, per = 8 / slots, most = per * fragments;
  const int step = 4 * run, count = mode == NVFP4 ? run / 16 : 1, columns = 8 * fragments, chains = 2;
  // Shapes are launch arguments, available earlier than values in memory.
  const int K = w_shape[1] * 32 / bits, steps = (K + step - 1) / step;
  int M = 1;
#pragma clang loop unroll(disable)
  for (int i = 0; i < x_ndim - 1; i++) {
    M *= x_shape[i];
  }
  const int sizes[3] = {w_shape[0], w1 ? w1_shape[0] : 0, w2 ? w2_shape[0] : 0};
  const packed_matrix<S> matrices[3] = {
      {w, scales, biases}, {w1, scales1, biases1}, {w2, scales2, biases2}};
  threadgroup float parts[tiles * most * simds_k * 16];
  threadgroup float squares[simds_k * columns];

  const int quarter = fragment_col(lane) / 2, joined = gate ? 2 : 1;
  const int all = (sizes[0] + 15) / 16 + (sizes[1] + 15) / 16 + (sizes[2] + 15) / 16;
  const int begin = threadgroup_index * joined, between = (all + tiles - 1) / tiles * joined;
  const int here = (all - begin + between - 1) / between * joined;
  const bool odd = begins_odd(w) || begins_odd(w1) || begins_odd(w2);
  // A lane fills the columns of the slot of its depths with x, the others with zeros.
  const int depth = right_depth(lane, 0) % 8 / 2 * run, column = right_column(lane, 0);
  const int row = column % per - column;
  const int filled = column / per == depth / (step / slots) ? M - row : 0;
  // x is loaded first: it is small, and would wait behind the loads of the matrix.
  row_runs<T, fragments, run> rows;
  load_rows<per, bits>(
      rows, x, norm_weight, simd * step, row, simd * step + depth < K ? filled : 0, K, lane);
  // The tiles of a gate alternate between two matrices.
  const bool known = gate && ahead % 2 == 0;
  packed_tile<S, bits, run, 1, count> tile[ahead] = {};
#pragma unroll
  for (int d = 0; d < ahead; d++) {
    fetch_tile<gate, mode, group>(
        tile[d],
        matrices,
        sizes,
        begin + d / joined * between + d % joined,
        known ? d % 2 : -1,
        simd,
        K,
        d < here && int(simd) < steps,
        odd,
        quarter,
        lane);
  }
  square_sums squared[fragments] = {};

  // The norm factors of rows, while the first loads are in flight.
  if (partial_squares) {
    const int of_row = (K + 15) / 16;
    for (int m = simd; m < M; m += simds_k) {
      float factor = norm_factor(partial_squares + m * of_row, of_row, K, as_type<float>(epsilon), lane);
      if (lane == 0) {
        squares[m] = factor;
      }
    }
  }
  right_fragment<T> values[fragments * run / 4];
  take_rows<bits>(values, squared, rows, normed, norm_weight);
  // The sums of x over a group, for the biases.
  sum_fragment added[fragments];
#pragma unroll
  for (int f = 0; f < (mode == AFFINE ? fragments : 0); f++) {
    sum_columns<run / 4>(added[f], values + f * (run / 4));
  }
  // One loop for each alignment of words; one of them runs.
#pragma unroll
  for (int reading = 0; reading < READINGS; reading++) {
    for (int r = 0; r < (reading == odd ? here : 0); r += ahead) {
#pragma unroll
      for (int d = 0; d < ahead; d++) {
        sum_fragment totals[fragments] = {};
        take_next_numbers(tile[d]);
        if (mode == NVFP4) {
          multiply_tile<T, fragments, mode>(totals, tile[d], 0, values, quarter);
        } else {
          sum_fragment sums[chains * fragments];
          multiply_tile<T, fragments, mode, chains>(sums, tile[d], 0, values, quarter);
#pragma unroll
          for (int f = 0; f < (chains - 1) * fragments; f++) {
            sums[f % fragments].part[0] += sums[fragments + f].part[0];
            sums[f % fragments].part[1] += sums[fragments + f].part[1];
          }
          add_scaled<T, fragments, mode, (slots < 4)>(
              totals, sums, added, tile[d], quarter * slots / 4, lane);
        }
        const int coming = r + d + ahead;
        const bool inside = coming < here && int(simd) < steps;
        fetch_tile<gate, mode, group>(
            tile[d],
            matrices,
            sizes,
            begin + coming / joined * between + coming % joined,
            known ? d % 2 : -1,
            simd,
            K,
            inside,
            reading,
            quarter,
            lane);
        if (r + d < here) {
          threadgroup float* to = parts + ((r + d) * most * simds_k + simd) * 16;
          store_sums<slots, fragments>(to, totals, simds_k * 16, M, quarter, lane);
        }
      }
    }
  }
  if (normed) {
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      store_squares(squares + simd * columns + 8 * f, squared[f], lane);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // A thread finishes an element: row n of the tiles or, with a gate, of every other tile. With a deferred norm
  // whole SIMD groups run the loop, since sixteen threads add up the squares of a tile.
  const int height = here / joined * 16, elements = height * M;
  const int sharing = min(simds_k, steps);
  for (int i = simd * 32 + lane; i < (deferred_weight ? (elements + 31) / 32 * 32 : elements);
       i += simds_k * 32) {
    int n = i % height, m = min(i / height, M - 1), r = n / 16 * joined;
    float factor = sum_factor<mode>(), sums[2] = {0, 0}, square = 0;
    if (partial_squares) {
      factor *= squares[m];
    } else if (normed) {
      float total = 0;
      for (int j = 0; j < simds_k * slots; j++) {
        total += squares[j / slots * columns + m / per * 8 + m % per + j % slots * per];
      }
      factor *= metal::precise::rsqrt(total / float(K) + as_type<float>(epsilon));
    }
#pragma unroll
    for (int j = 0; j < joined; j++) {
      for (int part = 0; part < sharing; part++) {
        sums[j] += parts[(((r + j) * most + m) * simds_k + part) * 16 + n % 16];
      }
      sums[j] *= factor;
    }
    tile_place place = place_of_tile<gate, 16>(begin + r / joined * between, sizes, w1, w2);
    int to = place.first + n % 16, which = place.matrix;
    int N = which == 0 ? sizes[0] : which == 1 ? sizes[1] : sizes[2];
    if (to < N && i < elements) {
      device T* out = which == 0 ? y : which == 1 ? y1 : y2;
      size_t at = size_t(m) * N + to;
      T result = finished<T, gate>(
          sums[0],
          sums[1],
          to,
          at,
          which == 0 ? bias : which == 1 ? bias1 : bias2,
          bias1,
          residual);
      out[at] = result;
      if (deferred_weight) {
        scaled[at] = T(float(result) * float(deferred_weight[to]));
        square = float(result) * float(result);
      }
    }
    if (deferred_weight) {
#pragma unroll
      for (ushort apart = 8; apart > 0; apart /= 2) {
        square += simd_shuffle_xor(square, apart);
      }
      if (n % 16 == 0 && place.first < N && i < elements) {
        scaled_squares[m * ((N + 15) / 16) + place.first / 16] = square;
      }
    }
  }
}
