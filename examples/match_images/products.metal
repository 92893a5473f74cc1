// The products of both models on CPUs, in float32.
//
// product     y = bias + rest + sum over taps and channels of x * weight, and SELU of it: convolutions
//             with zeros around the image, and matrix products. x (B, H, W, C), rest and y
//             (B, Ho, Wo, O), weight (B or 1, strips, KH, KW, C, V) and bias (strips, V), zeros (C).
//             One thread computes V channels of P pixels side by side, which stay in registers;
//             grid (ceil(Wo / P) * strips, B * Ho, 1).
// attention   softmax(q k^T) v of P queries by one thread, V keys at a time: q and y (heads, N, D),
//             keys (heads, strips, D, V), values (heads, strips, V, D); grid (ceil(N / P), heads, 1).
// peaks       where x is the largest around, of x (B, H, W) that is not negative; one thread takes
//             COUNT pixels of a row, grid (ceil(W / COUNT), B * H, 1).
// selu, gelu, normalized: see there. None needs threadgroup memory.

#include <metal_stdlib>
using namespace metal;

template <int V>
struct channels {
  float at[V];
};

template <int V>
METAL_FUNC channels<V> load(const device float* from) {
  return *reinterpret_cast<const device channels<V>*>(from);
}

// e^x of x <= 0 by a polynomial, which compilers vectorise.
METAL_FUNC float power(float x) {
  x = max(x, -87.0f);
  float n = rint(x * 1.44269504f);
  float r = fma(n, 2.12194440e-4f, fma(n, -0.693359375f, x));
  float y = fma(1.9875691500e-4f, r, 1.3981999507e-3f);
  y = fma(y, r, 8.3334519073e-3f);
  y = fma(y, r, 4.1665795894e-2f);
  y = fma(y, r, 1.6666665459e-1f);
  y = fma(y, r, 5.0000001201e-1f);
  return (fma(y, r * r, r) + 1.0f) * as_type<float>((int(n) + 127) << 23);
}

METAL_FUNC float selu_of(float x) {
  float below = 1.7580993408473766f * (power(min(x, 0.0f)) - 1.0f);
  return x > 0 ? 1.0507009873554805f * x : below;
}

// The entries of `sizes`: the last say whether every image has a weight of its own, and
// whether there are a rest and SELU.
enum size { HEIGHT, WIDTH, DOWN, ACROSS, CHANNELS, OUTPUTS, KH, KW, ABOVE, LEFT, EACH, REST, SELU };

template <int P, int V>
[[kernel]] void product(
    const device float* x,
    const device float* weight,
    const device float* bias,
    const device float* rest,
    const device float* zeros,
    const device int* sizes,
    device float* y,
    uint3 position [[thread_position_in_grid]]) {
  int width = sizes[WIDTH], across = sizes[ACROSS], depth = sizes[CHANNELS], taps = sizes[KW];
  int outputs = sizes[OUTPUTS], groups = (across + P - 1) / P, strips = (outputs + V - 1) / V;
  int strip = int(position.x) / groups, first = int(position.x) % groups * P;
  int image = int(position.y) / sizes[DOWN], line = int(position.y) % sizes[DOWN];
  const device float* weights = weight +
      ulong(image * sizes[EACH] * strips + strip) * sizes[KH] * taps * depth * V;
  channels<V> sum[P];
  ulong out[P];
  int there = min(V, outputs - strip * V);
#pragma clang loop unroll(full)
  for (int p = 0; p < P; p++) {
    // Beyond the last pixel it is computed again.
    out[p] = (ulong(position.y) * across + min(first + p, across - 1)) * outputs + strip * V;
#pragma clang loop unroll(full)
    for (int v = 0; v < V; v++) {
      sum[p].at[v] = 0;
    }
  }
  // Inside of the image the taps of a row are one run of numbers.
  int left = first - sizes[LEFT];
  bool inside = left >= 0 && left + P + taps - 1 <= width;
  int runs = inside ? 1 : taps, length = inside ? taps * depth : depth;
  for (int ky = 0; ky < sizes[KH]; ky++) {
    int row = line + ky - sizes[ABOVE];
    if (row < 0 || row >= sizes[HEIGHT]) {
      weights += taps * depth * V;
      continue;
    }
    const device float* pixels = x + (ulong(image) * sizes[HEIGHT] + row) * width * depth;
    for (int run = 0; run < runs; run++) {
      const device float* from[P];
#pragma clang loop unroll(full)
      for (int p = 0; p < P; p++) {
        int column = min(first + p, across - 1) - sizes[LEFT] + run;
        from[p] = column < 0 || column >= width ? zeros : pixels + column * depth;
      }
      for (int k = 0; k < length; k++) {
        channels<V> factors = load<V>(weights);
        weights += V;
#pragma clang loop unroll(full)
        for (int p = 0; p < P; p++) {
          float value = from[p][k];
#pragma clang loop unroll(full)
          for (int v = 0; v < V; v++) {
            sum[p].at[v] = fma(value, factors.at[v], sum[p].at[v]);
          }
        }
      }
    }
  }
#pragma clang loop unroll(full)
  for (int p = 0; p < P; p++) {
    channels<V> made = sum[p], start = load<V>(bias + strip * V);
    if (sizes[REST]) {
      for (int v = 0; v < there; v++) {
        start.at[v] += rest[out[p] + v];
      }
    }
    for (int v = 0; v < V; v++) {
      made.at[v] += start.at[v];
    }
    if (sizes[SELU]) {
      for (int v = 0; v < V; v++) {
        made.at[v] = selu_of(made.at[v]);
      }
    }
    if (there == V) {
      *reinterpret_cast<device channels<V>*>(y + out[p]) = made;
    } else {
      for (int v = 0; v < there; v++) {
        y[out[p] + v] = made.at[v];
      }
    }
  }
}

