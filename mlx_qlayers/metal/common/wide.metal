// Operations of one thread of a CPU on whole vector registers, WIDE floats at a time.
//
// The fast build of the host backend takes the functions of this file from its shim, which implements them by
// the processor's vector instructions; the contract is the same. No GPU runs them. packed.metal has to be
// included before this file.

#include <metal_stdlib>
using namespace metal;

#define WIDE 16

// Lets the processor load what is going to be read, or nothing: p may lie beyond the end of its buffer.
METAL_FUNC void wide_prefetch(const device uint* p) {
}

// Loads `count` elements, a multiple of WIDE.
template <int count, typename T>
METAL_FUNC void wide_values(thread float* to, const device T* from) {
  for (int i = 0; i < count; i++) {
    to[i] = float(from[i]);
  }
}

// Dequantizes `count` elements of one group, from word `at` of w on.
template <int mode, int bits, int count>
METAL_FUNC void wide_weights(
    thread float* to, const device uint* w, size_t at, float scale, float bias) {
  dequantize<mode, bits, count>(to, w, at, scale, bias);
}

// sums[i % WIDE] += a[i] * b[i]
template <int count>
METAL_FUNC void wide_products(thread float* sums, const thread float* a, const thread float* b) {
  for (int i = 0; i < count; i++) {
    sums[i % WIDE] = fma(a[i], b[i], sums[i % WIDE]);
  }
}

// Products of `rows` rows of x with `columns` rows of w, all `stride` apart, over `depth` elements, a
// multiple of WIDE: adds to WIDE sums for each pair.
template <int rows, int columns, int stride>
METAL_FUNC void wide_block(
    thread float* sums, const thread float* x, const thread float* w, int depth) {
  for (int m = 0; m < rows; m++) {
    for (int n = 0; n < columns; n++) {
      thread float* to = sums + (m * columns + n) * WIDE;
      for (int i = 0; i < depth; i++) {
        to[i % WIDE] = fma(x[m * stride + i], w[n * stride + i], to[i % WIDE]);
      }
    }
  }
}

// The sum of WIDE sums. Added in pairs, which rounds less often than one by one.
METAL_FUNC float wide_sum(const thread float* sums) {
  float parts[WIDE / 2];
  for (int i = 0; i < WIDE / 2; i++) {
    parts[i] = sums[i] + sums[i + WIDE / 2];
  }
  for (int pair = WIDE / 4; pair > 0; pair /= 2) {
    for (int i = 0; i < pair; i++) {
      parts[i] += parts[i + pair];
    }
  }
  return parts[0];
}
