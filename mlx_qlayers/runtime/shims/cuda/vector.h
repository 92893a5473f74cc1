// vec<T, N> and its operators. C++ cannot spell v.xyz: the launcher writes v.get<0, 1, 2>() where
// it is read and v.set<0, 1, 2>() where it is assigned to.
#pragma once

#include "types.h"

namespace mlx::core::cu {

template <typename T, int N>
struct vec;

template <typename T>
constexpr int lanes_of = 1;
template <typename T, int N>
constexpr int lanes_of<vec<T, N>> = N;

template <typename T, typename U>
T* fill_components(T* at, U x) {
  if constexpr (lanes_of<U> == 1) {
    *at++ = static_cast<T>(x);
  } else {
#pragma unroll
    for (int i = 0; i < lanes_of<U>; i++)
      *at++ = static_cast<T>(x[i]);
  }
  return at;
}

// Two floats are rounded to a pair by one instruction.
inline void round_pair(half* at, float x, float y) {
  __half2 pair = __floats2half2_rn(x, y);
  memcpy(at, &pair, sizeof(pair));
}
inline void round_pair(bfloat* at, float x, float y) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  memcpy(at, &pair, sizeof(pair));
}
template <typename N, int n, when<n % 2 == 0> = 0>
narrow<N>* fill_components(narrow<N>* at, vec<float, n> x) {
#pragma unroll
  for (int i = 0; i < n; i += 2)
    round_pair(at + i, x[i], x[i + 1]);
  return at + n;
}

// Some components of a vector, to be written to.
template <typename T, int... I>
struct components {
  T* first;
  using value = vec<T, sizeof...(I)>;

  operator value() const {
    return value(first[I]...);
  }
  components& operator=(value v) {
    int from = 0;
    ((first[I] = v[from++]), ...);
    return *this;
  }
};

// Constructors: a scalar for every component, a vector of another type, or a list of scalars and
// vectors that add up to N components.
#define MSL_VECTOR(N, size, ...)                                                 \
  template <typename T>                                                          \
  struct alignas(size * sizeof(T)) vec<T, N> {                                   \
    T __VA_ARGS__;                                                               \
    vec() = default;                                                             \
    template <typename U, when<is_scalar_v<U>> = 0>                              \
    vec(U s) {                                                                   \
      _Pragma("unroll") for (int i = 0; i < N; i++) (&x)[i] = static_cast<T>(s); \
    }                                                                            \
    template <typename U, when<!is_same_v<U, T>> = 0>                 \
    explicit vec(vec<U, N> v) {                                                  \
      fill_components(&x, v);                                                    \
    }                                                                            \
    template <typename A, typename B, typename... C>                             \
    vec(A a, B b, C... c) {                                                      \
      static_assert(                                                             \
          lanes_of<A> + lanes_of<B> + (0 + ... + lanes_of<C>) == N,              \
          "the components given do not add up");                                 \
      T* at = fill_components(fill_components(&x, a), b);                        \
      ((at = fill_components(at, c)), ...);                                      \
    }                                                                            \
    T& operator[](int i) {                                                       \
      return (&x)[i];                                                            \
    }                                                                            \
    const T& operator[](int i) const {                                           \
      return (&x)[i];                                                            \
    }                                                                            \
    template <int... I>                                                          \
    vec<T, sizeof...(I)> get() const {                                           \
      return {(&x)[I]...};                                                       \
    }                                                                            \
    template <int... I>                                                          \
    components<T, I...> set() {                                                  \
      return {&x};                                                               \
    }                                                                            \
  };
MSL_VECTOR(2, 2, x, y)
MSL_VECTOR(3, 4, x, y, z)
MSL_VECTOR(4, 4, x, y, z, w)
#undef MSL_VECTOR

// The same components without padding, aligned like one of them.
template <typename T, int N>
struct packed_vec {
  T components[N];
  packed_vec() = default;
  packed_vec(vec<T, N> v) {
    fill_components(components, v);
  }
  operator vec<T, N>() const {
    vec<T, N> v;
    fill_components(&v.x, *this);
    return v;
  }
  T& operator[](int i) {
    return components[i];
  }
  const T& operator[](int i) const {
    return components[i];
  }
};
template <typename T, int N>
constexpr int lanes_of<packed_vec<T, N>> = N;

#define MSL_NAMED_VECTORS(name, T)           \
  using name##2 = vec<T, 2>;                 \
  using name##3 = vec<T, 3>;                 \
  using name##4 = vec<T, 4>;                 \
  using packed_##name##2 = packed_vec<T, 2>; \
  using packed_##name##3 = packed_vec<T, 3>; \
  using packed_##name##4 = packed_vec<T, 4>;
