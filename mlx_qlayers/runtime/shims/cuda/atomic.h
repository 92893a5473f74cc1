// Atomic types and functions, relaxed. A kernel declared with atomic outputs gets them as
// atomic<T>*; threadgroup memory may hold them too.
#pragma once

#include "types.h"

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
using same = typename cuda::std::common_type<T>::type;

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
  T before;
  if constexpr (cuda::std::is_same_v<T, float>)
    before = __uint_as_float(atomicCAS(
        reinterpret_cast<uint*>(object), __float_as_uint(*expected), __float_as_uint(desired)));
  else
    before = atomicCAS(atomic_cell(object), *expected, desired);
  bool exchanged = memcmp(&before, expected, sizeof(T)) == 0;
  *expected = before;
  return exchanged;
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
inline void atomic_max_explicit(atomic<ulong>* object, ulong value, memory_order) {
  atomicMax(atomic_cell(object), static_cast<unsigned long long>(value));
}
inline void atomic_min_explicit(atomic<ulong>* object, ulong value, memory_order) {
  atomicMin(atomic_cell(object), static_cast<unsigned long long>(value));
}

} // namespace mlx::core::cu
