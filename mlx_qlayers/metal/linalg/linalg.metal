// Factorisations and triangular solves in float32, of batches of matrices.
//
// All are blocked by 32: a thread owns one column of a block row, x[32], and subtracts products with tiles
// of 32 x 32 in threadgroup memory. Inputs are read by their strides, (batch, row, column), so that
// transposed, reversed or sliced ones are not copied. Matrices are padded with the identity to whole blocks.
//
// cholesky_block     R of W = R^T R, from the upper triangle of W (batch, n, n): one threadgroup for a
//                    matrix, one thread for a column, n at most THREADS. info: its previous value or,
//                    if that is 0, the order of the first leading minor that is not positive, plus
//                    `first`; from there on R is NaN. Grid (THREADS * batch, 1, 1), 9 KiB.
// solve_lower        X of L X = B, from the lower triangle of L (batch, n, n), B (batch, n, m).
//                    Grid (batch * m in whole THREADS, 1, 1), 5 KiB.
// subtract_product   B - A X, A (batch, n, k), X (batch, k, m); with UPPER only the blocks that reach
//                    above the diagonal, else 0. ACROSS threads with EACH columns compute 32 rows, a
//                    threadgroup 32 * THREADS / ACROSS. With split-K each group along z takes a part of
//                    k, and the first adds B; the result is the sum of y (groups, batch, n, m).
//                    Grid (batch * m in whole blocks, n in whole blocks, parts),
//                    5 KiB * THREADS / ACROSS.

#include <metal_stdlib>
using namespace metal;

// Rows of tiles begin at multiples of 16 bytes and in different banks. The padding of a row holds its pivot
// and the inverse of the pivot.
constant int TILE_STRIDE = 36;

// x[k] -= row[k] * factor; rows begin at multiples of 16 bytes.
METAL_FUNC void subtract_row(thread float* x, const threadgroup float* row, float factor) {
  const threadgroup float4* fours = reinterpret_cast<const threadgroup float4*>(row);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    float4 four = fours[k];
    x[4 * k] -= four.x * factor;
    x[4 * k + 1] -= four.y * factor;
    x[4 * k + 2] -= four.z * factor;
    x[4 * k + 3] -= four.w * factor;
  }
}

// Loads y[p] of 32 rows, all before one is used.
METAL_FUNC void load_column(thread float* y, const device float* from, int64_t stride, bool inside) {
#pragma unroll
  for (int p = 0; p < 32; p++) {
    y[p] = inside ? *from : 0.0f;
    from += stride;
  }
}

// x[k] -= tile[p][k] * y[p] for 32 p.
METAL_FUNC void subtract_tile(
    thread float* x, const threadgroup float* tile, thread const float* y) {
#pragma unroll
  for (int p = 0; p < 32; p++) {
    subtract_row(x, tile + p * TILE_STRIDE, y[p]);
  }
}

// Loads a thread's part of 32 x 32 elements a[k][p]: 0 beyond the columns, and where k - p is less than `least`;
// elements below the last row are not used. All are loaded before write_tile stores the first.
template <int THREADS, typename P>
METAL_FUNC void read_tile(
    thread float* own,
    P a,
    int64_t row_stride,
    int64_t column_stride,
    int rows,
    int columns,
    int least,
    uint thread_index) {
  bool along_rows = column_stride == 1;  // neighbouring threads load neighbours
  int near = thread_index % 32, far = thread_index / 32;
  int near_end = along_rows ? columns : rows, far_end = along_rows ? rows : columns;
  int64_t far_stride = along_rows ? row_stride : column_stride;
  // Loads are unconditional: beyond the last element they repeat it.
  a += min(near, near_end - 1) * (along_rows ? column_stride : row_stride);
#pragma unroll
  for (int u = 0; u < 1024 / THREADS; u++) {
    float value = a[min(far, far_end - 1) * far_stride];
    int k = along_rows ? far : near, p = along_rows ? near : far;
    own[u] = p < columns && k - p >= least ? value : 0.0f;
    far += THREADS / 32;
  }
}

