// Code that the attention kernels share: tiles of rows in threadgroup memory, operands in registers,
// scores and masks.
//
// A SIMD group owns 16 rows (or two blocks of 16) and, for wide heads, one of SLICES slices of the
// columns: its products are then partial scores, which the slices add up through threadgroup memory.
// Scores are in units of log2.

#include "common/power.metal"
#include "common/tile.metal"

#include <metal_stdlib>
using namespace metal;

// Indices into `sizes` and `factors`. Query i attends to the keys j with
// i + REACH - WINDOW < j <= i + REACH.
enum size { QUERIES, KEYS, HEADS, GQA_FACTOR, REACH, WINDOW };
enum factor { SCALE, CAP, SLOPE };
enum mask_kind { NO_MASK, BOOLEAN, ADDED };

constant float LOG2E = 1.44269504f;
// The score of a hidden key, and the maximum of a query that attends to none: exp2 of any score less BLANK
// is 0. Both are finite, so that no difference of them is NaN.
constant float LOWEST = -1.0e30f;
constant float BLANK = 1.0e38f;

constexpr int rounded_up(int n, int to) {
  return (n + to - 1) / to * to;
}
constexpr int larger(int a, int b) {
  return a > b ? a : b;
}
constexpr int packs_per_thread(int rows, int width, int bytes, int threads) {
  return (rows * width * bytes / 16 + threads - 1) / threads;
}

// The rows of one head, with the array's strides. `packed` says whether they can be read in vectors of 16
// bytes, with 32-bit offsets in a tile.
template <typename T>
struct head_rows {
  const device T* at;
  long row, column;
  int count;
  bool packed;
};

template <typename T>
METAL_FUNC head_rows<T> rows_of(
    const device T* x, const constant int64_t* strides, uint batch, uint head, int count) {
  head_rows<T> rows;
  rows.at = x + (batch * long(strides[0]) + head * long(strides[1]));
  rows.row = strides[2];
  rows.column = strides[3];
  rows.count = count;
  rows.packed = rows.column == 1 && rows.row * sizeof(T) % 16 == 0 &&
      reinterpret_cast<ulong>(rows.at) % 16 == 0 &&
      rows.row < 1 << 23 && rows.row > -(1 << 23);
  return rows;
}

// Each thread loads vectors of EACH elements of a tile's rows. If THREADS vectors are whole rows, those of a
// thread are THREADS / VECTORS rows apart. The row and the column of vector i:
template <int PADDED, int EACH, int THREADS>
METAL_FUNC uint2 vector_place(int i, uint thread_index) {
  constexpr int VECTORS = PADDED / EACH, STEP = THREADS / VECTORS;
  constexpr bool WHOLE = THREADS % VECTORS == 0;
  uint index = WHOLE ? thread_index : thread_index + i * THREADS;
  return uint2(index / VECTORS + (WHOLE ? i * STEP : 0), index % VECTORS * EACH);
}
// The offset of element `from` of vector i in a tile; eight rows are a constant distance apart.
template <typename T, int ROWS, int PADDED, int EACH, int THREADS, bool WARPGROUP>
METAL_FUNC int vector_offset(int i, int from, uint thread_index) {
  constexpr int VECTORS = PADDED / EACH, STEP = THREADS / VECTORS;
  constexpr bool REGULAR = THREADS % VECTORS == 0 && STEP % 8 == 0;
  uint2 place = vector_place<PADDED, EACH, THREADS>(REGULAR ? 0 : i, thread_index);
  int jump = REGULAR ? i * place_in_tile<T, ROWS, PADDED, WARPGROUP>(STEP, 0) : 0;
  return place_in_tile<T, ROWS, PADDED, WARPGROUP>(place.x, place.y + from) + jump;
}

// Copies tile after tile of ROWS rows, with WIDTH columns, from device memory to threadgroup memory; the
// padding is zero. A thread's vectors of 16 bytes go through registers or, with DIRECT, by asynchronous
// copies into a tile that is free. Rows that are not aligned are copied element by element in `put`.
template <typename T, int ROWS, int WIDTH, int PADDED, int THREADS, bool WARPGROUP, bool DIRECT>
struct tile_reader {
  head_rows<T> rows;
  uint4 held[DIRECT ? 1 : packs_per_thread(ROWS, PADDED, sizeof(T), THREADS)];

