// Tiles of quantized keys and values (mode affine), as mlx-lm's quantized caches keep them.
//
// A cache is a view of three larger buffers: words, scales and biases, each with strides of its own.
// A tile holds dequantized elements in T, so that products are those of plain rows.

#include "quantized_matmul/packed.metal"
#include "score_tile.metal"

#include <metal_stdlib>
using namespace metal;

template <typename T>
struct packed_rows {
  head_rows<uint> words;
  head_rows<T> scales, biases;
};

template <typename T>
METAL_FUNC bool short_steps(head_rows<T> rows) {
  return rows.row < 1 << 23 && rows.row > -(1 << 23) && rows.column == 1;
}

// The rows of one head; plain rows have no scales and biases.
template <int BITS, typename T>
METAL_FUNC head_rows<T> cache_rows_of(
    const device T* x,
    const constant int64_t* strides,
    const device T*,
    const constant int64_t*,
    const device T*,
    const constant int64_t*,
    uint batch,
    uint head,
    int count) {
  return rows_of(x, strides, batch, head, count);
}
template <int BITS, typename T>
METAL_FUNC packed_rows<T> cache_rows_of(
    const device uint* words,
    const constant int64_t* strides,
    const device T* scales,
    const constant int64_t* scales_strides,
    const device T* biases,
    const constant int64_t* biases_strides,
    uint batch,
    uint head,
    int count) {
  packed_rows<T> rows;
  rows.words = rows_of(words, strides, batch, head, count);
  rows.scales = rows_of(scales, scales_strides, batch, head, count);
  rows.biases = rows_of(biases, biases_strides, batch, head, count);
  rows.words.packed = rows.words.packed && short_steps(rows.scales) && short_steps(rows.biases);
  return rows;
}

// The tile_reader of quantized rows. A thread holds packed words, and dequantizes them when it writes
// them to threadgroup memory.
template <
    typename T,
    int BITS,
    int GROUP,
    int ROWS,
    int WIDTH,
    int PADDED,
    int THREADS,
    bool WARPGROUP>
struct packed_reader {
  enum { EACH = ROWS * PADDED % (16 * THREADS) == 0 ? 16 : 8, WORDS = EACH * (BITS < 4 ? 4 : BITS) / 32 };
  enum { VECTORS = (ROWS * PADDED / EACH + THREADS - 1) / THREADS, V = 16 / sizeof(T) };
  enum { EVEN = ROWS * PADDED / EACH % THREADS == 0 };

  packed_rows<T> rows;
  alignas(16) uint held[VECTORS][WORDS];
  T scales[VECTORS], biases[VECTORS];

  METAL_FUNC void fetch(threadgroup T*, uint thread_index) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      uint2 place = vector_place<PADDED, EACH, THREADS>(i, thread_index);
      int row = int(place.x), column = int(place.y);
      bool inside = rows.words.packed && row < rows.words.count && (EVEN || row < ROWS) &&
          (WIDTH == PADDED || column < WIDTH);
#pragma unroll
      for (int j = 0; j < WORDS; j++) {
        held[i][j] = 0;
      }
      scales[i] = biases[i] = T(0.0f);
      if (inside) {
        int from = row * int(rows.words.row), group = column / GROUP;
        if (BITS < 4) {
#pragma unroll
          for (int j = 0; j < WORDS; j++) {
            held[i][j] = spread_codes<BITS == 3 ? 3 : 2>(rows.words.at + from, column + 8 * j, 1);
          }
        } else {
          load_packs<WORDS>(held[i], rows.words.at + from + column * BITS / 32, false);
        }
        scales[i] = rows.scales.at[row * int(rows.scales.row) + group];
        biases[i] = rows.biases.at[row * int(rows.biases.row) + group];
      }
    }
  }

  template <int LATER = 0>
  METAL_FUNC void put(threadgroup T* tile, uint thread_index) {
    if (rows.words.packed) {
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        if (EVEN || vector_place<PADDED, EACH, THREADS>(i, thread_index).x < ROWS) {
          float values[EACH], scale = float(scales[i]) * code_factor<T, AFFINE, BITS>();
          if (BITS >= 4) {
            decode_codes<T, AFFINE, BITS < 4 ? 4 : BITS, EACH>(values, held[i]);
          }
#pragma unroll
          for (int j = 0; j < EACH; j++) {
            if (BITS < 4) {
              uint code = held[i][j / 8] >> (j % 8 / 4 * 16 + j % 4 * BITS) & ((1u << BITS) - 1);
              values[j] = float_from_integer(code);
            }
            values[j] = fma(scale, values[j], float(biases[i]));
          }
#pragma unroll
          for (int j = 0; j < EACH; j += V) {
            int to = vector_offset<T, ROWS, PADDED, EACH, THREADS, WARPGROUP>(i, j, thread_index);
            *reinterpret_cast<threadgroup uint4*>(tile + to) = rounded<T>(values + j);
          }
        }
      }
    } else {
#pragma clang loop unroll(disable)
      for (uint index = thread_index; index < ROWS * PADDED; index += THREADS) {
        uint row = index / PADDED, column = index % PADDED;
        tile[place_in_tile<T, ROWS, PADDED, WARPGROUP>(row, column)] = number_at(row, column);
      }
    }
    if (WARPGROUP) {
      show_to_products();
    }
  }

  // One element of rows that are not aligned for vector loads.
  METAL_FUNC T number_at(uint row, uint column) {
    if (int(row) >= rows.words.count || column >= WIDTH) {
      return T(0.0f);
    }
    uint first = column * BITS, group = column / GROUP;
    int64_t at = row * rows.words.row + first / 32 * rows.words.column;
    uint code = rows.words.at[at] >> first % 32;
    if (32 % BITS != 0 && first % 32 + BITS > 32) {
      code |= rows.words.at[at + rows.words.column] << (32 - first % 32);
    }
    float scale = float(rows.scales.at[row * rows.scales.row + group * rows.scales.column]);
    float bias = float(rows.biases.at[row * rows.biases.row + group * rows.biases.column]);
    return T(fma(scale, float_from_integer(code & ((1u << BITS) - 1)), bias));
  }

  METAL_FUNC void skip(int count) {
    rows.words.at += count * rows.words.row;
    rows.scales.at += count * rows.scales.row;
    rows.biases.at += count * rows.biases.row;
    rows.words.count -= count;
  }
};
