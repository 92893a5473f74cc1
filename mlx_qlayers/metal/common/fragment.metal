// Matrix fragments: the operands of a 16 x 8 x 16 product, spread over one SIMD group.
//
//   sum_fragment (16 x 8, float) += left_fragment<T> (16 x 16) * right_fragment<T> (16 x 8)
//
// T is half, bfloat or float. A fragment is made of 8 x 8 parts, and each lane holds two elements
// of each part: part[p][i]. Where an element lies:
//
//   left:   row    fragment_row(lane) + 8 * (p % 2),  depth fragment_col(lane) + 8 * (p / 2) + i
//   sum:    row    fragment_row(lane) + 8 * p,        column fragment_col(lane) + i
//   right:  depth  right_depth(lane, i) + 8 * p,      column right_column(lane, i)
//
// The layouts differ between GPUs: use these functions, never compute them. On NVIDIA GPUs the
// functions of this file come from the CUDA shim, with one tensor core instruction for a product.
// Every lane must take part. Rows in threadgroup memory begin at multiples of 16 bytes, rows in
// device memory at multiples of two elements.

#include "load.metal"

#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

template <typename T>
struct left_fragment {
  metal::vec<T, 2> part[4];
};

template <typename T>
struct right_fragment {
  metal::vec<T, 2> part[2];
};

struct sum_fragment {
  float2 part[2];
};

// The row of a lane's pair in an 8 x 8 part, and the first of its two adjacent columns.
METAL_FUNC ushort fragment_row(uint lane) {
  return ((lane / 4) & 4) + (lane / 2) % 4;
}
METAL_FUNC ushort fragment_col(uint lane) {
  return ((lane / 4) & 2) * 2 + (lane % 2) * 2;
}
METAL_FUNC ushort right_depth(uint lane, ushort i) {
  return fragment_row(lane);
}
METAL_FUNC ushort right_column(uint lane, ushort i) {
  return fragment_col(lane) + i;
}

// x of the lane that holds pair `pair` of this lane's row.
METAL_FUNC uint from_row_lane(uint x, ushort pair, uint lane) {
  return simd_shuffle(x, ushort((lane & ~9u) | (pair & 1) | (pair & 2) << 2));
}

// Reductions over the 8 columns of a part: all lanes of a row get the result.
METAL_FUNC float fragment_row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}
METAL_FUNC float fragment_row_max(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 8));
}

// And over its 8 rows: all lanes of a column get the result.
METAL_FUNC float2 fragment_column_sum(float2 x) {
  x += simd_shuffle_xor(x, 2);
  x += simd_shuffle_xor(x, 4);
  return x + simd_shuffle_xor(x, 16);
}
METAL_FUNC float2 fragment_column_max(float2 x) {
  x = max(x, simd_shuffle_xor(x, 2));
  x = max(x, simd_shuffle_xor(x, 4));
  return max(x, simd_shuffle_xor(x, 16));
}

// Element (row, depth) is p[row * stride + depth]; transposed, p[depth * stride + row].
template <typename T, typename P>
METAL_FUNC void load_left(thread left_fragment<T>& f, P p, uint stride, uint lane) {
  p += fragment_row(lane) * stride + fragment_col(lane);
#pragma unroll
  for (ushort k = 0; k < 4; k++) {
    P at = p + 8 * (k % 2) * stride + 8 * (k / 2);
    f.part[k] = metal::vec<T, 2>(at[0], at[1]);
  }
}
template <typename T, typename P>
METAL_FUNC void load_left_transposed(thread left_fragment<T>& f, P p, uint stride, uint lane) {
  p += fragment_col(lane) * stride + fragment_row(lane);
#pragma unroll
  for (ushort k = 0; k < 4; k++) {
    P at = p + 8 * (k / 2) * stride + 8 * (k % 2);
    f.part[k] = metal::vec<T, 2>(at[0], at[stride]);
  }
}

// Element (depth, column) is p[depth * stride + column]; transposed, p[column * stride + depth].
template <typename T, typename P>
METAL_FUNC void load_right(thread right_fragment<T>& f, P p, uint stride, uint lane) {
  p += fragment_row(lane) * stride + fragment_col(lane);
#pragma unroll
  for (ushort k = 0; k < 2; k++) {
    P at = p + 8 * k * stride;
    f.part[k] = metal::vec<T, 2>(at[0], at[1]);
  }
}
template <typename T, typename P>
METAL_FUNC void load_right_transposed(thread right_fragment<T>& f, P p, uint stride, uint lane) {
  p += fragment_col(lane) * stride + fragment_row(lane);
#pragma unroll
  for (ushort k = 0; k < 2; k++) {
    P at = p + 8 * k;
    f.part[k] = metal::vec<T, 2>(at[0], at[stride]);
  }
}

