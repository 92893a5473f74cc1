// The scheduler of one worker: fibers meet at SIMD functions and barriers, and what waits forever
// is reported as divergence.
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "scheduler.h"

static __thread Worker* tls_worker;

static pthread_key_t at_exit;
static pthread_once_t once = PTHREAD_ONCE_INIT;

// A thread that ends gives back what its launches took: hundreds of megabytes of addresses.
static void end_worker(void* p) {
  Worker* w = (Worker*)p;
  w->stacks.release();
  if (w->arena) munmap(w->arena, kArenaBytes);
  if (w->tensors) tensors_end(w->tensors);
  free(w->fibers);
  free(w->simds);
  free(w);
  tls_worker = nullptr;
}

static void make_key() { pthread_key_create(&at_exit, end_worker); }

Worker* this_worker() {
  if (!tls_worker) {
    tls_worker = (Worker*)calloc(1, sizeof(Worker));
    pthread_once(&once, make_key);
    pthread_setspecific(at_exit, tls_worker);
  }
  return tls_worker;
}

extern "C" qk_thread* qk_self() { return &tls_worker->current->thread; }

static void go(Worker* w, Fiber* next) {
  Fiber* from = w->current;
  w->current = next;
  qk_switch(&from->sp, next->sp);
}

void Worker::fail(Fault fault, const char* format, ...) {
  if (__atomic_exchange_n(&launch->fault, (uint32_t)fault, __ATOMIC_ACQ_REL) == kNone) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(launch->message, sizeof launch->message, format, arguments);
    va_end(arguments);
    launch->fault_line = current->line;
    for (int i = 0; i < 3; i++) {
      launch->fault_threadgroup[i] = current->thread.threadgroup_position[i];
      launch->fault_thread[i] = current->thread.position_in_threadgroup[i];
    }
  }
  // The fibers are abandoned where they stand; nothing in a kernel needs unwinding.
  live = 0;
  void* nowhere;
  qk_switch(&nowhere, main_sp);
}

static const char* waits_for(const Fiber& f) {
  static const char* const names[] = {"a SIMD shuffle",   "a SIMD reduction", "a quad function",
                                      "a matrix function", "simdgroup_barrier", "threadgroup_barrier",
                                      "a tensor operation"};
  return names[f.operation < 7 ? f.operation : 5];
}

// Nothing can run: some threads wait where the others never come.
static void diverged(Worker* w) {
  Fiber* a = w->current;
  for (uint32_t s = 0; s < w->simd_count; s++) {
    Simd* g = &w->simds[s];
    for (uint32_t waiting = g->meeting | g->waiting; waiting; waiting &= waiting - 1) {
      Fiber* b = &w->fibers[s * kSimdWidth + __builtin_ctz(waiting)];
      if (b->site != a->site || b->operation != a->operation) {
        w->fail(kDivergence, "not all live threads reach %s: thread %u waits for %s elsewhere",
                waits_for(*a), b->thread.index_in_threadgroup, waits_for(*b));
      }
    }
  }
  w->fail(kDivergence, "not all live threads reach %s", waits_for(*a));
}

static Fiber* runnable_in(Worker* w, Simd* s, uint32_t after) {
  uint32_t later = s->runnable & (uint32_t)~((2ull << after) - 1);
  uint32_t lane = __builtin_ctz(later ? later : s->runnable);
  return &w->fibers[(s - w->simds) * kSimdWidth + lane];
}

// Another fiber that can run: of this SIMD group first, so that its lanes stay together.
static Fiber* next_fiber(Worker* w) {
  Simd* s = (Simd*)w->current->thread.simd;
  if (s->runnable) return runnable_in(w, s, w->current->thread.lane);
  uint32_t own = s - w->simds;
  for (uint32_t i = 1; i < w->simd_count; i++) {
    Simd* other = &w->simds[own + i < w->simd_count ? own + i : own + i - w->simd_count];
    if (other->runnable) return runnable_in(w, other, kSimdWidth - 1);
  }
  return nullptr;
}

