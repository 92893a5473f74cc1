// Counts the threadgroups of one launch without waiting: the last to arrive sees the writes of all others.
//
// On NVIDIA GPUs this comes from the CUDA shim. Before Metal 3.2 a threadgroup cannot see the writes of
// another one, so that no kernel uses it there; threads of a CPU see them anyway.

#include <metal_stdlib>
using namespace metal;

// The number of threadgroups that arrived before this one. One thread calls it after a barrier; threadgroups
// that arrive later see everything that its threadgroup wrote before the barrier.
METAL_FUNC int arrive(device int* semaphore) {
  return atomic_fetch_add_explicit(
      reinterpret_cast<device atomic_int*>(semaphore), 1, memory_order_relaxed);
}
