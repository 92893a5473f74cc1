// mpp::tensor_ops of Metal 4 for the host backend. Empty, as Apple's, before that version.
#pragma once
#if __METAL_VERSION__ >= 400
#include <metal_tensor>

namespace mpp {
namespace tensor_ops {
using namespace metal;

enum class reduction_operation { sum, max, min };
template <typename E>
struct reduction_operation_identity {
  static constexpr constant E sum_identity = E(0);
  static constexpr constant E max_identity = numeric_limits<E>::lowest();
  static constexpr constant E min_identity = numeric_limits<E>::max();
};
template <typename I>
constexpr constant I dynamic_length_v = numeric_limits<I>::max();

// A template argument in Metal's C++; here a number is, to which it converts.
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  METAL_FUNC constexpr matmul2d_descriptor(
      int rows, int columns, int depth = (int)metal::dynamic_extent, bool left = false,
      bool right = false, bool relaxed = false, mode how = mode::multiply)
      : m(rows), n(columns), k(depth), transpose_left(left), transpose_right(right),
        relaxed_precision(relaxed), matmul_mode(how) {}
  METAL_FUNC constexpr operator ulong() const {
    ulong depth = k <= 0 || k == 0x7fffffff ? 0 : k;
    return (ulong)m | (ulong)n << 16 | depth << 32 | (ulong)transpose_left << 56 |
        (ulong)transpose_right << 57 | (ulong)relaxed_precision << 58 |
        (ulong)(matmul_mode == mode::multiply_accumulate) << 59;
  }
};

#define QK_IS(T, U) is_same_v<T, U>
template <typename T>
constexpr bool qk_integer() { return QK_IS(T, char) || QK_IS(T, signed char) || QK_IS(T, uchar); }
template <typename T>
constexpr bool qk_number() { return QK_IS(T, half) || QK_IS(T, float) || QK_IS(T, bfloat); }
template <typename T>
constexpr bool qk_nibble() { return qk_element_of<T>::value >= QK_INT4; }
// The types of left operand, right operand and destination that go together.
template <typename L, typename R, typename C>
constexpr bool qk_multiplies() {
  if (qk_nibble<L>()) return false;
  if (qk_nibble<R>()) {
    if (qk_integer<L>()) {
      return QK_IS(C, int) && (QK_IS(L, uchar) == (qk_element_of<R>::value == QK_UINT4));
    }
    return (QK_IS(L, half) || QK_IS(L, bfloat)) && (QK_IS(C, L) || QK_IS(C, float));
  }
  if (qk_integer<L>() && qk_integer<R>()) {
    return QK_IS(C, int) && QK_IS(L, uchar) == QK_IS(R, uchar);
  }
  if ((!qk_integer<L>() && !qk_number<L>()) || (!qk_integer<R>() && !qk_number<R>())) return false;
  if (QK_IS(C, float)) return true;
  if (QK_IS(L, float) || QK_IS(R, float)) return false;
  bool brain = QK_IS(L, bfloat) || QK_IS(R, bfloat);
  bool mixed = QK_IS(L, half) || QK_IS(R, half);
  return (QK_IS(C, half) && (!brain || mixed)) || (QK_IS(C, bfloat) && brain);
}

template <typename T, typename = void>
struct qk_operand_type {
  static constexpr constant bool cooperative = true, packed = false;
  static constexpr constant bool fixed = true;
  using element = typename T::element_type;
  using layout = typename T::layout;
};
template <typename E, typename X, typename D>
struct qk_operand_type<tensor<E, X, D>> {
  static constexpr constant bool cooperative = false;
  using element = remove_addrspace_t<E>;
  static_assert(X::rank() == 2, "an operand of matmul2d in memory has rank 2");
};

template <ulong D, typename Scope, typename... Arguments>
class matmul2d {
  static constexpr constant int qk_m = D & 0xffff, qk_n = (D >> 16) & 0xffff,
                                qk_k = (D >> 32) & 0xffffff;
  static constexpr constant bool qk_tl = (D >> 56) & 1, qk_tr = (D >> 57) & 1;
  static_assert(qk_m % 16 == 0 || qk_n % 16 == 0, "m or n must be a multiple of 16");
  static_assert(qk_m > 0 && qk_n > 0, "m and n are known when a matmul2d is compiled");
  using qk_left = qk_spread<D, Scope, QK_LEFT, qk_tl ? qk_k : qk_m, qk_tl ? qk_m : qk_k>;
  using qk_right = qk_spread<D, Scope, QK_RIGHT, qk_tr ? qk_n : qk_k, qk_tr ? qk_k : qk_n>;
  using qk_destination = qk_spread<D, Scope, QK_DESTINATION, qk_m, qk_n>;
  using qk_rows = qk_spread<D, Scope, QK_ROW_VALUES, qk_m, qk_n>;
  using qk_columns = qk_spread<D, Scope, QK_COLUMN_VALUES, qk_m, qk_n>;
  template <typename E, typename Layout, size_t R>
  using qk_of = cooperative_tensor<E, dextents<int, R>, Layout>;

