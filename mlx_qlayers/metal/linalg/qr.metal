// QR of panels of at most 32 columns by Householder reflections, in float32.
//
// qr_panel     H and tau of A (batch, m, b), read by its strides, as in LAPACK's geqrf: R in the upper
//              triangle of H, below it the reflections v without their leading 1, and tau of
//              I - tau v v^T. V (batch, m, min(m, b)) has the whole reflections, whose product is
//              I + V S^-1 V^T with the upper triangle S. One threadgroup computes a matrix: a lane
//              owns a column, a SIMD group every SIMDS-th row.
//              Grid (32 * SIMDS * batch, 1, 1), 128 * (SIMDS + 1) bytes.
//
// A pass over the rows applies reflection j and computes the products of column j + 1 with all others, which
// reflection j + 1 needs: each element is read and written once for each column. The products with earlier
// reflections are S without its diagonal, -1 / tau.

#include <metal_stdlib>
using namespace metal;

// Rows that a SIMD group loads before it stores one.
constant int AHEAD = 8;

// A row below the pivot after reflection j; `leading` is its element of the next column.
METAL_FUNC float reflected(
    float x, int column, int j, float scale, float weight, thread float& leading) {
  float below_pivot = simd_shuffle(x, ushort(j)) * scale;
  x = column == j ? below_pivot : x - below_pivot * weight;
  leading = simd_shuffle(x, ushort((j + 1) % 32));
  return x;
}

// FULL: b is 32.
template <int SIMDS, bool FULL>
[[kernel]] void qr_panel(
    const device float* a,
    const constant int* a_shape,
    const constant int64_t* a_strides,
    device float* h,
    device float* tau,
    device float* v,
    device float* s,
    uint batch [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[32 * SIMDS], pivot_row[32];
  int m = a_shape[1], b = FULL ? 32 : a_shape[2], steps = min(m, b), column = lane;
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
    bool inside = FULL || column < b;
    float leading;
    if (int(simd) == j % SIMDS && inside) {
      out[j * b + column] = column == j ? beta : out[j * b + column] - weight;
    }
    if (int(simd) == (j + 1) % SIMDS && j + 1 < m) {
      float x = inside ? out[(j + 1) * b + column] : 0.0f;
      x = reflected(x, column, j, scale, weight, leading);
      pivot_row[lane] = x;
      if (inside) {
        out[(j + 1) * b + column] = x;
      }
    }
    // The first row from j + 2 on that belongs to this SIMD group.
    int i = int(simd) + (j + 2 - int(simd) + SIMDS - 1) / SIMDS * SIMDS;
    i = j + 2 > int(simd) ? i : int(simd);
    for (; i + (AHEAD - 1) * SIMDS < m; i += AHEAD * SIMDS) {
      device float* from = out + i * b + column;
      float own[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        own[k] = inside ? from[k * SIMDS * b] : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        float x = reflected(own[k], column, j, scale, weight, leading);
        sum += leading * x;
        if (inside) {
          from[k * SIMDS * b] = x;
        }
      }
    }
    for (; i < m; i += SIMDS) {
      float x = inside ? out[i * b + column] : 0.0f;
      x = reflected(x, column, j, scale, weight, leading);
      sum += leading * x;
      if (inside) {
        out[i * b + column] = x;
      }
    }
    if (simd == 0 && column < steps) {
      float product = column < j ? row + scale * products : 0.0f;
      s[(size_t(batch) * steps + column) * steps + j] = -(column == j ? 1.0f / t : product);
      if (column == j) {
        tau[batch * steps + j] = t;
      }
    }
  }
  for (int i = simd; i < m && column < steps; i += SIMDS) {
    float below = i > column ? out[size_t(i) * b + column] : float(i == column);
    v[(size_t(batch) * m + i) * steps + column] = below;
  }
}
