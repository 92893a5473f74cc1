// Atomic types and functions, relaxed. A kernel declared with atomic outputs gets them as
// atomic<T>*; threadgroup memory may hold them too.
#pragma once

#include "simd.h"

namespace mlx::core::cu {

enum memory_order { memory_order_relaxed };
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};

template <typename T>
struct atomic {
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
using atomic_ulong = atomic<ulong>;

// CUDA names unsigned 64-bit atomics by another type of the same size.
template <typename T>
auto* atomic_cell(atomic<T>* object) {
  if constexpr (sizeof(T) == 8)
    return reinterpret_cast<unsigned long long*>(&object->value);
  else
    return &object->value;
}
template <typename T>
atomic<T>* as_atomic(T* values) {
  return reinterpret_cast<atomic<T>*>(values);
}

template <typename T>
using same = type_identity_t<T>;

template <typename T>
T atomic_load_explicit(const atomic<T>* object, memory_order) {
  return *const_cast<const volatile T*>(&object->value);
}
template <typename T>
void atomic_store_explicit(atomic<T>* object, same<T> value, memory_order) {
  *const_cast<volatile T*>(&object->value) = value;
}
template <typename T>
T atomic_exchange_explicit(atomic<T>* object, same<T> value, memory_order) {
  return atomicExch(atomic_cell(object), value);
}
template <typename T>
bool atomic_compare_exchange_weak_explicit(
    atomic<T>* object, T* expected, same<T> desired, memory_order, memory_order) {
  // By bits, so that a NaN equals itself.
  using Bits = conditional_t<sizeof(T) == 8, unsigned long long, uint>;
  Bits wanted = as_type<Bits>(*expected);
  Bits before = atomicCAS(reinterpret_cast<Bits*>(object), wanted, as_type<Bits>(T(desired)));
  *expected = as_type<T>(before);
  return before == wanted;
}
#define MSL_ATOMIC(name, function)                                                  \
  template <typename T>                                                             \
  T atomic_fetch_##name##_explicit(atomic<T>* object, same<T> value, memory_order) { \
    return function(atomic_cell(object), value);                                    \
  }
MSL_ATOMIC(add, atomicAdd)
MSL_ATOMIC(min, atomicMin)
MSL_ATOMIC(max, atomicMax)
MSL_ATOMIC(and, atomicAnd)
MSL_ATOMIC(or, atomicOr)
MSL_ATOMIC(xor, atomicXor)
#undef MSL_ATOMIC
template <typename T>
T atomic_fetch_sub_explicit(atomic<T>* object, same<T> value, memory_order) {
  return atomicAdd(atomic_cell(object), -value);
}
inline void atomic_thread_fence(
    mem_flags, memory_order, thread_scope scope = thread_scope_device) {
  if (scope == thread_scope_device)
    __threadfence();
  else
    __threadfence_block();
}
inline void atomic_max_explicit(atomic<ulong>* object, ulong value, memory_order) {
  atomicMax(atomic_cell(object), static_cast<unsigned long long>(value));
}
inline void atomic_min_explicit(atomic<ulong>* object, ulong value, memory_order) {
  atomicMin(atomic_cell(object), static_cast<unsigned long long>(value));
}

} // namespace mlx::core::cu
