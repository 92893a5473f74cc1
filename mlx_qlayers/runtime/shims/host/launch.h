// A launch as Python fills it in and reads it back; runtime/host/runtime_library.py mirrors these structs.
#pragma once
#include <stdint.h>
#include "abi.h"

typedef void (*Entry)(qk_thread*, const uint64_t*);

enum Fault {
  kNone,
  kOutOfBounds,
  kMisaligned,
  kUninitialised,
  kRace,
  kDivergence,
  kThreadgroupMemory,
  kHang,
  kUndefined,
  kFailed,
};

// One buffer of a checked launch, at the address that qk_place gave it.
struct Region {
  uint64_t begin;
  uint64_t bytes;
  uint32_t writable;
  uint32_t initialised;  // 0 for an output without init_value
};

struct Counters {
  uint64_t bytes_read, bytes_written;                    // device memory, every access
  uint64_t distinct_read, distinct_written;              // device memory, each byte once
  uint64_t constant_read;                                // constant address space
  uint64_t threadgroup_read, threadgroup_written;        // bytes
  uint64_t bank_conflicts;                               // extra cycles on 32 banks of 4 bytes
  uint64_t threadgroup_barriers, simdgroup_barriers;     // each once for all its threads
  uint64_t simd_operations, quad_operations, matrix_operations;  // each once for a SIMD group
  uint64_t atomics;                                      // each once for a thread
  uint64_t loads, stores;                                // device instructions, a thread at a time
  uint64_t threads, threadgroups;
  uint64_t bank_ways;  // the most threads that one bank served in one of these accesses
  uint64_t alu_cycles;         // of all threads, by the costs of an Apple M1
  uint64_t turns;              // of all loops, in all threads
  uint64_t threadgroup_memory;  // bytes that a threadgroup takes
  uint64_t same_value_writes;  // by two threads, in no order: harmless, and worth knowing
};

struct Launch {
  Entry entry;
  const uint64_t* buffers;
  uint32_t grid[3];
  uint32_t threadgroup[3];
  uint32_t dynamic_bytes[8];  // of [[threadgroup(i)]] parameters
  uint32_t fibers;            // 0 where the kernel meets no other thread
  uint32_t workers;
  uint32_t checked;
  uint32_t threadgroup_bytes;  // out: what the kernel's threadgroup variables take
  const Region* regions;  // one for each of `buffers`
  uint32_t region_count;
  uint32_t granule;  // bytes of the smallest store: what one cell of the race detector stands for
  uint64_t budget;     // steps of a checked launch
  uint32_t tolerated;  // a bit for each Fault that is let pass
  uint32_t layout, layout_seed;  // of cooperative tensors (enum qk_layout)
  uint32_t flush;      // whether matrix products take subnormal halves for zero
  Counters* counters;
  uint64_t work;  // in: nanoseconds that the last such launch took in all threads, or 0; out: this one
  // The first fault.
  uint32_t fault;
  uint32_t fault_line;
  uint32_t fault_threadgroup[3];
  uint32_t fault_thread[3];
  char message[256];
};

// A step of a list of launches.
struct Item {
  Launch* launch;  // or null, where rows are copied or normed
  uint64_t to, from, weight;  // addresses of rows; without a weight to norm by, 0
  uint32_t rows, width;  // elements of a row, or bytes of one that is copied
  uint64_t stride;  // bytes from one row that is written to the next
  uint32_t type;  // 0 of a copy, else of what is normed: 1 float, 2 half, 3 bfloat
  float epsilon;
  uint64_t count, chunk, next, done;  // threadgroups, while it runs
};

// A word that gets the address of an array, or of a row of it: that of number `start` of the rows that a run names.
struct Place {
  uint64_t* word;
  uint32_t array, start;
  uint64_t row, behind;  // bytes
};
