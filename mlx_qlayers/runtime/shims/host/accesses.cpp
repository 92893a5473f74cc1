// Every load and store of the checked build comes here before it happens: bounds, values, races.
#include "checks.h"

enum Kind { kRead, kWrite, kAtomic };
static const char* const kVerbs[] = {"reads", "writes", "updates"};

static bool tolerated(Checks* c, Fault fault) { return c->launch->tolerated >> fault & 1; }

// Whether `a` comes before `b`; threadgroup memory is new to each threadgroup.
static bool ordered(const Access& a, const Access& b, bool in_device) {
  if (a.group != b.group) return !in_device;
  if (a.thread == b.thread || a.epoch != b.epoch) return true;
  return a.thread / kSimdWidth == b.thread / kSimdWidth && a.simd_epoch != b.simd_epoch;
}

static void remember(Access* reads, const Access& now) {
  const Access last = reads[0];
  bool other_group = last.group != now.group;
  if (other_group || last.thread != now.thread) reads[1] = last;
  if (other_group || last.thread / kSimdWidth != now.thread / kSimdWidth) reads[2] = last;
  if (other_group) reads[3] = last;
  reads[0] = now;
}

static void race(Checks* c, const Access& other, const char* did, Kind kind, Memory m) {
  if (tolerated(c, kRace)) return;
  c->worker->fail(kRace, "race: thread %u of threadgroup number %u %s the same bytes of %s %u, which this one %s",
                  other.thread, other.group - 1, did, m.kind, m.index, kVerbs[kind]);
}

void checks_settle(Checks* c) {
  Pending& p = c->pending;
  if (!p.by) return;
  Fiber* by = p.by;
  p.by = nullptr;
  if (memcmp(p.at, p.before, p.bytes) == 0) {
    c->counters->same_value_writes++;
    return;
  }
  c->worker->current = by;
  by->line = p.line;
  race(c, p.other, "wrote", kWrite, p.memory);
}

// Compares an access with those before it in its cells, and remembers it there.
static void order(Checks* c, Cells& cells, uint64_t offset, const Access& now, Kind kind, const char* at, uint64_t bytes, Memory m) {
  bool in_device = m.kind[0] == 'b';
  uint32_t granule = c->launch->granule;
  for (uint64_t i = offset / granule; i <= (offset + bytes - 1) / granule; i++) {
    Access& w = cells.writes[i];
    if (w.group && !ordered(w, now, in_device) && !(w.atomic && now.atomic)) {
      if (kind == kWrite && bytes <= sizeof c->pending.before) {
        c->pending = {c->worker->current, at, w, m, (uint32_t)bytes, c->worker->current->line, {}};
        memcpy(c->pending.before, at, bytes);
      } else {
        race(c, w, "wrote", kind, m);
      }
    }
    if (kind == kRead) {
      remember(cells.reads[i], now);
      cells.read = true;
      continue;
    }
    if (cells.read) {
      for (const Access& r : cells.reads[i]) {
        if (r.group && !ordered(r, now, in_device) && !(r.atomic && now.atomic)) race(c, r, "read", kind, m);
      }
    }
    w = now;
  }
}

static void mark(uint8_t* map, uint64_t at, uint64_t bytes) {
  for (; bytes && at % 8; at++, bytes--) map[at / 8] |= 1 << (at % 8);
  for (; bytes >= 8; at += 8, bytes -= 8) map[at / 8] = 0xff;
  if (bytes) map[at / 8] |= (1 << bytes) - 1;
}

static bool marked(const uint8_t* map, uint64_t at, uint64_t bytes) {
  for (uint64_t i = at; i < at + bytes; i++) {
    if (!(map[i / 8] >> (i % 8) & 1)) return false;
  }
  return true;
}

static Access access_now(Checks* c, const qk_thread& t, bool in_device, bool atomic) {
  Simd* s = (Simd*)t.simd;
  return {c->group, (uint16_t)t.index_in_threadgroup, (uint16_t)atomic,
          in_device ? c->device_epoch : c->threadgroup_epoch,
          in_device ? s->device_epoch : s->threadgroup_epoch};
}

