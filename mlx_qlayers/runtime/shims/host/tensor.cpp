// Tensor operations: the lanes of a scope meet, and the first to go on computes for all of them.
#include <stdlib.h>
#include "tensor.h"

namespace {

// What a fresh element holds: values that no kernel computes. Of 8 bits every value may be meant.
const uint32_t kFresh[] = {0x7e5a, 0x7fda, 0x7fc5a5a5, 0x5a, 0x5a, 0x7fc5a5a5};
const uint32_t kBytes[] = {2, 2, 4, 1, 1, 4};

bool fresh(uint32_t element, const char* p) {
  uint32_t bits = 0;
  if (element == QK_INT8 || element == QK_UINT8) return false;
  memcpy(&bits, p, kBytes[element]);
  return bits == kFresh[element];
}

float number(uint32_t element, const char* p) {
  switch (element) {
    case QK_HALF: return this_worker()->checks ? qk_half_operand((float)*(const _Float16*)p)
                                               : (float)*(const _Float16*)p;
    case QK_BFLOAT: {
      uint32_t bits = (uint32_t) * (const uint16_t*)p << 16;
      float x;
      memcpy(&x, &bits, 4);
      return x;
    }
    case QK_FLOAT: return *(const float*)p;
    case QK_INT8: return *(const int8_t*)p;
    case QK_UINT8: return *(const uint8_t*)p;
    default: return (float)*(const int32_t*)p;
  }
}

void put(uint32_t element, char* p, float x) {
  if (element == QK_HALF) *(_Float16*)p = (_Float16)x;
  else if (element == QK_FLOAT) *(float*)p = x;
  else if (element == QK_BFLOAT) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bool nan = x != x;
    *(uint16_t*)p = nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
}

// What a matrix unit takes of a float under relaxed precision: ten bits of mantissa.
float relaxed(float x) {
  uint32_t bits;
  if (x != x || __builtin_isinf(x)) return x;
  memcpy(&bits, &x, 4);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
  memcpy(&x, &bits, 4);
  return x;
}

// Sums of integers may be larger than what a float holds.
template <typename T>
T value(uint32_t element, const char* p, bool is_relaxed) {
  if (element == QK_INT32) return (T)*(const int32_t*)p;
  float x = number(element, p);
  return (T)(is_relaxed ? relaxed(x) : x);
}

void seen(const void* p, uint64_t bytes, uint32_t alignment, bool written) {
  Worker* w = this_worker();
  if (!w->checks || !bytes) return;
  (written ? qk_store : qk_load)(p, bytes, alignment | 1 << 16, w->current->line);
}

struct Call {
  const qk_tensor_product* product;
  const qk_tensor_operand* operands[3];
};

const qk_tensor_operand& of_thread(const qk_tensor_operand& o, uint32_t thread, int which) {
  Worker* w = this_worker();
  uint32_t first = o.tile.simds == 1
      ? w->current->thread.index_in_threadgroup / kSimdWidth * kSimdWidth : 0;
  return *((const Call*)w->calls[first + thread])->operands[which];
}

const char* name(int which) {
  static const char* const names[] = {"left operand", "right operand", "destination"};
  return names[which];
}

// What there is of a matrix in memory, as much as is not clipped; faults where a fixed tile is not.
void bound(const qk_tensor_operand& o, int rows, int columns, int which) {
  Worker* w = this_worker();
  bool beyond = (o.fixed & 1 && o.columns > o.columns_left) || (o.fixed & 2 && o.rows > o.rows_left);
  if (beyond) {
    w->fail(kOutOfBounds, "the %s is a fixed tile of %d columns and %d rows, of which %d and %d are in its tensor",
            name(which), o.columns, o.rows, o.columns_left, o.rows_left);
  }
  if ((o.fixed & 1 && columns > o.columns) || (o.fixed & 2 && rows > o.rows)) {
    w->fail(kOutOfBounds, "the %s is a fixed tile of %d columns and %d rows; the operation takes %d and %d",
            name(which), o.columns, o.rows, columns, rows);
  }
}

// An operand as a matrix, `rows` by `columns` as stored; zero where it is clipped.
template <typename T>
void gather(T* to, const qk_tensor_operand& o, int rows, int columns, int which, bool is_relaxed) {
  Worker* w = this_worker();
  bool rounds = is_relaxed && o.element == QK_FLOAT && which < 2;
  for (int i = 0; i < rows * columns; i++) to[i] = 0;
  if (o.cooperative) {
    const Spread& s = spread_of(o.tile);
    uint32_t bytes = kBytes[o.element];
    for (uint32_t thread = 0; thread < 32 * o.tile.simds; thread++) {
      const char* own = (const char*)of_thread(o, thread, which).address;
      for (uint32_t i = 0; i < s.capacity; i++) {
        uint32_t at = s.at[thread * s.capacity + i];
        if (at == kNowhere) continue;
        const char* p = own + i * bytes;
        if (fresh(o.element, p) && w->checks) {
          w->fail(kUninitialised, "the %s is read in row %u, column %u, where nobody has set it",
                  name(which), at >> 16, at & 0xffff);
        }
        to[(at >> 16) * columns + (at & 0xffff)] = value<T>(o.element, p, rounds);
      }
    }
    return;
  }
  bound(o, rows, columns, which);
  int last_row = rows < o.rows ? rows : o.rows, last = columns < o.columns ? columns : o.columns;
  for (int r = 0; r < last_row && last > 0; r++) {
    if (o.element == QK_INT4 || o.element == QK_UINT4) {
      const uint8_t* p = (const uint8_t*)o.address + r * o.stride / 2;
      seen(p, (last + 1) / 2, 1, false);
      for (int c = 0; c < last; c++) {
        int code = p[c / 2] >> c % 2 * 4 & 15;
        to[r * columns + c] = o.element == QK_INT4 && code > 7 ? code - 16 : code;
      }
      continue;
    }
    uint32_t bytes = kBytes[o.element];
    const char* p = (const char*)o.address + r * o.stride * bytes;
    seen(p, last * bytes, bytes, false);
    for (int c = 0; c < last; c++) to[r * columns + c] = value<T>(o.element, p + c * bytes, rounds);
  }
}

void store(const int32_t* whole, const float* sums, const qk_tensor_operand& o, int rows, int columns) {
  auto one = [&](char* p, int at) {
    if (o.element == QK_INT32) *(int32_t*)p = whole[at];
    else put(o.element, p, sums[at]);
  };
  uint32_t bytes = kBytes[o.element];
  if (o.cooperative) {
    const Spread& s = spread_of(o.tile);
    for (uint32_t thread = 0; thread < 32 * o.tile.simds; thread++) {
      char* own = (char*)of_thread(o, thread, 2).address;
      for (uint32_t i = 0; i < s.capacity; i++) {
        uint32_t at = s.at[thread * s.capacity + i];
        if (at != kNowhere) one(own + i * bytes, (at >> 16) * columns + (at & 0xffff));
      }
    }
    return;
  }
  bound(o, rows, columns, 2);
  int last_row = rows < o.rows ? rows : o.rows, last = columns < o.columns ? columns : o.columns;
  for (int r = 0; r < last_row && last > 0; r++) {
    char* p = (char*)o.address + r * o.stride * bytes;
    seen(p, last * bytes, bytes, true);
    for (int c = 0; c < last; c++) one(p + c * bytes, r * columns + c);
  }
}

int depth_of(const qk_tensor_product& p, const qk_tensor_operand& left, const qk_tensor_operand& right) {
  Worker* w = this_worker();
  int of_left = left.cooperative ? p.k : p.transpose_left ? left.rows : left.columns;
  int of_right = right.cooperative ? p.k : p.transpose_right ? right.columns : right.rows;
  if (p.k < 0) {
    if (of_left != of_right) {
      w->fail(kUndefined, "the left operand has a depth of %d, the right one of %d", of_left, of_right);
    }
    return of_left;
  }
  if (of_left < p.k || of_right < p.k) {
    w->fail(kOutOfBounds, "a fixed depth of %d reaches past the operands, which have %d and %d: "
            "only a dynamic one is clipped", p.k, of_left, of_right);
  }
  return p.k;
}

float* room(uint64_t count) {
  Tensors& kept = *this_worker()->tensors;
  if (count > kept.size) {
    free(kept.room);
    kept.room = (float*)malloc(count * sizeof(float));
    kept.size = count;
  }
  return kept.room;
}

void multiply(const qk_tensor_product& p, const Call& call) {
  const qk_tensor_operand &a = *call.operands[0], &b = *call.operands[1], &c = *call.operands[2];
  int m = p.m, n = p.n, k = depth_of(p, a, b);
  uint64_t mk = (uint64_t)m * k, kn = (uint64_t)k * n, mn = (uint64_t)m * n;
  float* left = room(mk + kn + (mk > kn ? mk : kn) + 2 * mn);
  float *right = left + mk, *turned = right + kn, *sums = turned + (mk > kn ? mk : kn);
  int32_t* whole = (int32_t*)(sums + mn);
  auto operand = [&](float* to, const qk_tensor_operand& o, int rows, int columns, bool turn, int which) {
    gather(turn ? turned : to, o, turn ? columns : rows, turn ? rows : columns, which, p.relaxed);
    for (int i = 0; turn && i < rows * columns; i++) to[i] = turned[i % columns * rows + i / columns];
  };
  operand(left, a, m, k, p.transpose_left, 0);
  operand(right, b, k, n, p.transpose_right, 1);
  bool integers = c.element == QK_INT32;
  for (uint64_t i = 0; i < mn; i++) sums[i] = 0, whole[i] = 0;
  if (p.accumulate) {
    integers ? gather(whole, c, m, n, 2, false) : gather(sums, c, m, n, 2, false);
  }
  for (int i = 0; i < m; i++) {
    for (int d = 0; d < k; d++) {
      float x = left[(uint64_t)i * k + d];
      const float* row = right + (uint64_t)d * n;
      if (integers) {
        for (int j = 0; j < n; j++) whole[i * n + j] += (int32_t)x * (int32_t)row[j];
      } else {
        for (int j = 0; j < n; j++) sums[i * n + j] += x * row[j];
      }
    }
  }
  store(whole, sums, c, m, n);
}

// Meets the threads of a scope; returns whether this one computes for them all.
bool first_of(uint32_t simds, const Call& call, const void* site) {
  Worker* w = this_worker();
  const qk_thread& self = w->current->thread;
  w->calls[self.index_in_threadgroup] = &call;
  const uint32_t* size = self.threads_per_threadgroup;
  uint32_t threads = size[0] * size[1] * size[2];
  if (simds == 1) {
    qk_row* row = self.simd->row;
    uint32_t lanes = meet_lanes(QK_MATRIX, site);
    if (lanes != ~0u) {
      w->fail(kDivergence, "%d of 32 lanes take part in a tensor operation", __builtin_popcount(lanes));
    }
    if (row->ready) return false;
    row->ready = 1;
    return true;
  }
  if (threads != 32 * simds) {
    w->fail(kDivergence, "a scope of %u SIMD groups in a threadgroup of %u threads", simds, threads);
  }
  meet_threads(kTensor, 0, site);
  if (w->came != threads) {
    w->fail(kDivergence, "%u of %u threads take part in a tensor operation", w->came, threads);
  }
  if (w->tensor_ready) return false;
  w->tensor_ready = true;
  return true;
}

// The operands in memory must be the same in all threads.
void compare(uint32_t simds, const Call& call) {
  Worker* w = this_worker();
  if (!w->checks) return;
  uint32_t self = w->current->thread.index_in_threadgroup;
  uint32_t first = simds == 1 ? self / kSimdWidth * kSimdWidth : 0;
  for (uint32_t i = 0; i < 32 * simds; i++) {
    const Call& other = *(const Call*)w->calls[first + i];
    for (int o = 0; o < 3; o++) {
      if (call.operands[o] && !call.operands[o]->cooperative &&
          memcmp(call.operands[o], other.operands[o], sizeof(qk_tensor_operand)) != 0) {
        w->fail(kDivergence, "the %s is not the same in threads %u and %u", name(o), self, first + i);
      }
    }
  }
}

} // namespace

