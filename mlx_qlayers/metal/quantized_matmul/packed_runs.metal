// Dequantizes a tile of a packed matrix into threadgroup memory, once for all SIMD groups. Packed words go
// through registers, which are loaded while the previous tile is multiplied.

#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

// Elements of padding of each row of a tile, so that neighbouring rows begin in different banks.
#define PADDING 8

// How many of `all` pieces a thread takes, every threads-th, and whether `piece` is one.
#define PIECES_PER_THREAD(all, threads) (((all) + (threads) - 1) / (threads))
#define IS_PIECE(all, threads) ((all) % (threads) == 0 || piece < (all))

template <typename S, int words>
struct packed_run {
  alignas(16) uint word[words];
  S scale, bias;
};

// Loads the packed runs of a tile at (row, column) of a matrix (rows, columns), with `across` runs in each row.
template <
    int mode, int group, int bits, int run, int all, int across, int threads, bool ahead, typename S>
METAL_FUNC void fetch_runs(
    thread packed_run<S, run * bits / 32>* held,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    int row,
    int column,
    int rows,
    int columns,
    int thread_index,
    bool odd) {
#pragma unroll
  for (int i = 0; i < PIECES_PER_THREAD(all, threads); i++) {
    int piece = thread_index + i * threads, r = row + piece / across;
    int c = column + piece % across * run;
    if (IS_PIECE(all, threads) && r < rows && c < columns) {
      size_t at = size_t(r) * (columns / group) + c / group;
      load_packs<run * bits / 32, ahead ? READ_AHEAD : CACHED>(
          held[i].word, w + (size_t(r) * (size_t(columns) * bits / 32) + c * bits / 32), odd);
      held[i].scale = ahead ? load_ahead(scales + at) : scales[at];
      held[i].bias = mode != AFFINE ? S(0) : ahead ? load_ahead(biases + at) : biases[at];
    } else {
#pragma unroll
      for (int j = 0; j < run * bits / 32; j++) {
        held[i].word[j] = 0;
      }
      held[i].scale = S(0);
      held[i].bias = S(0);
    }
  }
}

template <
    typename T, int mode, int bits, int run, int all, int across, int threads, typename S>
METAL_FUNC void place_runs(
    threadgroup T* tile, const thread packed_run<S, run * bits / 32>* held, int thread_index) {
  constexpr int width = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < PIECES_PER_THREAD(all, threads); i++) {
    int piece = thread_index + i * threads;
    if (!IS_PIECE(all, threads)) {
      continue;
    }
    threadgroup T* to =
        tile + piece / across * (across * run + PADDING) + piece % across * run;
    float values[run];
    decode_run<T, mode, bits, run>(
        values, held[i].word, decoded_scale<mode>(held[i].scale), float(held[i].bias));
#pragma unroll
    for (int j = 0; j < run; j += width) {
      *reinterpret_cast<threadgroup uint4*>(to + j) = rounded<T>(values + j);
    }
  }
}
