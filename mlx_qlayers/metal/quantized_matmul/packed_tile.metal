// 16 rows of a packed matrix, as the lanes of a SIMD group hold them for the matrix units.

#include "epilogue.metal"
#include "common/fragment.metal"
#include "packed_pairs.metal"

#include <metal_stdlib>
using namespace metal;

// A lane's part of a tile, of row fragment_row(lane) and the eighth row below: the words of `ahead` runs, and
// the current and next scales and biases (`numbers`). The four lanes of a row load those of four groups and
// exchange them by shuffles; in NVFP4 each lane loads those of its own runs.
template <typename S, int bits, int run, int ahead, int count>
struct packed_tile {
  packed_matrix<S> matrix;
  uint words_at[2], numbers_at[2];
  alignas(16) uint words[ahead][2][RUN_WORDS(bits, run)];
  uint numbers[2][count], next_scales[2][count], next_biases[2][count];
};

template <typename S, int bits, int run, int ahead, int count>
METAL_FUNC void load_words_of(
    thread packed_tile<S, bits, run, ahead, count>& tile,
    int d,
    int step,
    bool inside,
    bool odd) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (inside) {
      load_packs<RUN_WORDS(bits, run), READ_ONCE>(
          tile.words[d][i], tile.matrix.w + (tile.words_at[i] + step * (run * bits / 8)),
          odd || !WHOLE(bits, run));
    }
  }
}

// A scale and a bias in one word.
template <typename S>
using number_parts = metal::vec<S, 4 / sizeof(S)>;

// Loads the next scales and biases, of `count` groups; zeros if there are none. They are combined only when
// they are used, since combining waits for the loads.
template <int mode, typename S, int bits, int run, int ahead, int count>
METAL_FUNC void load_numbers_of(
    thread packed_tile<S, bits, run, ahead, count>& tile, int group, bool inside) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int c = 0; c < count; c++) {
      uint at = tile.numbers_at[i] + group + c;
      load_bits(tile.next_scales[i][c], tile.matrix.scales + at, inside);
      if (mode == AFFINE) {
        load_bits(tile.next_biases[i][c], tile.matrix.biases + at, inside);
      }
    }
  }
}
template <typename S, int bits, int run, int ahead, int count>
METAL_FUNC void take_next_numbers(thread packed_tile<S, bits, run, ahead, count>& tile) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int c = 0; c < count; c++) {
      tile.numbers[i][c] = tile.next_scales[i][c] | tile.next_biases[i][c] << 16;
    }
  }
}