MSL_NAMED_VECTORS(bool, bool)
MSL_NAMED_VECTORS(char, char)
MSL_NAMED_VECTORS(uchar, uchar)
MSL_NAMED_VECTORS(short, short)
MSL_NAMED_VECTORS(ushort, ushort)
MSL_NAMED_VECTORS(int, int)
MSL_NAMED_VECTORS(uint, uint)
MSL_NAMED_VECTORS(long, int64_t)
MSL_NAMED_VECTORS(ulong, ulong)
MSL_NAMED_VECTORS(half, half)
MSL_NAMED_VECTORS(bfloat, bfloat)
MSL_NAMED_VECTORS(float, float)
#undef MSL_NAMED_VECTORS

#define MSL_EACH(expression)           \
  _Pragma("unroll") for (int i = 0; i < N; i++) r[i] = expression; \
  return r;
#define MSL_VECTOR_OPERATOR(op, result)                                        \
  template <typename T, int N>                                                 \
  vec<result, N> operator op(vec<T, N> a, vec<T, N> b) {                       \
    vec<result, N> r;                                                          \
    MSL_EACH(a[i] op b[i])                                                     \
  }                                                                            \
  template <typename T, int N, typename U, when<is_scalar_v<U>> = 0>           \
  vec<result, N> operator op(vec<T, N> a, U b) {                               \
    return a op vec<T, N>(b);                                                  \
  }                                                                            \
  template <typename T, int N, typename U, when<is_scalar_v<U>> = 0>           \
  vec<result, N> operator op(U a, vec<T, N> b) {                               \
    return vec<T, N>(a) op b;                                                  \
  }
#define MSL_VECTOR_ARITHMETIC(op)                                              \
  MSL_VECTOR_OPERATOR(op, T)                                                   \
  template <typename T, int N, typename U>                                     \
  vec<T, N>& operator op##=(vec<T, N>& a, U b) {                               \
    return a = a op b;                                                         \
  }                                                                            \
  template <typename T, int... I, typename U>                                  \
  void operator op##=(components<T, I...> a, U b) {                            \
    a = vec<T, sizeof...(I)>(a) op b;                                          \
  }
MSL_VECTOR_ARITHMETIC(+)
MSL_VECTOR_ARITHMETIC(-)
MSL_VECTOR_ARITHMETIC(*)
MSL_VECTOR_ARITHMETIC(/)
MSL_VECTOR_ARITHMETIC(%)
MSL_VECTOR_ARITHMETIC(&)
MSL_VECTOR_ARITHMETIC(|)
MSL_VECTOR_ARITHMETIC(^)
MSL_VECTOR_ARITHMETIC(<<)
MSL_VECTOR_ARITHMETIC(>>)
MSL_VECTOR_OPERATOR(==, bool)
MSL_VECTOR_OPERATOR(!=, bool)
MSL_VECTOR_OPERATOR(<, bool)
MSL_VECTOR_OPERATOR(>, bool)
MSL_VECTOR_OPERATOR(<=, bool)
MSL_VECTOR_OPERATOR(>=, bool)
MSL_VECTOR_OPERATOR(&&, bool)
MSL_VECTOR_OPERATOR(||, bool)
#undef MSL_VECTOR_ARITHMETIC
#undef MSL_VECTOR_OPERATOR

// Pairs of half or bfloat have instructions of their own.
inline __half2 as_pair(half2 v) {
  return as_type<__half2>(v);
}
inline __nv_bfloat162 as_pair(bfloat2 v) {
  return as_type<__nv_bfloat162>(v);
}
#define MSL_PAIR_OPERATOR(op, function)                                                   \
  template <typename N>                                                                   \
  vec<narrow<N>, 2> operator op(vec<narrow<N>, 2> a, vec<narrow<N>, 2> b) {               \
    return as_type<vec<narrow<N>, 2>>(function(as_pair(a), as_pair(b)));                  \
  }
MSL_PAIR_OPERATOR(+, __hadd2_rn)
MSL_PAIR_OPERATOR(-, __hsub2_rn)
MSL_PAIR_OPERATOR(*, __hmul2_rn)
#undef MSL_PAIR_OPERATOR

template <typename T, int N>
vec<T, N> operator-(vec<T, N> a) {
  vec<T, N> r;
  MSL_EACH(-a[i])
}
template <typename T, int N>
vec<T, N> operator~(vec<T, N> a) {
  vec<T, N> r;
  MSL_EACH(~a[i])
}
template <typename T, int N>
vec<bool, N> operator!(vec<T, N> a) {
  vec<bool, N> r;
  MSL_EACH(!a[i])
}

} // namespace mlx::core::cu
