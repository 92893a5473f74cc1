// qmv: up to 16 rows times up to three quantized matrices, on the matrix units:
//
//   y_i (M, N_i) = norm(x) (M, K) * w_i^T + bias_i,   or   gate(y_0) * y_1,   or   y_0 + residual
//
// A deferred RMS norm behind y needs no launch of its own: y times `deferred_weight` is stored as `scaled`, and
// the sum of squares of every 16 columns of y as `scaled_squares`. The product that follows takes the first
// for x and the second for `partial_squares` (M, K / 16).
//
// The packed weights are the left operand, 16 rows of w to a tile, and the rows of x are columns of the right
// one: 8 rows take the time of one. A threadgroup has `simds_n` times `simds_k` SIMD groups, each with `tiles`
// tiles; `simds_k` of them divide K and add their sums in threadgroup memory.
//
//   grid (threads * ceil(all tiles / (tiles * simds_n)), 1, 1), threadgroup (threads, 1, 1)
//   where threads = 32 * simds_k * simds_n
//
// Codes are multiplied without their scales, with the offset that unpacking leaves in them; scale, bias and
// offset are applied to the float32 sums of a group. The four lanes of a row of w take `run` elements each, of
// `slots` neighbouring groups: zeros in x separate their sums into columns. `fragments` right operands of 8
// columns hold the rows of x times slots. run divides K. The rows of x, the scales of the groups and `ahead`
// runs of a tile are loaded before their step. `epsilon` holds the bits of a float, since an array argument
// would take host time in each launch. In NVFP4, with groups of 16, the scale is multiplied into the code
// instead, which is exact.

#include "qmv_matrix_steps.metal"
#include "common/fragment.metal"
#include "packed_tile.metal"

#include <metal_stdlib>
using namespace metal;

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
    int simds_n,
    int simds_k,
    int ahead,
    int RESIDENT>
[[kernel]] void qmv_matrix(
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
  const int slots = mode == NVFP4 ? 1 : 4 * run / group, per = 8 / slots, columns = 8 * fragments;
  const int step = 4 * run, all = simds_n * tiles;
  // Steps whose scales the four lanes of a row hold.
  const int held = mode == NVFP4 ? 1 : 4 / slots, count = mode == NVFP4 ? run / 16 : 1;
  // Shapes are launch arguments, available earlier than values in memory.
  const int K = w_shape[1] * 32 / bits, groups = K / group;
  int M = 1;
#pragma clang loop unroll(disable)
  for (int i = 0; i < x_ndim - 1; i++) {
    M *= x_shape[i];
  }
  const int sizes[3] = {w_shape[0], w1 ? w1_shape[0] : 0, w2 ? w2_shape[0] : 0};
  threadgroup float parts[simds_k * all * 16 * columns];
  threadgroup float squares[simds_n * simds_k * columns];

  // Step i of this SIMD group is step begin + between * i of the rows. With one tile each, SIMD groups have
  // contiguous steps; with several, their steps are interleaved, so that they load neighbouring words.
  const int part = simd % simds_k, above = simd / simds_k * tiles, quarter = fragment_col(lane) / 2;
  const int offset = quarter * run, steps = (K + step - 1) / step, steps_per_simd = (steps + simds_k - 1) / simds_k;
  const int begin = tiles == 1 ? part * steps_per_simd : part, between = tiles == 1 ? 1 : simds_k;
  const int own_steps = tiles == 1 ? min(steps_per_simd, steps - begin) : (steps - part + simds_k - 1) / simds_k;
  const int per_step = step / group;
  const int numbers_from = mode == NVFP4 ? quarter * (run / 16) : quarter % slots;
  const int numbers_step = mode == NVFP4 ? 0 : quarter / slots;
  const bool odd = begins_odd(w) || begins_odd(w1) || begins_odd(w2);
  packed_tile<S, bits, run, ahead, count> tile[tiles] = {};
  sum_fragment totals[tiles][fragments] = {};
#pragma unroll
  for (int r = 0; r < tiles; r++) {
    tile_place place =
        place_of_tile<gate, 16>(threadgroup_index * all + above + r, sizes, w1, w2);
    int m = gate ? r % 2 : place.matrix, size = m == 0 ? sizes[0] : m == 1 ? sizes[1] : sizes[2];
    tile[r].matrix.w = m == 0 ? w : m == 1 ? w1 : w2;
    tile[r].matrix.scales = m == 0 ? scales : m == 1 ? scales1 : scales2;
    tile[r].matrix.biases = m == 0 ? biases : m == 1 ? biases1 : biases2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // Beyond the edge of a matrix its last row is repeated.
      uint row = min(place.first + fragment_row(lane) + 8 * i, size - 1);
      tile[r].words_at[i] = row * (K / 16 * bits / 2) + first_word<bits, run>(quarter);
      tile[r].numbers_at[i] = row * groups;
    }
#pragma unroll
    for (int d = 0; d < ahead; d++) {
      int first = begin + between * d;
      load_words_of(tile[r], d, first, d < own_steps && first * step + offset < K, odd);
    }
    int first = (begin + between * numbers_step) * per_step + numbers_from;
    load_numbers_of<mode>(tile[r], first, numbers_step < own_steps && first < groups);
  }
  // A lane fills the columns of the slot of its depths with x, the others with zeros.
  const int depth = right_depth(lane, 0) % 8 / 2 * run, column = right_column(lane, 0);
  const int row = column % per - column;
  const int filled = column / per == depth / (step / slots) ? M - row : 0;
  square_sums squared[fragments] = {};

  // Short runs of x are loaded a step ahead; long ones would take too many registers.
  const bool early = run <= 16;
  row_runs<T, fragments, run> rows;
  if (early) {
    int k = begin * step;
    load_rows<per, bits>(
        rows, x, norm_weight, k, row, own_steps > 0 && k + depth < K ? filled : 0, K, lane);
  }
  // The norm factors of rows, while the first loads are in flight.
  const int thread_index = simd * 32 + lane, threads = simds_n * simds_k * 32;
  if (partial_squares) {
    const int of_row = (K + 15) / 16;
    for (int m = simd; m < M; m += simds_n * simds_k) {
      float factor = norm_factor(partial_squares + m * of_row, of_row, K, as_type<float>(epsilon), lane);
      if (lane == 0) {
        squares[m] = factor;
      }
    }
  }
  // One loop for each alignment of words; one of them runs.