template <int P, int V, int D>
[[kernel]] void attention(
    const device float* q,
    const device float* keys,
    const device float* values,
    constant int* sizes,
    device float* y,
    uint3 position [[thread_position_in_grid]]) {
  int queries = sizes[0], count = sizes[1], strips = (count + V - 1) / V;
  int first = int(position.x) * P;
  const device float* key = keys + ulong(position.y) * strips * D * V;
  const device float* value = values + ulong(position.y) * strips * D * V;
  const device float* from[P];
  channels<D> out[P];
  float largest[P], total[P];
  for (int p = 0; p < P; p++) {
    from[p] = q + (ulong(position.y) * queries + min(first + p, queries - 1)) * D;
    largest[p] = -1e30f;
    total[p] = 0;
    for (int d = 0; d < D; d++) {
      out[p].at[d] = 0;
    }
  }
  for (int strip = 0; strip < strips; strip++) {
    channels<V> score[P], sum[P];
#pragma clang loop unroll(full)
    for (int p = 0; p < P; p++) {
#pragma clang loop unroll(full)
      for (int v = 0; v < V; v++) {
        sum[p].at[v] = 0;
      }
    }
    for (int d = 0; d < D; d++) {
      channels<V> factors = load<V>(key + d * V);
#pragma clang loop unroll(full)
      for (int p = 0; p < P; p++) {
        float x = from[p][d];
#pragma clang loop unroll(full)
        for (int v = 0; v < V; v++) {
          sum[p].at[v] = fma(x, factors.at[v], sum[p].at[v]);
        }
      }
    }
#pragma clang loop unroll(full)
    for (int p = 0; p < P; p++) {
      score[p] = sum[p];
    }
    // Each row by its largest so far.
    for (int p = 0; p < P; p++) {
      for (int v = count - strip * V; v < V; v++) {
        score[p].at[v] = -1e30f;
      }
      float most = largest[p];
      channels<V> part = score[p];
#pragma clang loop unroll(full)
      for (int half_width = V / 2; half_width > 0; half_width /= 2) {
#pragma clang loop unroll(full)
        for (int v = 0; v < half_width; v++) {
          part.at[v] = max(part.at[v], part.at[v + half_width]);
        }
      }
      most = max(most, part.at[0]);
#pragma clang loop unroll(full)
      for (int v = 0; v < V; v++) {
        score[p].at[v] = power(score[p].at[v] - most);
      }
      part = score[p];
#pragma clang loop unroll(full)
      for (int half_width = V / 2; half_width > 0; half_width /= 2) {
#pragma clang loop unroll(full)
        for (int v = 0; v < half_width; v++) {
          part.at[v] += part.at[v + half_width];
        }
      }
      float factor = power(largest[p] - most);
      total[p] = fma(total[p], factor, part.at[0]);
      largest[p] = most;
#pragma clang loop unroll(full)
      for (int d = 0; d < D; d++) {
        out[p].at[d] *= factor;
      }
    }
    for (int d = 0; d < D; d += V) {
      channels<V> sum[P];
#pragma clang loop unroll(full)
      for (int p = 0; p < P; p++) {
#pragma clang loop unroll(full)
        for (int v = 0; v < V; v++) {
          sum[p].at[v] = 0;
        }
      }
      for (int k = 0; k < V; k++) {
        channels<V> factors = load<V>(value + k * D + d);
#pragma clang loop unroll(full)
        for (int p = 0; p < P; p++) {
          float share = score[p].at[k];
#pragma clang loop unroll(full)
          for (int v = 0; v < V; v++) {
            sum[p].at[v] = fma(share, factors.at[v], sum[p].at[v]);
          }
        }
      }
#pragma clang loop unroll(full)
      for (int p = 0; p < P; p++) {
#pragma clang loop unroll(full)
        for (int v = 0; v < V; v++) {
          out[p].at[d + v] += sum[p].at[v];
        }
      }
    }
    key += D * V;
    value += D * V;
  }
  for (int p = 0; p < min(P, queries - first); p++) {
    device float* to = y + (ulong(position.y) * queries + first + p) * D;
    for (int d = 0; d < D; d++) {
      to[d] = out[p].at[d] / total[p];
    }
  }
}

