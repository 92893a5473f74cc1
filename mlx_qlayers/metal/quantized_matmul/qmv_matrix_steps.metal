// The steps of qmv on the matrix units: rows of x become operands, a packed tile is
// multiplied with them, and scales and biases are applied to the sums.

#include "common/fragment.metal"
#include "packed_pairs.metal"
#include "packed_tile.metal"

#include <metal_stdlib>
using namespace metal;

// sums += run d of a tile times x; in modes other than NVFP4, sums = their product. Each fragment has `chains`
// independent sums, to hide latency; the caller adds them up.
template <
    typename T,
    int fragments,
    int mode,
    int chains = 1,
    typename S,
    int bits,
    int run,
    int ahead,
    int count>
METAL_FUNC void multiply_tile(
    thread sum_fragment* sums,
    thread packed_tile<S, bits, run, ahead, count>& tile,
    int d,
    const thread right_fragment<T>* x,
    int quarter) {
  const int span = RUN_SPAN(bits, run), pairs = PAIRS(bits, run);
#pragma unroll
  for (int s = 0; s < run / (2 * pairs); s++) {
    uint halves[2][span];
    float scales[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (WHOLE(bits, run)) {
        pair_halves<span>(halves[i], tile.words[d][i] + s * span);
      } else {
        pair_short_run<bits, run>(halves[i], tile.words[d][i], quarter);
      }
      if (mode == NVFP4) {
        uint number = tile.numbers[i][s * 2 * pairs / 16];
        scales[i] = decoded_scale<mode>(as_type<number_parts<S>>(number).x);
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
          int chain = (s * pairs / 2 + j) % chains * fragments + f;
          if (mode != NVFP4 && s * pairs / 2 + j < chains && part == 0) {
            multiply(sums[chain], left, right);
          } else {
            multiply_accumulate(sums[chain], left, right);
          }
        }
      }
    }
  }
}

// Loads the rows of x from element k on, each in its columns, and the norm's weight.
template <typename T, int fragments, int run>
struct row_runs {
  loaded_run<T, run / 4> x[fragments], weight;
};
template <int per, int bits, typename T, int fragments, int run>
METAL_FUNC void load_rows(
    thread row_runs<T, fragments, run>& rows,
    const device T* x,
    const device T* norm_weight,
    int k,
    int row,
    int filled,
    int K,
    uint lane) {
#pragma unroll
  for (int f = 0; f < fragments; f++) {
    load_run<PAIRS(bits, run)>(
        rows.x[f], x, (row + f * per) * K + k, K, run, max(filled - f * per, 0), lane);
  }
  if (norm_weight) {
    load_run<PAIRS(bits, run)>(rows.weight, norm_weight, k, 0, run, max(filled, 0), lane);
  }
}
// Makes operands of the loaded x, times the norm's weight, and adds up its squares.
template <int bits, typename T, int fragments, int run>
METAL_FUNC void take_rows(
    thread right_fragment<T>* values,
    thread square_sums* squares,
    thread row_runs<T, fragments, run>& rows,
    bool normed,
    bool weighted) {
  const int count = run / 4;
#pragma unroll
  for (int f = 0; f < fragments; f++) {
    interleave<PAIRS(bits, run)>(values + f * count, rows.x[f]);
  }
  if (normed) {
#pragma unroll
    for (int j = 0; j < fragments * count; j++) {
      add_squares(squares[j / count], values[j]);
    }
  }
  if (weighted) {
    right_fragment<T> weight[count];
    interleave<PAIRS(bits, run)>(weight, rows.weight);
#pragma unroll
    for (int j = 0; j < fragments * count; j++) {
      values[j] = multiply_elements(values[j], weight[j % count]);
    }
  }
}

// totals += scale * sums + bias * added, with the offset of the codes removed; lane `from` of each row holds
// the scale and bias.
template <typename T, int fragments, int mode, bool handed, typename S, int bits, int run, int ahead, int count>
METAL_FUNC void add_scaled(
    thread sum_fragment* totals,
    const thread sum_fragment* sums,
    const thread sum_fragment* added,
    thread packed_tile<S, bits, run, ahead, count>& tile,
    int from,
    uint lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint word = tile.numbers[i][0];
    if (handed) {
      word = from_row_lane(word, from, lane);
    }
    number_parts<S> number = as_type<number_parts<S>>(word);
    float scale = decoded_scale<mode>(number.x);
    float bias = fma(-code_offset<T, bits>(), scale, float(number.y));
#pragma unroll
    for (int f = 0; f < fragments; f++) {
      float2 sum = sums[f].part[i] * byte_factor<T, mode, bits>();
      totals[f].part[i] = fma(float2(scale), sum, totals[f].part[i]);
      if (mode == AFFINE) {
        totals[f].part[i] = fma(float2(bias), added[f].part[i], totals[f].part[i]);
      }
    }
  }
}

// The RMS norm factor of a row of K elements, from the partial sums of squares of its tiles.
METAL_FUNC float norm_factor(
    const device float* squares, int tiles, int K, float epsilon, uint lane) {
  float total = 0;
#pragma clang loop unroll(disable)
  for (int j = lane; j < tiles; j += 4 * 32) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      total += j + 32 * i < tiles ? squares[j + 32 * i] : 0.0f;
    }
  }
  return metal::precise::rsqrt(simd_sum(total) / float(K) + epsilon);
}
