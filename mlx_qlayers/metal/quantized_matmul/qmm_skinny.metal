// qmm_skinny: 9 to 128 rows times up to three quantized matrices, each read once for all rows:
//
//   y_i (M, N_i) = x (M, K) * w_i^T + bias_i,   or   gate(y_0) * y_1,   or   y_0 + residual
//
// where x, and what y goes through next, may be part of a deferred norm as in qmv_matrix.
//
// The packed weights are the left operand, unpacked and rounded to T in registers. A threadgroup has
// `shares` times `sides` SIMD groups, each with `tiles` tiles of 16 rows of w. Those of one share
// read every shares-th window of 4 * run elements of K, and read x from threadgroup memory, where it
// lies as operands: each lane reads what that lane of another SIMD group wrote. With two `stages`
// one is filled while the other is multiplied. In the end shares are added, in as many columns at a
// time as the same memory takes.
//
//   grid (threads * ceil(M / (8 * fragments)), ceil(tiles in all / (tiles * sides)), 1),
//   threadgroup (threads, 1, 1) where threads = 32 * sides * shares
//
// The four lanes that share a row of w take `run` elements each of a window, which divides K and the
// group size, in NVFP4 of several groups. `fragments` right operands of 8 columns hold the rows of x;
// further rows are those of other threadgroups,
// neighbours in the grid, so that w is read from memory once.

#include "qmv_matrix_steps.metal"

#include <metal_stdlib>
using namespace metal;

// Threadgroup memory in units of 16 bytes: of x, and of the least that sums take.
#define SKINNY_X(fragments, run, shares, stages) ((shares) * (stages) * (fragments) * (run) * 4)
#define SKINNY_SUMS(rows, shares) ((shares) * (rows) * 10 / 4)

// Two weights of a row, rounded to T once.
template <typename T, int mode, int bits>
METAL_FUNC metal::vec<T, 2> dequantized_pair(
    const thread uint* halves, int i, float scale, float bias) {
  if (mode != AFFINE) {
    float factor = sum_factor<mode>() * scale;
    return metal::vec<T, 2>(float2(weight_pair<T, mode, bits>(halves, i, 0, 1.0f)) * factor);
  }
  // What is added and taken away here leaves integers up to 255, which are exact.
  T offset = T(-code_offset<T, bits>()), factor = T(byte_factor<T, mode, bits>());
  metal::vec<T, 2> code = metal::vec<T, 2>(offset, offset);
#pragma unroll
  for (int part = PARTS(T, mode, bits) - 1; part >= 0; part--) {
    metal::vec<T, 2> next = weight_pair<T, mode, bits>(halves, i, part, 1.0f);
    code = fused_pair(next, metal::vec<T, 2>(factor, factor), code);
  }
  T times = T(scale), added = T(bias);
  return fused_pair(code, metal::vec<T, 2>(times, times), metal::vec<T, 2>(added, added));
}

// Every sides-th operand of a window of x, from element k of its rows on.
template <int sides, int bits, typename T, int fragments, int run>
METAL_FUNC void fetch_operands(
    thread loaded_run<T, run / 4>* held, const device T* x, int k, int side, int M, int K, uint lane) {
  const int depth = right_depth(lane, 0) % 8 / 2 * run;
#pragma unroll
  for (int u = 0; u < (fragments + sides - 1) / sides; u++) {
    int f = side + u * sides;
    if (f < fragments) {
      load_run<PAIRS(bits, run)>(
          held[u], x, 8 * f * K + k, K, run, k + depth < K ? max(M - 8 * f, 0) : 0, lane);
    }
  }
}
template <int sides, int bits, typename T, int fragments, int run>
METAL_FUNC void place_operands(
    threadgroup uint4* stage, thread loaded_run<T, run / 4>* held, int side, uint lane) {
#pragma unroll
  for (int u = 0; u < (fragments + sides - 1) / sides; u++) {
    int f = side + u * sides;
    if (f < fragments) {
      right_fragment<T> values[run / 4];
      weave<PAIRS(bits, run)>(values, held[u]);
#pragma unroll
      for (int t = 0; t < run / 8; t++) {
        stage[(f * (run / 8) + t) * 32 + lane] = uint4(
            as_type<uint>(values[2 * t].part[0]),
            as_type<uint>(values[2 * t].part[1]),
            as_type<uint>(values[2 * t + 1].part[0]),
            as_type<uint>(values[2 * t + 1].part[1]));
      }
    }
  }
}

