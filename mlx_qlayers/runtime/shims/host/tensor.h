// How cooperative tensors are spread over lanes, and what a worker keeps for tensor operations.
#pragma once
#include "scheduler.h"

// The layout of a cooperative tensor: the row and column of each slot of each thread.
struct Spread {
  uint32_t kind, seed;
  qk_tile tile;
  uint32_t capacity;
  uint32_t* at;  // row << 16 | column, or kNowhere
};
const uint32_t kNowhere = ~0u;
const int kSpreads = 64;

// The state of a worker: the layouts that it used last, and buffers for matrices.
struct Tensors {
  Spread spreads[kSpreads];
  uint32_t next;
  float* room;
  uint64_t size;
};

const Spread& spread_of(const qk_tile& tile);