// Two neighbouring operands, columns 0 to 7 and 8 to 15.
template <typename T, typename P>
METAL_FUNC void load_right_pair(thread right_fragment<T>* f, P p, uint stride, uint lane) {
  load_right(f[0], p, stride, lane);
  load_right(f[1], p + 8, stride, lane);
}
template <typename T, typename P>
METAL_FUNC void load_right_transposed_pair(
    thread right_fragment<T>* f, P p, uint stride, uint lane) {
  load_right_transposed(f[0], p, stride, lane);
  load_right_transposed(f[1], p + 8 * stride, stride, lane);
}

// Loads `count` operands from 4 * count contiguous elements of each column, 2 * pairs at a time: depth d
// of operand j of each pairs / 2 is element d % 8 / 2 * step + d % 2 * pairs + 2 * j + d / 8, so that
// a lane unpacks words whose low and high halves are `pairs` elements apart. Columns from `columns`
// on are zero. p is uniform, `offset`, a multiple of 2 * pairs elements, need not be.
// Loads may complete while other work is done; `interleave` makes operands of them.
template <typename T, int count>
struct loaded_run {
  right_fragment<T> operands[count];
};
template <int pairs, typename T, int count, typename P>
METAL_FUNC void load_run(
    thread loaded_run<T, count>& run,
    P p,
    int offset,
    uint stride,
    uint step,
    uint columns,
    uint lane) {
  ushort depth = fragment_row(lane), column = fragment_col(lane);
  p += offset + int(column * stride + depth / 2 * step + depth % 2 * pairs);
#pragma unroll
  for (ushort k = 0; k < 2 * count; k++) {
    ushort at = k / pairs * 2 * pairs + k % pairs;
    T first = column < columns ? p[at] : T(0.0f);
    T second = column + 1u < columns ? p[stride + at] : T(0.0f);
    run.operands[k / 2].part[k % 2] = metal::vec<T, 2>(first, second);
  }
}
template <int pairs, typename T, int count>
METAL_FUNC void interleave(thread right_fragment<T>* f, loaded_run<T, count> run) {
#pragma unroll
  for (ushort k = 0; k < count; k++) {
    f[k] = run.operands[k];
  }
}

// The 16 or 8 bits of a scale, or zero if it is not `inside`.
template <typename S>
METAL_FUNC void load_bits(thread uint& to, const device S* from, bool inside) {
  to = 0;
  if (inside) {
    to = sizeof(S) == 2 ? uint(*reinterpret_cast<const device ushort*>(from))
                        : uint(*reinterpret_cast<const device uchar*>(from));
  }
}

// Operands for 8-bit codes in bfloat: one, with a conversion, or two of four bits each, where a product is
// cheaper than a conversion.
#define BYTE_PARTS 1

// (x & mask) | bits, one instruction on NVIDIA GPUs.
METAL_FUNC uint masked_or(uint x, uint mask, uint bits) {
  return (x & mask) | bits;
}

// Small floats shifted into halves are 2^shift times too small, and some are subnormal, which matrix
// units may flush to zero. This scales them; GPUs whose matrix units keep subnormals leave the factor to
// the sums, as scale_left.
template <int shift>
METAL_FUNC half2 scaled_up(half2 x) {
  return x * half2(half(1 << shift));
}
template <int shift>
METAL_FUNC float scale_left() {
  return 1.0f;
}

// Elements i and i + 4 of a word of E2M1 codes, times a scale that leaves them exact, without the factor
// scale_left<14>.
template <typename T>
METAL_FUNC metal::vec<T, 2> scaled_e2m1_pair(uint codes, int i, float scale) {
  uint magnitude = i < 3 ? codes << (9 - 4 * i) : codes >> (4 * i - 9);
  uint pair = (magnitude & 0x0e000e00u) | (codes << (12 - 4 * i) & 0x80008000u);
  return metal::vec<T, 2>(float2(scaled_up<14>(as_type<half2>(pair))) * scale);
}

// Products of elements, rounded.
template <typename T>
METAL_FUNC right_fragment<T> multiply_elements(right_fragment<T> a, right_fragment<T> b) {
#pragma unroll
  for (ushort k = 0; k < 2; k++) {
    a.part[k] = metal::vec<T, 2>(float2(a.part[k]) * float2(b.part[k]));
  }
  return a;
}