extern "C" void qk_tensor_fresh(void* elements, uint32_t element, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) memcpy((char*)elements + i * kBytes[element], &kFresh[element], kBytes[element]);
}

extern "C" void qk_tensor_wrong(uint32_t what) {
  static const char* const said[] = {
      "the first stride of a tensor is 1: its columns are neighbours",
      "a slice begins before its tensor", "an extent of a tensor is negative"};
  this_worker()->fail(kUndefined, "%s", said[what]);
}

extern "C" uint32_t qk_tensor_compatible() { return this_worker()->launch->layout != QK_LAYOUT_APART; }


extern "C" void qk_tensor_memory(const qk_tensor_operand* memory) { bound(*memory, 0, 0, 2); }

extern "C" void qk_tensor_meet(uint32_t simds) {
  Call call = {};
  first_of(simds, call, __builtin_return_address(0));
}

extern "C" void qk_tensor_run(const qk_tensor_product* product, const qk_tensor_operand* left, const qk_tensor_operand* right, const qk_tensor_operand* to) {
  Call call = {product, {left, right, to}};
  if (!first_of(product->simds, call, __builtin_return_address(0))) return;
  compare(product->simds, call);
  multiply(*product, call);
}

extern "C" void qk_tensor_convert(const qk_tensor_operand* from, const qk_tensor_operand* to) {
  Call call = {nullptr, {from, nullptr, to}};
  if (!qk_tensor_compatible()) {
    this_worker()->fail(kUndefined, "a destination is not compatible as an input: ask is_compatible_as_left_input");
  }
  if (!first_of(1, call, __builtin_return_address(0))) return;
  int rows = from->tile.rows, columns = from->tile.columns;
  float* values = room((uint64_t)rows * columns);
  gather(values, *from, rows, columns, 0, false);
  store(nullptr, values, *to, rows, columns);
}

