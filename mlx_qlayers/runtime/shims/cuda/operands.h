// The declarations of metal/common/operands.metal on tensor cores; the contract is written there. What
// differs: where the elements of two operands are neighbours, lanes read 16 bytes of them each, side by
// side, instead of each its own run. The cache looks up a line of 128 bytes in a cycle.
#pragma once

#include "tile.h"

namespace mlx::core::cu {

#define EXACT_BELOW_NORMAL true

template <typename T, int run>
struct row_k_tile {
  loaded_run<T, run / 4> rows;
};

// Piece u of a lane: 8 elements of a row, in a run, of which they are the t-th 8.
template <int run>
struct k_tile_piece {
  int row, quarter, t;
  k_tile_piece(int u, uint lane) {
    constexpr int pieces = run / 8, rows = 8 / pieces;
    row = u * rows + lane / 4 % rows;
    quarter = lane % 4;
    t = lane / (4 * rows);
  }
};

template <int pairs, typename T, int run>
void load_row_k_tile(
    row_k_tile<T, run>& k_tile, const T* x, int k, int K, int count, uint lane) {
  static_assert(run % 16 == 0, "rows of eight pieces at most");
  if constexpr (pairs > 4) {
    load_run<pairs>(k_tile.rows, x, k, K, run, k + int(lane % 4) * run < K ? ::max(count, 0) : 0, lane);
  } else {
    k_tile.rows = {};
    if (k + int(lane % 4) * run >= K)
      return;
    const bool whole = reinterpret_cast<size_t>(x) % 16 == 0;
#pragma unroll
    for (int u = 0; u < run / 8; u++) {
      k_tile_piece<run> piece(u, lane);
      // Products of rows beyond the last one are not used, so the last row is read instead.
      const T* at = x + (::min(piece.row, count - 1) * K + k + piece.quarter * run + piece.t * 8);
      uint* to = k_tile.rows.words + 4 * u;
      if (whole) {
        load_aligned<4, CACHED>(to, reinterpret_cast<const uint*>(at));
      } else {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(at);
#pragma unroll
        for (int i = 0; i < 4; i++)
          to[i] = from[2 * i] | uint(from[2 * i + 1]) << 16;
      }
    }
  }
}

template <int ROWS, bool WARPGROUP, int run, typename T>
void place_operand_pair(
    uint4* to, int first, int row, int quarter, int t, const right_fragment<T>* values) {
  if constexpr (WARPGROUP) {
    // The packs of neighbouring columns lie where their numbers differ.
    uint* words = reinterpret_cast<uint*>(to);
    int at = place_in_tile<T, ROWS, 4 * run, true>(first + row, 32 * t + 2 * quarter) / 2;
#pragma unroll
    for (int i = 0; i < 4; i++)
      words[at ^ 4 * i] = as_type<uint>(values[i / 2].part[i % 2]);
  } else {
    to[(first / 8 * (run / 8) + t) * 32 + row * 4 + quarter] = uint4(
        as_type<uint>(values[0].part[0]),
        as_type<uint>(values[0].part[1]),
        as_type<uint>(values[1].part[0]),
        as_type<uint>(values[1].part[1]));
  }
}
template <int pairs, int ROWS, bool WARPGROUP, typename T, int run>
void place_row_k_tile(uint4* to, int first, row_k_tile<T, run>& k_tile, uint lane) {
  if constexpr (pairs > 4) {
    right_fragment<T> values[run / 4];
    interleave<pairs>(values, k_tile.rows);
#pragma unroll
    for (int t = 0; t < run / 8; t++)
      place_operand_pair<ROWS, WARPGROUP, run>(to, first, lane / 4, lane % 4, t, values + 2 * t);
  } else {
#pragma unroll
    for (int u = 0; u < run / 8; u++) {
      k_tile_piece<run> piece(u, lane);
      loaded_run<T, 2> words;
#pragma unroll
      for (int i = 0; i < 4; i++)
        words.words[i] = k_tile.rows.words[4 * u + i];
      right_fragment<T> values[2];
      interleave<pairs>(values, words);
      place_operand_pair<ROWS, WARPGROUP, run>(to, first, piece.row, piece.quarter, piece.t, values);
    }
  }
}

// There are 16 barriers, of which the first is that of all threads.
template <int simds>
void barrier_of_some(int part) {
  if constexpr (simds == 1)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" :: "r"(part + 1), "n"(32 * simds) : "memory");
}

} // namespace mlx::core::cu