// SELU of x + rest + bias; `sizes` are those of x and of its last axis, and whether there are a rest
// and a bias. One thread computes up to COUNT elements, as below: grid (ceil(size / COUNT), 1, 1).
template <int COUNT>
[[kernel]] void selu(
    const device float* x,
    const device float* rest,
    const device float* bias,
    constant int* sizes,
    device float* y,
    uint i [[thread_position_in_grid]]) {
  int first = int(i) * COUNT;
  for (int k = first; k < min(first + COUNT, sizes[0]); k++) {
    float sum = x[k];
    sum += sizes[2] ? rest[k] : 0.0f;
    sum += sizes[3] ? bias[k % sizes[1]] : 0.0f;
    y[k] = selu_of(sum);
  }
}

// GELU; the error function is 7.1.26 of Abramowitz and Stegun, off by 1.5e-7 at most.
template <int COUNT>
[[kernel]] void gelu(
    const device float* x,
    constant int& size,
    device float* y,
    uint i [[thread_position_in_grid]]) {
  int first = int(i) * COUNT;
  for (int k = first; k < min(first + COUNT, size); k++) {
    float z = 0.7071067811865476f * fabs(x[k]), t = 1.0f / fma(0.3275911f, z, 1.0f);
    float rest = fma(fma(1.061405429f, t, -1.453152027f), t, 1.421413741f);
    rest = t * fma(fma(rest, t, -0.284496736f), t, 0.254829592f) * power(-z * z);
    y[k] = 0.5f * x[k] * (x[k] < 0 ? rest : 2.0f - rest);
  }
}

// Four parts of C numbers each side by side, at length one; one thread computes up to COUNT rows.
template <int COUNT, int C>
[[kernel]] void normalized(
    const device float* a,
    const device float* b,
    const device float* c,
    const device float* d,
    constant int& rows,
    device float* y,
    uint i [[thread_position_in_grid]]) {
  int first = int(i) * COUNT;
  for (int row = first; row < min(first + COUNT, rows); row++) {
    ulong at = ulong(row) * C;
    channels<C> parts[4] = {load<C>(a + at), load<C>(b + at), load<C>(c + at), load<C>(d + at)};
    channels<C> squares = {};
    for (int part = 0; part < 4; part++) {
      for (int k = 0; k < C; k++) {
        squares.at[k] += parts[part].at[k] * parts[part].at[k];
      }
    }
    float sum = 0;
    for (int k = 0; k < C; k++) {
      sum += squares.at[k];
    }
    float factor = 1.0f / max(precise::sqrt(sum), 1e-12f);
    for (int part = 0; part < 4; part++) {
      for (int k = 0; k < C; k++) {
        y[4 * at + part * C + k] = factor * parts[part].at[k];
      }
    }
  }
}

// The largest of (2 RADIUS + 1)^2 pixels; beyond the borders are copies of those at them.
template <int RADIUS, bool INSIDE>
METAL_FUNC float largest(const device float* x, int row, int column, int height, int width) {
  float most = 0;
#pragma clang loop unroll(full)
  for (int dy = -RADIUS; dy <= RADIUS; dy++) {
    const device float* line = x + clamp(row + dy, 0, height - 1) * width;
#pragma clang loop unroll(full)
    for (int dx = -RADIUS; dx <= RADIUS; dx++) {
      most = max(most, line[INSIDE ? column + dx : clamp(column + dx, 0, width - 1)]);
    }
  }
  return most;
}

template <bool REST>
METAL_FUNC float peak(float x, float most, float score, float found) {
  return REST ? (most > 0 ? 0.0f : score) : (x > 0 && x == most ? 1.0f : found);
}

// 1 where x is the largest, else what was found before; or as REST the scores but 0 near any x.
template <int COUNT, int RADIUS, bool REST>
[[kernel]] void peaks(
    const device float* x,
    const device float* scores,
    const device float* found,
    constant int* sizes,
    device float* y,
    uint3 position [[thread_position_in_grid]]) {
  int height = sizes[0], width = sizes[1], row = int(position.y) % height;
  int first = int(position.x) * COUNT, last = min(first + COUNT, width);
  ulong start = ulong(position.y) * width;
  const device float* image = x + start - ulong(row) * width;
  if (first >= RADIUS && last + RADIUS <= width) {
    for (int k = first; k < last; k++) {
      float most = largest<RADIUS, true>(image, row, k, height, width);
      y[start + k] = peak<REST>(x[start + k], most, scores[start + k], found[start + k]);
    }
  } else {
    for (int k = first; k < last; k++) {
      float most = largest<RADIUS, false>(image, row, k, height, width);
      y[start + k] = peak<REST>(x[start + k], most, scores[start + k], found[start + k]);
    }
  }
}
