// Attention of up to a few dozen query rows over a long cache: out = softmax(q k^T scale) v.
//
// The rows are the queries of all heads that share a key head, `share * L` of them. Keys are cut
// into stretches, and one threadgroup takes one stretch of one key head for all its rows (up to
// 8 * columns; more take further threadgroups), so that keys and values are read once:
//
//   for each tile of 16 * blocks * simds keys of the stretch:
//     scores^T (keys x rows) = k q^T, 16 * blocks keys by each SIMD group      [registers]
//     m' = max(m, scores); p = exp2(scores - m'); sum = sum * exp2(m - m') + p   [registers]
//     p to all SIMD groups                                                       [threadgroup]
//     out^T (Dv x rows) = out^T * exp2(m - m') + v^T p, `slice` of Dv by each    [registers]
//
// Keys and values go from device memory straight to registers, a tile ahead of their use; in packed
// form where `bits` > 0 (affine, `group` numbers to a scale). Grid (stretches * 32 * simds,
// Hkv * row blocks, B), threadgroup (32 * simds, 1, 1). Memory: q, p, and two numbers a row and
// SIMD group. With one stretch the result is written; else, as floats, out without its divisor,
// its maximum and its sum, and attention_combine adds the stretches up, one threadgroup to a row.
//
// Scores are in units of log 2. A hidden key has the score LOWEST, so that a row that sees no key
// is the mean of all; a key outside the stretch has -infinity.

#include "fragment.metal"
#include "packed.metal"

#include <metal_stdlib>
using namespace metal;

#define NO_MASK 0
#define CAUSAL 1
#define BOOLEAN 2
#define ADDITIVE 3
#define LOWEST (-3.402823466e+38f)
#define LOG2_E 1.44269504f

// The keys, or the values, of one head: rows of numbers, or of words with their scales and biases.
template <typename K, typename S>
struct cache_rows {
  const device K* values;
  const device S* scales;
  const device S* biases;
  int step, across;
  int scale_step, scale_across, bias_step, bias_across;
  bool wide;
};

// The rows of a head; `wide` where every run of `width` elements is aligned to its size.
template <typename K, typename S>
METAL_FUNC cache_rows<K, S> rows_of_head(
    const device K* values,
    const constant int64_t* strides,
    const device S* scales,
    const constant int64_t* scale_strides,
    const device S* biases,
    const constant int64_t* bias_strides,
    int batch,
    int head,
    int width) {
  cache_rows<K, S> rows;
  rows.values = values + batch * strides[0] + head * strides[1];
  rows.scales = scales + batch * scale_strides[0] + head * scale_strides[1];
  rows.biases = biases + batch * bias_strides[0] + head * bias_strides[1];
  rows.step = strides[2];
  rows.across = strides[3];
  rows.scale_step = scale_strides[2];
  rows.scale_across = scale_strides[3];
  rows.bias_step = bias_strides[2];
  rows.bias_across = bias_strides[3];
  rows.wide = reinterpret_cast<size_t>(rows.values) % (width * sizeof(K)) == 0 &&
      rows.step % width == 0 && rows.across == 1;
  return rows;
}

// `count` words from element `at` of a row.
template <int count, typename K, typename S>
METAL_FUNC void read_words(thread uint* to, cache_rows<K, S> rows, int key, int at, bool wide) {
  const device K* from = rows.values + int64_t(key) * rows.step;
  if (wide) {
    load_words<count>(to, reinterpret_cast<const device uint*>(from + at));
  } else {
    const int each = 4 / sizeof(K);
    alignas(16) K found[count * each];
    for (int i = 0; i < count * each; i++) {
      found[i] = from[int64_t(at + i) * rows.across];
    }
    for (int i = 0; i < count; i++) {
      to[i] = *reinterpret_cast<thread uint*>(found + i * each);
    }
  }
}

template <int count>
METAL_FUNC void clear_words(thread uint* to) {
#pragma unroll
  for (int i = 0; i < count; i++) {
    to[i] = 0;
  }
}

// Two neighbouring numbers out of words.
template <typename T>
METAL_FUNC metal::vec<T, 2> plain_pair(const thread uint* words, int i, T) {
  return as_type<metal::vec<T, 2>>(words[i]);
}
METAL_FUNC float2 plain_pair(const thread uint* words, int i, float) {
  return float2(as_type<float>(words[2 * i]), as_type<float>(words[2 * i + 1]));
}