  enum { PACKS = PADDED * sizeof(T) / 16, V = 16 / sizeof(T), STEP = THREADS / PACKS };
  enum { WHOLE = THREADS % PACKS == 0, EVEN = ROWS * PACKS % THREADS == 0 };

  // Starts to load the tile that `rows` begin with.
  METAL_FUNC void fetch(threadgroup T* tile, uint thread_index) {
    uint2 own = vector_place<PADDED, V, THREADS>(0, thread_index);
    int left = rows.packed ? rows.count - int(own.x) : 0;
    const device T* at = rows.at + (int(own.x) * int(rows.row) + int(own.y));
#pragma unroll
    for (int i = 0; i < packs_per_thread(ROWS, PADDED, sizeof(T), THREADS); i++) {
      uint2 place = vector_place<PADDED, V, THREADS>(i, thread_index);
      bool inside = (WHOLE ? i * STEP < left : rows.packed && int(place.x) < rows.count) &&
          (WIDTH == PADDED || place.y < WIDTH);
      if (!WHOLE) {
        at = rows.at + (int(place.x) * int(rows.row) + int(place.y));
      }
      if (!DIRECT) {
        held[i] = uint4(0);
        if (inside && (EVEN || place.x < ROWS)) {
          held[i] = *reinterpret_cast<const device uint4*>(at);
        }
      } else if (EVEN || place.x < ROWS) {
        int to = vector_offset<T, ROWS, PADDED, V, THREADS, WARPGROUP>(i, 0, thread_index);
        copy_pack(tile + to, at, inside);
      }
      at += STEP * rows.row;
    }
    if (DIRECT) {
      end_copies();
    }
  }

