// SIMD-group and quad-group functions. Every kernel writes rows of one value a thread; the table
// in Python names them in the same order.
#include <metal_stdlib>
using namespace metal;

#define ROW(r, value) out[(r) * n + i] = value

template <typename T>
[[kernel]] void simd_arithmetic(
    const device T* x, device T* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  ROW(0, simd_sum(x[i]));
  ROW(1, simd_product(x[i]));
  ROW(2, simd_min(x[i]));
  ROW(3, simd_max(x[i]));
  ROW(4, simd_prefix_inclusive_sum(x[i]));
  ROW(5, simd_prefix_exclusive_sum(x[i]));
  ROW(6, simd_prefix_inclusive_product(x[i]));
  ROW(7, simd_prefix_exclusive_product(x[i]));
}

template <typename T>
[[kernel]] void simd_bits(
    const device T* x, device T* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  ROW(0, simd_and(x[i]));
  ROW(1, simd_or(x[i]));
  ROW(2, simd_xor(x[i]));
}

template <typename T>
[[kernel]] void simd_moves(
    const device T* x, const device T* filling, device T* out,
    uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  uint i = at.x, n = size.x;
  T a = x[i], f = filling[i];
  ROW(0, simd_broadcast(a, 5));
  ROW(1, simd_shuffle(a, (lane * 7 + 3) % 32));
  T up = simd_shuffle_up(a, 3), down = simd_shuffle_down(a, 3);
  ROW(2, lane < 3 ? a : up);
  ROW(3, lane > 28 ? a : down);
  ROW(4, simd_shuffle_xor(a, 21));
  ROW(5, simd_shuffle_rotate_up(a, 5));
  ROW(6, simd_shuffle_rotate_down(a, 5));
  ROW(7, simd_shuffle_and_fill_up(a, f, 6));
  ROW(8, simd_shuffle_and_fill_down(a, f, 6));
  ROW(9, simd_shuffle_and_fill_up(a, f, 3, 8));
  ROW(10, simd_shuffle_and_fill_down(a, f, 3, 8));
}

[[kernel]] void simd_votes(
    const device int* x, device uint* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  simd_vote odd = simd_ballot(x[i] % 2 != 0);
  ROW(0, uint((ulong)odd));
  ROW(1, simd_all(x[i] < 100));
  ROW(2, simd_all(x[i] < 0));
  ROW(3, simd_any(x[i] == 3));
  ROW(4, simd_any(x[i] == 1000));
  ROW(5, uint((ulong)simd_active_threads_mask()));
  ROW(6, simd_is_first());
  ROW(7, odd.any());
  ROW(8, odd.all());
  ROW(9, uint(simd_broadcast_first(x[i])));
}

template <typename T>
[[kernel]] void quad_arithmetic(
    const device T* x, device T* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  ROW(0, quad_sum(x[i]));
  ROW(1, quad_product(x[i]));
  ROW(2, quad_min(x[i]));
  ROW(3, quad_max(x[i]));
  ROW(4, quad_prefix_inclusive_sum(x[i]));
  ROW(5, quad_prefix_exclusive_sum(x[i]));
  ROW(6, quad_prefix_inclusive_product(x[i]));
  ROW(7, quad_prefix_exclusive_product(x[i]));
}

template <typename T>
[[kernel]] void quad_bits(
    const device T* x, device T* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  ROW(0, quad_and(x[i]));
  ROW(1, quad_or(x[i]));
  ROW(2, quad_xor(x[i]));
}

template <typename T>
[[kernel]] void quad_moves(
    const device T* x, const device T* filling, device T* out,
    uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]],
    uint lane [[thread_index_in_quadgroup]]) {
  uint i = at.x, n = size.x;
  T a = x[i], f = filling[i];
  ROW(0, quad_broadcast(a, 2));
  ROW(1, quad_broadcast_first(a));
  ROW(2, quad_shuffle(a, 3 - lane));
  T up = quad_shuffle_up(a, 1), down = quad_shuffle_down(a, 1);
  ROW(3, lane < 1 ? a : up);
  ROW(4, lane > 2 ? a : down);
  ROW(5, quad_shuffle_xor(a, 3));
  ROW(6, quad_shuffle_rotate_up(a, 1));
  ROW(7, quad_shuffle_rotate_down(a, 1));
  ROW(8, quad_shuffle_and_fill_up(a, f, 1));
  ROW(9, quad_shuffle_and_fill_down(a, f, 1));
}

[[kernel]] void quad_votes(
    const device int* x, device uint* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  ROW(0, quad_all(x[i] < 20));
  ROW(1, quad_any(x[i] == 3));
  ROW(2, quad_is_first());
}

// Vectors move through SIMD functions whole, and a short SIMD group leaves out missing lanes.
[[kernel]] void simd_vectors(
    const device float* x, device float* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  float4 v = float4(x[i], x[i] + 1.0f, x[i] + 2.0f, x[i] + 3.0f);
  float4 moved = simd_shuffle_xor(v, 9), sum = simd_sum(v);
  ROW(0, moved.x);
  ROW(1, moved.w);
  ROW(2, sum.y);
  ROW(3, sum.z);
}

[[kernel]] void short_simdgroup(
    const device float* x, device float* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  ROW(0, simd_sum(x[i]));
  ROW(1, simd_max(x[i]));
  ROW(2, simd_broadcast_first(x[i]));
  ROW(3, float(simd_any(x[i] == 3.0f)));
}