// A run of numbers in pairs, from words that are numbers or packed codes of one group.
template <typename T, int bits, int run>
METAL_FUNC void unpack(
    thread metal::vec<T, 2>* to, const thread uint* words, float scale, float bias) {
#pragma unroll
  for (int i = 0; i < run / 2; i++) {
    if (bits == 0) {
      to[i] = plain_pair(words, i, T(0));
    } else {
      float low = decoded<AFFINE>(packed_code<(bits == 0 ? 4 : bits)>(words, 2 * i));
      float high = decoded<AFFINE>(packed_code<(bits == 0 ? 4 : bits)>(words, 2 * i + 1));
      to[i] = metal::vec<T, 2>(float2(fma(scale, low, bias), fma(scale, high, bias)));
    }
  }
}

template <
    typename T,
    typename K,
    typename S,
    typename M,
    typename N,
    typename P,
    int D,
    int Dv,
    int group,
    int bits,
    int columns,
    int simds,
    int blocks,
    int slice,
    int run,
    int seen,
    bool windowed,
    bool capped,
    bool sinking,
    bool split>
[[kernel]] void attention_decode(
    const device T* q,
    const constant int* q_shape,
    const constant int64_t* q_strides,
    const device K* k,
    const constant int* k_shape,
    const constant int64_t* k_strides,
    const device S* k_scales,
    const constant int64_t* k_scales_strides,
    const device S* k_biases,
    const constant int64_t* k_biases_strides,
    const device K* v,
    const constant int64_t* v_strides,
    const device S* v_scales,
    const constant int64_t* v_scales_strides,
    const device S* v_biases,
    const constant int64_t* v_biases_strides,
    const device M* mask,
    const constant int64_t* mask_strides,
    const device N* sinks,
    constant int* options,
    device P* out,
    uint3 place [[threadgroup_position_in_grid]],
    uint3 places [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  // A lane reads a run of a key in every `4 * run`, and of a value in every `8 * run_v`.
  const int width = bits == 0 ? 8 * int(sizeof(T)) : bits;
  const int words = run * width / 32;
  const int steps = (D + 4 * run - 1) / (4 * run);
  const int parts = steps * run / 4;
  const int most = bits == 0 ? 16 / int(sizeof(T)) : 8;
  const int run_v = slice / 8 < most ? slice / 8 : most;
  const int words_v = run_v * width / 32;
  const int steps_v = slice / (8 * run_v);
  const int tile = 16 * blocks * simds;
  const int q_step = 16 * parts + 16 / int(sizeof(T));
  const int p_step = 8 * columns + (columns % 2 == 0 ? 8 : 0);
  threadgroup T q_tile[8 * columns * q_step];
  threadgroup T p_tile[tile * p_step];
  threadgroup float2 reduced[simds][columns][4];

  int L = q_shape[2], S_keys = k_shape[2], heads_kv = k_shape[1];
  int share = q_shape[1] / heads_kv, rows = share * L;
  int head = int(place.y) % heads_kv, batch = place.z;
  int first_row = int(place.y) / heads_kv * 8 * columns;
  float scale = as_type<float>(options[0]), cap = as_type<float>(options[1]);
  int window = options[2];

  // Only where no array hides keys too, a row is sure to see one inside the window.
  int first = windowed && seen < BOOLEAN ? max(0, S_keys - L - window + 1) : 0;
  int stretch = (S_keys - first + int(places.x) - 1) / int(places.x);
  stretch = (stretch + tile - 1) / tile * tile;
  int start = min(first + int(place.x) * stretch, S_keys), stop = min(start + stretch, S_keys);

  cache_rows<K, S> keys = rows_of_head(
      k, k_strides, k_scales, k_scales_strides, k_biases, k_biases_strides, batch, head,
      words * 4 / int(sizeof(K)));
  cache_rows<K, S> values = rows_of_head(
      v, v_strides, v_scales, v_scales_strides, v_biases, v_biases_strides, batch, head,
      words_v * 4 / int(sizeof(K)));

  ushort near = fragment_row(lane), quarter = fragment_col(lane) / 2;
  alignas(16) uint k_words[blocks][2][steps][words];
  float k_scale[blocks][2][steps], k_bias[blocks][2][steps];
#define READ_KEYS(base, wide)                                                        \
  _Pragma("unroll") for (int b = 0; b < blocks; b++) {                               \
    _Pragma("unroll") for (int r = 0; r < 2; r++) {                                  \
      int key = min((base) + 16 * (int(simd) * blocks + b) + 8 * r + near, stop - 1); \
      _Pragma("unroll") for (int j = 0; j < steps; j++) {                            \
        int d = 4 * run * j + run * quarter;                                         \
        if (D % (4 * run) == 0 || d < D) {                                           \
          read_words<words>(k_words[b][r][j], keys, key, d * width / (8 * int(sizeof(K))), wide); \
          if (bits > 0) {                                                            \
            k_scale[b][r][j] = float(keys.scales[int64_t(key) * keys.scale_step + d / group * keys.scale_across]); \
            k_bias[b][r][j] = float(keys.biases[int64_t(key) * keys.bias_step + d / group * keys.bias_across]); \
          }                                                                          \
        } else {                                                                     \
          clear_words<words>(k_words[b][r][j]);                                      \
          k_scale[b][r][j] = 0;                                                      \
          k_bias[b][r][j] = 0;                                                       \
        }                                                                            \
      }                                                                              \
    }                                                                                \
  }
  if (start < stop) {
    if (keys.wide) {
      READ_KEYS(start, true)
    } else {
      READ_KEYS(start, false)
    }
  }

  // q in the order in which a lane's runs of a key meet it, padded with zeros.
  for (int i = thread_index; i < 8 * columns * 16 * parts; i += 32 * simds) {
    int row = min(first_row + i / (16 * parts), rows - 1), at = i % (16 * parts);
    int part = at / 16, pair = at % 16 / 8, c = at % 8 / 2;
    int d = part / (run / 4) * 4 * run + c * run + part % (run / 4) * 4 + 2 * pair + at % 2;
    int64_t from = batch * q_strides[0] + (head * share + row / L) * q_strides[1] +
        row % L * q_strides[2] + d * q_strides[3];
    q_tile[i / (16 * parts) * q_step + at] = d < D ? q[from] : T(0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const bool keep = columns * parts <= 16;
  right_fragment<T> q_kept[keep ? columns * parts : 1];
  if (keep) {
#pragma unroll
    for (int i = 0; i < columns * parts; i++) {
      load_right_transposed(
          q_kept[i], q_tile + i / parts * 8 * q_step + i % parts * 16, q_step, lane);
    }
  }

  // What a lane's two columns of each eight rows see.
  int last_seen[columns][2];
  const device M* row_mask[columns][2];
#pragma unroll
  for (int t = 0; t < columns; t++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = min(first_row + 8 * t + 2 * quarter + i, rows - 1);
      last_seen[t][i] = S_keys - L + row % L;
      row_mask[t][i] = mask;
      if (seen >= BOOLEAN) {
        row_mask[t][i] += batch * mask_strides[0] + (head * share + row / L) * mask_strides[1] +
            row % L * mask_strides[2];
      }
    }
  }

  float2 most_yet[columns], sum[columns];
  sum_fragment o[slice / 16][columns];
#pragma unroll
  for (int t = 0; t < columns; t++) {
    most_yet[t] = LOWEST;
    sum[t] = 0.0f;
#pragma unroll
    for (int n = 0; n < slice / 16; n++) {
      o[n][t].part[0] = 0.0f;
      o[n][t].part[1] = 0.0f;
    }
  }

  for (int base = start; base < stop; base += tile) {
    // Values of the whole tile, this SIMD group's slice of them.
    alignas(16) uint v_words[simds * blocks][4][steps_v][words_v];
    float v_scale[simds * blocks][4][steps_v], v_bias[simds * blocks][4][steps_v];
#define READ_VALUES(wide)                                                            \
  _Pragma("unroll") for (int b = 0; b < simds * blocks; b++) {                       \
    _Pragma("unroll") for (int n = 0; n < 4; n++) {                                  \
      int key = min(base + 16 * b + 2 * quarter + n / 2 * 8 + n % 2, stop - 1);      \
      _Pragma("unroll") for (int j = 0; j < steps_v; j++) {                          \
        int d = int(simd) * slice + 8 * run_v * j + run_v * near;                    \
        if (Dv == slice * simds || d < Dv) {                                         \
          read_words<words_v>(v_words[b][n][j], values, key, d * width / (8 * int(sizeof(K))), wide); \
          if (bits > 0) {                                                            \
            v_scale[b][n][j] = float(values.scales[int64_t(key) * values.scale_step + d / group * values.scale_across]); \
            v_bias[b][n][j] = float(values.biases[int64_t(key) * values.bias_step + d / group * values.bias_across]); \
          }                                                                          \
        } else {                                                                     \
          clear_words<words_v>(v_words[b][n][j]);                                    \
          v_scale[b][n][j] = 0;                                                      \
          v_bias[b][n][j] = 0;                                                       \
        }                                                                            \
      }                                                                              \
    }                                                                                \
  }
    if (values.wide) {
      READ_VALUES(true)
    } else {
      READ_VALUES(false)
    }

    sum_fragment s[blocks][columns];
#pragma unroll
    for (int b = 0; b < blocks; b++) {
#pragma unroll
      for (int t = 0; t < columns; t++) {
        s[b][t].part[0] = 0.0f;
        s[b][t].part[1] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < steps; j++) {
        metal::vec<T, 2> near_key[run / 2], far_key[run / 2];
        unpack<T, bits, run>(near_key, k_words[b][0][j], k_scale[b][0][j], k_bias[b][0][j]);
        unpack<T, bits, run>(far_key, k_words[b][1][j], k_scale[b][1][j], k_bias[b][1][j]);
#pragma unroll
        for (int f = 0; f < run / 4; f++) {
          left_fragment<T> left;
          left.part[0] = near_key[2 * f];
          left.part[1] = far_key[2 * f];
          left.part[2] = near_key[2 * f + 1];
          left.part[3] = far_key[2 * f + 1];
#pragma unroll
          for (int t = 0; t < columns; t++) {
            right_fragment<T> right;
            int part = j * (run / 4) + f;
            if (keep) {
              right = q_kept[keep ? t * parts + part : 0];
            } else {
              load_right_transposed(right, q_tile + 8 * t * q_step + 16 * part, q_step, lane);
            }
            multiply_accumulate(s[b][t], left, right);
          }
        }
      }
    }
    if (base + tile < stop) {
      if (keys.wide) {
        READ_KEYS(base + tile, true)
      } else {
        READ_KEYS(base + tile, false)
      }
    }

    float2 most[columns];
#pragma unroll
    for (int t = 0; t < columns; t++) {
      most[t] = LOWEST;
#pragma unroll
      for (int b = 0; b < blocks; b++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          int key = base + 16 * (int(simd) * blocks + b) + 8 * r + near;
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float x = s[b][t].part[r][i] * scale;
            if (capped) {
              x = cap * precise::tanh(x);
            }
            bool hidden = false;
            if (seen == ADDITIVE) {
              x += float(row_mask[t][i][min(key, stop - 1) * mask_strides[3]]) * LOG2_E;
              hidden = x < LOWEST;
            } else if (seen == BOOLEAN) {
              hidden = !bool(row_mask[t][i][min(key, stop - 1) * mask_strides[3]]);
            }
            if (seen == CAUSAL || windowed) {
              hidden = hidden || key > last_seen[t][i];
            }
            if (windowed) {
              hidden = hidden || key <= last_seen[t][i] - window;
            }
            x = hidden ? LOWEST : x;
            s[b][t].part[r][i] = key < stop ? x : -INFINITY;
          }
          most[t] = max(most[t], s[b][t].part[r]);
        }
      }
      most[t] = fragment_column_max(most[t]);
      if (near == 0) {
        reduced[simd][t][quarter] = most[t];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int t = 0; t < columns; t++) {
      float2 top = most_yet[t];
#pragma unroll
      for (int g = 0; g < simds; g++) {
        top = max(top, reduced[g][t][quarter]);
      }
      float2 fade = fast::exp2(most_yet[t] - top);
      most_yet[t] = top;
      sum[t] *= fade;
#pragma unroll
      for (int n = 0; n < slice / 16; n++) {
        o[n][t].part[0] *= fade;
        o[n][t].part[1] *= fade;
      }
#pragma unroll
      for (int b = 0; b < blocks; b++) {
        s[b][t].part[0] = fast::exp2(s[b][t].part[0] - top);
        s[b][t].part[1] = fast::exp2(s[b][t].part[1] - top);
        sum[t] += s[b][t].part[0] + s[b][t].part[1];
        store_sum<T>(
            s[b][t], p_tile + 16 * (int(simd) * blocks + b) * p_step + 8 * t, p_step, lane);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma unroll
    for (int b = 0; b < simds * blocks; b++) {
      right_fragment<T> p[columns];
#pragma unroll
      for (int t = 0; t < columns; t++) {
        load_right(p[t], p_tile + 16 * b * p_step + 8 * t, p_step, lane);
      }
#pragma unroll
      for (int j = 0; j < steps_v; j++) {
        metal::vec<T, 2> value[4][run_v / 2];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          unpack<T, bits, run_v>(
              value[n], v_words[b][n][j], v_scale[b][n][j], v_bias[b][n][j]);
        }
#pragma unroll
        for (int f = 0; f < run_v / 2; f++) {
          left_fragment<T> left;
          left.part[0] = metal::vec<T, 2>(value[0][f].x, value[1][f].x);
          left.part[1] = metal::vec<T, 2>(value[0][f].y, value[1][f].y);
          left.part[2] = metal::vec<T, 2>(value[2][f].x, value[3][f].x);
          left.part[3] = metal::vec<T, 2>(value[2][f].y, value[3][f].y);
#pragma unroll
          for (int t = 0; t < columns; t++) {
            multiply_accumulate(o[j * (run_v / 2) + f][t], left, p[t]);
          }
        }
      }
    }
  }

#pragma unroll
  for (int t = 0; t < columns; t++) {
    sum[t] = fragment_column_sum(sum[t]);
    if (near == 0) {
      reduced[simd][t][quarter] = sum[t];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int width_out = split ? Dv + 2 : Dv;
#pragma unroll
  for (int t = 0; t < columns; t++) {
    float2 total = 0.0f;
    for (int g = 0; g < simds; g++) {
      total += reduced[g][t][quarter];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = first_row + 8 * t + 2 * quarter + i;
      if (row >= rows) {
        continue;
      }
      float factor = 1.0f;
      if (!split) {
        if (sinking) {
          float sink = float(sinks[head * share + row / L]) * LOG2_E;
          float top = max(most_yet[t][i], sink);
          factor = fast::exp2(most_yet[t][i] - top);
          total[i] = total[i] * factor + fast::exp2(sink - top);
        }
        factor /= total[i];
      }
      // Rows of all heads, and in each of them the stretches.
      int64_t at = (int64_t(batch) * heads_kv + head) * rows + row;
      device P* to = out + (split ? at * places.x + place.x : at) * width_out;
#pragma unroll
      for (int n = 0; n < slice / 16; n++) {
        int d = int(simd) * slice + n / (run_v / 2) * 8 * run_v + run_v * near + n % (run_v / 2) * 2;
        if (Dv == slice * simds || d < Dv) {
          to[d] = P(o[n][t].part[0][i] * factor);
          to[d + 1] = P(o[n][t].part[1][i] * factor);
        }
      }
      if (split && simd == 0 && near == 0) {
        to[Dv] = P(most_yet[t][i]);
        to[Dv + 1] = P(total[i]);
      }
    }
  }
}

// parts (B, H, L, stretches, Dv + 2) to out (B, H, L, Dv). Grid (32 * simds, H * L, B).
template <typename T, typename N, int Dv, int simds, bool sinking>
[[kernel]] void attention_combine(
    const device float* parts,
    const constant int* parts_shape,
    const device N* sinks,
    device T* out,
    uint3 place [[threadgroup_position_in_grid]],
    uint3 places [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int width = (Dv + 31) / 32;
  threadgroup float shares[simds][32 * width];
  threadgroup float totals[simds];
  int stretches = parts_shape[3];
  int64_t row = int64_t(place.z) * places.y + place.y;
  const device float* from = parts + row * stretches * (Dv + 2);

  float top = LOWEST;
  for (int i = lane; i < stretches; i += 32) {
    top = max(top, from[i * (Dv + 2) + Dv]);
  }
  top = simd_max(top);
  float sink = 0.0f;
  if (sinking) {
    sink = float(sinks[place.y / parts_shape[2]]) * LOG2_E;
    top = max(top, sink);
  }
  float o[width] = {}, total = 0.0f;
#pragma unroll 4
  for (int i = simd; i < stretches; i += simds) {
    const device float* part = from + i * (Dv + 2);
    float factor = fast::exp2(part[Dv] - top);
    total += factor * part[Dv + 1];
#pragma unroll
    for (int j = 0; j < width; j++) {
      int d = 32 * j + lane;
      o[j] += Dv % 32 == 0 || d < Dv ? factor * part[d] : 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < width; j++) {
    shares[simd][32 * j + lane] = o[j];
  }
  if (lane == 0) {
    totals[simd] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float divisor = sinking ? fast::exp2(sink - top) : 0.0f;
  for (int g = 0; g < simds; g++) {
    divisor += totals[g];
  }
  for (int d = thread_index; d < Dv; d += 32 * simds) {
    float sum = 0.0f;
    for (int g = 0; g < simds; g++) {
      sum += shares[g][d];
    }
    out[row * Dv + d] = T(sum / divisor);
  }
}
