// The functions of metal/common/arrival.metal on NVIDIA GPUs; the contract is written there.
#pragma once

#include "types.h"

namespace mlx::core::cu {

inline int arrive(int* semaphore) {
  __threadfence();
  int before = atomicAdd(semaphore, 1);
  __threadfence();
  return before;
}

} // namespace mlx::core::cu
