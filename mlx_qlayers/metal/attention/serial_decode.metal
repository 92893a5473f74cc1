// Attention of a few queries over a long cache on a CPU, whose threads run one by one.
//
// attention_decode with vector instructions instead of SIMD groups: one thread computes up to `max_rows`
// rows of one key head. It converts `block` keys at a time to floats for all rows, so that keys and values
// are read once. If `held` is given, only the first `held` keys are attended to.
// Grid (Hkv, row blocks, B); no threadgroup memory.

#include "kv_cache.metal"
#include "score.metal"

#include <metal_stdlib>
using namespace metal;

// Row `key` as floats.
template <int bits, int group, int width, typename K, typename S>
METAL_FUNC void row_as_floats(thread float* to, cache_rows<K, S> rows, int key) {
  const device K* from = rows.elements + int64_t(key) * rows.step;
  if (bits > 0) {
    const int words = bits == 0 ? 1 : bits;
    for (int g = 0; g < width; g += 32) {
      float scale = float(rows.scales[int64_t(key) * rows.scale_step + g / group * rows.scale_span]);
      float bias = float(rows.biases[int64_t(key) * rows.bias_step + g / group * rows.bias_span]);
      uint word[words];
      for (int i = 0; i < words; i++) {
        word[i] = uint(from[int64_t(g / 32 * words + i) * rows.span]);
      }
#pragma unroll
      for (int i = 0; i < 32; i++) {
        to[g + i] = fma(scale, decoded<AFFINE>(packed_code<words>(word, i)), bias);
      }
    }
  } else if (rows.span == 1) {
    for (int d = 0; d < width; d++) {
      to[d] = float(from[d]);
    }
  } else {
    for (int d = 0; d < width; d++) {
      to[d] = float(from[int64_t(d) * rows.span]);
    }
  }
}

// The dot product in as many partial sums as a vector has elements, which are then added in pairs.
template <int width>
METAL_FUNC float dot_product(const thread float* a, const thread float* b) {
  const int ways = width % 32 == 0 ? 32 : 8;
  float parts[ways] = {};
  for (int d = 0; d < width; d += ways) {
#pragma unroll
    for (int i = 0; i < ways; i++) {
      parts[i] = fma(a[d + i], b[d + i], parts[i]);
    }
  }
#pragma unroll
  for (int pair = ways / 2; pair > 0; pair /= 2) {
    for (int i = 0; i < pair; i++) {
      parts[i] += parts[i + pair];
    }
  }
  return parts[0];
}

// o = o * rescale + weights * values, for one row.
template <int width, int block>
METAL_FUNC void add_values(
    thread float* o, float rescale, const thread float* weights, const thread float* values, int count) {
  const int ways = width % 32 == 0 ? 32 : 8;
  for (int d = 0; d < width; d += ways) {
    float parts[ways];
#pragma unroll
    for (int i = 0; i < ways; i++) {
      parts[i] = o[d + i] * rescale;
    }
    for (int key = 0; key < count; key++) {
#pragma unroll
      for (int i = 0; i < ways; i++) {
        parts[i] = fma(weights[key], values[key * width + d + i], parts[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < ways; i++) {
      o[d + i] = parts[i];
    }
  }
}

template <
    typename T,
    typename K,
    typename S,
    typename M,
    typename N,
    int D,
    int Dv,
    int group,
    int bits,
    int bits_v,
    int seen,
    bool windowed,
    bool capped,
    bool sinking,
    int max_rows,
    int block>
[[kernel]] void attention_serial(
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
    const constant int* held,
    constant int* options,
    device T* out,
    uint3 position [[thread_position_in_grid]]) {
  int L = q_shape[2], keys = held ? held[0] : k_shape[2];
  int heads = k_shape[1], share = q_shape[1] / heads;
  int head = position.x, first_row = position.y * max_rows, batch = position.z;
  int rows = min(share * L - first_row, max_rows);
  float scale = as_type<float>(options[0]), cap = as_type<float>(options[1]);
  int window = options[2];
  cache_rows<K, S> key_rows = rows_of_head<bits>(
      k, k_strides, k_scales, k_scales_strides, k_biases, k_biases_strides, batch, head, 1);
  cache_rows<K, S> value_rows = rows_of_head<bits_v>(
      v, v_strides, v_scales, v_scales_strides, v_biases, v_biases_strides, batch, head, 1);

  alignas(64) float queries[max_rows * D], o[max_rows * Dv], weights[block], tile[block * (D > Dv ? D : Dv)];
  float scores[max_rows * block], top[max_rows], sum[max_rows];
  for (int row = 0; row < rows; row++) {
    int h = head * share + (first_row + row) / L, l = (first_row + row) % L;
    const device T* from = q + batch * q_strides[0] + h * q_strides[1] + l * q_strides[2];
    for (int d = 0; d < D; d++) {
      queries[row * D + d] = float(from[d * q_strides[3]]);
    }
    for (int d = 0; d < Dv; d++) {
      o[row * Dv + d] = 0.0f;
    }
    top[row] = LOWEST;
    sum[row] = 0.0f;
  }

  // Only a mask array can leave a row without a key inside its window.
  int first = windowed && seen < BOOLEAN ? max(0, keys - L - window + 1) : 0;
  // No row sees keys behind those of the last query among them; one that sees none takes the mean of all.
  int last_row = first_row % L + rows - 1;
  int end = seen == CAUSAL && last_row < L && keys >= L ? keys - L + last_row + 1 : keys;
  for (int base = first; base < end; base += block) {
    int count = min(block, end - base);
    for (int i = 0; i < count; i++) {
      row_as_floats<bits, group, D>(tile + i * D, key_rows, base + i);
    }
    for (int row = 0; row < rows; row++) {
      int h = head * share + (first_row + row) / L, l = (first_row + row) % L;
      const device M* row_mask = mask;
      if (seen >= BOOLEAN) {
        row_mask += batch * mask_strides[1] + h * mask_strides[2] + l * mask_strides[3];
      }
      for (int i = 0; i < count; i++) {
        scores[row * block + i] = score<seen, windowed, capped>(
            dot_product<D>(queries + row * D, tile + i * D), scale, cap, row_mask,
            (base + i) * mask_strides[4], base + i - (keys - L + l), window);
      }
    }
    for (int i = 0; i < count; i++) {
      row_as_floats<bits_v, group, Dv>(tile + i * Dv, value_rows, base + i);
    }
    for (int row = 0; row < rows; row++) {
      float before = top[row], total = 0.0f;
      for (int i = 0; i < count; i++) {
        top[row] = max(top[row], scores[row * block + i]);
      }
      for (int i = 0; i < count; i++) {
        weights[i] = fast::exp2(scores[row * block + i] - top[row]);
        total += weights[i];
      }
      float rescale = fast::exp2(before - top[row]);
      sum[row] = sum[row] * rescale + total;
      add_values<Dv, block>(o + row * Dv, rescale, weights, tile, count);
    }
  }

  for (int row = 0; row < rows; row++) {
    int h = head * share + (first_row + row) / L, l = (first_row + row) % L;
    float factor = 1.0f, total = sum[row];
    if (sinking) {
      float sink = float(sinks[h]) * LOG2_E, peak = max(top[row], sink);
      factor = fast::exp2(top[row] - peak);
      total = total * factor + fast::exp2(sink - peak);
    }
    int64_t at = (int64_t(batch) * L + l) * heads * share + h;
    for (int d = 0; d < Dv; d++) {
      out[at * Dv + d] = T(o[row * Dv + d] * (factor / total));
    }
  }
}
