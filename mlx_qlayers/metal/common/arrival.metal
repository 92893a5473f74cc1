// Counts the threadgroups of one launch without waiting: the last to arrive sees what all others wrote.
//
// On NVIDIA GPUs these come from the CUDA shim. Before Metal 3.2 a threadgroup has no way to see what
// another one wrote, so that kernels there use none of it; the CPU's threads see it anyway.

#include <metal_stdlib>
using namespace metal;

// The number of threadgroups that arrived before this one. One thread calls it after a barrier; threadgroups
// that arrive later see everything that its threadgroup wrote before the barrier.
METAL_FUNC int arrive(device int* semaphore) {
  return atomic_fetch_add_explicit(
      reinterpret_cast<device atomic_int*>(semaphore), 1, memory_order_relaxed);
}