static void device_access(Checks* c, const qk_thread& t, uint64_t at, uint64_t bytes, Kind kind, bool atomic, bool constant) {
  uint32_t i = (at - (uint64_t)checks_space) / kRangeBytes;
  Launch* l = c->launch;
  if (i >= l->region_count) c->worker->fail(kOutOfBounds, "%s %llu bytes outside every buffer", kVerbs[kind], (unsigned long long)bytes);
  const Region& r = l->regions[i];
  if (at < r.begin || at + bytes > r.begin + r.bytes) {
    c->worker->fail(kOutOfBounds, "%s %llu bytes at byte %lld of buffer %u, which has %llu", kVerbs[kind],
                    (unsigned long long)bytes, (long long)(at - r.begin), i, (unsigned long long)r.bytes);
  }
  Shadow& s = c->shadows[i];
  uint64_t offset = at - r.begin;
  Counters& n = *c->counters;
  if (kind != kWrite) {
    (constant ? n.constant_read : n.bytes_read) += bytes;
    n.loads += !constant;
    if (!constant) mark(s.read, offset, bytes);
  }
  if (kind != kRead) n.bytes_written += bytes, n.stores++;
  if (!r.writable) {
    if (kind != kRead) c->worker->fail(kOutOfBounds, "%s buffer %u, which is read-only", kVerbs[kind], i);
    return;
  }
  if (kind != kWrite && !r.initialised && !tolerated(c, kUninitialised) &&
      !marked(s.written, offset, bytes)) {
    c->worker->fail(kUninitialised, "%s byte %llu of buffer %u, an output that nobody has written there",
                    kVerbs[kind], (unsigned long long)offset, i);
  }
  order(c, s.cells, offset, access_now(c, t, true, atomic), kind, (const char*)at, bytes, {"buffer", i});
  if (kind != kRead) mark(s.written, offset, bytes);
}

// A wide access goes in parts, as on hardware: the lanes of a quarter of the SIMD group move 16
// bytes each at once, those of a half 8.
static void issue(Checks* c, const qk_thread& t, uint32_t offset, uint32_t bytes, uint32_t line) {
  Banks& b = c->banks[t.index_in_threadgroup / kSimdWidth];
  for (uint32_t done = 0; done < bytes; done += 16) {
    uint32_t width = bytes - done < 16 ? bytes - done : 16, parts = width > 8 ? 4 : width > 4 ? 2 : 1;
    uint32_t k = b.issued[t.lane] + t.lane * parts / kSimdWidth;
    b.issued[t.lane] += parts;
    if (k >= kBuckets) return;
    for (; b.count <= k; b.count++) {
      b.buckets[b.count].line = line;
      b.buckets[b.count].words = 0;
    }
    Bucket& bucket = b.buckets[k];
    for (uint32_t at = done; at < done + width; at += 4) {
      uint32_t word = (offset + at) / 4;
      bool seen = bucket.line != line || bucket.words == kSimdWidth;
      for (uint32_t i = 0; i < bucket.words && !seen; i++) seen = bucket.word[i] == word;
      if (!seen) bucket.word[bucket.words++] = word;
    }
  }
}