// tile[p][k] = a[k][p], or tile[p][k - p] if skewed, from the parts that read_tile loaded.
template <int THREADS>
METAL_FUNC void write_tile(
    threadgroup float* tile,
    thread const float* own,
    int64_t column_stride,
    bool skewed,
    uint thread_index) {
  bool along_rows = column_stride == 1;
#pragma unroll
  for (int u = 0; u < 1024 / THREADS; u++) {
    int near = thread_index % 32, far = thread_index / 32 + u * (THREADS / 32);
    int k = along_rows ? far : near, p = along_rows ? near : far;
    tile[p * TILE_STRIDE + (skewed ? (k - p) & 31 : k)] = own[u];
  }
}

// x / pivot from an approximate inverse, rounded once.
METAL_FUNC float quotient(float x, float pivot, float inverse) {
  float found = x * inverse;
  return fma(fma(-found, pivot, x), inverse, found);
}

// The same where it may overflow; an inverse of 0 stands for one that cannot be used.
METAL_FUNC float divided(float x, float pivot, float inverse) {
  float found = quotient(x, pivot, inverse);
  return inverse != 0 && abs(found) < INFINITY ? found : x / pivot;
}

// One row of x = L^-1 x: subtracts x[0], which is done, times a row of a skewed tile; the others move up,
// so that the loop over rows need not be unrolled and fits into the instruction cache.
METAL_FUNC void move_up(thread float* x, const threadgroup float* row) {
  const threadgroup float4* fours = reinterpret_cast<const threadgroup float4*>(row);
  float done = x[0];
#pragma unroll
  for (int k = 0; k < 8; k++) {
    float4 four = fours[k];
    if (k > 0) {
      x[4 * k - 1] = x[4 * k] - four.x * done;
    }
    x[4 * k] = x[4 * k + 1] - four.y * done;
    x[4 * k + 1] = x[4 * k + 2] - four.z * done;
    x[4 * k + 2] = x[4 * k + 3] - four.w * done;
  }
}

// Stores the first `rows` of x = L^-1 x to rows of `out`, for L in a skewed tile with pivots.
METAL_FUNC void solve_tile(
    thread float* x,
    const threadgroup float* tile,
    int rows,
    device float* out,
    int64_t stride,
    bool inside) {
#pragma unroll 1
  for (int i = 0; i < rows; i++) {
    float2 pivot = *reinterpret_cast<const threadgroup float2*>(tile + 32);
    x[0] = divided(x[0], pivot.x, pivot.y);
    if (inside) {
      *out = x[0];
    }
    move_up(x, tile);
    out += stride;
    tile += TILE_STRIDE;
  }
}

