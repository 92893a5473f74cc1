// The steps of qmm_skinny: rows of x become operands in threadgroup memory; K tiles of the packed matrix
// are loaded, dequantized and multiplied with them.

#include "common/operands.metal"
#include "qmv_matrix_steps.metal"

#include <metal_stdlib>
using namespace metal;

// Codes without an offset are subnormal bfloats, 2^133 times too small. If these are multiplied exactly, scales
// have the factor 2^101, since 2^133 would overflow, biases the factor 2^-32, and sums 2^32 at the end.
template <typename T, typename S, int mode, int bits>
constexpr bool codes_are_numbers() {
  return EXACT_BELOW_NORMAL && mode == AFFINE && bits < 8 && is_same_v<T, bfloat> && is_same_v<S, T>;
}
template <typename T, typename S, int mode, int bits>
METAL_FUNC float left_of_weights() {
  return codes_are_numbers<T, S, mode, bits>() ? 4294967296.0f : 1.0f;
}

// Two weights of a row, rounded to T once.
template <typename T, int mode, int bits, typename S>
METAL_FUNC metal::vec<T, 2> dequantized_pair(
    const thread uint* halves, int i, number_parts<S> number) {
  if (mode != AFFINE) {
    float factor = sum_factor<mode>() * decoded_scale<mode>(number.x);
    return metal::vec<T, 2>(float2(weight_pair<T, mode, bits>(halves, i, 0, 1.0f)) * factor);
  }
  T times = T(number.x), added = T(number.y);
  if (codes_are_numbers<T, S, mode, bits>()) {
    metal::vec<T, 2> code = as_type<metal::vec<T, 2>>(code_pair<bits>(halves, bits * i, 0, 0));
    return fused_pair(code, metal::vec<T, 2>(times, times), metal::vec<T, 2>(added, added));
  }
  // Adding and subtracting the offset leaves integers up to 255, which are exact.
  T offset = T(-code_offset<T, bits>()), factor = T(byte_factor<T, mode, bits>());
  metal::vec<T, 2> code = metal::vec<T, 2>(offset, offset);
#pragma unroll
  for (int part = PARTS(T, mode, bits) - 1; part >= 0; part--) {
    metal::vec<T, 2> next = weight_pair<T, mode, bits>(halves, i, part, 1.0f);
    code = fused_pair(next, metal::vec<T, 2>(factor, factor), code);
  }
  return fused_pair(code, metal::vec<T, 2>(times, times), metal::vec<T, 2>(added, added));
}

// K tile i of the SIMD groups simd_k: blocks of `block_tiles` K tiles are interleaved among simds_k.
template <int block_tiles, int simds_k>
METAL_FUNC int k_tile_of(int i, int simd_k) {
  return (i / block_tiles * simds_k + simd_k) * block_tiles + i % block_tiles;
}

// The group whose scales a lane loads for the block that begins with K tile i.
template <int block_tiles, int simds_k, int step, int group>
METAL_FUNC int first_group(int i, int simd_k, int quarter) {
  int k_tile = k_tile_of<block_tiles, simds_k>(i, simd_k);
  return block_tiles > 1 ? k_tile / block_tiles * 4 + quarter : (k_tile * step + quarter * (step / 4)) / group;
}

// Every simds_n-th operand of x in `stage_tiles` K tiles of the SIMD groups simd_k, from K tile i on.
template <int simds_n, int bits, int stage_tiles, int block_tiles, int simds_k, typename T, int fragments, int run>
METAL_FUNC void fetch_operands(
    thread row_k_tile<T, run>* held,
    const device T* x,
    int i,
    int simd_k,
    int simd_n,
    int M,
    int K,
    uint lane) {
#pragma unroll
  for (int u = 0; u < (stage_tiles * fragments + simds_n - 1) / simds_n; u++) {
    int at = simd_n + u * simds_n, f = at % fragments;
    if (at < stage_tiles * fragments) {
      int k = k_tile_of<block_tiles, simds_k>(i + at / fragments, simd_k) * 4 * run;
      load_row_k_tile<PAIRS(bits, run)>(held[u], x + 8 * f * K, k, K, M - 8 * f, lane);
    }
  }
}
template <int simds_n, int bits, int stage_tiles, bool by_warpgroup, typename T, int fragments, int run>
METAL_FUNC void place_operands(
    threadgroup uint4* stage, thread row_k_tile<T, run>* held, int simd_n, uint lane) {
#pragma unroll
  for (int u = 0; u < (stage_tiles * fragments + simds_n - 1) / simds_n; u++) {
    int at = simd_n + u * simds_n, f = at % fragments;
    if (at < stage_tiles * fragments) {
      place_row_k_tile<PAIRS(bits, run), 8 * fragments, by_warpgroup>(
          stage + at / fragments * (fragments * run * 4), 8 * f, held[u], lane);
    }
  }
  if (by_warpgroup) {
    show_to_products();
  }
}

