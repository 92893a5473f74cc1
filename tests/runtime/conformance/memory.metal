// Atomics, barriers, threadgroup memory, and the ways in which MLX passes inputs.
#include <metal_stdlib>
using namespace metal;

#define ROW(r, value) out[(r) * n + i] = value
#define RELAXED memory_order_relaxed

// One cell for each operation, hit by every thread.
template <typename T>
[[kernel]] void atomic_integers(
    const device T* x, device atomic<T>* cells, uint3 at [[thread_position_in_grid]]) {
  T a = x[at.x];
  atomic_fetch_add_explicit(&cells[0], a, RELAXED);
  atomic_fetch_sub_explicit(&cells[1], a, RELAXED);
  atomic_fetch_min_explicit(&cells[2], a, RELAXED);
  atomic_fetch_max_explicit(&cells[3], a, RELAXED);
  atomic_fetch_and_explicit(&cells[4], a, RELAXED);
  atomic_fetch_or_explicit(&cells[5], a, RELAXED);
  atomic_fetch_xor_explicit(&cells[6], a, RELAXED);
  // Every thread swaps in the same value and adds up what it got back: the fill, and that value.
  T before = atomic_exchange_explicit(&cells[7], T(9), RELAXED);
  atomic_fetch_add_explicit(&cells[8], before, RELAXED);
  T expected = atomic_load_explicit(&cells[9], RELAXED);
  while (!atomic_compare_exchange_weak_explicit(
      &cells[9], &expected, T(expected + a), RELAXED, RELAXED)) {
  }
  atomic_store_explicit(&cells[10 + at.x], T(a + a), RELAXED);
}

[[kernel]] void atomic_floats(
    const device float* x, device atomic<float>* cells, uint3 at [[thread_position_in_grid]]) {
  float a = x[at.x];
  atomic_fetch_add_explicit(&cells[0], a, RELAXED);
  atomic_fetch_sub_explicit(&cells[1], a, RELAXED);
  float before = atomic_exchange_explicit(&cells[2], 9.0f, RELAXED);
  atomic_fetch_add_explicit(&cells[3], before, RELAXED);
  float expected = atomic_load_explicit(&cells[4], RELAXED);
  while (!atomic_compare_exchange_weak_explicit(
      &cells[4], &expected, max(expected, a), RELAXED, RELAXED)) {
  }
  atomic_store_explicit(&cells[5 + at.x], a + a, RELAXED);
}

// A histogram in threadgroup memory, then added to the whole one.
[[kernel]] void atomic_threadgroup(
    const device int* x, device atomic<int>* counts, uint3 at [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup atomic<int> local_counts[16];
  threadgroup atomic<uint> seen;
  if (t < 16) {
    atomic_store_explicit(&local_counts[t], 0, RELAXED);
  }
  if (t == 0) {
    atomic_store_explicit(&seen, 0u, RELAXED);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&local_counts[x[at.x] % 16], 1, RELAXED);
  atomic_fetch_max_explicit(&seen, uint(x[at.x]), RELAXED);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 16) {
    atomic_fetch_add_explicit(
        &counts[t], atomic_load_explicit(&local_counts[t], RELAXED), RELAXED);
  }
  if (t == 0) {
    atomic_fetch_max_explicit(&counts[16], int(atomic_load_explicit(&seen, RELAXED)), RELAXED);
  }
}

inline float neighbour(const threadgroup float* row, uint t, uint size) {
  return row[(t + 1) % size];
}

