// Hints for GPUs that take them: on NVIDIA GPUs this comes from the CUDA shim.

#include <metal_stdlib>
using namespace metal;

// What is at p will be loaded much later: meanwhile it may come into the cache.
template <typename T>
METAL_FUNC void will_load(const device T* p) {}
