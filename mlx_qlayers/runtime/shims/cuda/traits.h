// The parts of <type_traits> and <limits> that kernels and shims need: CUDA's own take a second to compile.
#pragma once

namespace mlx::core::cu {

template <typename T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  constexpr operator T() const {
    return v;
  }
};
template <bool v>
using bool_constant = integral_constant<bool, v>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool condition, typename T, typename F>
struct conditional {
  using type = T;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool condition, typename T, typename F>
using conditional_t = typename conditional<condition, T, F>::type;

template <bool condition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool condition, typename T = void>
using enable_if_t = typename enable_if<condition, T>::type;

#define MSL_REMOVES(name, from)  \
  template <typename T>          \
  struct name<from> {            \
    using type = T;              \
  };
#define MSL_REMOVE(name)                 \
  template <typename T>                  \
  struct name {                          \
    using type = T;                      \
  };                                     \
  template <typename T>                  \
  using name##_t = typename name<T>::type;
MSL_REMOVE(type_identity)
MSL_REMOVE(remove_cv)
MSL_REMOVES(remove_cv, const T)
MSL_REMOVES(remove_cv, volatile T)
MSL_REMOVES(remove_cv, const volatile T)
MSL_REMOVE(remove_reference)
MSL_REMOVES(remove_reference, T&)
MSL_REMOVES(remove_reference, T&&)
MSL_REMOVE(remove_pointer)
MSL_REMOVES(remove_pointer, T*)
MSL_REMOVES(remove_pointer, T* const)
MSL_REMOVES(remove_pointer, T* volatile)
MSL_REMOVES(remove_pointer, T* const volatile)
#undef MSL_REMOVE
#undef MSL_REMOVES

template <typename T>
T&& declval();

template <typename T, typename U>
constexpr bool is_same_v = false;
template <typename T>
constexpr bool is_same_v<T, T> = true;
template <typename T, typename U>
struct is_same : bool_constant<is_same_v<T, U>> {};
template <typename T, typename... Us>
constexpr bool is_one_of = (is_same_v<T, Us> || ...);

template <typename From, typename To>
constexpr bool is_convertible_v = __is_convertible_to(From, To);
template <typename From, typename To>
struct is_convertible : bool_constant<is_convertible_v<From, To>> {};

#define MSL_TRAIT(name, ...)                                \
  template <typename T>                                     \
  constexpr bool name##_v = __VA_ARGS__;                    \
  template <typename T>                                     \
  struct name : bool_constant<name##_v<T>> {};
template <typename T>
constexpr bool is_signed_integral = is_one_of<
    typename remove_cv<T>::type, signed char, short, int, long, long long>;
template <typename T>
constexpr bool is_unsigned_integral = is_one_of<
    typename remove_cv<T>::type, bool, unsigned char, unsigned short, unsigned int, unsigned long,
    unsigned long long>;
template <typename T>
constexpr bool is_builtin_float = is_one_of<typename remove_cv<T>::type, float, double>;
template <typename T>
constexpr bool is_char = is_same_v<typename remove_cv<T>::type, char>;
MSL_TRAIT(is_integral, is_signed_integral<T> || is_unsigned_integral<T> || is_char<T>)
MSL_TRAIT(is_signed, is_signed_integral<T> || is_builtin_float<T> || (is_char<T> && char(-1) < 0))
MSL_TRAIT(is_unsigned, is_unsigned_integral<T> || (is_char<T> && char(-1) > 0))
MSL_TRAIT(is_pointer, !is_same_v<remove_pointer_t<T>, T>)
#undef MSL_TRAIT

template <typename T>
struct other_sign;
#define MSL_SIGNS(s, u)       \
  template <>                 \
  struct other_sign<s> {      \
    using with = s;           \
    using without = u;        \
  };                          \
  template <>                 \
  struct other_sign<u> : other_sign<s> {};
MSL_SIGNS(signed char, unsigned char)
MSL_SIGNS(short, unsigned short)
MSL_SIGNS(int, unsigned int)
MSL_SIGNS(long, unsigned long)
MSL_SIGNS(long long, unsigned long long)
#undef MSL_SIGNS
template <>
struct other_sign<char> : other_sign<signed char> {};
template <typename T>
using make_signed_t = typename other_sign<T>::with;
template <typename T>
using make_unsigned_t = typename other_sign<T>::without;

template <typename T>
struct numeric_limits {
  static constexpr T max() {
    if constexpr (is_signed_v<T>)
      return static_cast<T>((1ull << (8 * sizeof(T) - 1)) - 1);
    else
      return static_cast<T>(~0ull);
  }
  static constexpr T min() {
    return is_signed_v<T> ? static_cast<T>(-max() - 1) : T(0);
  }
  static constexpr T lowest() {
    return min();
  }
};

#define MSL_FLOAT_LIMITS(T, make, smallest, largest, most_negative, eps, inf, nan, tiny)  \
  template <>                                                                             \
  struct numeric_limits<T> {                                                              \
    static constexpr T min() {                                                            \
      return make(smallest);                                                              \
    }                                                                                     \
    static constexpr T max() {                                                            \
      return make(largest);                                                               \
    }                                                                                     \
    static constexpr T lowest() {                                                         \
      return make(most_negative);                                                         \
    }                                                                                     \
    static constexpr T epsilon() {                                                        \
      return make(eps);                                                                   \
    }                                                                                     \
    static constexpr T infinity() {                                                       \
      return make(inf);                                                                   \
    }                                                                                     \
    static constexpr T quiet_NaN() {                                                      \
      return make(nan);                                                                   \
    }                                                                                     \
    static constexpr T denorm_min() {                                                     \
      return make(tiny);                                                                  \
    }                                                                                     \
  };
#define MSL_HALF(bits) __half(__half_raw{bits})
#define MSL_BFLOAT(bits) __nv_bfloat16(__nv_bfloat16_raw{bits})
#define MSL_FLOAT(value) (value)
MSL_FLOAT_LIMITS(
    float, MSL_FLOAT, 1.175494351e-38f, 3.402823466e+38f, -3.402823466e+38f, 1.192092896e-07f,
    __builtin_bit_cast(float, 0x7f800000), __builtin_bit_cast(float, 0x7fc00000), 1.401298464e-45f)
MSL_FLOAT_LIMITS(__half, MSL_HALF, 0x0400, 0x7bff, 0xfbff, 0x1400, 0x7c00, 0x7e00, 0x0001)
MSL_FLOAT_LIMITS(
    __nv_bfloat16, MSL_BFLOAT, 0x0080, 0x7f7f, 0xff7f, 0x3c00, 0x7f80, 0x7fc0, 0x0001)
#undef MSL_FLOAT_LIMITS
#undef MSL_HALF
#undef MSL_BFLOAT
#undef MSL_FLOAT

} // namespace mlx::core::cu
