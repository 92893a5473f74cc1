// Threadgroups of one launch that wait for nobody: the last to arrive finds what all others wrote.
//
// On NVIDIA GPUs these come from the CUDA shim. Before Metal 3.2 a threadgroup has no way to see what
// another one wrote, so that kernels there use none of it; the CPU's threads see it anyway.

#include <metal_stdlib>
using namespace metal;

// How many threadgroups arrived before this one. One thread calls it behind a barrier; what the
// others of its threadgroup wrote ahead of that is seen by whoever arrives later.
METAL_FUNC int arrive(device int* ticket) {
  return atomic_fetch_add_explicit(
      reinterpret_cast<device atomic_int*>(ticket), 1, memory_order_relaxed);
}
