// The declarations of metal/common/load.metal on NVIDIA GPUs; the contract is written there.
#pragma once

#include "types.h"
#include "vector.h"

namespace mlx::core::cu {

enum caching { CACHED, READ_ONCE, READ_AHEAD };

#define MSL_LOAD(hints)                                                                \
  if constexpr (width == 4)                                                            \
    asm("ld.global.nc" hints ".v4.u32 {%0,%1,%2,%3}, [%4];"                            \
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));             \
  else if constexpr (width == 2)                                                       \
    asm("ld.global.nc" hints ".v2.u32 {%0,%1}, [%2];"                                  \
        : "=r"(to[0]), "=r"(to[1]) : "l"(from));                                       \
  else                                                                                 \
    asm("ld.global.nc" hints ".u32 %0, [%1];" : "=r"(to[0]) : "l"(from));

template <int count>
struct alignas(4 * count) words_of {
  uint word[count];
};

// The second level of the cache takes 256 bytes at a time; otherwise rows that are read in short
// pieces cost a visit of a memory page each.
template <int width, caching how>
void load_aligned(uint* to, const uint* from) {
  if constexpr (how == READ_ONCE && width > 1) {
    MSL_LOAD(".L1::no_allocate.L2::128B")
  } else if constexpr (how == READ_AHEAD) {
    MSL_LOAD(".L2::256B")
  } else {
    *reinterpret_cast<words_of<width>*>(to) = *reinterpret_cast<const words_of<width>*>(from);
  }
}
#undef MSL_LOAD

#define READINGS 2
template <typename T>
bool begins_odd(const T* array) {
  return reinterpret_cast<size_t>(array) % 16 != 0;
}

template <int count, caching how = CACHED>
void load_packs(uint* to, const uint* from, bool odd) {
  constexpr int width = count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
  if (odd) {
#pragma unroll
    for (int i = 0; i < count; i++)
      load_aligned<1, how>(to + i, from + i);
  } else {
#pragma unroll
    for (int i = 0; i < count; i += width)
      load_aligned<width, how>(to + i, from + i);
  }
}

template <int count, caching how = CACHED, typename T, typename I>
void load_words(uint* to, const T* array, I at) {
  const T* from = array + at;
  if (sizeof(T) >= 4 || !begins_odd(array))
    return load_packs<count, how>(to, reinterpret_cast<const uint*>(from), begins_odd(array));
  const ushort* halves = reinterpret_cast<const ushort*>(from);
#pragma unroll
  for (int i = 0; i < count; i++)
    to[i] = halves[2 * i] | uint(halves[2 * i + 1]) << 16;
}

template <typename T>
T load_ahead(const T* p) {
  if constexpr (sizeof(T) == 1) {
    return *p;
  } else if constexpr (sizeof(T) == 2) {
    ushort bits;
    asm("ld.global.nc.L2::256B.u16 %0, [%1];" : "=h"(bits) : "l"(p));
    return as_type<T>(bits);
  } else {
    uint bits;
    load_aligned<1, READ_AHEAD>(&bits, reinterpret_cast<const uint*>(p));
    return as_type<T>(bits);
  }
}

} // namespace mlx::core::cu
