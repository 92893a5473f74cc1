// The state of a checked launch: where its buffers lie, what is counted, what the scheduler tells.
#include <stdio.h>
#include <stdlib.h>
#include "checks.h"

char* checks_space;

extern "C" uint64_t qk_place(uint32_t index, uint64_t bytes, uint32_t offset) {
  if (!checks_space) {
    void* p = mmap(nullptr, kRangeBytes * kRanges, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return 0;
    checks_space = (char*)p;
  }
  if (index >= kRanges || bytes > kRangeBytes / 4) return 0;
  char* begin = checks_space + index * kRangeBytes + kRangeBytes / 2;
  if (mmap(begin, bytes + offset + 64, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
    return 0;
  }
  return (uint64_t)(begin + offset);
}
extern "C" void qk_unplace(uint32_t index, uint64_t bytes) {
  mmap(checks_space + index * kRangeBytes + kRangeBytes / 2, bytes + 4096, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

// Zeroed memory that costs nothing until it is touched.
static void* pages(uint64_t bytes) {
  void* p = mmap(nullptr, bytes + 64, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

static bool cells_begin(Cells& cells, uint64_t count) {
  cells.writes = (Access*)pages(count * sizeof *cells.writes);
  cells.reads = (Access(*)[4])pages(count * sizeof *cells.reads);
  return cells.writes && cells.reads;
}

static void cells_end(Cells& cells, uint64_t count) {
  munmap(cells.writes, count * sizeof *cells.writes + 64);
  munmap(cells.reads, count * sizeof *cells.reads + 64);
}

Checks* checks_begin(Launch* l, Worker* w) {
  Checks* c = (Checks*)calloc(1, sizeof(Checks));
  if (!c) return nullptr;
  c->launch = l;
  c->worker = w;
  c->counters = l->counters;
  c->budget = l->budget;
  bool ok = true;
  for (uint32_t i = 0; i < l->region_count; i++) {
    const Region& r = l->regions[i];
    Shadow& s = c->shadows[i];
    s.read = (uint8_t*)pages(r.bytes / 8 + 8);
    ok = ok && s.read;
    if (!r.writable) continue;
    s.written = (uint8_t*)pages(r.bytes / 8 + 8);
    ok = cells_begin(s.cells, r.bytes / l->granule + 2) && ok && s.written;
  }
  ok = cells_begin(c->arena_cells, kArenaBytes) && ok;
  c->arena_written = (uint32_t*)pages(kArenaBytes * sizeof(uint32_t));
  c->banks = (Banks*)pages(32 * sizeof(Banks));
  if (!ok || !c->arena_written || !c->banks) return nullptr;
  return c;
}

static uint64_t bits_set(const uint8_t* map, uint64_t bytes) {
  uint64_t n = 0;
  for (uint64_t i = 0; i < bytes / 8 + 1; i++) n += __builtin_popcount(map[i]);
  return n;
}

void checks_end(Checks* c) {
  Launch* l = c->launch;
  c->counters->threadgroup_memory = l->threadgroup_bytes;
  for (uint32_t i = 0; i < l->region_count; i++) {
    const Region& r = l->regions[i];
    Shadow& s = c->shadows[i];
    c->counters->distinct_read += bits_set(s.read, r.bytes);
    if (r.writable) {
      uint64_t written = bits_set(s.written, r.bytes);
      c->counters->distinct_written += written;
      if (!r.initialised && written < r.bytes && !l->fault) {
        uint64_t first = 0;
        while (s.written[first / 8] >> (first % 8) & 1) first++;
        l->fault = kUninitialised;
        snprintf(l->message, sizeof l->message,
                 "buffer %u is an output and %llu of its %llu bytes are never written, the first at %llu",
                 i, (unsigned long long)(r.bytes - written), (unsigned long long)r.bytes,
                 (unsigned long long)first);
      }
      munmap(s.written, r.bytes / 8 + 8 + 64);
      cells_end(s.cells, r.bytes / l->granule + 2);
    }
    munmap(s.read, r.bytes / 8 + 8 + 64);
  }
  cells_end(c->arena_cells, kArenaBytes);
  munmap(c->arena_written, kArenaBytes * sizeof(uint32_t) + 64);
  munmap(c->banks, 32 * sizeof(Banks) + 64);
  free(c);
}

static void settle_banks(Checks* c, uint32_t simd) {
  Banks& b = c->banks[simd];
  for (uint32_t k = 0; k < b.count; k++) {
    uint8_t load[32] = {0};
    uint32_t worst = 0;
    Bucket& bucket = b.buckets[k];
    for (uint32_t i = 0; i < bucket.words; i++) {
      uint32_t n = ++load[bucket.word[i] % 32];
      if (n > worst) worst = n;
    }
    if (worst > 1) c->counters->bank_conflicts += worst - 1;
    if (worst > c->counters->bank_ways) c->counters->bank_ways = worst;
  }
  b.count = 0;
  memset(b.issued, 0, sizeof b.issued);
}

void checks_threadgroup(Checks* c) {
  for (uint32_t s = 0; s < 32; s++) settle_banks(c, s);
  c->group++;
  c->device_epoch = c->threadgroup_epoch = 0;
  c->counters->threadgroups++;
  c->counters->threads += c->worker->live;
}

void checks_barrier(Checks* c, uint32_t operation, uint32_t flags) {
  (operation == kTensor ? c->counters->matrix_operations : c->counters->threadgroup_barriers)++;
  if (flags & 1) c->device_epoch++;
  if (flags & 2) c->threadgroup_epoch++;
  for (uint32_t s = 0; s < c->worker->simd_count; s++) settle_banks(c, s);
}

void checks_meeting(Checks* c, Simd* s, uint32_t operation, uint32_t flags) {
  settle_banks(c, s - c->worker->simds);
  switch (operation) {
    case QK_QUAD: c->counters->quad_operations++; break;
    case QK_MATRIX: c->counters->matrix_operations++; break;
    case kSimdBarrier:
      c->counters->simdgroup_barriers++;
      if (flags & 1) s->device_epoch++;
      if (flags & 2) s->threadgroup_epoch++;
      break;
    default: c->counters->simd_operations++;
  }
}

void checks_arena(Checks* c, uint32_t, uint32_t begin, uint32_t bytes) {
  memset(c->worker->arena + begin, 0xff, bytes);  // a NaN in every format
}