template <int THREADS>
[[kernel]] void cholesky_block(
    const device float* w,
    const constant int* w_shape,
    const constant int64_t* w_strides,
    const device int* before,
    constant int& first,
    device float* r,
    device int* info,
    uint batch [[threadgroup_position_in_grid]],
    uint column [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 tile_memory[8 * TILE_STRIDE], diagonal_memory[8 * TILE_STRIDE];
  threadgroup int minor;
  threadgroup float* tile = reinterpret_cast<threadgroup float*>(tile_memory);
  threadgroup float* diagonal = reinterpret_cast<threadgroup float*>(diagonal_memory);
  int n = w_shape[1], c = column;
  device float* out = r + size_t(batch) * n * n;
  if (column == 0) {
    minor = 0;
  }
  for (int j = 0; j < n; j += 32) {
    float x[32];
    int rows = min(32, n - j);
    int64_t from = batch * w_strides[0] + min(c, n - 1) * w_strides[2];
#pragma unroll
    for (int k = 0; k < 32; k++) {
      float value = w[from + (j + min(k, rows - 1)) * w_strides[1]];
      x[k] = k < rows && c < n && j + k <= c ? value : float(j + k == c);
    }
    for (int p = 0; p < j; p += 32) {
      float above[32], own[1024 / THREADS];
      load_column(above, out + size_t(p) * n + c, n, c >= j && c < n);
      threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
      read_tile<THREADS>(own, out + size_t(p) * n + j, 1, n, rows, 32, -32, column);
      write_tile<THREADS>(tile, own, n, false, column);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (c >= j && c < n) {
        subtract_tile(x, tile, above);
      }
    }
    device float* to = out + (size_t(j) * n + c);
    if (int(simd) == j / 32) {
      threadgroup float* row = diagonal;
      device float* r_row = to;
      float pivot = simd_shuffle(x[0], ushort(0));
      int failed = 0;
#pragma unroll 1
      for (int i = 0; i < rows; i++) {
        failed = pivot <= 0 ? i + 1 : failed;  // all later pivots are NaN
        float inverse = pivot > 0 ? precise::rsqrt(pivot) : NAN, root = pivot * inverse;
        root = fma(0.5f * inverse, fma(-root, root, pivot), root);
        x[0] = int(lane) == i ? root : quotient(x[0], root, inverse);
        float right = int(lane) > i ? x[0] : 0.0f;
        row[(int(lane) - i) & 31] = right;
        if (int(lane) == i) {
          *reinterpret_cast<threadgroup float2*>(row + 32) = float2(root, inverse);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (c < n) {
          *r_row = int(lane) == i ? root : right;
        }
        move_up(x, row);
        pivot = simd_shuffle(x[0], ushort((i + 1) & 31));
        row += TILE_STRIDE;
        r_row += n;
      }
      if (failed > 0 && lane == 0) {
        minor = first + j + failed;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (c >= j + 32) {
      solve_tile(x, diagonal, rows, to, n, c < n);
    }
    for (int i = 0; c < j && i < rows; i++) {
      to[size_t(i) * n] = 0.0f;
    }
  }
  if (column == 0) {
    info[batch] = before[batch] > 0 ? before[batch] : minor;
  }
}

template <int THREADS>
[[kernel]] void solve_lower(
    const device float* l,
    const constant int* l_shape,
    const constant int64_t* l_strides,
    const device float* b,
    const constant int* b_shape,
    const constant int64_t* b_strides,
    device float* x,
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 tile_memory[8 * TILE_STRIDE];
  threadgroup float* tile = reinterpret_cast<threadgroup float*>(tile_memory);
  int n = l_shape[1], m = b_shape[2], groups = (m + THREADS - 1) / THREADS;
  int batch = group / groups, c = group % groups * THREADS + thread_index;
  int64_t row = l_strides[1], col = l_strides[2], left = batch * l_strides[0];
  device float* out = x + size_t(batch) * n * m + c;
  float part[1024 / THREADS];  // of the next tile, which is loaded while this one is multiplied
  read_tile<THREADS>(part, l + left, row, col, min(32, n), n, 0, thread_index);
  for (int j = 0; j < n; j += 32) {
    float own[32];
    int rows = min(32, n - j);
    int64_t from = batch * b_strides[0] + min(c, m - 1) * b_strides[2];
#pragma unroll
    for (int k = 0; k < 32; k++) {
      own[k] = b[from + (j + min(k, rows - 1)) * b_strides[1]];
    }
    for (int p = 0; p <= j; p += 32) {
      float above[32];
      load_column(above, out + size_t(p) * m, m, p < j && c < m);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      write_tile<THREADS>(tile, part, col, p == j, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      int next_j = p < j ? j : j + 32, next_p = p < j ? p + 32 : 0;
      if (next_j < n) {
        int least = next_p == next_j ? 0 : -32;
        read_tile<THREADS>(
            part, l + (left + next_j * row + next_p * col), row, col, min(32, n - next_j),
            n - next_p, least, thread_index);
      }
      if (p < j && c < m) {
        subtract_tile(own, tile, above);
      }
    }
    if (thread_index < 32) {
      float pivot = int(thread_index) < rows ? tile[thread_index * TILE_STRIDE] : 1.0f;
      // Denormal inverses may be flushed to 0, and those of denormal numbers are infinite.
      bool usable = abs(pivot) > 0x1p-60f && abs(pivot) < 0x1p60f;
      *reinterpret_cast<threadgroup float2*>(tile + thread_index * TILE_STRIDE + 32) =
          float2(pivot, usable ? 1.0f / pivot : 0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    solve_tile(own, tile, rows, out + size_t(j) * m, m, c < m);
  }
}

template <int THREADS, int ACROSS, int EACH, bool UPPER>
[[kernel]] void subtract_product(
    const device float* b,
    const constant int64_t* b_strides,
    const device float* a,
    const constant int* a_shape,
    const constant int64_t* a_strides,
    const device float* x,
    const constant int* x_shape,
    const constant int64_t* x_strides,
    device float* y,
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr int DOWN = THREADS / ACROSS, AHEAD = 4;
  threadgroup float4 tile_memory[DOWN * 8 * TILE_STRIDE];
  int lane = thread_index % ACROSS, down = thread_index / ACROSS;
  threadgroup float* tile =
      reinterpret_cast<threadgroup float*>(tile_memory) + down * 32 * TILE_STRIDE;
  int n = a_shape[1], depth = a_shape[2], m = x_shape[2];
  int blocks = (m + EACH * ACROSS - 1) / (EACH * ACROSS), batch = group.x / blocks;
  int first = group.x % blocks * EACH * ACROSS, top = group.y * 32 * DOWN;
  int i = top + 32 * down, rows = min(32, n - i);
  int part = (depth + 32 * groups.z - 1) / (32 * groups.z) * 32;
  int end = min(depth, int(group.z + 1) * part);
  bool wanted = !UPPER || first + EACH * ACROSS > top;
  float sums[EACH][32];
  int start = group.z * part;
  // The columns of a thread, clamped to the last one: there may be more threads than columns.
  int64_t right[EACH];
#pragma unroll
  for (int u = 0; u < EACH; u++) {
    int c = min(first + u * ACROSS + lane, m - 1);
    right[u] = batch * x_strides[0] + c * x_strides[2] + min(start, depth - 1) * x_strides[1];
    int64_t from = batch * b_strides[0] + min(i, n - 1) * b_strides[1] + c * b_strides[2];
#pragma unroll
    for (int k = 0; k < 32; k++) {
      sums[u][k] = wanted && group.z == 0 ? b[from] : 0.0f;
      from += k + 1 < rows ? b_strides[1] : 0;
    }
  }
  int64_t left = batch * a_strides[0] + min(i, n - 1) * a_strides[1];
  // AHEAD rows of x are loaded before they are used.
  float factors[AHEAD][EACH];
#pragma unroll
  for (int h = 0; h < AHEAD; h++) {
#pragma unroll
    for (int u = 0; u < EACH; u++) {
      float value = x[right[u]];
      factors[h][u] = start + h < end ? value : 0.0f;
      right[u] += start + h + 1 < end ? x_strides[1] : 0;
    }
  }
  for (int p = start; wanted && p < end; p += 32) {
    int count = min(32, end - p);
    float own[1024 / ACROSS];
    read_tile<ACROSS>(
        own, a + (left + p * a_strides[2]), a_strides[1], a_strides[2], max(rows, 1), count, -32, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    write_tile<ACROSS>(tile, own, a_strides[2], false, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int q = 0; q < count; q += AHEAD) {
      float next[AHEAD][EACH];
#pragma unroll
      for (int h = 0; h < AHEAD; h++) {
        int row = p + q + AHEAD + h;
#pragma unroll
        for (int u = 0; u < EACH; u++) {
          float value = x[right[u]];
          next[h][u] = row < end ? value : 0.0f;
          right[u] += row + 1 < end ? x_strides[1] : 0;
        }
      }
#pragma unroll
      for (int h = 0; h < AHEAD; h++) {
#pragma unroll
        for (int u = 0; u < EACH; u++) {
          subtract_row(sums[u], tile + (q + h) * TILE_STRIDE, factors[h][u]);
          factors[h][u] = next[h][u];
        }
      }
    }
  }
  size_t to = (size_t(group.z) * (groups.x / blocks) + batch) * n;
#pragma unroll
  for (int u = 0; u < EACH; u++) {
    int c = first + u * ACROSS + lane;
#pragma unroll
    for (int k = 0; k < 32; k++) {
      if (k < rows && c < m) {
        y[(to + i + k) * m + c] = sums[u][k];
      }
    }
  }
}