static void release_meeting(Worker* w, Simd* s, uint32_t operation) {
  s->lanes = s->runnable = s->meeting;
  s->meeting = 0;
  s->row = s->row == &s->rows[0] ? &s->rows[1] : &s->rows[0];
  s->row->ready = 0;
  if (w->checks) checks_meeting(w->checks, s, operation, s->flags);
}

static void release_barrier(Worker* w) {
  for (uint32_t i = 0; i < w->simd_count; i++) {
    w->simds[i].runnable = w->simds[i].waiting;
    w->simds[i].waiting = 0;
  }
  w->came = w->waiting;
  w->waiting = 0;
  w->tensor_ready = false;
  if (w->checks) checks_barrier(w->checks, w->current->operation, w->barrier_flags);
}

// In a checked launch, lanes that meet must come from the same place in the program.
static void compare_sites(Worker* w, Simd* s, Fiber* f, uint32_t others) {
  if (!w->checks || !others) return;
  Fiber* first = &w->fibers[(s - w->simds) * kSimdWidth + __builtin_ctz(others)];
  if (first->operation != f->operation || first->site != f->site) {
    w->fail(kDivergence, "lanes of one SIMD group meet at different places: %s here, %s in lane %u",
            waits_for(*f), waits_for(*first), first->thread.lane);
  }
}

// The thread that runs, which meets others at `site`.
static Fiber* arrive(Worker* w, uint32_t operation, const void* site) {
  if (w->checks) checks_settle(w->checks);
  Fiber* f = w->current;
  f->site = site;
  f->operation = operation;
  return f;
}

uint32_t meet_lanes(uint32_t operation, const void* site) {
  Worker* w = tls_worker;
  Fiber* f = arrive(w, operation, site);
  Simd* s = (Simd*)f->thread.simd;
  uint32_t bit = 1u << f->thread.lane;
  compare_sites(w, s, f, s->meeting);
  s->meeting |= bit;
  s->runnable &= ~bit;
  if (s->meeting == s->live) {
    release_meeting(w, s, operation);
  } else {
    Fiber* next = next_fiber(w);
    if (!next) diverged(w);
    go(w, next);
  }
  return s->lanes;
}

extern "C" uint32_t qk_simd_sync(uint32_t operation) {
  return meet_lanes(operation, __builtin_return_address(0));
}

extern "C" void qk_simdgroup_barrier(uint32_t flags) {
  ((Simd*)tls_worker->current->thread.simd)->flags = flags;
  meet_lanes(kSimdBarrier, __builtin_return_address(0));
}

void meet_threads(uint32_t operation, uint32_t flags, const void* site) {
  Worker* w = tls_worker;
  Fiber* f = arrive(w, operation, site);
  Simd* s = (Simd*)f->thread.simd;
  uint32_t bit = 1u << f->thread.lane;
  if (w->checks && w->waiting) {
    for (uint32_t i = 0; i < w->simd_count; i++) {
      if (!w->simds[i].waiting) continue;
      Fiber* first = &w->fibers[i * kSimdWidth + __builtin_ctz(w->simds[i].waiting)];
      if (first->site != f->site) {
        w->fail(kDivergence, "threads wait at different threadgroup barriers: thread %u elsewhere",
                first->thread.index_in_threadgroup);
      }
      break;
    }
  }
  w->barrier_flags = flags;
  s->waiting |= bit;
  s->runnable &= ~bit;
  if (++w->waiting == w->live) {
    release_barrier(w);
    return;
  }
  Fiber* next = next_fiber(w);
  if (!next) diverged(w);
  go(w, next);
}

extern "C" void qk_threadgroup_barrier(uint32_t flags) {
  meet_threads(kThreadgroupBarrier, flags, __builtin_return_address(0));
}