  template <typename LE, typename RE, typename CE>
  static constexpr void qk_types() {
    static_assert(
        qk_multiplies<LE, RE, CE>(), "matmul2d does not take these types of left, right and destination");
    static_assert(
        !(is_same_v<LE, bfloat> || is_same_v<RE, bfloat> || is_same_v<CE, bfloat>) ||
            __ENVIRONMENT_OS_VERSION_MIN_REQUIRED__ >= 260100,
        "bfloat operands came with macOS 26.1");
  }
  template <typename LE, typename RE, typename CE>
  static constexpr void qk_input() {
    qk_types<LE, RE, CE>();
    static_assert(Scope::count == 1, "cooperative inputs exist in a single SIMD group only");
    static_assert(qk_k > 0, "a cooperative input needs a k that is known when it is compiled");
    static_assert(
        __ENVIRONMENT_OS_VERSION_MIN_REQUIRED__ >= 260200, "cooperative inputs came with macOS 26.2");
    static_assert(!qk_nibble<RE>(), "packed codes are right operands in memory only");
  }
  template <typename T, typename Layout>
  static constexpr void qk_own() {
    if constexpr (qk_operand_type<T>::cooperative) {
      static_assert(
          is_same_v<typename T::layout, Layout>, "this cooperative tensor belongs to another operation");
    }
  }

 public:
  using scope = Scope;
  static constexpr constant matmul2d_descriptor descriptor = matmul2d_descriptor(
      qk_m, qk_n, qk_k ? qk_k : -1, qk_tl, qk_tr, (D >> 58) & 1,
      (D >> 59) & 1 ? matmul2d_descriptor::mode::multiply_accumulate
                    : matmul2d_descriptor::mode::multiply);
  template <typename LE, typename RE, typename CE, typename... R>
  using cooperative_tensor_left_input_t = qk_of<LE, qk_left, 2>;
  template <typename LE, typename RE, typename CE, typename... R>
  using cooperative_tensor_right_input_t = qk_of<RE, qk_right, 2>;
  template <typename L, typename R, typename CE, typename... M>
  using cooperative_tensor_destination_t = qk_of<CE, qk_destination, 2>;
  template <typename L, typename R, typename CE, typename... M>
  using cooperative_tensor_row_reduction_destination_t = qk_of<CE, qk_rows, 1>;
  template <typename L, typename R, typename CE, typename... M>
  using cooperative_tensor_column_reduction_destination_t = qk_of<CE, qk_columns, 1>;

  template <typename LE, typename RE, typename CE, typename Index = int>
  METAL_FUNC qk_of<LE, qk_left, 2> get_left_input_cooperative_tensor() const {
    qk_input<LE, RE, CE>();
    return qk_of<LE, qk_left, 2>();
  }
  template <typename LE, typename RE, typename CE, typename Index = int>
  METAL_FUNC qk_of<RE, qk_right, 2> get_right_input_cooperative_tensor() const {
    qk_input<LE, RE, CE>();
    return qk_of<RE, qk_right, 2>();
  }
  template <typename LE, typename RE, typename CE, typename E, typename X, typename Layout>
  METAL_FUNC qk_of<LE, qk_left, 2> get_left_input_cooperative_tensor(
      const thread cooperative_tensor<E, X, Layout>& from) const {
    qk_input<LE, RE, CE>();
    return qk_converted<LE, qk_left, E, X, Layout>(from);
  }
  template <typename LE, typename RE, typename CE, typename E, typename X, typename Layout>
  METAL_FUNC qk_of<RE, qk_right, 2> get_right_input_cooperative_tensor(
      const thread cooperative_tensor<E, X, Layout>& from) const {
    qk_input<LE, RE, CE>();
    return qk_converted<RE, qk_right, E, X, Layout>(from);
  }
  template <typename LE, typename RE, typename CE, typename E, typename X, typename Layout>
  METAL_FUNC bool is_compatible_as_left_input(const thread cooperative_tensor<E, X, Layout>&) const {
    return is_same_v<E, LE> && qk_fits<qk_left, Layout>() && qk_tensor_compatible();
  }
  template <typename LE, typename RE, typename CE, typename E, typename X, typename Layout>
  METAL_FUNC bool is_compatible_as_right_input(const thread cooperative_tensor<E, X, Layout>&) const {
    return is_same_v<E, RE> && qk_fits<qk_right, Layout>() && qk_tensor_compatible();
  }
  template <typename L, typename R, typename CE, typename Index = int>
  METAL_FUNC qk_of<CE, qk_destination, 2> get_destination_cooperative_tensor() const {
    qk_operands<L, R, CE>();
    return qk_of<CE, qk_destination, 2>();
  }
  template <typename L, typename R, typename CE, typename Index = int>
  METAL_FUNC qk_of<CE, qk_rows, 1> get_row_reduction_destination_cooperative_tensor() const {
    qk_operands<L, R, CE>();
    static_assert(Scope::count == 1, "reductions exist in a single SIMD group only");
    return qk_of<CE, qk_rows, 1>();
  }
  template <typename L, typename R, typename CE, typename Index = int>
  METAL_FUNC qk_of<CE, qk_columns, 1> get_column_reduction_destination_cooperative_tensor() const {
    qk_operands<L, R, CE>();
    static_assert(Scope::count == 1, "reductions exist in a single SIMD group only");
    return qk_of<CE, qk_columns, 1>();
  }
  template <typename L, typename R, typename C>
  METAL_FUNC void run(thread L& left, thread R& right, thread C& to) const {
    qk_operands<L, R, typename qk_operand_type<C>::element>();
    qk_own<C, qk_destination>();
    static_assert(!__is_const(typename qk_operand_type<C>::element), "the destination is const");
    qk_tensor_product product = {qk_m, qk_n, qk_k ? qk_k : -1, qk_tl, qk_tr, (D >> 58) & 1, (D >> 59) & 1,
                          Scope::count};
    qk_tensor_operand a = left.qk_described(), b = right.qk_described(), c = to.qk_described();
    qk_tensor_run(&product, &a, &b, &c);
  }

