// Code that the qmv kernels share: up to three matrices in one launch, and the epilogue of sums.

#include <metal_stdlib>
using namespace metal;

#define GATE_SILU 1
#define GATE_GELU 2
#define GATE_GELU_APPROX 3

template <typename S>
struct packed_matrix {
  const device uint* w;
  const device S* scales;
  const device S* biases;
};

// A tile of `height` rows begins at row `first` of a matrix. Tiles are numbered through the matrices or,
// with a gate, alternate between both.
struct tile_place {
  int matrix, first;
};
template <int gate, int height, typename P>
METAL_FUNC tile_place place_of_tile(int tile, P rows, bool second, bool third) {
  tile_place place;
  place.matrix = gate ? tile % 2 : 0;
  if (gate) {
    tile /= 2;
  } else if (second && tile >= (rows[0] + height - 1) / height) {
    tile -= (rows[0] + height - 1) / height;
    place.matrix = 1;
    if (third && tile >= (rows[1] + height - 1) / height) {
      tile -= (rows[1] + height - 1) / height;
      place.matrix = 2;
    }
  }
  place.first = tile * height;
  return place;
}

// The error function: x * p(x * x) up to 1, and 1 - exp(p(x)) above; fitted, within 1.1e-7.
METAL_FUNC float error_function(float x) {
  float size = min(abs(x), 4.0f), t = size * size;
  float low = fma(
      fma(fma(fma(fma(-5.65410592e-4f, t, 4.92327753e-3f), t, -2.67163850e-2f), t, 0.112803645f),
          t,
          -0.376123488f),
      t,
      1.12837911f);
  float high = fma(
      fma(fma(fma(-1.33093899e-5f, size, 3.17572034e-4f), size, -3.43686761e-3f),
          size,
          2.26219855e-2f),
      size,
      -0.103318982f);
  high = fma(fma(fma(high, size, -0.639093339f), size, -1.12592590f), size, -7.56968628e-4f);
  return size <= 1 ? low * x : copysign(1 - precise::exp(high), x);
}

template <int gate>
METAL_FUNC float activation(float x) {
  if (gate == GATE_GELU) {
    return 0.5f * x * (1 + error_function(x * 0.707106781f));
  }
  // 1 + tanh(u) is twice the logistic function of 2 u.
  float u = gate == GATE_SILU ? x : 1.59576912f * fma(0.044715f * x * x, x, x);
  return x / (1 + precise::exp(-u));
}

// One element from its sum, or from two with a gate; null pointers add nothing.
template <typename T, int gate>
METAL_FUNC T finished(
    float sum,
    float other,
    int row,
    size_t at,
    const device T* bias,
    const device T* other_bias,
    const device T* residual) {
  if (bias) {
    sum += float(bias[row]);
  }
  if (gate) {
    if (other_bias) {
      other += float(other_bias[row]);
    }
    sum = activation<gate>(sum) * other;
  }
  if (residual) {
    sum += float(residual[at]);
  }
  return T(sum);
}
