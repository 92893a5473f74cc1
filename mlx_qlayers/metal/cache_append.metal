// The buffers of a cache with new keys and values in them, as whole copies: MLX copies a buffer too
// when it is still being read, and takes four launches.
//
// Both are (B * Hkv, S, D) and (B * Hkv, S, Dv), rows of whole 16 bytes. One thread copies 16 bytes
// of a row of either; rows `length` to `length + L` come from the new ones. Grid (16 bytes in a row
// of both, S or more, B * Hkv), any threadgroup, no threadgroup memory.

#include <metal_stdlib>
using namespace metal;

// sizes: S, L, and 16 bytes in a row of each buffer.
template <typename T>
[[kernel]] void cache_append(
    const device T* k_buffer,
    const device T* v_buffer,
    const device T* k,
    const device T* v,
    constant int& length,
    const constant int* sizes,
    device T* k_out,
    device T* v_out,
    uint3 at [[thread_position_in_grid]]) {
  int row = at.y, fresh = row - length;
  if (row >= sizes[0] || int(at.x) >= sizes[2] + sizes[3]) {
    return;
  }
  bool is_key = int(at.x) < sizes[2];
  int word = is_key ? at.x : at.x - sizes[2], words = is_key ? sizes[2] : sizes[3];
  bool is_new = fresh >= 0 && fresh < sizes[1];
  const device T* from = is_key ? (is_new ? k : k_buffer) : (is_new ? v : v_buffer);
  int64_t first = int64_t(at.z) * (is_new ? sizes[1] : sizes[0]) + (is_new ? fresh : row);
  int64_t place = (int64_t(at.z) * sizes[0] + row) * words + word;
  reinterpret_cast<device uint4*>(is_key ? k_out : v_out)[place] =
      reinterpret_cast<const device uint4*>(from)[first * words + word];
}