#pragma unroll
  for (int reading = 0; reading < READINGS; reading++) {
    for (int i = 0; i < (reading == odd ? own_steps : 0); i += ahead) {
#pragma unroll
      for (int d = 0; d < ahead; d++) {
        int now = i + d, next = now + ahead, next_at = begin + between * next;
        if (d > 0 && now >= own_steps) {
          break;
        }
        if (now % held == 0) {
          int then = now + held + numbers_step;
          int first = (begin + between * then) * per_step + numbers_from;
#pragma unroll
          for (int r = 0; r < tiles; r++) {
            take_next_numbers(tile[r]);
            load_numbers_of<mode>(tile[r], first, then < own_steps && first < groups);
          }
        }
        right_fragment<T> values[fragments * run / 4];
        if (early) {
          take_rows<bits>(values, squared, rows, normed, norm_weight);
        }
        int coming = now + early, k = (begin + between * coming) * step;
        load_rows<per, bits>(
            rows, x, norm_weight, k, row, coming < own_steps && k + depth < K ? filled : 0, K, lane);
        if (!early) {
          take_rows<bits>(values, squared, rows, normed, norm_weight);
        }
        // The sums of x over a group, for the biases.
        sum_fragment added[fragments];
#pragma unroll
        for (int f = 0; f < (mode == AFFINE ? fragments : 0); f++) {
          sum_columns<run / 4>(added[f], values + f * (run / 4));
        }
#pragma unroll
        for (int r = 0; r < tiles; r++) {
          if (mode == NVFP4) {
            multiply_tile<T, fragments, mode>(totals[r], tile[r], d, values, quarter);
          } else {
            sum_fragment sums[fragments];
            multiply_tile<T, fragments, mode>(sums, tile[r], d, values, quarter);
            int from = now % held * slots + quarter * slots / 4;
            add_scaled<T, fragments, mode, (slots < 4)>(totals[r], sums, added, tile[r], from, lane);
          }
          load_words_of(tile[r], d, next_at, next < own_steps && next_at * step + offset < K, reading);
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < tiles; r++) {
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      threadgroup float* to = parts + (part * all + above + r) * 16 * columns + 8 * f;
      store_sum<float>(totals[r][f], to, columns, lane);
    }
  }
  if (normed && above == 0) {
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      store_squares(squares + part * columns + 8 * f, squared[f], lane);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // A thread finishes an element: row n of the tiles or, with a gate, of every other tile. With a deferred norm
  // whole SIMD groups run the loop, since sixteen threads add up the squares of a tile.
  const int height = gate ? 8 * all : 16 * all, joined = gate ? 2 : 1, elements = height * M;
  for (int i = thread_index; i < (deferred_weight ? (elements + 31) / 32 * 32 : elements); i += threads) {
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
    for (int j = 0; j < simds_k * slots * joined; j++) {
      int from = (j / slots % simds_k * all + r + j / (slots * simds_k)) * 16 + n % 16;
      sums[j / (slots * simds_k)] +=
          factor * parts[from * columns + m / per * 8 + m % per + j % slots * per];
    }
    tile_place place = place_of_tile<gate, 16>(threadgroup_index * all + r, sizes, w1, w2);
    int to = place.first + n % 16, which = place.matrix, N = which == 0 ? sizes[0] : which == 1 ? sizes[1] : sizes[2];
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