// What an RMS norm multiplies each row of K elements with, from the squares of its tiles. Four rows at
// a time, so that a SIMD group waits for memory once for all of them.
template <int simds>
METAL_FUNC void row_factors(
    threadgroup float* factors,
    const device float* squares,
    int M,
    int K,
    float epsilon,
    int simd,
    uint lane) {
  const int tiles = (K + 15) / 16;
  for (int m = simd; m < M; m += 4 * simds) {
    float totals[4] = {0, 0, 0, 0};
    for (int j = lane; j < tiles; j += 32) {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        totals[r] += squares[min(m + r * simds, M - 1) * tiles + j];
      }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      float factor = metal::precise::rsqrt(simd_sum(totals[r]) / float(K) + epsilon);
      if (lane == 0 && m + r * simds < M) {
        factors[m + r * simds] = factor;
      }
    }
  }
}

// The words of a window, a step before they are multiplied.
template <typename S, int bits, int run, int ahead, int count>
METAL_FUNC void load_window(
    thread packed_tile<S, bits, run, ahead, count>& tile, int d, int window, bool inside, bool odd) {
  if (odd) {
    load_words_of(tile, d, window, inside, true);
  } else {
    load_words_of(tile, d, window, inside, false);
  }
}

// totals += the windows d of the tiles, times x.
template <
    typename T, int fragments, int mode, int tiles, typename S, int bits, int run, int ahead, int count>
