// One worker runs one threadgroup at a time: each thread a fiber, each SIMD group a set of lanes.
#pragma once
#include "fiber.h"
#include "launch.h"

static const int kSimdWidth = 32;
static const uint32_t kThreadgroupLimit = 32 * 1024;
static const uint32_t kArenaBytes = 128 * 1024;  // with the gaps of a checked launch
static const int kSlots = 72;  // threadgroup variables: 64 named, 8 parameters

struct Checks;   // checks.cpp: the state of a checked launch
struct Tensors;  // tensor.cpp: how tensors are spread over lanes
Tensors* tensors_begin();
void tensors_end(Tensors*);

// A SIMD group: which of its lanes live, run, wait at a SIMD function, or wait at a barrier.
struct Simd : qk_simd {
  qk_row rows[2];
  uint32_t live, runnable, meeting, waiting;
  uint32_t lanes;  // those of the last meeting
  uint32_t flags;  // of the barrier at which they meet
  uint32_t device_epoch, threadgroup_epoch;  // its barriers that order memory, for the race detector
};

struct Fiber {
  qk_thread thread;
  void* sp;
  const void* site;    // where it waits
  uint32_t operation;  // and for what
  uint32_t line;
};

// Zero is its initial state.
struct Worker {
  Launch* launch;
  Checks* checks;
  Tensors* tensors;
  Stacks stacks;
  Fiber* fibers;
  Fiber* current;
  Simd* simds;
  uint32_t simd_count, live, waiting;
  uint32_t came;  // threads at the last barrier
  uint32_t barrier_flags;
  void* main_sp;
  const void* calls[1024];  // what each thread brings to a tensor operation
  bool tensor_ready;        // whether one thread has computed it for all
  char* arena;
  uint32_t arena_used, arena_counted;
  struct Slot {
    uint32_t begin, bytes;
    bool known;
  } slots[kSlots];

  bool prepare(Launch* launch);
  void run_threadgroup(uint32_t linear);
  void run_serially(uint32_t linear);
  void fail(Fault fault, const char* format, ...) __attribute__((format(printf, 3, 4)));
};

Worker* this_worker();
uint32_t meet_lanes(uint32_t operation, const void* site);  // of a SIMD group; those that came
void meet_threads(uint32_t operation, uint32_t flags, const void* site);  // of the threadgroup

// Operations beyond those of abi.h.
static const uint32_t kSimdBarrier = 4, kThreadgroupBarrier = 5, kTensor = 6;

// The hooks of a checked launch, empty otherwise (checks.cpp).
Checks* checks_begin(Launch*, Worker*);
void checks_end(Checks*);
void checks_threadgroup(Checks*);
void checks_settle(Checks*);
void checks_barrier(Checks*, uint32_t operation, uint32_t flags);
void checks_meeting(Checks*, Simd*, uint32_t operation, uint32_t flags);
void checks_arena(Checks*, uint32_t slot, uint32_t begin, uint32_t bytes);
// Instrumented code calls this before an access; tensor operations access memory on behalf of their threads.
extern "C" void qk_load(const void* p, uint64_t bytes, uint32_t how, uint32_t line);
extern "C" void qk_store(const void* p, uint64_t bytes, uint32_t how, uint32_t line);