// The sums of the columns of `count` right operands, in every row.
template <int count, typename T>
METAL_FUNC void sum_columns(thread sum_fragment& sum, const thread right_fragment<T>* f) {
  float2 all = float2(f[0].part[0]) + float2(f[0].part[1]);
#pragma unroll
  for (ushort k = 1; k < count; k++) {
    all += float2(f[k].part[0]) + float2(f[k].part[1]);
  }
  sum.part[0] = sum.part[1] = fragment_column_sum(all);
}

// Sums of squares of the columns of right operands, in any layout; store_squares writes that of column c
// to p[c].
struct square_sums {
  float2 part;
};
template <typename T>
METAL_FUNC void add_squares(thread square_sums& sums, right_fragment<T> x) {
#pragma unroll
  for (ushort k = 0; k < 2; k++) {
    sums.part = fma(float2(x.part[k]), float2(x.part[k]), sums.part);
  }
}
template <typename P>
METAL_FUNC void store_squares(P p, square_sums sums, uint lane) {
  float2 all = fragment_column_sum(sums.part);
  if (fragment_row(lane) == 0) {
    p[fragment_col(lane)] = all.x;
    p[fragment_col(lane) + 1] = all.y;
  }
}

// x * y + z of two elements, rounded once.
template <typename T>
METAL_FUNC metal::vec<T, 2> fused_pair(metal::vec<T, 2> x, metal::vec<T, 2> y, metal::vec<T, 2> z) {
  return metal::vec<T, 2>(fma(float2(x), float2(y), float2(z)));
}

// Two neighbouring sum fragments, columns 0 to 7 and 8 to 15, as the left operand of the next product.
template <typename T>
METAL_FUNC void left_from_sums(thread left_fragment<T>& f, sum_fragment low, sum_fragment high) {
  f.part[0] = metal::vec<T, 2>(low.part[0]);
  f.part[1] = metal::vec<T, 2>(low.part[1]);
  f.part[2] = metal::vec<T, 2>(high.part[0]);
  f.part[3] = metal::vec<T, 2>(high.part[1]);
}

// The type in which bfloat operands are multiplied. GPUs before the M3 have no bfloat matrix units and convert
// both operands of every product; there the launcher defines float, and each operand is widened once.
#define BFLOAT_PRODUCTS bfloat
template <typename T>
struct multiplied_as {
  using type = T;
};
template <>
struct multiplied_as<bfloat> {
  using type = BFLOAT_PRODUCTS;
};

template <typename T>
METAL_FUNC simdgroup_matrix<T, 8, 8> part_matrix(metal::vec<T, 2> part) {
  simdgroup_matrix<T, 8, 8> m;
  reinterpret_cast<thread metal::vec<T, 2>&>(m.thread_elements()) = part;
  return m;
}

template <typename T>
METAL_FUNC void multiply_accumulate(
    thread sum_fragment& sum, left_fragment<T> left, right_fragment<T> right) {
  using P = typename multiplied_as<T>::type;
#pragma unroll
  for (ushort row = 0; row < 2; row++) {
    simdgroup_matrix<float, 8, 8> d = part_matrix<float>(sum.part[row]);
#pragma unroll
    for (ushort depth = 0; depth < 2; depth++) {
      simdgroup_multiply_accumulate(
          d, part_matrix<P>(metal::vec<P, 2>(left.part[2 * depth + row])),
          part_matrix<P>(metal::vec<P, 2>(right.part[depth])), d);
    }
    sum.part[row] = reinterpret_cast<thread float2&>(d.thread_elements());
  }
}

// The product without an addend.
template <typename T>
METAL_FUNC void multiply(thread sum_fragment& sum, left_fragment<T> left, right_fragment<T> right) {
  sum.part[0] = float2(0);
  sum.part[1] = float2(0);
  multiply_accumulate(sum, left, right);
}

// Stores element (row, column), rounded to T, at p[row * stride + column].
template <typename T, typename P>
METAL_FUNC void store_sum(sum_fragment f, P p, uint stride, uint lane) {
  p += fragment_row(lane) * stride + fragment_col(lane);
#pragma unroll
  for (ushort k = 0; k < 2; k++) {
    p[8 * k * stride] = T(f.part[k].x);
    p[8 * k * stride + 1] = T(f.part[k].y);
  }
}