 private:
  template <typename L, typename R, typename CE>
  static constexpr void qk_operands() {
    using LT = remove_addrspace_t<L>;
    using RT = remove_addrspace_t<R>;
    using LE = typename qk_operand_type<LT>::element;
    using RE = typename qk_operand_type<RT>::element;
    static_assert(
        !__is_const(LE) && !__is_const(RE), "operands of matmul2d are not const: cast the pointer");
    qk_types<LE, RE, CE>();
    qk_own<LT, qk_left>();
    qk_own<RT, qk_right>();
    static_assert(
        !qk_nibble<RE>() || qk_k % 32 == 0, "packed codes take a dynamic k or a multiple of 32");
  }
  template <typename To, typename From>
  static constexpr bool qk_fits() {
    return From::role == QK_DESTINATION && From::simds == 1 && From::rows == To::rows &&
        From::columns == To::columns;
  }
  template <typename E2, typename To, typename E, typename X, typename From>
  METAL_FUNC static qk_of<E2, To, 2> qk_converted(const thread cooperative_tensor<E, X, From>& from) {
    static_assert(is_same_v<E, E2>, "an input is made from a destination of the same element type");
    static_assert(qk_fits<To, From>(), "this destination has not the shape of the input");
    return qk_of<E2, To, 2>(from, 0);
  }
};

template <bool rows, typename E, typename X, typename A, typename Y, typename B>
METAL_FUNC void qk_reduce(
    const thread cooperative_tensor<E, X, A>& from, thread cooperative_tensor<E, Y, B>& to,
    reduction_operation operation, E identity) {
  static_assert(A::simds == 1 && B::simds == 1, "reductions exist in a single SIMD group only");
  static_assert(
      A::role == QK_DESTINATION && B::role == (rows ? QK_ROW_VALUES : QK_COLUMN_VALUES) &&
          A::rows == B::rows && A::columns == B::columns,
      "the result of a reduction belongs to the destination's operation");
  qk_tensor_operand a = from.qk_described(), b = to.qk_described();
  qk_tensor_reduce(&a, &b, (uint)operation, (float)identity);
}
template <typename E, typename X, typename A, typename Y, typename B>
METAL_FUNC void reduce_rows(
    const thread cooperative_tensor<E, X, A>& from, thread cooperative_tensor<E, Y, B>& to,
    reduction_operation operation = reduction_operation::sum, E identity = E(0)) {
  qk_reduce<true>(from, to, operation, identity);
}
template <typename E, typename X, typename A, typename Y, typename B>
METAL_FUNC void reduce_columns(
    const thread cooperative_tensor<E, X, A>& from, thread cooperative_tensor<E, Y, B>& to,
    reduction_operation operation = reduction_operation::sum, E identity = E(0)) {
  qk_reduce<false>(from, to, operation, identity);
}
template <typename E, typename X, typename A, typename F, typename Y, typename B>
METAL_FUNC bool is_iterator_compatible(
    const thread cooperative_tensor<E, X, A>&, const thread cooperative_tensor<F, Y, B>&) {
  return qk_tensor_compatible() && A::simds == 1 && B::simds == 1 && A::role == QK_DESTINATION &&
      (B::role == QK_ROW_VALUES ? A::rows == B::rows
                                : B::role == QK_COLUMN_VALUES && A::columns == B::columns);
}
} // namespace tensor_ops
} // namespace mpp
#endif
