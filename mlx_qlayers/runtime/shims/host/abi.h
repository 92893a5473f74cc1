// The calling interface between a compiled kernel and the runtime, in C that both dialects read.
#pragma once

typedef unsigned int qk_uint;

// A place where the lanes of one SIMD group leave values for each other.
typedef struct qk_row {
  unsigned char values[32 * 16] __attribute__((aligned(64)));
  unsigned char results[32 * 16] __attribute__((aligned(64)));
  qk_uint ready;  // 1 once a lane has computed the results
} qk_row;

// A SIMD group; `row` alternates between two, so that a fast lane cannot overwrite a slow one's.
typedef struct qk_simd {
  qk_row* row;
} qk_simd;

// One thread of the grid, as the kernel's entry sees it.
typedef struct qk_thread {
  qk_simd* simd;
  qk_uint lane;
  qk_uint index_in_threadgroup;
  qk_uint position_in_threadgroup[3];
  qk_uint threadgroup_position[3];
  qk_uint threads_per_threadgroup[3];           // of this threadgroup, smaller at the grid's edge
  qk_uint dispatch_threads_per_threadgroup[3];  // of a full one
  qk_uint threadgroups_per_grid[3];
  qk_uint threads_per_grid[3];
} qk_thread;

// The kind of a SIMD group operation, for counting and for error messages.
enum qk_operation { QK_SIMD_SHUFFLE, QK_SIMD_REDUCE, QK_QUAD, QK_MATRIX };

// Apple's layout of 8 x 8 matrices: where a lane's first of two neighbouring elements is.
#define QK_MATRIX_ROW(lane) ((((lane) / 4) & 4) + ((lane) / 2) % 4)
#define QK_MATRIX_COLUMN(lane) ((((lane) / 4) & 2) * 2 + ((lane) % 2) * 2)

// Tensors (metal_tensor, tensor.cpp). Element types, in the order of MLX's tensors and packed codes.
enum qk_element {
  QK_HALF, QK_BFLOAT, QK_FLOAT, QK_INT8, QK_UINT8, QK_INT32, QK_INT4, QK_UINT4
};
enum qk_role { QK_LEFT, QK_RIGHT, QK_DESTINATION, QK_ROW_VALUES, QK_COLUMN_VALUES };
// How the elements of a cooperative tensor are spread over lanes.
// In the last two slots outnumber the elements; in the last one no tensor is compatible with another.
enum qk_layout { QK_LAYOUT_M5, QK_LAYOUT_STRIPS, QK_LAYOUT_RANDOM, QK_LAYOUT_APART };

// Rows and columns that the lanes of `simds` SIMD groups hold between them.
typedef struct qk_tile {
  qk_uint role, rows, columns, simds;
} qk_tile;

// A cooperative tensor, as one lane holds it, or a tensor in memory.
typedef struct qk_tensor_operand {
  unsigned long address;  // of the lane's elements, or of the first in memory
  qk_uint element;
  qk_uint cooperative;
  qk_tile tile;       // of a cooperative one
  int columns, rows;  // of one in memory: extents, which are clipped where they are not `fixed`,
  int fixed;
  int columns_left, rows_left;  // what there is of the tensor that it was cut from,
  long stride;                  // and the elements from row to row
} qk_tensor_operand;

typedef struct qk_tensor_product {
  int m, n, k;  // k < 0: as many as there are
  int transpose_left, transpose_right, relaxed, accumulate;
  qk_uint simds;
} qk_tensor_product;

#ifdef __cplusplus
extern "C" {
#endif
qk_thread* qk_self(void);
qk_uint qk_simd_sync(qk_uint operation);  // returns the lanes that take part
void qk_inactive_lane(qk_uint lane);      // a lane read the value of an inactive lane
void qk_threadgroup_barrier(qk_uint flags);
void qk_simdgroup_barrier(qk_uint flags);
void qk_matrix_product(qk_row* row);  // results = left * right, from (left, left, right, right)
float qk_half_operand(float x);       // of a checked launch: what a matrix product makes of a half
qk_uint qk_tensor_capacity(const qk_tile* tile);
unsigned long qk_tensor_at(const qk_tile* tile, qk_uint i);  // column, row << 16, and 1 << 32 if valid
qk_uint qk_tensor_map(const qk_tile* from, qk_uint i, const qk_tile* to);
void qk_tensor_fresh(void* elements, qk_uint element, qk_uint count);
void qk_tensor_run(const qk_tensor_product*, const qk_tensor_operand* left, const qk_tensor_operand* right, const qk_tensor_operand* to);
void qk_tensor_convert(const qk_tensor_operand* from, const qk_tensor_operand* to);
void qk_tensor_reduce(const qk_tensor_operand* from, const qk_tensor_operand* to, qk_uint operation, float identity);
void qk_tensor_meet(qk_uint simds);
void qk_tensor_slot(const qk_tile* tile, qk_uint i);  // an element is read or written
qk_uint qk_tensor_compatible(void);
void qk_tensor_wrong(qk_uint what);  // 0: the first stride is not 1, 1: a slice or 2: an extent below 0
void qk_tensor_memory(const qk_tensor_operand* memory);  // a tile is read from it, or written
void* qk_threadgroup_memory(qk_uint slot, qk_uint bytes, qk_uint alignment);
#ifdef __cplusplus
}
#endif
