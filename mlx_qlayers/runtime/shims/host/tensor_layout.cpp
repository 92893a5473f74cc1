// Which element of a cooperative tensor a lane holds in each of its slots.
#include <stdlib.h>
#include "tensor.h"

Tensors* tensors_begin() { return (Tensors*)calloc(1, sizeof(Tensors)); }

void tensors_end(Tensors* t) {
  for (Spread& s : t->spreads) free(s.at);
  free(t->room);
  free(t);
}

namespace {

struct Random {
  uint64_t state;
  uint32_t below(uint32_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((state >> 33) % n);
  }
  void shuffle(uint32_t* values, uint32_t count) {
    for (uint32_t i = count; i > 1; i--) {
      uint32_t j = below(i), kept = values[i - 1];
      values[i - 1] = values[j], values[j] = kept;
    }
  }
};

// 16 x 16 squares, 8 elements of each in a lane: rows r and r + 8, four neighbouring columns.
uint32_t square_at(const qk_tile& t, uint32_t thread, uint32_t slot, uint32_t capacity) {
  uint32_t across = (t.columns + 15) / 16, lane = thread % 32, q = lane >> 2, i = slot % 8;
  uint32_t square = thread / 32 * (capacity / 8) + slot / 8;
  uint32_t row = square / across * 16 + ((q & 4) | ((lane >> 1) & 3)) + 8 * (i >> 2);
  uint32_t column = square % across * 16 + ((q & 2) | (lane & 1)) * 4 + (i & 3);
  return row < t.rows && column < t.columns ? row << 16 | column : kNowhere;
}

void spread_matrix(Spread& s) {
  const qk_tile& t = s.tile;
  uint32_t threads = 32 * t.simds, all = t.rows * t.columns, least = (all + threads - 1) / threads;
  uint32_t squares = (t.rows + 15) / 16 * ((t.columns + 15) / 16);
  s.capacity = s.kind == QK_LAYOUT_M5 ? (squares + t.simds - 1) / t.simds * 8
      : s.kind == QK_LAYOUT_STRIPS    ? least
                                      : least + 1 + (s.seed & 1);
  s.at = (uint32_t*)malloc(threads * s.capacity * sizeof(uint32_t));
  for (uint32_t k = 0; k < threads * s.capacity; k++) {
    uint32_t thread = k / s.capacity, slot = k % s.capacity;
    uint32_t i = s.kind == QK_LAYOUT_STRIPS ? thread + slot * threads : k;
    s.at[k] = s.kind == QK_LAYOUT_M5 ? square_at(t, thread, slot, s.capacity)
        : i < all                    ? i / t.columns << 16 | i % t.columns
                                     : kNowhere;
  }
  Random random = {s.seed * 77ull + t.role};
  if (s.kind >= QK_LAYOUT_RANDOM) random.shuffle(s.at, threads * s.capacity);
}

// A statistic of rows or columns: each lane has those that its elements of a destination need.
void spread_values(Spread& s) {
  const qk_tile& t = s.tile;
  bool rows = t.role == QK_ROW_VALUES;
  uint32_t count = rows ? t.rows : t.columns, step = rows ? 16 : 0;
  bool squares = s.kind == QK_LAYOUT_M5 && rows;
  s.capacity = squares ? (count + 15) / 16 * 2 : count + (s.kind >= QK_LAYOUT_RANDOM);
  s.at = (uint32_t*)malloc(32 * s.capacity * sizeof(uint32_t));
  Random random = {s.seed * 131ull + t.role};
  for (uint32_t lane = 0; lane < 32; lane++) {
    uint32_t* own = s.at + lane * s.capacity;
    for (uint32_t i = 0; i < s.capacity; i++) {
      uint32_t q = lane >> 2;
      uint32_t value = squares ? i / 2 * step + ((q & 4) | ((lane >> 1) & 3)) + 8 * (i & 1)
                               : (s.kind == QK_LAYOUT_STRIPS ? (i + lane) % count : i);
      own[i] = value < count ? (rows ? value << 16 : value) : kNowhere;
    }
    if (s.kind >= QK_LAYOUT_RANDOM) random.shuffle(own, s.capacity);
  }
}

} // namespace

const Spread& spread_of(const qk_tile& t) {
  const Launch* l = this_worker()->launch;
  Tensors& kept = *this_worker()->tensors;
  for (Spread& s : kept.spreads) {
    if (s.at && s.kind == l->layout && s.seed == l->layout_seed &&
        memcmp(&s.tile, &t, sizeof t) == 0) {
      return s;
    }
  }
  Spread& s = kept.spreads[kept.next++ % kSpreads];
  free(s.at);
  s.kind = l->layout, s.seed = l->layout_seed, s.tile = t;
  t.role >= QK_ROW_VALUES ? spread_values(s) : spread_matrix(s);
  return s;
}

static uint32_t own_thread(const qk_tile& t) {
  const qk_thread& self = this_worker()->current->thread;
  return t.simds == 1 ? self.lane : self.index_in_threadgroup;
}

extern "C" uint32_t qk_tensor_capacity(const qk_tile* tile) { return spread_of(*tile).capacity; }

extern "C" unsigned long qk_tensor_at(const qk_tile* tile, uint32_t i) {
  const Spread& s = spread_of(*tile);
  if (i >= s.capacity) {
    this_worker()->fail(kOutOfBounds, "element %u of a cooperative tensor, of which each thread has %u", i, s.capacity);
  }
  uint32_t at = s.at[own_thread(*tile) * s.capacity + i];
  return at == kNowhere ? 0 : 1ul << 32 | at;
}

extern "C" void qk_tensor_slot(const qk_tile* tile, uint32_t i) {
  if (this_worker()->checks && !qk_tensor_at(tile, i)) {
    this_worker()->fail(kUndefined, "slot %u of a cooperative tensor is no valid element in this thread", i);
  }
}

extern "C" uint32_t qk_tensor_map(const qk_tile* from, uint32_t i, const qk_tile* to) {
  unsigned long at = qk_tensor_at(from, i);
  if (!qk_tensor_compatible()) {
    this_worker()->fail(kUndefined, "iterators of these tensors are not compatible: ask is_iterator_compatible");
  }
  if (!at) {
    this_worker()->fail(kUndefined, "map_iterator of slot %u, which is no valid element in this thread", i);
  }
  bool rows = to->role == QK_ROW_VALUES;
  const Spread& s = spread_of(*to);
  const uint32_t* own = s.at + own_thread(*to) * s.capacity;
  for (uint32_t k = 0; k < s.capacity; k++) {
    if (own[k] != kNowhere && (rows ? own[k] >> 16 == (at >> 16 & 0xffff) : own[k] == (at & 0xffff))) return k;
  }
  return 0;
}
