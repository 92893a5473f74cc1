// QR of panels of at most 32 columns by Householder reflections, in float32.
//
// qr_panel     H and tau of A (batch, m, b), read by its strides, as LAPACK's geqrf has them: R in
//              the upper triangle of H, below it the reflections v but for their leading 1, and
//              tau of I - tau v v^T. One threadgroup a matrix: a lane owns a column, a SIMD group
//              every SIMDS-th row. Grid (32 * SIMDS * batch, 1, 1), 128 * (SIMDS + 1) bytes.
//
// A pass over the rows applies reflection j and adds up what reflection j + 1 needs, the products of
// column j + 1 with all others: each element is read and written once for each column.

#include <metal_stdlib>
using namespace metal;

template <int SIMDS>
[[kernel]] void qr_panel(
    const device float* a,
    const constant int* a_shape,
    const constant int64_t* a_strides,
    device float* h,
    device float* tau,
    uint batch [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[32 * SIMDS], pivot_row[32];
  int m = a_shape[1], b = a_shape[2], steps = min(m, b), column = lane;
  device float* out = h + size_t(batch) * m * b;
  float sum = 0;
  for (int i = simd; i < m; i += SIMDS) {
    float x = column < b
        ? a[batch * a_strides[0] + i * a_strides[1] + column * a_strides[2]]
        : 0.0f;
    float leading = simd_shuffle(x, ushort(0));
    if (i == 0) {
      pivot_row[lane] = x;
    } else {
      sum += leading * x;
    }
    if (column < b) {
      out[size_t(i) * b + column] = x;
    }
  }
  for (int j = 0; j < steps; j++) {
    parts[simd * 32 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float row = pivot_row[lane], products = 0;
    for (int s = 0; s < SIMDS; s++) {
      products += parts[s * 32 + lane];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float alpha = simd_shuffle(row, ushort(j)), below = simd_shuffle(products, ushort(j));
    float beta = alpha, t = 0, scale = 0;
    if (below != 0) {
      float norm = precise::sqrt(alpha * alpha + below);
      beta = alpha > 0 ? -norm : norm;
      t = (beta - alpha) / beta;
      scale = 1.0f / (alpha - beta);
    }
    float weight = column > j ? t * (row + scale * products) : 0.0f;
    sum = 0;
    int first = j - int(simd);
    first = first <= 0 ? int(simd) : int(simd) + (first + SIMDS - 1) / SIMDS * SIMDS;
    for (int i = first; i < m; i += SIMDS) {
      float x = column < b ? out[size_t(i) * b + column] : 0.0f;
      float v = simd_shuffle(x, ushort(j)) * scale;
      if (i == j) {
        x = column == j ? beta : x - weight;
      } else {
        x = column == j ? v : x - v * weight;
      }
      float leading = simd_shuffle(x, ushort((j + 1) % 32));
      if (i == j + 1) {
        pivot_row[lane] = x;
      } else if (i > j + 1) {
        sum += leading * x;
      }
      if (column < b) {
        out[size_t(i) * b + column] = x;
      }
    }
    if (simd == 0 && lane == 0) {
      tau[batch * steps + j] = t;
    }
  }
}
