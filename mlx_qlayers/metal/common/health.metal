// A report from inside a kernel, for the debug mode of mlx_qlayers/runtime/health.py.
//
// A kernel calls health_check(condition, code, value); where a result may go wrong. Outside the debug
// mode the runtime removes these statements. In it, the kernel gets one more output, of 9 words that
// are zero at first, and calls the functions below:
//
//   0 threads started     1-3 threads per grid     4 threads finished
//   5 threads that failed, and of the first:     6 code     7 value     8 thread, x before y before z

#define health_check(condition, code, value)

METAL_FUNC void health_start(device atomic<uint>* health, uint3 grid) {
  atomic_fetch_add_explicit(&health[0], 1u, memory_order_relaxed);
  atomic_store_explicit(&health[1], grid.x, memory_order_relaxed);
  atomic_store_explicit(&health[2], grid.y, memory_order_relaxed);
  atomic_store_explicit(&health[3], grid.z, memory_order_relaxed);
}

METAL_FUNC void health_finish(device atomic<uint>* health) {
  atomic_fetch_add_explicit(&health[4], 1u, memory_order_relaxed);
}

METAL_FUNC void health_report(
    device atomic<uint>* health, uint3 position, uint3 grid, bool healthy, uint code, float value) {
  // Only the first thread that fails writes its code and value.
  if (healthy || atomic_fetch_add_explicit(&health[5], 1u, memory_order_relaxed) > 0) {
    return;
  }
  uint index = (position.z * grid.y + position.y) * grid.x + position.x;
  atomic_store_explicit(&health[6], code, memory_order_relaxed);
  atomic_store_explicit(&health[7], as_type<uint>(value), memory_order_relaxed);
  atomic_store_explicit(&health[8], index, memory_order_relaxed);
}
