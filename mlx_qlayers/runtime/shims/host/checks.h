// The state of a checked launch, shared by checks.cpp and accesses.cpp.
#pragma once
#include "scheduler.h"

// Buffers of a checked launch lie this far apart, each in the middle of its range.
static const uint64_t kRangeBytes = 1ull << 36;
static const int kRanges = 64;
static const int kBuckets = 4096;
extern __attribute__((visibility("hidden"))) char* checks_space;

struct Access {
  uint32_t group;  // threadgroup + 1; 0 for none
  uint16_t thread;
  uint16_t atomic;
  uint32_t epoch, simd_epoch;
};
// Each granule's last write, and its last reads: by any thread, by a thread other than that one, by another
// SIMD group, and by another threadgroup. A write that is ordered after these four is ordered after every
// read. Reads are stored separately, so that granules that are never read take no memory for them.
struct Cells {
  Access* writes;
  Access (*reads)[4];
  bool read;
};
// The lanes' n-th accesses to threadgroup memory since they last met, as if issued together.
struct Bucket {
  uint32_t line, words;
  uint32_t word[kSimdWidth];
};
struct Banks {
  uint32_t count;
  uint32_t issued[kSimdWidth];
  Bucket buckets[kBuckets];
};
struct Shadow {
  uint8_t* read;     // a bit for each byte
  uint8_t* written;  // a bit for each byte
  Cells cells;
};

// Memory as messages name it: a buffer or a threadgroup array.
struct Memory {
  const char* kind;
  uint32_t index;
};

// A store over what another thread wrote: a race, unless it leaves the bytes as they are.
struct Pending {
  Fiber* by;
  const char* at;
  Access other;
  Memory memory;
  uint32_t bytes, line;
  char before[16];
};

struct Checks {
  Launch* launch;
  Worker* worker;
  Counters* counters;
  uint64_t budget;
  uint32_t group, device_epoch, threadgroup_epoch;
  Shadow shadows[kRanges];
  Cells arena_cells;
  uint32_t* arena_written;  // the threadgroup that wrote a byte last
  Banks* banks;
  int slot;  // the threadgroup array used last
  Pending pending;
};
