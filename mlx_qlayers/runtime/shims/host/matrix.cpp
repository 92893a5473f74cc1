// The product of two 8 x 8 matrices, computed by one lane for its whole SIMD group.
#include "abi.h"

typedef float Row __attribute__((vector_size(32), aligned(4)));

extern "C" void qk_matrix_product(qk_row* row) {
  const float* values = (const float*)row->values;
  alignas(32) float left[8][8], right[8][8];
  for (int lane = 0; lane < 32; lane++) {
    int r = QK_MATRIX_ROW(lane), c = QK_MATRIX_COLUMN(lane);
    left[r][c] = values[4 * lane], left[r][c + 1] = values[4 * lane + 1];
    right[r][c] = values[4 * lane + 2], right[r][c + 1] = values[4 * lane + 3];
  }
  for (int r = 0; r < 8; r++) {
    Row sum = {};
    for (int k = 0; k < 8; k++) sum += left[r][k] * *(const Row*)right[k];
    *(Row*)((float*)row->results + 8 * r) = sum;
  }
}
