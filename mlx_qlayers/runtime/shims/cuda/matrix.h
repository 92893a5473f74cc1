// simdgroup_matrix<T, 8, 8>: any kernel that finds its lanes by fragment_row and fragment_col.
// An 8 x 8 x 8 product uses half of a tensor core step of half depth; fragment.h uses all of it.
#pragma once

#include "mma.h"

namespace mlx::core::cu {

template <typename T, int rows, int columns>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "Metal has 8 x 8 matrices alone");
  static_assert(is_floating_point_v<T>, "of half, bfloat or float");
  using storage_type = vec<T, 2>;
  storage_type elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    int row = fragment_row(lane_index()), col = fragment_col(lane_index());
    elements = storage_type(row == col ? diagonal : T(0), row == col + 1 ? diagonal : T(0));
  }
  storage_type& thread_elements() {
    return elements;
  }
  const storage_type& thread_elements() const {
    return elements;
  }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <typename T, int rows, int columns>
simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> m;
  m.elements = vec<T, 2>(value);
  return m;
}

// The offset of this lane's first element, and the distance to its second.
struct matrix_place {
  ulong first, next;
  matrix_place(ulong elements_per_row, ulong2 origin, bool transpose) {
    ulong row = fragment_row(lane_index()), col = fragment_col(lane_index());
    first = transpose ? (origin.y + col) * elements_per_row + origin.x + row
                      : (origin.y + row) * elements_per_row + origin.x + col;
    next = transpose ? elements_per_row : 1;
  }
};
template <typename T>
void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& d,
    const T* src,
    ulong elements_per_row = 8,
    ulong2 matrix_origin = 0,
    bool transpose_matrix = false) {
  matrix_place at(elements_per_row, matrix_origin, transpose_matrix);
  d.elements = vec<T, 2>(src[at.first], src[at.first + at.next]);
}
template <typename T>
void simdgroup_store(
    simdgroup_matrix<T, 8, 8> a,
    T* dst,
    ulong elements_per_row = 8,
    ulong2 matrix_origin = 0,
    bool transpose_matrix = false) {
  matrix_place at(elements_per_row, matrix_origin, transpose_matrix);
  dst[at.first] = a.elements.x;
  dst[at.first + at.next] = a.elements.y;
}

// half or bfloat operands of one type go in as they are; any others as float.
template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d,
    simdgroup_matrix<A, 8, 8> a,
    simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c) {
  using T = conditional_t<is_same_v<A, B>, A, float>;
  vec<T, 2> left[2] = {vec<T, 2>(a.elements), vec<T, 2>(0)};
  vec<T, 2> right = transposed(vec<T, 2>(b.elements));
  float2 sum[2] = {float2(c.elements), float2(0)};
  tensor_core_8(sum, left, &right);
  d.elements = vec<D, 2>(sum[0]);
}
template <typename D, typename A, typename B>
void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f));
}
template <typename T>
simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

} // namespace mlx::core::cu