static void arena_access(Checks* c, const qk_thread& t, uint64_t at, uint64_t bytes, Kind kind, bool atomic, uint32_t line) {
  Worker* w = c->worker;
  uint32_t offset = at - (uint64_t)w->arena;
  auto holds = [&](int i) {
    const Worker::Slot& s = w->slots[i];
    return s.known && offset >= s.begin && offset + bytes <= s.begin + s.bytes;
  };
  // Mostly the array of the last access.
  int slot = c->slot;
  if (!holds(slot)) {
    for (slot = kSlots - 1; slot >= 0 && !holds(slot);) slot--;
  }
  if (slot < 0) {
    for (int i = 0; i < kSlots; i++) {
      const Worker::Slot& s = w->slots[i];
      if (s.known && offset + 128 >= s.begin && offset < s.begin + s.bytes + 128) {
        w->fail(kOutOfBounds, "%s %llu bytes at byte %d of threadgroup array %d, which has %u", kVerbs[kind],
                (unsigned long long)bytes, (int)(offset - s.begin), i, s.bytes);
      }
    }
    w->fail(kOutOfBounds, "%s threadgroup memory outside every array", kVerbs[kind]);
  }
  c->slot = slot;
  for (uint32_t i = offset; i < offset + bytes; i++) {
    if (kind != kWrite && c->arena_written[i] != c->group && !tolerated(c, kUninitialised)) {
      w->fail(kUninitialised, "%s byte %u of threadgroup array %d, which nobody has written", kVerbs[kind],
              i - w->slots[slot].begin, slot);
    }
    if (kind != kRead) c->arena_written[i] = c->group;
  }
  order(c, c->arena_cells, offset, access_now(c, t, false, atomic), kind, (const char*)at, bytes,
        {"threadgroup array", (uint32_t)slot});
  (kind == kRead ? c->counters->threadgroup_read : c->counters->threadgroup_written) += bytes;
  issue(c, t, offset, bytes, line);
}

// `how`: the alignment; from bit 16 the address space (1 device, 2 constant, 3 threadgroup, 0
// any); from bit 24 whether it is atomic.
static inline void check(const void* p, uint64_t bytes, uint32_t how, uint32_t line, Kind kind) {
  Worker* w = this_worker();
  Checks* c = w->checks;
  if (!c || !bytes) return;
  w->current->line = line;
  uint64_t at = (uint64_t)p;
  uint32_t alignment = how & 0xffff, spaces = how >> 16 & 0xff;
  bool atomic = how >> 24;
  checks_settle(c);
  const qk_thread& t = w->current->thread;
  c->counters->atomics += atomic;
  if (at - (uint64_t)checks_space < kRangeBytes * kRanges) {
    device_access(c, t, at, bytes, kind, atomic, spaces == 2);
  } else if (at - (uint64_t)w->arena < kArenaBytes) {
    arena_access(c, t, at, bytes, kind, atomic, line);
  } else if (spaces == 0) {
    return;  // the thread's own
  } else if (spaces != 2 || at < 65536) {
    w->fail(kOutOfBounds, "%s %llu bytes at address %#llx, which is no buffer", kVerbs[kind],
            (unsigned long long)bytes, (unsigned long long)at);
  }
  if (at & (alignment - 1)) {
    w->fail(kMisaligned, "%s %llu bytes at an address that is no multiple of %u", kVerbs[kind],
            (unsigned long long)bytes, alignment);
  }
}

extern "C" void qk_load(const void* p, uint64_t bytes, uint32_t how, uint32_t line) {
  check(p, bytes, how, line, kRead);
}
extern "C" void qk_store(const void* p, uint64_t bytes, uint32_t how, uint32_t line) {
  check(p, bytes, how, line, kWrite);
}
extern "C" void qk_atomic(const void* p, uint64_t bytes, uint32_t how, uint32_t line) {
  check(p, bytes, how, line, kAtomic);
}
extern "C" void qk_at(uint32_t line) { this_worker()->current->line = line; }
extern "C" void qk_work(uint32_t cycles) {
  Worker* w = this_worker();
  if (w->checks) w->checks->counters->alu_cycles += cycles;
}
extern "C" void qk_tick(uint32_t line) {
  Worker* w = this_worker();
  if (w->checks) w->checks->counters->turns++;
  if (w->checks && w->checks->budget-- == 0) {
    w->current->line = line;
    w->fail(kHang, "still running after %llu steps", (unsigned long long)w->launch->budget);
  }
}

// What clang's own checks call, after qk_at has told where.
extern "C" void __ubsan_handle_out_of_bounds(void*, uint64_t index) {
  this_worker()->fail(kOutOfBounds, "index %lld is outside an array", (long long)index);
}
extern "C" void __ubsan_handle_divrem_overflow(void*, uint64_t, uint64_t) {
  this_worker()->fail(kUndefined, "integer division by zero");
}
