// qmm_skinny: 9 to 128 rows times up to three quantized matrices, each read once for all rows:
//
//   y_i (M, N_i) = x (M, K) * w_i^T + bias_i,   or   gate(y_0) * y_1,   or   y_0 + residual
//
// where x, and what y goes through next, may be part of a deferred norm as in qmv_matrix. Or it `rounds` in turn.
//
// The packed weights are the left operand, dequantized to T in registers. A threadgroup has `simds_n` times
// `simds_k` SIMD groups, each with `tiles` tiles of 16 rows of w; those with one index along K read every
// simds_k-th block of `block_tiles` K tiles, each of 4 * run elements of K. The four lanes of a row load the
// scales of a block and exchange them. The loop is unrolled by `ahead` K tiles; with 2 the next words go to
// registers of their own, with 1 they are moved.
//
// x lies in threadgroup memory in the order of operands: each lane reads what the same lane of another SIMD
// group wrote. With two `stages` of `stage_tiles` K tiles one is filled while the other is multiplied. With
// none, `stage_tiles` of x are persistent: no barrier follows, and `ahead` K tiles of w are in flight. A
// longer K is split among threadgroups along z, which write float32 planes for qmm_skinny_sum. With
// `warpgroup`, on GPUs that multiply with four SIMD groups at once (see tile.metal), x is stored as a tile.
// At the end the sums of the SIMD groups along K are added, at least 8 * chunk columns at a time.
//
//   grid (threads * ceil(M / (8 * fragments)), ceil(all tiles / (tiles * simds_n)), splits of K),
//   threadgroup (threads, 1, 1) where threads = 32 * simds_n * simds_k
//
// The four lanes of a row of w take `run` elements each of a K tile; run divides K and the group size, in
// NVFP4 it may be several groups. `fragments` right operands of 8 columns hold the rows of x. Further rows
// belong to other threadgroups, neighbours in the grid, so that w is read from device memory once.

#include "qmm_skinny_steps.metal"
#include "common/tile_products.metal"

#include <metal_stdlib>
using namespace metal;

// Threadgroup memory for the sums of `chunk` fragments, in units of 16 bytes.
#define SKINNY_SUMS(rows, simds_k, chunk) (((simds_k) * (rows) * (8 * (chunk) + 2) + 3) / 4)

template <
    typename T,
    typename S,
    int mode,
    int group,
    int bits,
    int gate,
    bool rounds,
    bool normed,
    int epsilon,
    int fragments,
    int run,
    int tiles,
    int simds_n,
    int simds_k,
    int stages,
    int ahead,
    int stage_tiles,
    int chunk,
    int block_tiles,
    bool warpgroup,
    int RESIDENT,
    int SHARED,
    typename O>
