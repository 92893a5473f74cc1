// GPTQ of a block of 128 columns of W (batch, N, 128): each column is quantized, and its error, times a row
// of U (batch, 128, 128), is subtracted from the columns behind it. U is the diagonal block of the upper
// Cholesky factor of the inverse Hessian.
//
// gptq_block         A group of GROUP columns (32, 64 or 128) gets the scale and bias with the least error
//                    of SEARCH ranges, from half to all of the range of its updated weights, rounded
//                    to T, in which they are stored. codes has a byte for each weight, errors is
//                    (w - q) / U[k][k].
// gptq_fixed_block   The same with a scale and a bias for each weight that were chosen before.
//
// A SIMD group computes a row: a lane holds columns lane, lane + 32, lane + 64, lane + 96.
// Grid (32 * batch * N, 1, 1), no threadgroup memory.

#include <metal_stdlib>
using namespace metal;

// The code of w, for a scale above 0.
METAL_FUNC float code_of(float w, float scale, float bias, float levels) {
  return clamp(rint((w - bias) / scale), 0.0f, levels);
}

// Scale and bias of the weights w[FIRST ...] of COUNT columns a lane.
template <typename T, int FIRST, int COUNT, int SEARCH>
METAL_FUNC void fit(
    thread const float* w,
    thread const float* importance,
    float levels,
    thread float& scale,
    thread float& bias) {
  float low = w[FIRST], high = w[FIRST];
#pragma unroll
  for (int i = FIRST + 1; i < FIRST + COUNT; i++) {
    low = min(low, w[i]);
    high = max(high, w[i]);
  }
  low = simd_min(low);
  high = simd_max(high);
  float middle = 0.5f * (low + high), least = INFINITY;
  for (int s = 0; s < SEARCH; s++) {
    float ratio = 1.0f - 0.5f * float(s) / float(SEARCH);
    float step = float(T((high - low) * ratio / levels));
    step = step > 0 ? step : 1.0f;
    float start = float(T(middle - (middle - low) * ratio)), loss = 0;
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; i++) {
      float difference = w[i] - (code_of(w[i], step, start, levels) * step + start);
      loss += importance[i] * difference * difference;
    }
    loss = simd_sum(loss);
    if (loss < least || s == 0) {
      least = loss;
      scale = step;
      bias = start;
    }
  }
}

// Quantizes the 32 columns from 32 * QUARTER on, one after the other.
template <int QUARTER>
METAL_FUNC void quantize_quarter(
    thread float* w,
    thread const float* scale,
    thread const float* bias,
    const device float* u,
    float levels,
    device uint8_t* codes,
    device float* errors,
    uint lane) {
  for (int j = 0; j < 32; j++) {
    int k = 32 * QUARTER + j;
    float value = simd_shuffle(w[QUARTER], ushort(j));
    float step = simd_shuffle(scale[QUARTER], ushort(j));
    float start = simd_shuffle(bias[QUARTER], ushort(j));
    float code = code_of(value, step, start, levels);
    float error = (value - (code * step + start)) / u[k * 128 + k];
#pragma unroll
    for (int i = QUARTER; i < 4; i++) {
      w[i] -= error * u[k * 128 + 32 * i + lane];
    }
    if (int(lane) == j) {
      codes[k] = uint8_t(code);
      errors[k] = error;
    }
  }
}

template <typename T, int BITS, int GROUP, int SEARCH>
[[kernel]] void gptq_block(
    const device float* w,
    const device float* u,
    constant int& rows,
    device uint8_t* codes,
    device float* errors,
    device T* scales,
    device T* biases,
    uint position [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int WIDE = GROUP / 32;  // columns of a lane in a group
  const float levels = float((1 << BITS) - 1);
  size_t row = position / 32;
  const device float* own = u + row / rows * 16384;
  float x[4], importance[4], scale[4], bias[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int k = 32 * i + lane;
    x[i] = w[row * 128 + k];
    float pivot = own[k * 128 + k];
    importance[i] = 1.0f / (pivot * pivot);
  }
  device uint8_t* to = codes + row * 128;
  device float* error_row = errors + row * 128;
  fit<T, 0, WIDE, SEARCH>(x, importance, levels, scale[0], bias[0]);
#pragma unroll
  for (int i = 1; i < WIDE; i++) {
    scale[i] = scale[0];
    bias[i] = bias[0];
  }
  quantize_quarter<0>(x, scale, bias, own, levels, to, error_row, lane);
  if (WIDE == 1) {
    fit<T, 1, 1, SEARCH>(x, importance, levels, scale[1], bias[1]);
  }
  quantize_quarter<1>(x, scale, bias, own, levels, to, error_row, lane);
  if (WIDE < 4) {
    fit<T, 2, WIDE == 1 ? 1 : 2, SEARCH>(x, importance, levels, scale[2], bias[2]);
    scale[3] = scale[2];
    bias[3] = bias[2];
  }
  quantize_quarter<2>(x, scale, bias, own, levels, to, error_row, lane);
  if (WIDE == 1) {
    fit<T, 3, 1, SEARCH>(x, importance, levels, scale[3], bias[3]);
  }
  quantize_quarter<3>(x, scale, bias, own, levels, to, error_row, lane);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < 4; i += WIDE) {
      scales[row * (4 / WIDE) + i / WIDE] = T(scale[i]);
      biases[row * (4 / WIDE) + i / WIDE] = T(bias[i]);
    }
  }
}

template <int BITS>
[[kernel]] void gptq_fixed_block(
    const device float* w,
    const device float* u,
    const device float* scales,
    const device float* biases,
    constant int& rows,
    device uint8_t* codes,
    device float* errors,
    uint position [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const float levels = float((1 << BITS) - 1);
  size_t row = position / 32;
  const device float* own = u + row / rows * 16384;
  float x[4], scale[4], bias[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    size_t at = row * 128 + 32 * i + lane;
    x[i] = w[at];
    scale[i] = scales[at];
    bias[i] = biases[at];
  }
  device uint8_t* to = codes + row * 128;
  device float* error_row = errors + row * 128;
  quantize_quarter<0>(x, scale, bias, own, levels, to, error_row, lane);
  quantize_quarter<1>(x, scale, bias, own, levels, to, error_row, lane);
  quantize_quarter<2>(x, scale, bias, own, levels, to, error_row, lane);
  quantize_quarter<3>(x, scale, bias, own, levels, to, error_row, lane);
}
