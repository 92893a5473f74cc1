// Product of few rows with a quantized matrix: y (M, N) = x (M, K) * w^T + bias, M up to `rows`.
//
// w is (N, K) packed in `bits` bits an element; `group` elements of a row share a scale (and in
// mode affine a bias). A tile is `outputs` neighbouring rows of w, read and unpacked once for all
// rows of x by the `lanes` threads of one SIMD group, or by one thread where `lanes` is 1:
//
//   grid ((tiles * lanes), 1, 1), tiles of at least ceil(N / outputs); threadgroup any multiple of
//   `lanes`; no threadgroup memory. A thread takes runs of `run` elements of K, every lanes-th.
//
// Sums are float32, in `ways` parts that a processor with vectors adds side by side. At the edge of
// N a tile reads the last row again and writes only what exists.

#include <metal_stdlib>
using namespace metal;

#define AFFINE 0
#define MXFP4 1
#define MXFP8 2
#define NVFP4 3

// Element i of a row of packed words; i is known when the loop around it is unrolled.
template <int bits>
METAL_FUNC uint packed_code(const thread uint* words, int i) {
  int word = i * bits / 32, shift = i * bits % 32;
  uint code = words[word] >> shift;
  if (shift + bits > 32) {
    code |= words[word + 1] << (32 - shift);
  }
  return code & ((1u << bits) - 1);
}

// E4M3 and E2M1 are halves with a smaller exponent: shifted into place, they are a power of two off.
METAL_FUNC float float_from_e4m3(uint code) {
  uint magnitude = code & 0x7f;
  uint nan = (magnitude + 1) >> 7 << 14;
  return float(as_type<half>(ushort((code & 0x80) << 8 | magnitude << 7 | nan))) * 256.0f;
}
METAL_FUNC float float_from_e2m1(uint code) {
  return float(as_type<half>(ushort((code & 8) << 12 | (code & 7) << 9))) * 16384.0f;
}

// An integer below 2^23 in the mantissa of 2^23: cheaper than a conversion on Apple GPUs.
METAL_FUNC float float_from_integer(uint code) {
  return as_type<float>(code | 0x4b000000u) - 8388608.0f;
}

template <int mode>
METAL_FUNC float decoded(uint code) {
  if (mode == AFFINE) {
    return float_from_integer(code);
  }
  return mode == MXFP8 ? float_from_e4m3(code) : float_from_e2m1(code);
}

template <int mode, typename S>
METAL_FUNC float decoded_scale(S scale) {
  if (mode == AFFINE) {
    return float(scale);
  }
  uint code = uint(scale);
  if (mode == NVFP4) {
    return float_from_e4m3(code);
  }
  return as_type<float>(code == 0 ? 0x00400000u : code << 23);
}

// Rows begin at multiples of a run, so that its words can be read four or two at once.
template <int count>
METAL_FUNC void load_words(thread uint* to, const device uint* from) {
  const int width = count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < count; i += width) {
    if (width == 4) {
      *reinterpret_cast<thread uint4*>(to + i) = *reinterpret_cast<const device uint4*>(from + i);
    } else if (width == 2) {
      *reinterpret_cast<thread uint2*>(to + i) = *reinterpret_cast<const device uint2*>(from + i);
    } else {
      to[i] = from[i];
    }
  }
}

// `count` elements of one group, from their packed words, as numbers.
template <int mode, int bits, int count>
METAL_FUNC void dequantize(thread float* to, const device uint* from, float scale, float bias) {
  alignas(16) uint words[count * bits / 32];
  load_words<count * bits / 32>(words, from);
#pragma unroll
  for (int i = 0; i < count; i++) {
    to[i] = fma(scale, decoded<mode>(packed_code<bits>(words, i)), bias);
  }
}

// sums[i % ways] += a[i] * b[i]
template <int count, int ways>
METAL_FUNC void accumulate(thread float* sums, const thread float* a, const thread float* b) {
  float parts[ways];
#pragma unroll
  for (int j = 0; j < ways; j++) {
    parts[j] = sums[j];
  }
#pragma unroll
  for (int i = 0; i < count; i++) {
    parts[i % ways] = fma(a[i], b[i], parts[i % ways]);
  }
#pragma unroll
  for (int j = 0; j < ways; j++) {
    sums[j] = parts[j];
  }
}

template <
    typename T,
    typename S,
    int mode,
    int group,
    int bits,
    int rows,
    int outputs,
    int run,
    int lanes,
    int ways,
    bool biased>
[[kernel]] void quantized_matmul_few_rows(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const device T* bias,
    constant int* shape,
    device T* y,
    uint id [[thread_position_in_grid]]) {
  int M = shape[0], N = shape[1], K = shape[2];
  int first = int(id / lanes) * outputs, lane = id % lanes;
  size_t words = size_t(K) * bits / 32, groups = K / group;
  alignas(64) float sums[rows][outputs][ways] = {};

  // A tile beyond N, there to fill the last threadgroup, reads nothing.
  int depth = first < N ? K : 0;
  for (int k = lane * run; k < depth; k += lanes * run) {
    alignas(64) float weights[outputs][run];
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
    for (int n = 0; n < outputs; n++) {
      size_t row = min(first + n, N - 1), at = row * groups + k / group;
      float scale = decoded_scale<mode>(scales[at]);
      float offset = mode == AFFINE ? float(biases[at]) : 0.0f;
      dequantize<mode, bits, run>(
          weights[n], w + row * words + size_t(k) * bits / 32, scale, offset);
    }
#pragma unroll(lanes > 1 ? rows : 1)
    for (int m = 0; m < rows; m++) {
      if (rows > 1 && m >= M) {
        continue;
      }
      float values[run];
#pragma unroll
      for (int i = 0; i < run; i++) {
        values[i] = float(x[size_t(m) * K + k + i]);
      }
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
      for (int n = 0; n < outputs; n++) {
        accumulate<run, ways>(sums[m][n], weights[n], values);
      }
    }
  }

#pragma unroll(lanes > 1 ? rows : 1)
  for (int m = 0; m < rows; m++) {
#pragma unroll(lanes > 1 ? outputs : 1)
#pragma clang loop vectorize(disable)
    for (int n = 0; n < outputs; n++) {
      // In pairs: one after another would round more often.
#pragma unroll
      for (int pair = ways / 2; pair > 0; pair /= 2) {
        for (int j = 0; j < pair; j++) {
          sums[m][n][j] += sums[m][n][j + pair];
        }
      }
      float sum = sums[m][n][0];
      if (lanes > 1) {
        sum = simd_sum(sum);
      }
      if (lane == 0 && m < M && first + n < N) {
        y[size_t(m) * N + first + n] = T(biased ? sum + float(bias[first + n]) : sum);
      }
    }
  }
}
