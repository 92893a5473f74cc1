// How a kernel's parameters are filled: its entry point is generated from these by translate.py.
#pragma once
#include <metal_stdlib>

template <typename F>
struct qk_parameters;
template <typename R, typename... P>
struct qk_parameters<R(P...)> {
  template <int I>
  using at = __type_pack_element<I, P...>;
};

// A buffer: a pointer as it is, a reference to what lies there.
template <typename P>
METAL_FUNC P qk_buffer(ulong address) {
  if constexpr (__is_reference(P)) {
    return *(__remove_reference_t(P)*)address;
  } else {
    return (P)address;
  }
}
// A position or size in the width that the kernel asks for.
template <typename P>
METAL_FUNC P qk_position(const thread uint* v) {
  if constexpr (metal::qk_shape<P>::lanes == 1) {
    return (P)v[0];
  } else if constexpr (metal::qk_shape<P>::lanes == 2) {
    return P{(typename metal::qk_shape<P>::element)v[0], (typename metal::qk_shape<P>::element)v[1]};
  } else {
    return P{(typename metal::qk_shape<P>::element)v[0], (typename metal::qk_shape<P>::element)v[1],
             (typename metal::qk_shape<P>::element)v[2]};
  }
}
template <typename P>
METAL_FUNC P qk_scalar(uint v) {
  return (P)v;
}
METAL_FUNC uint qk_product(const thread uint* v) { return v[0] * v[1] * v[2]; }

// The storage of one threadgroup variable, named by its place among the kernel's declarations.
template <typename T>
METAL_FUNC threadgroup T& qk_shared(uint slot) {
  return *(threadgroup T*)(ulong)qk_threadgroup_memory(slot, sizeof(T), alignof(T));
}
