// What the attention kernels share: tiles of rows in threadgroup memory, operands in registers,
// scores and masks.
//
// A SIMD group owns 16 rows (or two blocks of 16) and, where heads are wide, one of SLICES slices
// of the columns: its products are then parts of the scores, which the slices add up through
// threadgroup memory. Scores are in units of log2.

#include "fragment.metal"

#include <metal_stdlib>
using namespace metal;

// What the entries of `sizes` and `numbers` are. Query i sees the keys j of those that there are
// with i + REACH - WINDOW < j <= i + REACH.
enum size { QUERIES, KEYS, HEADS, SHARE, REACH, WINDOW };
enum number { SCALE, CAP, SLOPE };
enum mask_kind { NO_MASK, BOOLEAN, ADDED };

constant float LOG2E = 1.44269504f;
// The score of a hidden key, and what lowers those of a query that sees none: exp2 of any score less
// this is 0. Both are finite, so that no difference of them is NaN.
constant float LOWEST = -1.0e30f;
constant float BLANK = 1.0e38f;

constexpr int rounded_up(int n, int to) {
  return (n + to - 1) / to * to;
}
constexpr int larger(int a, int b) {
  return a > b ? a : b;
}
// From row to row of a tile: an odd number of packs, so that rows begin in different banks.
constexpr int tile_stride(int width, int bytes) {
  return (width * bytes / 16 | 1) * 16 / bytes;
}
// Elements of a tile, and where the pack with an element begins.
template <typename T, bool TOGETHER>
constexpr int tile_elements(int rows, int width) {
  return TOGETHER ? rows * width : rows * tile_stride(width, sizeof(T));
}
template <typename T, int ROWS, int WIDTH, bool TOGETHER>
METAL_FUNC int tile_place(int row, int column) {
  return TOGETHER ? shared_place<ROWS>(row, column) : row * tile_stride(WIDTH, sizeof(T)) + column;
}
constexpr int packs_per_thread(int rows, int width, int bytes, int threads) {
  return (rows * width * bytes / 16 + threads - 1) / threads;
}

// The rows of one head, as the array's strides have them.
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
      reinterpret_cast<ulong>(rows.at) % 16 == 0;
  return rows;
}

template <typename T>
METAL_FUNC void skip_rows(thread head_rows<T>& rows, int count) {
  rows.at += count * rows.row;
  rows.count -= count;
}

// A thread's share of a tile of the first ROWS rows, WIDTH columns of which are there: in packs of 16
// bytes from device memory to registers, and on to threadgroup memory. What is outside is zero. Where
// packs are not possible, elements go straight to threadgroup memory.
template <typename T, int ROWS, int WIDTH, int PADDED, int THREADS, bool TOGETHER, bool DIRECT>
METAL_FUNC void fetch_tile(
    thread uint4* held,
    thread const head_rows<T>& from,
    threadgroup T* tile,
    uint thread_index) {
  constexpr int V = 16 / sizeof(T), PACKS = PADDED / V;
  constexpr bool WHOLE = THREADS % PACKS == 0;
  // Packs of a thread are as many rows apart as the threads cover at once, if these are whole.
  const device T* p = from.at + (thread_index / PACKS * from.row + thread_index % PACKS * V);
#pragma unroll
  for (int i = 0; i < packs_per_thread(ROWS, PADDED, sizeof(T), THREADS); i++) {
    int index = int(thread_index) + i * THREADS, row = index / PACKS, column = index % PACKS * V;
    const device T* at = WHOLE ? p + i * (THREADS / PACKS) * from.row
                               : from.at + (row * from.row + column);
    bool inside = from.packed && row < from.count && column < WIDTH && index < ROWS * PACKS;
    if (DIRECT) {
      if (index < ROWS * PACKS) {
        copy_pack(tile + tile_place<T, ROWS, PADDED, TOGETHER>(row, column), at, inside);
      }
    } else {
      held[i] = uint4(0);
      if (inside) {
        held[i] = *reinterpret_cast<const device uint4*>(at);
      }
    }
  }
}
template <typename T, int ROWS, int WIDTH, int PADDED, int THREADS, bool TOGETHER, bool DIRECT>
METAL_FUNC void put_tile(
    thread const uint4* held,
    thread const head_rows<T>& from,
    threadgroup T* tile,
    uint thread_index) {
  constexpr int V = 16 / sizeof(T), PACKS = PADDED / V;
  if (from.packed) {
    if (!DIRECT) {
#pragma unroll
      for (int i = 0; i < packs_per_thread(ROWS, PADDED, sizeof(T), THREADS); i++) {
        int index = int(thread_index) + i * THREADS;
        if (index < ROWS * PACKS) {
          *reinterpret_cast<threadgroup uint4*>(
              tile +
              tile_place<T, ROWS, PADDED, TOGETHER>(index / PACKS, index % PACKS * V)) = held[i];
        }
      }
    }
  } else {
    if (DIRECT) {
      wait_for_copies();
    }
#pragma clang loop unroll(disable)
    for (int index = int(thread_index); index < ROWS * PADDED; index += THREADS) {
      int row = index / PADDED, column = index % PADDED;
      bool inside = row < from.count && column < WIDTH;
      T value = T(0);
      if (inside) {
        value = from.at[row * from.row + column * from.column];
      }
      tile[tile_place<T, ROWS, PADDED, TOGETHER>(row, column)] = value;
    }
  }
  if (TOGETHER) {
    wait_for_copies();
  }
}