METAL_FUNC void multiply_window(
    thread sum_fragment (&totals)[tiles][fragments],
    thread packed_tile<S, bits, run, ahead, count> (&tile)[tiles],
    int d,
    const threadgroup uint4* stage,
    uint lane) {
  const int span = SPAN(bits), pairs = PAIRS(bits, run);
#pragma unroll
  for (int t = 0; t < run / 4; t += 2) {
    left_fragment<T> left[2][tiles];
#pragma unroll
    for (int r = 0; r < tiles; r++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        // The numbers of the run, in NVFP4 of 16 elements of it.
        uint number = tile[r].numbers[i][mode == NVFP4 ? t / 4 : 0];
        number_parts<S> parts = as_type<number_parts<S>>(number);
        float scale = decoded_scale<mode>(parts.x), bias = mode == AFFINE ? float(parts.y) : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          uint halves[span];
          pair_halves<span>(halves, tile[r].words[d][i] + (t + e) / (pairs / 2) * span);
#pragma unroll
          for (int p = 0; p < 2; p++) {
            left[e][r].part[2 * p + i] = dequantized_pair<T, mode, bits>(
                halves, (t + e) % (pairs / 2) * 2 + p, scale, bias);
          }
        }
      }
    }
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      uint4 both = stage[(f * (run / 8) + t / 2) * 32 + lane];
      right_fragment<T> right[2];
      right[0].part[0] = as_type<metal::vec<T, 2>>(both.x);
      right[0].part[1] = as_type<metal::vec<T, 2>>(both.y);
      right[1].part[0] = as_type<metal::vec<T, 2>>(both.z);
      right[1].part[1] = as_type<metal::vec<T, 2>>(both.w);
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int r = 0; r < tiles; r++) {
          multiply_accumulate(totals[r][f], left[e][r], right[e]);
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
    int sides,
    int shares,
    int stages,
    int RESIDENT>
[[kernel]] void qmm_skinny(
    const device T* x,
    const constant int* x_shape,
    const constant int& x_ndim,
    const device float* tile_squares,
    const device T* residual,
    const device T* next_weight,
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
    uint3 threadgroup_place [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int step = 4 * run, all = sides * tiles, simds = sides * shares, threads = 32 * simds;
  constexpr int count = mode == NVFP4 ? run / 16 : 1, units = (fragments + sides - 1) / sides;
  constexpr int stage_size = SKINNY_X(fragments, run, 1, 1), x_size = shares * stages * stage_size;
  constexpr int least = SKINNY_SUMS(16 * all, shares), size = x_size > least ? x_size : least;
  const int K = w_shape[1] * 32 / bits, groups = K / group;
  const int threadgroup_index = threadgroup_place.y, above = threadgroup_place.x * 8 * fragments;
  int M = 1;
#pragma clang loop unroll(disable)
  for (int i = 0; i < x_ndim - 1; i++) {
    M *= x_shape[i];
  }
  M = min(M - above, 8 * fragments);
  x += size_t(above) * K;
  const int sizes[3] = {w_shape[0], w1 ? w1_shape[0] : 0, w2 ? w2_shape[0] : 0};
  threadgroup uint4 memory[size];
  threadgroup float factors[8 * fragments];

  const int side = simd % sides, share = simd / sides, quarter = fragment_col(lane) / 2;
  const int offset = quarter * run, windows = (K + step - 1) / step;
  const int steps = (windows + shares - 1) / shares;
  const bool odd = begins_odd(w) || begins_odd(w1) || begins_odd(w2);
  threadgroup uint4* own = memory + share * stages * stage_size;
  packed_tile<S, bits, run, 2, count> tile[tiles] = {};
  sum_fragment totals[tiles][fragments] = {};
#pragma unroll
  for (int r = 0; r < tiles; r++) {
    tile_place place =
        place_of_tile<gate, 16>(threadgroup_index * all + side * tiles + r, sizes, w1, w2);
    int m = place.matrix, rows = m == 0 ? sizes[0] : m == 1 ? sizes[1] : sizes[2];
    tile[r].matrix.w = m == 0 ? w : m == 1 ? w1 : w2;
    tile[r].matrix.scales = m == 0 ? scales : m == 1 ? scales1 : scales2;
    tile[r].matrix.biases = m == 0 ? biases : m == 1 ? biases1 : biases2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // At the edge of a matrix its last row stands in.
      uint row = min(place.first + fragment_row(lane) + 8 * i, rows - 1);
      tile[r].words_at[i] = row * (K / 16 * bits / 2) + quarter * (run * bits / 32);
      tile[r].numbers_at[i] = row * groups;
    }
    int k = share * step + offset;
    load_window(tile[r], 0, share, k < K, odd);
    load_numbers_of<mode>(tile[r], k / group, k < K);
  }
  loaded_run<T, run / 4> held[units];
  fetch_operands<sides, bits, T, fragments, run>(held, x, share * step, side, M, K, lane);
  if (tile_squares) {
    row_factors<simds>(
        factors, tile_squares + size_t(above) * ((K + 15) / 16), M, K, as_type<float>(epsilon), simd, lane);
  }
  place_operands<sides, bits, T, fragments, run>(own, held, side, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = 0; i < steps; i += 2) {
#pragma unroll
    for (int d = 0; d < 2; d++) {
      if (i + d >= steps) {
        break;
      }
      int next = share + (i + d + 1) * shares, k = next * step + offset;
#pragma unroll
      for (int r = 0; r < tiles; r++) {
        take_next_numbers(tile[r]);
        load_numbers_of<mode>(tile[r], k / group, k < K);
        load_window(tile[r], 1 - d, next, k < K, odd);
      }
      fetch_operands<sides, bits, T, fragments, run>(held, x, next * step, side, M, K, lane);
      multiply_window<T, fragments, mode, tiles>(
          totals, tile, d, own + (stages == 2 ? d * stage_size : 0), lane);
      if (stages == 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      place_operands<sides, bits, T, fragments, run>(
          own + (stages == 2 ? (1 - d) * stage_size : 0), held, side, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  // So many fragments of all sums at a time; two floats more keep rows apart in banks.
  constexpr int fitting = (size * 4 / (shares * all * 16) - 2) / 8;
  constexpr int chunk = fitting < fragments ? fitting : fragments, stride = 8 * chunk + 2;
  constexpr int height = gate ? 8 * all : 16 * all, joined = gate ? 2 : 1;
  threadgroup float* parts = reinterpret_cast<threadgroup float*>(memory);
  for (int first = 0; 8 * first < M; first += chunk) {
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      if (f >= first && f < first + chunk) {
#pragma unroll
        for (int r = 0; r < tiles; r++) {
          threadgroup float* to = parts + ((share * all + side * tiles + r) * 16) * stride;
          store_sum<float>(totals[r][f], to + 8 * (f - first), stride, lane);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // A thread finishes an element, as in qmv_matrix.
    int elements = height * min(8 * chunk, M - 8 * first);
    int bound = next_weight ? (elements + 31) / 32 * 32 : elements;
    for (int i = simd * 32 + lane; i < bound; i += threads) {
      int n = i % height, column = min(i, elements - 1) / height, m = 8 * first + column;
      int r = n / 16 * joined;
      float factor = tile_squares ? factors[m] : 1.0f, sums[2] = {0, 0}, square = 0;
#pragma unroll
      for (int j = 0; j < joined; j++) {
#pragma unroll
        for (int s = 0; s < shares; s++) {
          sums[j] += parts[((s * all + r + j) * 16 + n % 16) * stride + column];
        }
        sums[j] *= factor;
      }
      tile_place place = place_of_tile<gate, 16>(threadgroup_index * all + r, sizes, w1, w2);
      int to = place.first + n % 16, which = place.matrix;
      int N = which == 0 ? sizes[0] : which == 1 ? sizes[1] : sizes[2];
      if (to < N && i < elements) {
        device T* out = which == 0 ? y : which == 1 ? y1 : y2;
        size_t at = size_t(above + m) * N + to;
        T result = finished<T, gate>(
            sums[0],
            sums[1],
            to,
            at,
            which == 0 ? bias : which == 1 ? bias1 : bias2,
            bias1,
            residual);
        out[at] = result;
        if (next_weight) {
          scaled[at] = T(float(result) * float(next_weight[to]));
          square = float(result) * float(result);
        }
      }
      if (next_weight) {
#pragma unroll
        for (ushort apart = 8; apart > 0; apart /= 2) {
          square += simd_shuffle_xor(square, apart);
        }
        if (n % 16 == 0 && place.first < N && i < elements) {
          scaled_squares[(above + m) * ((N + 15) / 16) + place.first / 16] = square;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
