// Vector loads from an array that may begin at any element of its buffer, as a view does.
//
// Only the offset from the array's first element is known: a multiple of the load's size, or of 16 bytes.
// The alignment is the same for all lanes and loads, so the width of the loads is decided once, before
// the loop. On NVIDIA GPUs, which load 16 bytes only from multiples of 16, the functions of this file come
// from the CUDA shim; Metal's packed vectors need no more than the alignment of their elements.

#include <metal_stdlib>
using namespace metal;

// Cache hints, for GPUs that have them: words that are read once need not stay in a cache, and in rows that
// are soon read to their end the following words are prefetched.
enum caching { CACHED, READ_ONCE, READ_AHEAD };

// 32 bits of elements of 8 or 16 bits.
template <typename T>
METAL_FUNC uint joined_word(const device T* from) {
  const int each = 4 / sizeof(T);
  alignas(4) T elements[each];
#pragma unroll
  for (int i = 0; i < each; i++) {
    elements[i] = from[i];
  }
  return *reinterpret_cast<thread uint*>(elements);
}

// Whether an array begins where vectors cannot be loaded. On GPUs where arrays of words can do so,
// READINGS is 2: hot loops are compiled twice, for aligned and other arrays.
#define READINGS 1
template <typename T>
METAL_FUNC bool begins_odd(const device T* array) {
  return sizeof(T) < 4 && reinterpret_cast<ulong>(array) % 4 != 0;
}

// Loads `count` words of an array of words; `to` begins at a multiple of 16 bytes.
template <int count, caching how = CACHED>
METAL_FUNC void load_packs(thread uint* to, const device uint* from, bool odd) {
  const int width = count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < count; i += width) {
    if (width == 4) {
      *reinterpret_cast<thread uint4*>(to + i) =
          uint4(*reinterpret_cast<const device packed_uint4*>(from + i));
    } else if (width == 2) {
      *reinterpret_cast<thread uint2*>(to + i) =
          uint2(*reinterpret_cast<const device packed_uint2*>(from + i));
    } else {
      to[i] = from[i];
    }
  }
}

// The same from element `at` on of an array of any type.
template <int count, caching how = CACHED, typename T, typename I>
METAL_FUNC void load_words(thread uint* to, const device T* array, I at) {
  const device T* from = array + at;
  if (sizeof(T) >= 4 || !begins_odd(array)) {
    load_packs<count, how>(to, reinterpret_cast<const device uint*>(from), begins_odd(array));
    return;
  }
#pragma unroll
  for (int i = 0; i < count; i++) {
    to[i] = joined_word(from + i * int(4 / sizeof(T)));
  }
}

template <typename T>
T load_ahead(const device T* p) {
  return *p;
}
