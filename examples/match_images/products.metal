// Convolutions and matrix products on CPUs: y = bias + sum over taps and channels of x * weight.
//
// x (B, H + KH - 1, W + KW - 1, C) has its margin, weight is (B or 1, KH, KW, C, O), and y
// (B, H, W, O), where V divides O. One thread computes V channels of P pixels side by side, which
// stay in registers; grid (ceil(W / P) * O / V, B * H, 1), no threadgroup memory.

#include <metal_stdlib>
using namespace metal;

// What the entries of `sizes` are. EACH says whether every image has a weight of its own.
enum size { HEIGHT, WIDTH, CHANNELS, OUTPUTS, KH, KW, EACH };

template <int V>
struct channels {
  float at[V];
};

template <int P, int V>
[[kernel]] void product(
    const device float* x,
    const device float* weight,
    const device float* bias,
    constant int* sizes,
    device float* y,
    uint3 position [[thread_position_in_grid]]) {
  int width = sizes[WIDTH], depth = sizes[CHANNELS], outputs = sizes[OUTPUTS], taps = sizes[KW];
  int strips = outputs / V, channel = int(position.x) % strips * V;
  int first = int(position.x) / strips * P, line = int(position.y) % sizes[HEIGHT];
  ulong image = position.y / sizes[HEIGHT], stride = ulong(width + taps - 1) * depth;
  const device float* from = x + (image * (sizes[HEIGHT] + sizes[KH] - 1) + line) * stride;
  const device float* weights =
      weight + image * sizes[EACH] * sizes[KH] * taps * depth * outputs + channel;
  // Beyond the last pixel it is computed again.
  int at[P];
  channels<V> sum[P];
#pragma clang loop unroll(full)
  for (int p = 0; p < P; p++) {
    at[p] = min(first + p, width - 1);
    sum[p] = *reinterpret_cast<const device channels<V>*>(bias + channel);
  }
  for (int ky = 0; ky < sizes[KH]; ky++) {
    for (int k = 0; k < taps * depth; k++) {
      channels<V> factors = *reinterpret_cast<const device channels<V>*>(weights);
      weights += outputs;
#pragma clang loop unroll(full)
      for (int p = 0; p < P; p++) {
        float value = from[at[p] * depth + k];
#pragma clang loop unroll(full)
        for (int v = 0; v < V; v++) {
          sum[p].at[v] = fma(value, factors.at[v], sum[p].at[v]);
        }
      }
    }
    from += stride;
  }
  device float* out = y + (image * sizes[HEIGHT] + line) * width * outputs + channel;
#pragma clang loop unroll(full)
  for (int p = 0; p < P; p++) {
    *reinterpret_cast<device channels<V>*>(out + at[p] * outputs) = sum[p];
  }
}

// SELU: one thread computes up to COUNT elements; grid (ceil(size / COUNT), 1, 1).
template <int COUNT>
[[kernel]] void selu(
    const device float* x,
    constant int& size,
    device float* y,
    uint i [[thread_position_in_grid]]) {
  int first = int(i) * COUNT;
  for (int k = first; k < min(first + COUNT, size); k++) {
    float below = 1.7580993408473766f * (precise::exp(min(x[k], 0.0f)) - 1.0f);
    y[k] = x[k] > 0 ? 1.0507009873554805f * x[k] : below;
  }
}

// Rows of C numbers at length one; one thread computes up to COUNT rows, grid likewise.
template <int COUNT, int C>
[[kernel]] void normalized(
    const device float* x,
    constant int& rows,
    device float* y,
    uint i [[thread_position_in_grid]]) {
  int first = int(i) * COUNT;
  for (int row = first; row < min(first + COUNT, rows); row++) {
    channels<C> each = *reinterpret_cast<const device channels<C>*>(x + ulong(row) * C);
    float parts[16] = {};
    for (int k = 0; k < C; k += 16) {
#pragma clang loop unroll(full)
      for (int v = 0; v < 16; v++) {
        parts[v] += each.at[k + v] * each.at[k + v];
      }
    }
    float sum = 0;
    for (int v = 0; v < 16; v++) {
      sum += parts[v];
    }
    float factor = 1.0f / max(precise::sqrt(sum), 1e-12f);
    for (int k = 0; k < C; k++) {
      y[ulong(row) * C + k] = factor * each.at[k];
    }
  }
}