[[kernel]] void qmm_skinny(
    const device T* x,
    const constant int* x_shape,
    const constant int& x_ndim,
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
    device O* y,
    device T* y1,
    device T* y2,
    device T* scaled,
    device float* scaled_squares,
    uint3 threadgroup_place [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int step = 4 * run, all = simds_n * tiles, simds = simds_n * simds_k, threads = 32 * simds;
  constexpr int count = mode == NVFP4 ? run / 16 : 1, units = (stage_tiles * fragments + simds_n - 1) / simds_n;
  constexpr int k_tile_size = fragments * run * 4, stage_size = stage_tiles * k_tile_size;
  constexpr bool persistent = stages == 0;
  constexpr int places = persistent ? 1 : stages, slots = persistent ? ahead : 2;
  constexpr int x_size = persistent ? stage_size : simds_k * stages * stage_size;
  constexpr int least = SKINNY_SUMS(16 * all, simds_k, chunk), size = x_size > least ? x_size : least;
  constexpr bool split = !is_same_v<O, T>;
  const int K = w_shape[1] * 32 / bits, from = persistent ? threadgroup_place.z * stage_tiles * step : 0;
  const int groups = (K - from) / group, end = split ? min(K, from + stage_tiles * step) : K;
  const int threadgroup_index = threadgroup_place.y, above = threadgroup_place.x * 8 * fragments;
  int M = 1;
#pragma clang loop unroll(disable)
  for (int i = 0; i < x_ndim - 1; i++) {
    M *= x_shape[i];
  }
  const size_t plane = size_t(threadgroup_place.z) * M;
  M = min(M - above, 8 * fragments);
  x += size_t(above) * K;
  const int sizes[3] = {w_shape[0], w1 ? w1_shape[0] : 0, w2 ? w2_shape[0] : 0};
  // K tiles must be whole panels of a tile.
  constexpr bool by_warpgroup = warpgroup && uses_warpgroup<T>(simds_n, 1, step, step);
  threadgroup tile_packs<persistent ? declared_packs(size) : size> packs;
  threadgroup uint4* memory = persistent ? all_packs(packs) : packs.pack;
  threadgroup float factors[8 * fragments];

  constexpr bool even_steps = stage_tiles % (block_tiles * simds_k * ahead) == 0;
  const int simd_n = simd % simds_n, simd_k = simd / simds_n, quarter = fragment_col(lane) / 2;
  const int offset = quarter * run, blocks = (K + block_tiles * step - 1) / (block_tiles * step);
  const int steps =
      persistent && even_steps ? stage_tiles / simds_k : (blocks + simds_k - 1) / simds_k * block_tiles;
  const bool odd = begins_odd(w) || begins_odd(w1) || begins_odd(w2);
  threadgroup uint4* own = memory + simd_k * stages * stage_size;
  packed_tile<S, bits, run, slots, count> tile[tiles] = {};
  sum_fragment totals[tiles][fragments] = {};
  // Operands that are loaded at a time: more SIMD groups have fewer registers.
  constexpr int some_units = simds > 16 ? 2 : 4;
  row_k_tile<T, run> held[persistent ? some_units : units];
  // Without split-K the norm is that of the whole row.
  constexpr bool early_squares = persistent && !split;
  row_squares<simds, 8 * fragments, early_squares ? (stage_tiles * step / 16 + 31) / 32 : 1> squares;
  if (persistent) {
    // Loaded before words of w, behind which they would wait in the memory queue.
    fetch_some<some_units, simds, bits, stage_tiles, T, fragments>(held, x, simd, from, M, K, lane);
  }
  if (early_squares && partial_squares) {
    fetch_squares(squares, partial_squares + size_t(above) * ((K + 15) / 16), M, (K + 15) / 16, simd, lane);
  }
#pragma unroll
  for (int r = 0; r < tiles; r++) {
    tile_place place =
        place_of_tile<gate, 16>(threadgroup_index * all + simd_n * tiles + r, sizes, w1, w2);
    int m = place.matrix, rows = m == 0 ? sizes[0] : m == 1 ? sizes[1] : sizes[2];
    tile[r].matrix.w = m == 0 ? w : m == 1 ? w1 : w2;
    tile[r].matrix.scales = m == 0 ? scales : m == 1 ? scales1 : scales2;
    tile[r].matrix.biases = m == 0 ? biases : m == 1 ? biases1 : biases2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // Beyond the edge of a matrix its last row is repeated.
      uint row = min(place.first + fragment_row(lane) + 8 * i, rows - 1);
      tile[r].words_at[i] = row * (K / 16 * bits / 2) + (from / run + quarter) * (run * bits / 32);
      tile[r].numbers_at[i] = row * (K / group) + from / group;
    }
    int group_at = first_group<block_tiles, simds_k, 4 * run, group>(0, simd_k, quarter);
#pragma unroll
    for (int d = 0; d < (persistent ? ahead : 1); d++) {
      int k_tile = k_tile_of<block_tiles, simds_k>(d, simd_k);
      load_k_tile(tile[r], d, k_tile, from + k_tile * step + offset < end, odd);
    }
    load_numbers_of<mode>(tile[r], group_at, group_at < groups);
  }
  if (!persistent) {
    fetch_operands<simds_n, bits, stage_tiles, block_tiles, simds_k, T, fragments>(
        held, x, 0, simd_k, simd_n, M, K, lane);
  }
  if (!early_squares && partial_squares) {
    row_factors<simds>(
        factors, partial_squares + size_t(above) * ((K + 15) / 16), M, K, as_type<float>(epsilon), simd, lane);
  }
  if (persistent) {
#pragma clang loop unroll(disable)
    for (int first = simd; first < stage_tiles * fragments; first += some_units * simds) {
      if (first >= some_units * simds) {
        fetch_some<some_units, simds, bits, stage_tiles, T, fragments>(held, x, first, from, M, K, lane);
      }
      place_some<some_units, simds, bits, stage_tiles, by_warpgroup, T, fragments>(memory, held, first, lane);
    }
    if (early_squares && partial_squares) {
      factors_of_squares(factors, squares, M, K, as_type<float>(epsilon), simd, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // One loop for each alignment of words; one of them runs.
#pragma unroll
    for (int reading = 0; reading < READINGS; reading++) {
#pragma clang loop unroll(disable)
      for (int begin = 0; begin < (reading == odd ? steps : 0); begin += ahead) {
#pragma unroll
        for (int d = 0; d < ahead; d++) {
          int i = begin + d, k_tile = k_tile_of<block_tiles, simds_k>(i, simd_k);
          if (!even_steps && k_tile >= stage_tiles) {
            break;
          }
#pragma unroll
          for (int r = 0; r < tiles; r++) {
            if (i % block_tiles == 0) {
              take_next_numbers(tile[r]);
              int first = first_group<block_tiles, simds_k, 4 * run, group>(i + block_tiles, simd_k, quarter);
              load_numbers_of<mode>(tile[r], first, first < groups);
            }
          }
          multiply_k_tile<T, fragments, mode, tiles, (block_tiles > 1), by_warpgroup>(
              totals, tile, d, (i % block_tiles * 4 + quarter) / block_tiles, memory + k_tile * k_tile_size, lane);
          int next = k_tile_of<block_tiles, simds_k>(i + ahead, simd_k);
#pragma unroll
          for (int r = 0; r < tiles; r++) {
            load_k_tile(tile[r], d, next, from + next * step + offset < end, reading);
          }
        }
      }
    }
  } else {
    place_operands<simds_n, bits, stage_tiles, by_warpgroup, T, fragments>(own, held, simd_n, lane);
    // An operand that is written to threadgroup memory one step early is fetched two steps early.
    constexpr int early = stages == 2 ? 2 : 1;
    if (early == 2) {
      fetch_operands<simds_n, bits, stage_tiles, block_tiles, simds_k, T, fragments>(
          held, x, stage_tiles, simd_k, simd_n, M, K, lane);
    }
    barrier_of_some<simds_n>(simd_k);
#pragma clang loop unroll(disable)
    for (int begin = 0; begin < steps; begin += ahead) {
#pragma unroll
      for (int d = 0; d < ahead; d++) {
        int i = begin + d, next = k_tile_of<block_tiles, simds_k>(i + 1, simd_k);
        if (i >= steps) {
          break;
        }
        // Before the loads, if show_to_products would wait for those too.
        threadgroup uint4* other = own + (i / stage_tiles + 1) % places * stage_size;
        const bool begins = i % stage_tiles == 0;
        if (stages == 2 && by_warpgroup && begins) {
          place_operands<simds_n, bits, stage_tiles, by_warpgroup, T, fragments>(other, held, simd_n, lane);
        }
#pragma unroll
        for (int r = 0; r < tiles; r++) {
          if (i % block_tiles == 0) {
            take_next_numbers(tile[r]);
            int first = first_group<block_tiles, simds_k, 4 * run, group>(i + block_tiles, simd_k, quarter);
            load_numbers_of<mode>(tile[r], first, first < groups);
          }
          load_k_tile(tile[r], 1 - d, next, next * step + offset < K, odd);
        }
        if (stages == 2 && !by_warpgroup && begins) {
          place_operands<simds_n, bits, stage_tiles, by_warpgroup, T, fragments>(other, held, simd_n, lane);
        }
        if (begins) {
          fetch_operands<simds_n, bits, stage_tiles, block_tiles, simds_k, T, fragments>(
              held, x, i + early * stage_tiles, simd_k, simd_n, M, K, lane);
        }
        multiply_k_tile<T, fragments, mode, tiles, (block_tiles > 1), by_warpgroup>(
            totals,
            tile,
            d,
            (i % block_tiles * 4 + quarter) / block_tiles,
            own + i / stage_tiles % places * stage_size + i % stage_tiles * k_tile_size,
            lane);
        const bool ends = i % stage_tiles == stage_tiles - 1;
        if (ends) {
          barrier_of_some<simds_n>(simd_k);
        }
        if (stages == 1 && ends) {
          place_operands<simds_n, bits, stage_tiles, by_warpgroup, T, fragments>(own, held, simd_n, lane);
          barrier_of_some<simds_n>(simd_k);
        }
        if (ahead == 1) {
#pragma unroll
          for (int r = 0; r < tiles; r++) {
            take_next_words(tile[r]);
          }
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // The fragments of sums that fit at a time; padding of two floats avoids bank conflicts.
  constexpr int fitting = (size * 4 / (simds_k * all * 16) - 2) / 8;
  constexpr int most = fitting < fragments ? fitting : fragments, stride = 8 * most + 2;
  constexpr int height = gate ? 8 * all : 16 * all, joined = gate ? 2 : 1;
  threadgroup float* parts = reinterpret_cast<threadgroup float*>(memory);
  for (int first = 0; 8 * first < M; first += most) {
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      if (f >= first && f < first + most) {
#pragma unroll
        for (int r = 0; r < tiles; r++) {
          threadgroup float* to = parts + ((simd_k * all + simd_n * tiles + r) * 16) * stride;
          store_sum<float>(totals[r][f], to + 8 * (f - first), stride, lane);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // A thread finishes an element, as in qmv_matrix; residuals and weights of `some` elements are loaded at
    // once. If `even`, all elements of a thread belong to one row of w.
    constexpr bool even = threads % height == 0;
    constexpr int some = 4;
    const int thread_index = simd * 32 + lane, columns = min(8 * most, M - 8 * first);
    const int elements = height * columns;
    const int bound = deferred_weight ? (elements + 31) / 32 * 32 : elements;
    for (int start = thread_index; start < bound; start += some * threads) {
      T added[some], weights[some];
#pragma unroll
      for (int u = 0; u < some; u++) {
        int i = start + u * threads, n = (even ? thread_index : i) % height;
        int m = above + 8 * first + min(i / height, columns - 1);
        int to = min(threadgroup_index * 16 * all + n, sizes[0] - 1);
        added[u] = residual ? residual[size_t(m) * sizes[0] + to] : T(0.0f);
        weights[u] = deferred_weight ? deferred_weight[to] : T(0.0f);
      }
#pragma unroll
      for (int u = 0; u < some; u++) {
        int i = start + u * threads;
        if (i >= bound) {
          break;
        }
        int n = (even ? thread_index : i) % height, column = min(i / height, columns - 1);
        int m = 8 * first + column;
        int r = n / 16 * joined;
        float factor = left_of_weights<T, S, mode, bits>(), sums[2] = {0, 0}, square = 0;
        if (partial_squares) {
          factor *= factors[m];
        }
#pragma unroll
        for (int j = 0; j < joined; j++) {
#pragma unroll
          for (int s = 0; s < simds_k; s++) {
            sums[j] += parts[((s * all + r + j) * 16 + n % 16) * stride + column];
          }
          sums[j] *= factor;
        }
        tile_place place = place_of_tile<gate, 16>(threadgroup_index * all + r, sizes, w1, w2);
        int to = place.first + n % 16, which = place.matrix;
        int N = which == 0 ? sizes[0] : which == 1 ? sizes[1] : sizes[2];
        size_t at = size_t(above + m) * N + to;
        if (split && to < N && i < elements) {
          reinterpret_cast<device float*>(y)[plane * N + at] = sums[0];
        } else if (to < N && i < elements) {
          device T* out = which == 0 ? reinterpret_cast<device T*>(y) : which == 1 ? y1 : y2;
          const device T* bias_of = which == 0 ? bias : which == 1 ? bias1 : bias2;
          T result = rounds ? rounded_in_turn<T, gate>(sums[0], sums[1], to, bias_of, bias1, residual, added[u])
                            : finished<T, gate>(sums[0] + float(added[u]), sums[1], to, at, bias_of, bias1, nullptr);
          out[at] = result;
          if (deferred_weight) {
            scaled[at] = T(float(result) * float(weights[u]));
            square = float(result) * float(result);
          }
        }
        if (deferred_weight) {
#pragma unroll
          for (ushort apart = 8; apart > 0; apart /= 2) {
            square += simd_shuffle_xor(square, apart);
          }
          if (n % 16 == 0 && place.first < N && i < elements) {
            scaled_squares[(above + m) * ((N + 15) / 16) + place.first / 16] = square;
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// y = the sum of planes (parts, M, N), with the epilogue of qmm_skinny.
//
//   grid (ceil(N / 32) * 32, M, 1), threadgroup (32 * n, 1, 1)
template <typename T, bool rounds>
[[kernel]] void qmm_skinny_sum(
    const device float* planes,
    const constant int* planes_shape,
    const device T* bias,
    const device T* residual,
    const device T* deferred_weight,
    device T* y,
    device T* scaled,
    device float* scaled_squares,
    uint3 id [[thread_position_in_grid]]) {
  const int parts = planes_shape[0], M = planes_shape[1], N = planes_shape[2], n = id.x;
  const size_t at = size_t(id.y) * N + n;
  float sum = 0, square = 0;
  if (n < N) {
    for (int z = 0; z < parts; z++) {
      sum += planes[size_t(z) * M * N + at];
    }
    T result = rounds ? rounded_in_turn<T, 0>(sum, 0.0f, n, bias, nullptr, residual, residual ? residual[at] : T(0))
                      : finished<T, 0>(sum, 0.0f, n, at, bias, nullptr, residual);
    y[at] = result;
    if (deferred_weight) {
      scaled[at] = T(float(result) * float(deferred_weight[n]));
      square = float(result) * float(result);
    }
  }
  if (deferred_weight) {
#pragma unroll
    for (ushort apart = 8; apart > 0; apart /= 2) {
      square += simd_shuffle_xor(square, apart);
    }
    if (n % 16 == 0 && n < N) {
      scaled_squares[id.y * ((N + 15) / 16) + n / 16] = square;
    }
  }
}