  // Stores the tile that begins `back` rows ahead of `rows`; it is visible behind the next barrier. LATER tiles
  // may be in flight already. Of several tiles that are stored at once, only the last has to be SHOWN to products.
  template <int LATER = 0, bool SHOWN = true>
  METAL_FUNC void put(threadgroup T* tile, uint thread_index, int back = 0) {
    if (DIRECT) {
      wait_for_copies<LATER>();
    }
    if (!DIRECT && rows.packed) {
#pragma unroll
      for (int i = 0; i < packs_per_thread(ROWS, PADDED, sizeof(T), THREADS); i++) {
        if (EVEN || vector_place<PADDED, V, THREADS>(i, thread_index).x < ROWS) {
          int to = vector_offset<T, ROWS, PADDED, V, THREADS, WARPGROUP>(i, 0, thread_index);
          *reinterpret_cast<threadgroup uint4*>(tile + to) = held[i];
        }
      }
    }
    if (!rows.packed) {
      if (DIRECT) {
        // `fetch` copied zeros, which must not arrive behind the elements of another thread.
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
#pragma clang loop unroll(disable)
      for (uint index = thread_index; index < ROWS * PADDED; index += THREADS) {
        uint row = index / PADDED, column = index % PADDED;
        T value = T(0);
        if (int(row) - back < rows.count && column < WIDTH) {
          value = rows.at[(int(row) - back) * rows.row + column * rows.column];
        }
        tile[place_in_tile<T, ROWS, PADDED, WARPGROUP>(row, column)] = value;
      }
    }
    if (WARPGROUP && SHOWN) {
      show_to_products();
    }
  }

  METAL_FUNC void skip(int count) {
    rows.at += count * rows.row;
    rows.count -= count;
  }
};

// Loads STEPS left operands of 16 rows, 16 columns each, with zeros outside the `width` columns.
template <typename T, int STEPS>
METAL_FUNC void load_left_rows(
    thread left_fragment<T>* f, head_rows<T> from, int width, int row, int column, uint lane) {
  // Whole words: to combine two halves takes a wait for each.
  using word = metal::conditional_t<sizeof(T) == 2, uint, uint2>;
  word words[STEPS * 4];
#pragma unroll
  for (int i = 0; i < STEPS * 4; i++) {
    int r = row + fragment_row(lane) + i % 2 * 8, c = column + i / 2 * 8 + fragment_col(lane);
    words[i] = word(0);
    if (from.packed && r < from.count && c < width) {
      words[i] = *reinterpret_cast<const device word*>(from.at + (r * from.row + c));
    }
  }
  // Not unrolled: all addresses and elements at once would not fit into registers.
#pragma clang loop unroll(disable)
  for (int i = 0; i < (from.packed ? 0 : STEPS * 4); i++) {
    int r = row + fragment_row(lane) + i % 2 * 8, c = column + i / 2 * 8 + fragment_col(lane);
    metal::vec<T, 2> pair = metal::vec<T, 2>(T(0));
    if (r < from.count && c < width) {
      const device T* at = from.at + (r * from.row + c * from.column);
      pair = metal::vec<T, 2>(at[0], at[from.column]);
    }
#pragma unroll
    for (int k = 0; k < STEPS * 4; k++) {
      words[k] = k == i ? as_type<word>(pair) : words[k];
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS * 4; i++) {
    f[i / 4].part[i % 4] = as_type<metal::vec<T, 2>>(words[i]);
  }
}

template <int COUNT>
METAL_FUNC void clear(thread sum_fragment* sums) {
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    sums[n].part[0] = sums[n].part[1] = float2(0.0f);
  }
}

// Adds up COUNT fragments of the SLICES SIMD groups that own the same rows. All get the same bits. Each
// OWNERS SIMD groups are one slice.
template <int COUNT, int SLICES, int OWNERS>
METAL_FUNC void add_slices(
    thread sum_fragment* parts, threadgroup float2* exchange, uint simd_group, uint lane) {
#pragma unroll
  for (int i = 0; i < 2 * COUNT; i++) {
    exchange[(simd_group * 2 * COUNT + i) * 32 + lane] = parts[i / 2].part[i % 2];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint first = simd_group / (OWNERS * SLICES) * (OWNERS * SLICES) + simd_group % OWNERS;
#pragma unroll
  for (int i = 0; i < 2 * COUNT; i++) {
    float2 sum = exchange[(first * 2 * COUNT + i) * 32 + lane];
#pragma unroll
    for (int slice = 1; slice < SLICES; slice++) {
      sum += exchange[((first + slice * OWNERS) * 2 * COUNT + i) * 32 + lane];
    }
    parts[i / 2].part[i % 2] = sum;
  }
}

// The mask of one head, and the factors that turn a product into a score.
template <typename M>
struct score_rule {
  const device M* mask;
  long mask_query, mask_key;
  int queries, keys, reach, window;
  float scale, cap;
};

template <typename M>
METAL_FUNC score_rule<M> rule_of(
    const device M* mask,
    const constant int64_t* strides,
    constant int* sizes,
    constant float* factors,
    uint batch,
    uint head) {
  score_rule<M> rule;
  rule.mask = mask + (batch * long(strides[1]) + head * long(strides[2]));
  rule.mask_query = strides[3];
  rule.mask_key = strides[4];
  rule.queries = sizes[QUERIES];
  rule.keys = sizes[KEYS];
  rule.reach = sizes[REACH];
  rule.window = sizes[WINDOW];
  rule.scale = factors[SCALE];
  rule.cap = factors[CAP];
  return rule;
}

// The rows, head and batch entry of a threadgroup. `groups.x` heads, whose arrays fit into the cache, run at the
// same time with the same rows.
METAL_FUNC uint3 part_of(uint3 group, uint3 groups, constant int* sizes) {
  uint parts = uint(sizes[HEADS]) / groups.x;
  return uint3(group.y, group.z % parts * groups.x + group.x, group.z / parts);
}

// The weights of a query are 2^(score - x) y, by the norms of the forward pass. For 16-bit types x includes the
// logarithm of the sum, which saves a product; in float32 its rounding would show.
template <typename T>
METAL_FUNC float2 norm_of(const device float* norms, int query, int queries) {
  if (query >= queries) {
    return float2(BLANK, 1.0f);
  }
  float top = norms[2 * query], total = norms[2 * query + 1];
  return sizeof(T) == 4 ? float2(top, 1.0f / total) : float2(top + fast::log2(total), 1.0f);
}
template <typename T>
METAL_FUNC float2 weights_of(float2 scores, float unit, float2 lowered, float2 factor) {
  float2 weight = float2(
      power_of_2<T>(fma(scores.x, unit, -lowered.x)),
      power_of_2<T>(fma(scores.y, unit, -lowered.y)));
  return sizeof(T) == 4 ? weight * factor : weight;
}

// Whether, by positions, all of these queries attend to all of these keys.
template <typename M>
METAL_FUNC bool all_seen(
    thread const score_rule<M>& rule, int first_query, int queries, int first_key, int keys) {
  int last_query = first_query + queries - 1, last_key = first_key + keys - 1;
  return last_key < rule.keys && last_key <= first_query + rule.reach &&
      first_key > last_query + rule.reach - rule.window;
}

// Without softcap and mask, products are used as scores directly; `unit` is their factor in the exponent.
constexpr bool is_raw(int mask, bool softcap) {
  return mask == NO_MASK && !softcap;
}

// The address of the mask for the columns from `column` on, and the stride of columns, which loops add:
// a 64-bit multiplication takes sixteen cycles on Apple GPUs.
template <bool TRANSPOSED, typename M>
METAL_FUNC const device M* mask_from(thread const score_rule<M>& rule, int column) {
  return rule.mask + column * (TRANSPOSED ? rule.mask_query : rule.mask_key);
}
template <bool TRANSPOSED, typename M>
METAL_FUNC long mask_step(thread const score_rule<M>& rule, int columns) {
  return columns * (TRANSPOSED ? rule.mask_query : rule.mask_key);
}

// Turns COUNT fragments of products into scores. Rows are queries and columns keys, or the other way round
// if TRANSPOSED. `mask` points to that of `column`. `slopes` gets the derivative of the softcap.
template <int MASK, bool SOFTCAP, bool TRANSPOSED, int COUNT, typename M>
METAL_FUNC void make_scores(
    thread sum_fragment* scores,
    thread sum_fragment* slopes,
    int row,
    int column,
    const device M* mask,
    thread const score_rule<M>& rule,
    uint lane) {
  row += fragment_row(lane);
  column += fragment_col(lane);
  int rows = TRANSPOSED ? rule.keys : rule.queries, columns = TRANSPOSED ? rule.queries : rule.keys;
  long across = mask_step<TRANSPOSED>(rule, 1), down = mask_step<!TRANSPOSED>(rule, 1);
  const device M* own = mask + (row * down + fragment_col(lane) * across);
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float score = scores[n].part[i / 2][i % 2] * (is_raw(MASK, SOFTCAP) ? 1.0f : rule.scale);
      if (SOFTCAP) {
        float tanh_score = precise::tanh(score);
        score = tanh_score * rule.cap;
        slopes[n].part[i / 2][i % 2] = 1.0f - tanh_score * tanh_score;
      }
      if (MASK != NO_MASK) {
        // Outside, scores are hidden or their results are not stored.
        bool inside = row + i / 2 * 8 < rows && column + 8 * n + i % 2 < columns;
        M value = *(inside ? own + (i / 2 * 8 * down + (8 * n + i % 2) * across) : mask);
        if (MASK == BOOLEAN) {
          score = bool(value) ? score : LOWEST;
        } else {
          score = fma(float(value), LOG2E, score);
          score = score < LOWEST ? LOWEST : score;
        }
      }
      scores[n].part[i / 2][i % 2] = score;
    }
  }
}

// Hides keys by position, in the same fragments: a row attends to a range of columns. Rows beyond the last
// key may keep some, since their results are not stored.
template <bool TRANSPOSED, int COUNT, typename M>
METAL_FUNC void hide_unseen(
    thread sum_fragment* scores,
    int row,
    int column,
    thread const score_rule<M>& rule,
    uint lane) {
  row += fragment_row(lane);
  column += fragment_col(lane);
  int first = TRANSPOSED ? row - rule.reach : row + rule.reach - rule.window + 1;
#pragma unroll
  for (int p = 0; p < 2; p++) {
    int left = TRANSPOSED ? rule.window : rule.keys - first - 8 * p;
    uint seen = uint(clamp(left, 0, rule.window));
#pragma unroll
    for (int i = 0; i < 2 * COUNT; i++) {
      float score = scores[i / 2].part[p][i % 2];
      uint place = uint(column - first + (i / 2 * 8 + i % 2 - 8 * p));
      scores[i / 2].part[p][i % 2] = place < seen ? score : LOWEST;
    }
  }
}