extern "C" void qk_tensor_reduce(const qk_tensor_operand* from, const qk_tensor_operand* to, uint32_t operation, float identity) {
  Worker* w = this_worker();
  Call call = {nullptr, {from, nullptr, to}};
  if (!first_of(1, call, __builtin_return_address(0))) return;
  static const char* const names[] = {"sum", "maximum", "minimum"};
  float most = from->element == QK_HALF ? 65504.0f : 3.3895314e38f;
  bool right = operation == 0 ? identity == 0 : operation == 1 ? identity <= -most : identity >= most;
  if (!right) w->fail(kUndefined, "%g is not the identity of a %s", (double)identity, names[operation]);
  int rows = from->tile.rows, columns = from->tile.columns;
  bool by_rows = to->tile.role == QK_ROW_VALUES;
  int count = by_rows ? rows : columns;
  float* values = room((uint64_t)rows * columns + count);
  float* results = values + rows * columns;
  gather(values, *from, rows, columns, 0, false);
  for (int i = 0; i < count; i++) results[i] = identity;
  for (int i = 0; i < rows * columns; i++) {
    float& r = results[by_rows ? i / columns : i % columns];
    float x = values[i];
    r = operation == 0 ? r + x : operation == 1 ? __builtin_fmaxf(r, x) : __builtin_fminf(r, x);
  }
  const Spread& s = spread_of(to->tile);
  for (uint32_t lane = 0; lane < 32; lane++) {
    char* own = (char*)of_thread(*to, lane, 2).address;
    for (uint32_t i = 0; i < s.capacity; i++) {
      uint32_t at = s.at[lane * s.capacity + i];
      if (at != kNowhere) put(to->element, own + i * kBytes[to->element], results[by_rows ? at >> 16 : at]);
    }
  }
}