extern "C" void qk_inactive_lane(uint32_t lane) {
  Worker* w = tls_worker;
  if (w->checks) w->fail(kDivergence, "reads lane %u, which takes no part in this SIMD function", lane);
}

static void fiber_start() {
  Worker* w = tls_worker;
  Fiber* f = w->current;
  w->launch->entry(&f->thread, w->launch->buffers);
  if (w->checks) checks_settle(w->checks);
  Simd* s = (Simd*)f->thread.simd;
  uint32_t bit = 1u << f->thread.lane;
  s->live &= ~bit;
  s->runnable &= ~bit;
  w->live--;
  // A thread that leaves may be the last that others waited for.
  if (s->live && s->meeting == s->live) {
    release_meeting(w, s, w->fibers[(s - w->simds) * kSimdWidth + __builtin_ctz(s->meeting)].operation);
  }
  if (w->live && w->waiting == w->live) release_barrier(w);
  void* nowhere;
  if (!w->live) qk_switch(&nowhere, w->main_sp);
  Fiber* next = next_fiber(w);
  if (!next) {
    for (uint32_t i = 0; i < w->simd_count; i++) {
      uint32_t stuck = w->simds[i].meeting | w->simds[i].waiting;
      if (stuck) w->current = &w->fibers[i * kSimdWidth + __builtin_ctz(stuck)];
    }
    diverged(w);
  }
  w->current = next;
  qk_switch(&nowhere, next->sp);
}

extern "C" float qk_half_operand(float x) {
  return tls_worker->launch->flush && __builtin_fabsf(x) < 0x1p-14f ? 0 : x;
}

extern "C" void* qk_threadgroup_memory(uint32_t slot, uint32_t bytes, uint32_t alignment) {
  Worker* w = tls_worker;
  Worker::Slot& s = w->slots[slot];
  if (!s.known) {
    if (slot >= 64) bytes = w->launch->dynamic_bytes[slot - 64];
    uint32_t usual = alignment < 16 ? 16 : alignment;
    w->arena_counted = ((w->arena_counted + usual - 1) & ~(usual - 1)) + bytes;
    if (w->arena_counted > kThreadgroupLimit) {
      w->fail(kThreadgroupMemory, "%u bytes of threadgroup memory, Metal has %u", w->arena_counted,
              kThreadgroupLimit);
    }
    // Checked arrays lie apart, so that running past one does not reach the next, and have the
    // alignment that they are declared with and no more, so that wider accesses show.
    uint32_t gap = w->checks ? 256 : 0, least = w->checks ? alignment : usual;
    s.begin = ((w->arena_used + gap + least - 1) & ~(least - 1));
    if (w->checks && !(s.begin & least)) s.begin += least;
    s.bytes = bytes;
    s.known = true;
    w->arena_used = s.begin + bytes;
    w->launch->threadgroup_bytes = w->arena_counted;
    if (w->checks) checks_arena(w->checks, slot, s.begin, bytes);
  }
  return w->arena + s.begin;
}

bool Worker::prepare(Launch* l) {
  launch = l;
  uint32_t threads = l->threadgroup[0] * l->threadgroup[1] * l->threadgroup[2];
  simd_count = (threads + kSimdWidth - 1) / kSimdWidth;
  if (!fibers) {
    fibers = (Fiber*)calloc(1024, sizeof(Fiber));
    simds = (Simd*)aligned_alloc(64, 32 * sizeof(Simd));
    arena = (char*)mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    tensors = tensors_begin();
    if (!fibers || !simds || !tensors || arena == MAP_FAILED) return false;
  }
  if (l->fibers && !stacks.reserve((threads + 63) & ~63u)) return false;
  memset(slots, 0, sizeof slots);
  arena_used = arena_counted = 0;
  for (uint32_t i = 0; i < threads; i++) {
    qk_thread& t = fibers[i].thread;
    t.simd = &simds[i / kSimdWidth];
    t.lane = i % kSimdWidth;
    for (int d = 0; d < 3; d++) {
      t.dispatch_threads_per_threadgroup[d] = l->threadgroup[d];
      t.threads_per_grid[d] = l->grid[d];
      t.threadgroups_per_grid[d] = (l->grid[d] + l->threadgroup[d] - 1) / l->threadgroup[d];
    }
  }
  return true;
}

