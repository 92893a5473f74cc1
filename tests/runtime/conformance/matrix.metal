// simdgroup_matrix, and the fragments on top of it.
#include "fragment.metal"

// a and b are 8 x 24 and 24 x 8, in rows of 24 and 8; one SIMD group.
template <typename T>
[[kernel]] void matrix_layouts(
    const device T* a, const device T* b, device float* out,
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup T tile[8 * 8];
  simdgroup_matrix<T, 8, 8> m, other;
  simdgroup_load(m, a, 24);
  thread metal::vec<T, 2>& own = reinterpret_cast<thread metal::vec<T, 2>&>(m.thread_elements());
  uint row = fragment_row(lane), col = fragment_col(lane);
  out[row * 8 + col] = float(own[0]);
  out[row * 8 + col + 1] = float(own[1]);
  simdgroup_load(m, a, 24, ulong2(8, 0));
  simdgroup_store(m, tile, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[64 + lane] = float(tile[lane]);
  out[96 + lane] = float(tile[lane + 32]);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(m, a + 16, 24, ulong2(0, 0), true);
  simdgroup_store(m, tile, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[128 + lane] = float(tile[lane]);
  out[160 + lane] = float(tile[lane + 32]);

  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
#pragma unroll
  for (ushort k = 0; k < 24; k += 8) {
    simdgroup_load(m, a, 24, ulong2(k, 0));
    simdgroup_load(other, b, 8, ulong2(0, k));
    simdgroup_multiply_accumulate(sum, m, other, sum);
  }
  simdgroup_store(sum, out + 192, 8);
  simdgroup_load(m, a, 24);
  simdgroup_load(other, b, 8);
  simdgroup_multiply(sum, m, other);
  simdgroup_store(sum, out + 256, 8);
  simdgroup_float8x8 twice = simdgroup_float8x8(2.0f);
  simdgroup_multiply(sum, twice, sum);
  simdgroup_store(sum, out + 320, 8, ulong2(0, 0), true);
}

// Loads of one kind from device and from threadgroup memory, written back by the maps.
template <typename T>
[[kernel]] void fragment_loads(
    const device T* x, device float* out, uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint stride = 24;
  threadgroup T tile[16 * stride];
  for (uint k = lane; k < 16 * stride; k += 32) {
    tile[k] = x[k];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  left_fragment<T> left[4];
  load_left(left[0], x, stride, lane);
  load_left(left[1], tile, stride, lane);
  load_left_transposed(left[2], x, stride, lane);
  load_left_transposed(left[3], tile, stride, lane);
  right_fragment<T> right[4];
  load_right(right[0], x, stride, lane);
  load_right(right[1], tile, stride, lane);
  load_right_transposed(right[2], x, stride, lane);
  load_right_transposed(right[3], tile, stride, lane);
#pragma unroll
  for (ushort k = 0; k < 4; k++) {
#pragma unroll
    for (ushort p = 0; p < 4; p++) {
      uint row = fragment_row(lane) + 8 * (p % 2), depth = fragment_col(lane) + 8 * (p / 2);
      out[k * 256 + row * 16 + depth] = float(left[k].part[p].x);
      out[k * 256 + row * 16 + depth + 1] = float(left[k].part[p].y);
    }
#pragma unroll
    for (ushort p = 0; p < 2; p++) {
#pragma unroll
      for (ushort i = 0; i < 2; i++) {
        uint depth = right_depth(lane, i) + 8 * p, column = right_column(lane, i);
        out[1024 + k * 128 + depth * 8 + column] = float(right[k].part[p][i]);
      }
    }
  }
}

// (left * right) twice over: sums become the left operand of a second product.
template <typename T>
[[kernel]] void fragment_products(
    const device T* a, const device T* b, const device T* c, device float* out, device T* rounded,
    uint lane [[thread_index_in_simdgroup]]) {
  left_fragment<T> left;
  right_fragment<T> right;
  sum_fragment low, high, last;
#pragma unroll
  for (ushort p = 0; p < 2; p++) {
    low.part[p] = 0.0f;
    high.part[p] = 0.0f;
    last.part[p] = 1.0f;
  }
  load_left(left, a, 16, lane);
  load_right(right, b, 16, lane);
  multiply_accumulate(low, left, right);
  load_right(right, b + 8, 16, lane);
  multiply_accumulate(high, left, right);
  store_sum<float>(low, out, 16, lane);
  store_sum<float>(high, out + 8, 16, lane);
  store_sum<T>(low, rounded, 16, lane);
  store_sum<T>(high, rounded + 8, 16, lane);
  left_from_sums(left, low, high);
  load_right_transposed(right, c, 16, lane);
  multiply_accumulate(last, left, right);
  store_sum<float>(last, out + 256, 8, lane);
#pragma unroll
  for (ushort p = 0; p < 2; p++) {
    float2 v = last.part[p];
    uint row = fragment_row(lane) + 8 * p;
    float sum = fragment_row_sum(v.x + v.y), most = fragment_row_max(max(v.x, v.y));
    if (fragment_col(lane) == 0) {
      out[384 + row] = sum;
      out[400 + row] = most;
    }
    float2 total = fragment_column_sum(v), peak = fragment_column_max(v);
    if (fragment_row(lane) == 0) {
#pragma unroll
      for (ushort i = 0; i < 2; i++) {
        out[416 + 8 * p + fragment_col(lane) + i] = total[i];
        out[432 + 8 * p + fragment_col(lane) + i] = peak[i];
      }
    }
  }
}

// Infinities and NaN stay in their row and column.
template <typename T>
[[kernel]] void fragment_special(
    const device T* a, const device T* b, device float* out,
    uint lane [[thread_index_in_simdgroup]]) {
  left_fragment<T> left;
  right_fragment<T> right;
  sum_fragment sum;
  sum.part[0] = 0.0f;
  sum.part[1] = 0.0f;
  load_left(left, a, 16, lane);
  load_right_transposed(right, b, 16, lane);
  multiply_accumulate(sum, left, right);
  store_sum<float>(sum, out, 8, lane);
}