// With `stage_tiles` persistent K tiles: the `some` operands of a SIMD group, every simds-th from `first` on,
// of K tiles from element `from` on.
template <int some, int simds, int bits, int stage_tiles, typename T, int fragments, int run>
METAL_FUNC void fetch_some(
    thread row_k_tile<T, run>* held,
    const device T* x,
    int first,
    int from,
    int M,
    int K,
    uint lane) {
#pragma unroll
  for (int u = 0; u < some; u++) {
    int at = first + u * simds, f = at % fragments;
    if (at < stage_tiles * fragments) {
      int k = from + at / fragments * 4 * run;
      load_row_k_tile<PAIRS(bits, run)>(held[u], x + 8 * f * K, k, K, M - 8 * f, lane);
    }
  }
}
template <int some, int simds, int bits, int stage_tiles, bool by_warpgroup, typename T, int fragments, int run>
METAL_FUNC void place_some(
    threadgroup uint4* memory, thread row_k_tile<T, run>* held, int first, uint lane) {
#pragma unroll
  for (int u = 0; u < some; u++) {
    int at = first + u * simds, f = at % fragments;
    if (at < stage_tiles * fragments) {
      place_row_k_tile<PAIRS(bits, run), 8 * fragments, by_warpgroup>(
          memory + at / fragments * (fragments * run * 4), 8 * f, held[u], lane);
    }
  }
  if (by_warpgroup) {
    show_to_products();
  }
}

// The RMS norm factor of each row of K elements, from the partial sums of squares of its tiles. Four rows
// are read at a time, so that a SIMD group waits for memory once for all of them.
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
#pragma clang loop unroll(disable)
    for (int j = lane; j < tiles; j += 4 * 32) {
#pragma unroll
      for (int i = 0; i < 16; i++) {
        int r = i % 4, at = j + i / 4 * 32;
        totals[r] += at < tiles ? squares[min(m + r * simds, M - 1) * tiles + at] : 0.0f;
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

// The same for rows of at most 32 * count `tiles`, in two steps: loads first, sums later. Beyond the last tile
// there are zeros.
template <int simds, int rows, int count>
struct row_squares {
  float of[(rows + simds - 1) / simds][count];
};
template <int simds, int rows, int count>
METAL_FUNC void fetch_squares(
    thread row_squares<simds, rows, count>& held,
    const device float* squares,
    int M,
    int tiles,
    int simd,
    uint lane) {
#pragma unroll
  for (int r = 0; r < (rows + simds - 1) / simds; r++) {
    int m = simd + r * simds;
#pragma unroll
    for (int j = 0; j < count; j++) {
      int at = lane + 32 * j;
      held.of[r][j] = m < M && at < tiles ? squares[m * tiles + at] : 0.0f;
    }
  }
}
template <int simds, int rows, int count>
METAL_FUNC void factors_of_squares(
    threadgroup float* factors,
    thread row_squares<simds, rows, count>& held,
    int M,
    int K,
    float epsilon,
    int simd,
    uint lane) {
#pragma unroll
  for (int r = 0; r < (rows + simds - 1) / simds; r++) {
    float total = 0;
#pragma unroll
    for (int j = 0; j < count; j++) {
      total += held.of[r][j];
    }
    float factor = metal::precise::rsqrt(simd_sum(total) / float(K) + epsilon);
    if (lane == 0 && simd + r * simds < M) {
      factors[simd + r * simds] = factor;
    }
  }
}

// Loads the words of a K tile. READ_AHEAD prefetches what follows them in their rows: rows are read in
// pieces of run * bits / 2 bytes, one of each row after the other.
template <typename S, int bits, int run, int ahead, int count>
METAL_FUNC void load_k_tile(
    thread packed_tile<S, bits, run, ahead, count>& tile, int d, int k_tile, bool inside, bool odd) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (inside) {
      load_packs<RUN_WORDS(bits, run), READ_AHEAD>(
          tile.words[d][i], tile.matrix.w + (tile.words_at[i] + k_tile * (run * bits / 8)), odd);
    }
  }
}

