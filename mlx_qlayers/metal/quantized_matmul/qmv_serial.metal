// qmv on a CPU, whose threads run one by one: any number of rows times up to three quantized matrices,
//
//   y_i (M, N_i) = x (M, K) * w_i^T + bias_i,   or   gate(y_0) * y_1,   or   y_0 + residual
//
// A thread computes a tile, `outputs` neighbouring rows of a matrix, or half as many of both matrices of a
// gate, for all rows of x:
//
//   grid (tiles, 1, 1) or more; any threadgroup; no threadgroup memory.
//
// For a few rows it dequantizes and multiplies one group at a time, and fetches the next tile meanwhile: rows are
// too short for the processor to foresee that. For more rows it dequantizes LENGTH elements of each row of the
// tile, and multiplies `rows` rows of x with them, four at a time. Each row of y has the same bits in both. With
// `integers` it rounds x to 8 bits in blocks, LENGTH elements at a time, and multiplies codes as they are packed.

#include "epilogue.metal"
#include "packed.metal"
#include "common/wide.metal"

#include <metal_stdlib>
using namespace metal;

// Rows that are fetched ahead where codes are multiplied as they are packed.
#define AHEAD 8

// A tile's rows of the matrices: where their words and scales begin.
template <typename S, int outputs>
struct serial_rows {
  packed_matrix<S> matrix[outputs];
};

template <int mode, int group, int bits, int run, int outputs, typename S>
METAL_FUNC void serial_weights(
    thread float* to, thread const serial_rows<S, outputs>& rows, int n, int k) {
  const device S* scales = rows.matrix[n].scales;
  const device S* biases = rows.matrix[n].biases;
  wide_weights<mode, bits, run>(
      to,
      rows.matrix[n].w,
      size_t(k) * bits / 32,
      decoded_scale<mode>(scales[k / group]),
      mode == AFFINE ? float(biases[k / group]) : 0.0f);
}

// Adds products of `count` rows of x, at most FEW, with the rows of a tile; fetches those that are `ahead` words
// further on.
template <int mode, int group, int bits, bool single, int outputs, typename S, typename T>
METAL_FUNC void serial_few(
    thread float* sums, thread const serial_rows<S, outputs>& tile, size_t ahead, const device T* x, int K, int count) {
  const int stride = outputs * WIDE;
#pragma unroll(1)
  for (int n = 0; n < outputs; n += COLUMNS) {
    thread float* to = sums + n * WIDE;
    const thread packed_matrix<S>* matrix = tile.matrix + n;
    if (single || FEW == 1 || count == 1) {
      wide_few<mode, bits, group, 1, stride>(to, matrix, x, K, ahead);
    } else if (count == 2) {
      wide_few<mode, bits, group, 2, stride>(to, matrix, x, K, ahead);
    } else if (count == 3) {
      wide_few<mode, bits, group, 3, stride>(to, matrix, x, K, ahead);
    } else if (count == 4) {
      wide_few<mode, bits, group, 4, stride>(to, matrix, x, K, ahead);
    } else {
      wide_few<mode, bits, group, 5, stride>(to, matrix, x, K, ahead);
    }
  }
}

// Adds products of `count` rows of x, rounded, with the rows of a tile, from element `from` on; fetches the rows
// that are `ahead` words further on.
template <int group, int bits, int count, int outputs, typename S>
METAL_FUNC void serial_integers(
    thread float* sums,
    thread const serial_rows<S, outputs>& tile,
    size_t ahead,
    thread const char* codes,
    thread const float* steps,
    thread const float* totals,
    int from,
    int depth) {
#pragma unroll(1)
  for (int n = 0; n < outputs; n++) {
    const device uint* w = tile.matrix[n].w + size_t(from) * bits / 32;
    for (int i = 0; i < depth * bits / 32; i += 16) {
      wide_prefetch(w + ahead + i);
    }
    wide_integers<bits, group, count, outputs * WIDE>(
        sums + n * WIDE,
        w,
        tile.matrix[n].scales + from / group,
        tile.matrix[n].biases + from / group,
        codes,
        steps,
        totals,
        depth);
  }
}

template <
    typename T,
    typename S,
    int mode,
    int group,
    int bits,
    int gate,
    int rows,
    int outputs,
    int run,
    int integers>
