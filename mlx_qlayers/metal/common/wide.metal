// Operations of one thread of a CPU on whole vector registers, WIDE floats at a time.
//
// The fast build of the host backend takes the functions of this file from its shim, which implements them by
// the processor's vector instructions; the contract is the same. No GPU runs them. packed.metal has to be
// included before this file.

#include <metal_stdlib>
using namespace metal;

#define WIDE 16
// Elements of a row of operands: those of a tile fit into the nearest caches.
#define LENGTH 512
// Elements that are rounded to integers together.
#define BLOCK 32
// Rows of x and of a matrix whose products have their sums in registers.
#define FEW 5
#define COLUMNS 4

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

// Products of at most FEW rows of x, which are K apart, with COLUMNS rows of a matrix, dequantized as they are
// multiplied: adds to WIDE sums for each pair, `stride` apart from one row of x to the next. The next rows of the
// matrix lie `ahead` words further on.
template <int mode, int bits, int group, int rows, int stride, typename M, typename T>
METAL_FUNC void wide_few(thread float* sums, const thread M* matrix, const device T* x, int K, size_t ahead) {
  for (int k = 0; k < K; k += group) {
    float weights[COLUMNS][group];
    for (int n = 0; n < COLUMNS; n++) {
      wide_weights<mode, bits, group>(
          weights[n],
          matrix[n].w,
          size_t(k) * bits / 32,
          decoded_scale<mode>(matrix[n].scales[k / group]),
          mode == AFFINE ? float(matrix[n].biases[k / group]) : 0.0f);
    }
    for (int m = 0; m < rows; m++) {
      for (int i = 0; i < group; i++) {
        float value = float(x[size_t(m) * K + k + i]);
        for (int n = 0; n < COLUMNS; n++) {
          thread float* to = sums + m * stride + n * WIDE + i % WIDE;
          *to = fma(value, weights[n][i], *to);
        }
      }
    }
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

// Rounds `depth` elements of x, whole blocks of BLOCK, to integers from -127 to 127: gives of each block the step
// between neighbouring values, and the sum of the rounded ones.
template <typename T>
METAL_FUNC void wide_round(
    thread char* codes, thread float* steps, thread float* totals, const device T* x, int depth) {
  for (int block = 0; block < depth / BLOCK; block++) {
    uint most = 0;
    for (int i = 0; i < BLOCK; i++) {
      // The bits of positive floats have their order, and NaN is the largest.
      most = max(most, as_type<uint>(abs(float(x[block * BLOCK + i]))));
    }
    float largest = as_type<float>(most);
    float inverse = largest > 0.0f && largest < INFINITY ? 127.0f / largest : 0.0f;
    int total = 0;
    for (int i = 0; i < BLOCK; i++) {
      int code = inverse == 0.0f ? 0 : int(rint(float(x[block * BLOCK + i]) * inverse));
      codes[block * BLOCK + i] = char(code);
      total += code;
    }
    steps[block] = largest / 127.0f;
    totals[block] = steps[block] * float(total);
  }
}

// Products of `rows` rows, rounded by wide_round, with a row of `depth` codes of 4 or 8 bits, of at most
// LENGTH and whole blocks, in groups of whole blocks; sums of a block are exact. Adds to WIDE sums for each row,
// which are `stride` apart.
template <int bits, int group, int rows, int stride, typename S>
METAL_FUNC void wide_integers(
    thread float* sums,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    const thread char* codes,
    const thread float* steps,
    const thread float* totals,
    int depth) {
  for (int m = 0; m < rows; m++) {
    for (int block = 0; block < depth / BLOCK; block++) {
      int sum = 0, at = m * LENGTH / BLOCK + block, of = block * BLOCK / group;
      for (int i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
        uint code = w[i * bits / 32] >> (i * bits % 32) & ((1u << bits) - 1u);
        sum += int(code) * codes[m * LENGTH + i];
      }
      thread float* to = sums + m * stride + block % WIDE;
      to[0] += float(scales[of]) * steps[at] * float(sum) + float(biases[of]) * totals[at];
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