// Reversal through a two-dimensional tile, a scan with two barriers a step, a neighbour's value
// behind simdgroup_barrier, and 16-byte accesses.
[[kernel]] void barriers(
    const device float* x, device float* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]], uint t [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint width = 128;
  threadgroup float tile[4][32 + 1];
  threadgroup float line[width];
  threadgroup float4 wide[width / 4];
  uint i = at.x, n = size.x;
  tile[t / 32][t % 32] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ROW(0, tile[3 - t / 32][31 - t % 32]);

  line[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint step = 1; step < width; step *= 2) {
    float before = t >= step ? line[t - step] : 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    line[t] += before;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  ROW(1, line[t]);
  ROW(2, neighbour(line, t, width));

  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* own = line + simdgroup * 32;
  own[lane] = x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  ROW(3, own[lane ^ 1]);

  if (t < width / 4) {
    wide[t] = float4(x[i], 2.0f * x[i], 3.0f * x[i], 4.0f * x[i]);
  }
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  ROW(4, ((const threadgroup float*)wide)[t]);
}

template <typename T>
[[kernel]] void wide_loads(
    const device T* x, device T* out, uint3 at [[thread_position_in_grid]]) {
  uint i = at.x;
  *(device uint4*)(out + i * (16 / sizeof(T))) = *(const device uint4*)(x + i * (16 / sizeof(T)));
}

inline float polynomial(const constant float* c, float x) {
  return c[0] + x * (c[1] + x * c[2]);
}

constant float weights[4] = {0.5f, 0.25, 0.125, 2.0};

// Inputs of fewer than 8 elements, a scalar, template values, a constant table, literals.
template <typename T, int rows, bool negate>
[[kernel]] void constant_inputs(
    const constant float* coefficients, const constant int& shift, const device T* x,
    device float* out, uint3 at [[thread_position_in_grid]], uint3 size [[threads_per_grid]]) {
  uint i = at.x, n = size.x;
  float v = float(x[i]);
  ROW(0, polynomial(coefficients, v));
  ROW(1, v + shift);
  ROW(2, weights[i % 4] * v);
  ROW(3, negate ? -v * rows : v * rows);
  ROW(4, 0.1 * v + 1e-3);
}

// Reads a transposed view through the strides that MLX passes.
[[kernel]] void strides(
    const device float* x, constant const int* x_shape, constant const int64_t* x_strides,
    constant const int& x_ndim, device float* out, uint3 at [[thread_position_in_grid]]) {
  uint i = at.x;
  auto place = elem_to_loc(i, x_shape, x_strides, x_ndim);
  out[i] = x[place] + x_ndim;
}

// Every attribute, packed into one number a row.
[[kernel]] void attributes(
    const device int* x, device int* out, uint3 grid_at [[thread_position_in_grid]],
    uint3 group_at [[threadgroup_position_in_grid]], uint3 at [[thread_position_in_threadgroup]],
    uint t [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint quad [[quadgroup_index_in_threadgroup]],
    uint quad_lane [[thread_index_in_quadgroup]], uint3 threads [[threads_per_threadgroup]],
    uint3 groups [[threadgroups_per_grid]], uint3 size [[threads_per_grid]],
    uint simdgroups [[simdgroups_per_threadgroup]], uint width [[threads_per_simdgroup]]) {
  uint n = size.x * size.y * size.z;
  uint i = (grid_at.z * size.y + grid_at.y) * size.x + grid_at.x;
  ROW(0, grid_at.x + 100 * grid_at.y + 10000 * grid_at.z);
  ROW(1, group_at.x + 100 * group_at.y + 10000 * group_at.z);
  ROW(2, at.x + 100 * at.y + 10000 * at.z);
  ROW(3, t);
  ROW(4, simdgroup + 100 * lane);
  ROW(5, quad + 100 * quad_lane);
  ROW(6, threads.x + 100 * threads.y + 10000 * threads.z);
  ROW(7, groups.x + 100 * groups.y + 10000 * groups.z);
  ROW(8, size.x + 100 * size.y + 10000 * size.z);
  ROW(9, simdgroups + 100 * width + x[0]);
}

// A grid that is not whole threadgroups: threads beyond it must write nothing.
[[kernel]] void surplus(
    const device float* x, device float* out, uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  out[at.y * size.x + at.x] = x[at.y * size.x + at.x] + 1.0f;
}