// STEPS left operands of 16 rows, 16 columns each; zero outside the `width` columns.
template <typename T, int STEPS>
METAL_FUNC void load_left_rows(
    thread left_fragment<T>* f, head_rows<T> from, int width, int row, int column, uint lane) {
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
      int r = row + fragment_row(lane) + p % 2 * 8;
      int c = column + 16 * i + fragment_col(lane) + p / 2 * 8;
      f[i].part[p] = metal::vec<T, 2>(T(0), T(0));
      if (r < from.count && c < width) {
        const device T* at = from.at + (r * from.row + c * from.column);
        f[i].part[p] = from.packed ? *reinterpret_cast<const device metal::vec<T, 2>*>(at)
                                   : metal::vec<T, 2>(at[0], at[from.column]);
      }
    }
  }
}

template <int COUNT>
METAL_FUNC void clear(thread sum_fragment* sums) {
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    sums[n].part[0] = sums[n].part[1] = float2(0.0f);
  }
}

// products = left * tile^T: 16 rows by the tile's COUNT * 8 rows.
template <typename T, int STEPS, int COUNT, int WIDTH, bool TOGETHER>
METAL_FUNC void multiply_by_rows(
    thread sum_fragment* products,
    thread const left_fragment<T>* left,
    const threadgroup T* tile,
    int column,
    uint lane) {
  if (TOGETHER) {
    shared_multiply_by_rows<T, STEPS, COUNT>(products, left, tile + column * 8 * COUNT);
    return;
  }
  constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
  clear<COUNT>(products);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
#pragma unroll
    for (int n = 0; n < COUNT; n += 2) {
      right_fragment<T> right[2];
      load_right_transposed_pair(
          right, tile + (8 * n * STRIDE + 16 * i + column), STRIDE, lane);
      multiply_accumulate(products[n], left[i], right[0]);
      multiply_accumulate(products[n + 1], left[i], right[1]);
    }
  }
}

// sums += weights * tile: 16 rows by COUNT * 8 columns, over the tile's DEPTH rows.
template <typename T, int DEPTH, int COUNT, int WIDTH, bool TOGETHER>
METAL_FUNC void add_weighted_rows(
    thread sum_fragment* sums,
    thread const sum_fragment* weights,
    const threadgroup T* tile,
    int column,
    uint lane) {
  if (TOGETHER) {
    shared_add_weighted_rows<T, DEPTH, COUNT>(sums, weights, tile + column * DEPTH);
    return;
  }
  constexpr int STRIDE = tile_stride(WIDTH, sizeof(T));
#pragma unroll
  for (int i = 0; i < DEPTH / 16; i++) {
    left_fragment<T> left;
    left_from_sums(left, weights[2 * i], weights[2 * i + 1]);
    right_fragment<T> right[2];
    const threadgroup T* at = tile + (16 * i * STRIDE + column);
#pragma unroll
    for (int n = 0; n < COUNT / 2 * 2; n += 2) {
      load_right_pair(right, at + 8 * n, STRIDE, lane);
      multiply_accumulate(sums[n], left, right[0]);
      multiply_accumulate(sums[n + 1], left, right[1]);
    }
    if (COUNT % 2) {
      load_right(right[0], at + 8 * (COUNT - 1), STRIDE, lane);
      multiply_accumulate(sums[COUNT - 1], left, right[0]);
    }
  }
}