// Where a threadgroup is and how large, at the grid's edge smaller; returns its threads.
static uint32_t threadgroup_at(const Launch* launch, uint32_t linear, const qk_thread& any, uint32_t at[3], uint32_t size[3]) {
  const uint32_t* groups = any.threadgroups_per_grid;
  at[0] = linear % groups[0], at[1] = linear / groups[0] % groups[1];
  at[2] = linear / groups[0] / groups[1];
  for (int d = 0; d < 3; d++) {
    uint32_t left = launch->grid[d] - at[d] * launch->threadgroup[d];
    size[d] = left < launch->threadgroup[d] ? left : launch->threadgroup[d];
  }
  return size[0] * size[1] * size[2];
}

static void set_threadgroup(qk_thread& t, const uint32_t at[3], const uint32_t size[3]) {
  for (int d = 0; d < 3; d++) {
    t.threadgroup_position[d] = at[d];
    t.threads_per_threadgroup[d] = size[d];
  }
}

// Calls f(index, x, y, z) for each thread of a threadgroup.
template <typename F>
static void each_thread(const uint32_t size[3], F f) {
  uint32_t i = 0;
  for (uint32_t z = 0; z < size[2]; z++) {
    for (uint32_t y = 0; y < size[1]; y++) {
      for (uint32_t x = 0; x < size[0]; x++, i++) f(i, x, y, z);
    }
  }
}

static void set_thread(qk_thread& t, uint32_t i, uint32_t x, uint32_t y, uint32_t z) {
  t.index_in_threadgroup = i;
  t.position_in_threadgroup[0] = x, t.position_in_threadgroup[1] = y;
  t.position_in_threadgroup[2] = z;
}

// Threads that never meet run one after another, as one fiber that is none.
void Worker::run_serially(uint32_t linear) {
  uint32_t at[3], size[3];
  current = &fibers[0];
  qk_thread& t = current->thread;
  threadgroup_at(launch, linear, t, at, size);
  set_threadgroup(t, at, size);
  Entry entry = launch->entry;
  const uint64_t* buffers = launch->buffers;
  each_thread(size, [&](uint32_t i, uint32_t x, uint32_t y, uint32_t z) {
    set_thread(t, i, x, y, z);
    t.lane = i % kSimdWidth;
    entry(&t, buffers);
  });
  t.lane = 0;
}

void Worker::run_threadgroup(uint32_t linear) {
  if (!launch->fibers) return run_serially(linear);
  uint32_t at[3], size[3];
  uint32_t threads = threadgroup_at(launch, linear, fibers[0].thread, at, size);
  each_thread(size, [&](uint32_t i, uint32_t x, uint32_t y, uint32_t z) {
    set_thread(fibers[i].thread, i, x, y, z);
    set_threadgroup(fibers[i].thread, at, size);
  });
  live = threads;
  waiting = 0;
  if (checks) checks_threadgroup(checks);
  simd_count = (threads + kSimdWidth - 1) / kSimdWidth;
  for (uint32_t s = 0; s < simd_count; s++) {
    Simd& g = simds[s];
    uint32_t lanes = threads - s * kSimdWidth < kSimdWidth ? threads - s * kSimdWidth : kSimdWidth;
    g.live = g.runnable = lanes == 32 ? ~0u : (1u << lanes) - 1;
    g.meeting = g.waiting = g.device_epoch = g.threadgroup_epoch = 0;
    g.row = &g.rows[0];
    g.row->ready = 0;
  }
  for (uint32_t k = 0; k < threads; k++) fibers[k].sp = stacks.prepare(k, fiber_start);
  current = &fibers[0];
  qk_switch(&main_sp, fibers[0].sp);
}
