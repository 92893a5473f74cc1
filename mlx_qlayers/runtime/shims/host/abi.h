// What a compiled kernel and the runtime share: the calling interface, in C that both dialects read.
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

// What an operation of a SIMD group is, for counting and for error messages.
enum qk_operation { QK_SIMD_SHUFFLE, QK_SIMD_REDUCE, QK_QUAD, QK_MATRIX };

// Apple's layout of 8 x 8 matrices: where a lane's first of two neighbouring elements is.
#define QK_MATRIX_ROW(lane) ((((lane) / 4) & 4) + ((lane) / 2) % 4)
#define QK_MATRIX_COLUMN(lane) ((((lane) / 4) & 2) * 2 + ((lane) % 2) * 2)

#ifdef __cplusplus
extern "C" {
#endif
qk_thread* qk_self(void);
qk_uint qk_simd_sync(qk_uint operation);  // returns the lanes that take part
void qk_inactive_lane(qk_uint lane);      // a lane read a value that nobody gave
void qk_threadgroup_barrier(qk_uint flags);
void qk_simdgroup_barrier(qk_uint flags);
void qk_matrix_product(qk_row* row);  // results = left * right, from (left, left, right, right)
float qk_half_operand(float x);       // of a checked launch: what a matrix product makes of a half
void* qk_threadgroup_memory(qk_uint slot, qk_uint bytes, qk_uint alignment);
#ifdef __cplusplus
}
#endif