// Adds up what SLICES SIMD groups have that own the same rows, COUNT fragments each. All get the same
// bits. Every OWNERS SIMD groups begin another slice.
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

// Where the mask of one head is, and what turns a product into a score.
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
    constant float* numbers,
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
  rule.scale = numbers[SCALE];
  rule.cap = numbers[CAP];
  return rule;
}

// 2^x: the hardware's few bits less are lost in what a 16-bit type rounds, not in float32.
template <typename T>
METAL_FUNC float power_of_2(float x) {
  return sizeof(T) == 4 ? precise::exp2(x) : fast::exp2(x);
}

// What makes the weights of a query again, 2^(score - x) y, from what the forward pass left. In 16 bits
// the logarithm of the sum goes into x, which spares a product; rounded, it would be seen in float32.
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

// Whether every one of these queries sees every one of these keys, as far as positions tell.
template <typename M>
METAL_FUNC bool all_seen(
    thread const score_rule<M>& rule, int first_query, int queries, int first_key, int keys) {
  int last_query = first_query + queries - 1, last_key = first_key + keys - 1;
  return last_key < rule.keys && last_key <= first_query + rule.reach &&
      first_key > last_query + rule.reach - rule.window;
}

// Where nothing is done to products they stand for scores as they are, and `unit` is what they are
// multiplied by in the exponent; scores are in units of log2.
constexpr bool is_raw(int mask, bool softcap) {
  return mask == NO_MASK && !softcap;
}

// Turns COUNT fragments of products into scores. Rows are queries and columns are keys, or
// TRANSPOSED the other way round. `bends` gets the softcap's slopes.
template <int MASK, bool SOFTCAP, bool TRANSPOSED, int COUNT, typename M>
METAL_FUNC void make_scores(
    thread sum_fragment* scores,
    thread sum_fragment* bends,
    int row,
    int column,
    thread const score_rule<M>& rule,
    uint lane) {
  row += fragment_row(lane);
  column += fragment_col(lane);
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float score = scores[n].part[i / 2][i % 2] * (is_raw(MASK, SOFTCAP) ? 1.0f : rule.scale);
      if (SOFTCAP) {
        float bent = precise::tanh(score);
        score = bent * rule.cap;
        bends[n].part[i / 2][i % 2] = 1.0f - bent * bent;
      }
      if (MASK != NO_MASK) {
        int r = row + i / 2 * 8, c = column + 8 * n + i % 2;
        int query = min(TRANSPOSED ? c : r, rule.queries - 1);
        int key = min(TRANSPOSED ? r : c, rule.keys - 1);
        M value = rule.mask[query * rule.mask_query + key * rule.mask_key];
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

// Hides what positions hide, in the same fragments.
template <bool TRANSPOSED, int COUNT, typename M>
METAL_FUNC void hide_unseen(
    thread sum_fragment* scores,
    int row,
    int column,
    thread const score_rule<M>& rule,
    uint lane) {
  row += fragment_row(lane);
  column += fragment_col(lane);
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int r = row + i / 2 * 8, c = column + 8 * n + i % 2;
      int key = TRANSPOSED ? r : c, reached = (TRANSPOSED ? c : r) + rule.reach;
      bool seen = key < rule.keys && key <= reached && key > reached - rule.window;
      scores[n].part[i / 2][i % 2] = seen ? scores[n].part[i / 2][i % 2] : LOWEST;
    }
  }
}

// Row `row` and the next 15 of an output whose rows begin `stride` elements apart, times `factor`.
template <typename T, int COUNT>
METAL_FUNC void store_rows(
    thread const sum_fragment* sums,
    device T* out,
    ulong stride,
    int row,
    int rows,
    int column,
    int width,
    float factor,
    uint lane) {
  row += fragment_row(lane);
  column += fragment_col(lane);
#pragma unroll
  for (int p = 0; p < 2; p++) {
    if (row + 8 * p < rows) {
      device T* to = out + (row + 8 * p) * stride;
#pragma unroll
      for (int c = 0; c < COUNT; c++) {
        if (column + 8 * c < width) {
          *reinterpret_cast<device metal::vec<T, 2>*>(to + column + 8 * c) =
              metal::vec<T, 2>(sums[c].part[p] * factor);
        }
      }
    }
  }
}