[[kernel]] void qmv_serial(
    const device T* x,
    const device T* norm_weight,
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
    uint id [[thread_position_in_grid]]) {
  const int height = gate ? outputs / 2 : outputs;
  int M = shape[0], K = shape[1];
  size_t words = size_t(K) * bits / 32, groups = K / group;
  tile_place place = place_of_tile<gate, height>(id * (gate ? 2 : 1), shape + 2, w1, w2);
  int first = place.first, m0 = place.matrix, N = shape[2 + m0];
  if (first >= N) {
    return;
  }
  serial_rows<S, outputs> tile;
#pragma unroll
  for (int n = 0; n < outputs; n++) {
    // At the edge of a matrix a tile repeats the last row, and does not store the repetitions.
    size_t row = min(first + n % height, N - 1);
    bool second = n >= height || m0 == 1;
    tile.matrix[n].w = (second ? w1 : m0 == 0 ? w : w2) + row * words;
    tile.matrix[n].scales = (second ? scales1 : m0 == 0 ? scales : scales2) + row * groups;
    if (mode == AFFINE) {
      tile.matrix[n].biases = (second ? biases1 : m0 == 0 ? biases : biases2) + row * groups;
    }
  }
  device T* out = m0 == 0 ? y : m0 == 1 ? y1 : y2;
  const device T* added = m0 == 0 ? bias : m0 == 1 ? bias1 : bias2;

  for (int begin = 0; begin < M; begin += rows) {
    alignas(64) float sums[rows][outputs][WIDE] = {};
    int count = min(rows, M - begin), parts = (count + FEW - 1) / FEW;
    if (integers) {
      alignas(64) char codes[4][LENGTH];
      // Those of blocks that a row lacks are multiplied by 0.
      alignas(64) float steps[4][LENGTH / BLOCK] = {}, totals[4][LENGTH / BLOCK] = {};
#pragma unroll(1)
      for (int from = 0; from < K; from += LENGTH) {
        int depth = min(LENGTH, K - from);
#pragma unroll(1)
        for (int m = 0; m < count; m += 4) {
          int four = min(4, count - m);
#pragma unroll(1)
          for (int i = 0; i < four; i++) {
            wide_round(codes[i], steps[i], totals[i], x + size_t(begin + m + i) * K + from, depth);
          }
          if (four == 4) {
            serial_integers<group, bits, 4, outputs>(
                sums[m][0], tile, AHEAD * words, codes[0], steps[0], totals[0], from, depth);
          } else if (four == 3) {
            serial_integers<group, bits, 3, outputs>(
                sums[m][0], tile, AHEAD * words, codes[0], steps[0], totals[0], from, depth);
          } else if (four == 2) {
            serial_integers<group, bits, 2, outputs>(
                sums[m][0], tile, AHEAD * words, codes[0], steps[0], totals[0], from, depth);
          } else {
            serial_integers<group, bits, 1, outputs>(
                sums[m][0], tile, AHEAD * words, codes[0], steps[0], totals[0], from, depth);
          }
        }
      }
      // Other rows than float32's are converted for every four outputs, which does not pay twice.
    } else if (rows == 1 || parts <= (sizeof(T) == 4 && FEW > 1 ? 2 : 1)) {
      int some = rows == 1 ? 1 : (count + parts - 1) / parts;
#pragma unroll(1)
      for (int m = 0; m < count; m += some) {
        serial_few<mode, group, bits, rows == 1, outputs>(
            sums[m][0], tile, height * words, x + size_t(begin + m) * K, K, min(some, count - m));
      }
    } else {
      for (int from = 0; from < K; from += LENGTH) {
        alignas(64) float weights[outputs][LENGTH];
        alignas(64) float values[4][LENGTH];
        int depth = min(LENGTH, K - from);
#pragma unroll(1)
        for (int n = 0; n < outputs; n++) {
          // Sums beyond the edge are undefined, and are not stored.
#pragma unroll(1)
          for (int k = 0; k < depth && first + n % height < N; k += run) {
            serial_weights<mode, group, bits, run>(weights[n] + k, tile, n, from + k);
          }
        }
#pragma unroll(1)
        for (int m = 0; m < count; m += 4) {
          int four = min(4, count - m);
#pragma unroll(1)
          for (int i = 0; i < four; i++) {
            const device T* row = x + size_t(begin + m + i) * K + from;
#pragma unroll(1)
            for (int k = 0; k < depth; k += run) {
              wide_values<run>(values[i] + k, row + k);
            }
          }
          if (four == 4) {
            wide_block<4, outputs, LENGTH>(sums[m][0], values[0], weights[0], depth);
          } else if (four == 3) {
            wide_block<3, outputs, LENGTH>(sums[m][0], values[0], weights[0], depth);
          } else if (four == 2) {
            wide_block<2, outputs, LENGTH>(sums[m][0], values[0], weights[0], depth);
          } else {
            wide_block<1, outputs, LENGTH>(sums[m][0], values[0], weights[0], depth);
          }
        }
      }
    }
#pragma unroll(1)
    for (int m = 0; m < count; m++) {
      // Indices that are known at compile time keep the sums of a single row in registers.
#pragma unroll(rows == 1 && !integers ? height : 1)
      for (int n = 0; n < height; n++) {
        if (first + n < N) {
          size_t at = size_t(begin + m) * N + first + n;
          const thread float* sum = sums[rows == 1 ? 0 : m][n];
          float other = gate ? wide_sum(sum + height * WIDE) : 0.0f;
          out[at] = finished<T, gate>(
              wide_sum(sum), other, first + n, at, added, bias1, residual);
        }
      }
    }
  }
}