template <typename S, int bits, int run, int ahead, int count>
METAL_FUNC void take_next_words(thread packed_tile<S, bits, run, ahead, count>& tile) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int word = 0; word < RUN_WORDS(bits, run); word++) {
      tile.words[0][i][word] = tile.words[ahead - 1][i][word];
    }
  }
}

// The scales and biases of a K tile, which lane `from` of each row holds if `handed`.
template <typename T, int mode, bool handed, typename S, int bits, int run, int ahead, int count>
METAL_FUNC void k_tile_numbers(
    thread uint* numbers,
    thread packed_tile<S, bits, run, ahead, count>& tile,
    int from,
    uint lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int c = 0; c < count; c++) {
      uint number = tile.numbers[i][c];
      number = handed ? from_row_lane(number, from, lane) : number;
      if (codes_are_numbers<T, S, mode, bits>()) {
        metal::vec<T, 2> factor = metal::vec<T, 2>(T(2.535301200456459e30f), T(2.3283064365386963e-10f));
        number = as_type<uint>(
            fused_pair(as_type<metal::vec<T, 2>>(number), factor, metal::vec<T, 2>(T(0), T(0))));
      }
      numbers[i * count + c] = number;
    }
  }
}

// Operands t and t + 1 of K tile d.
template <typename T, int mode, typename S, int bits, int run, int ahead, int count>
METAL_FUNC void unpack_operands(
    thread left_fragment<T>* left,
    thread packed_tile<S, bits, run, ahead, count>& tile,
    const thread uint* numbers,
    int d,
    int t) {
  const int span = SPAN(bits), pairs = PAIRS(bits, run);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    // The scale and bias of the run, in NVFP4 of 16 of its elements.
    number_parts<S> number = as_type<number_parts<S>>(numbers[i * count + (mode == NVFP4 ? t / 4 : 0)]);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      uint halves[span];
      pair_halves<span>(halves, tile.words[d][i] + (t + e) / (pairs / 2) * span);
#pragma unroll
      for (int p = 0; p < 2; p++) {
        left[e].part[2 * p + i] =
            dequantized_pair<T, mode, bits, S>(halves, (t + e) % (pairs / 2) * 2 + p, number);
      }
    }
  }
}

// totals += K tile d of the weights, times x.
template <
    typename T,
    int fragments,
    int mode,
    int tiles,
    bool handed,
    bool by_warpgroup,
    typename S,
    int bits,
    int run,
    int ahead,
    int count>
METAL_FUNC void multiply_k_tile(
    thread sum_fragment (&totals)[tiles][fragments],
    thread packed_tile<S, bits, run, ahead, count> (&tile)[tiles],
    int d,
    int from,
    const threadgroup uint4* stage,
    uint lane) {
  uint numbers[tiles][2 * count];
#pragma unroll
  for (int r = 0; r < tiles; r++) {
    k_tile_numbers<T, mode, handed>(numbers[r], tile[r], from, lane);
  }
  if (by_warpgroup) {
#pragma unroll
    for (int r = 0; r < tiles; r++) {
      // One panel of the tile at a time, to save registers.
#pragma unroll
      for (int t = 0; t < run / 4; t += 4) {
        left_fragment<T> left[4];
        unpack_operands<T, mode>(left, tile[r], numbers[r], d, t);
        unpack_operands<T, mode>(left + 2, tile[r], numbers[r], d, t + 2);
        multiply_by_rows<T, 4, fragments, 4 * run, by_warpgroup, true>(
            totals[r], left, reinterpret_cast<const threadgroup T*>(stage), 16 * t, lane);
      }
    }
    return;
  }
#pragma unroll
  for (int t = 0; t < run / 4; t += 2) {
    left_fragment<T> left[tiles][2];
#pragma unroll
    for (int r = 0; r < tiles; r++) {
      unpack_operands<T, mode>(left[r], tile[r], numbers[r], d, t);
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
          multiply_accumulate(totals[r][f], left[r][e], right[e]);
        }
      }
    }
  }
}

// One element as by operators that are launched one by one, each rounded; `more` is of the residual, if any.
template <typename T, int gate>
METAL_FUNC T rounded_in_turn(
    float sum,
    float other,
    int row,
    const device T* bias,
    const device T* other_bias,
    const device T* residual,
    T more) {
  T first = finished<T, 0>(sum, 0.0f, row, 0, bias, nullptr, nullptr);
  if (gate) {
    T second = finished<T, 0>(other, 0.0f, row, 0, other_bias, nullptr, nullptr);
    first = T(activation<gate>(float(first)) * float(second));
  }
  return residual ? T(float(first) + float(more)) : first;
}
