// What the shims make of loads and matrix products: speeds, not results.
#include "fragment.metal"

// Reads 16 bytes a thread and step, the whole grid side by side.
[[kernel]] void read_speed(
    const device uint32_t* x, constant int& steps, device uint32_t* out,
    uint i [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {
  const device uint4* wide = (const device uint4*)x;
  uint4 sum = uint4(0);
#pragma unroll 8
  for (int s = 0; s < steps; s++) {
    sum ^= wide[size_t(s) * size.x + i];
  }
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 12345) {
    out[0] = i;
  }
}

// 16 x 8 x 16 products in registers, eight sums at a time.
template <typename T>
[[kernel]] void fragment_speed(
    const device T* x, constant int& steps, device float* out,
    uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  left_fragment<T> left;
  right_fragment<T> right[8];
  sum_fragment sum[8];
  load_left(left, x, 16, lane);
#pragma unroll
  for (ushort k = 0; k < 8; k++) {
    load_right(right[k], x + k, 16, lane);
    sum[k].part[0] = 0.0f;
    sum[k].part[1] = 0.0f;
  }
  for (int s = 0; s < steps; s++) {
#pragma unroll
    for (ushort k = 0; k < 8; k++) {
      multiply_accumulate(sum[k], left, right[k]);
    }
  }
  float2 all = 0.0f;
#pragma unroll
  for (ushort k = 0; k < 8; k++) {
    all += sum[k].part[0] + sum[k].part[1];
  }
  out[i] = all.x + all.y;
}

// The same with 8 x 8 x 8 products.
template <typename T>
[[kernel]] void matrix_speed(
    const device T* x, constant int& steps, device float* out,
    uint i [[thread_position_in_grid]]) {
  simdgroup_matrix<T, 8, 8> left, right[8];
  simdgroup_matrix<float, 8, 8> sum[8];
  simdgroup_load(left, x, 16);
#pragma unroll
  for (ushort k = 0; k < 8; k++) {
    simdgroup_load(right[k], x + k, 16);
    sum[k] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int s = 0; s < steps; s++) {
#pragma unroll
    for (ushort k = 0; k < 8; k++) {
      simdgroup_multiply_accumulate(sum[k], left, right[k], sum[k]);
    }
  }
  float2 all = 0.0f;
#pragma unroll
  for (ushort k = 0; k < 8; k++) {
    all += reinterpret_cast<thread float2&>(sum[k].thread_elements());
  }
  out[i] = all.x + all.y;
}
