// SIMD-group and quad-group functions on a warp; barriers.
//
// All 32 lanes take part. In a threadgroup that is not a multiple of 32 (MSL_GROUP_SIZE comes from
// the launcher) the last warp asks which lanes live and leaves out the others, as Metal does.
#pragma once

#include "math.h"

namespace mlx::core::cu {

constexpr bool partial = MSL_GROUP_SIZE % 32 != 0;
inline uint live_lanes() {
  return partial ? __activemask() : 0xffffffffu;
}
inline uint lane_index() {
  uint lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// x of another lane, moved as 32-bit words: f(word) gives the other lane's word.
template <typename T, typename F>
T by_words(T x, F f) {
  constexpr int words = (sizeof(T) + 3) / 4;
  uint w[words] = {};
  memcpy(w, &x, sizeof(T));
#pragma unroll
  for (int i = 0; i < words; i++)
    w[i] = f(w[i]);
  T r;
  memcpy(&r, w, sizeof(T));
  return r;
}
template <typename T>
T from_lane(T x, uint lane) {
  return by_words(x, [=](uint w) { return __shfl_sync(live_lanes(), w, lane); });
}

// The lanes of a group of `width` (32 or 4) that holds this lane.
template <int width>
struct lanes {
  static uint base() {
    return lane_index() & ~(width - 1u);
  }
  static uint own() {
    return lane_index() & (width - 1u);
  }
  template <typename T>
  static T shuffle(T x, uint lane) {
    return from_lane(x, base() | (lane & (width - 1u)));
  }
  template <typename T>
  static T up(T x, uint delta) {
    T other = shuffle(x, own() - delta);
    return own() < delta ? x : other;
  }
  template <typename T>
  static T down(T x, uint delta) {
    T other = shuffle(x, own() + delta);
    return own() + delta < width ? other : x;
  }
  // Lanes in groups of `modulo`; what comes from outside a group is the filling's.
  template <typename T>
  static T fill_up(T x, T filling, uint delta, uint modulo) {
    uint at = own() % modulo, first = own() - at;
    T data = shuffle(x, own() - delta), other = shuffle(filling, first + (at - delta) % modulo);
    return at < delta ? other : data;
  }
  template <typename T>
  static T fill_down(T x, T filling, uint delta, uint modulo) {
    uint at = own() % modulo, first = own() - at;
    T data = shuffle(x, own() + delta), other = shuffle(filling, first + (at + delta) % modulo);
    return at + delta < modulo ? data : other;
  }
  static uint ballot(bool x) {
    uint all = __ballot_sync(live_lanes(), x);
    return width == 32 ? all : (all >> base()) & ((1u << (width & 31)) - 1u);
  }
  static uint live() {
    return width == 32 ? live_lanes() : (live_lanes() >> base()) & ((1u << (width & 31)) - 1u);
  }
  template <typename T, typename F>
  static T reduce(T x, F f) {
    if constexpr (partial) {
      uint alive = live(), first = __ffs(alive) - 1;
      T r = shuffle(x, first);
      for (uint lane = first + 1; lane < width; lane++) {
        T other = shuffle(x, lane);
        r = (alive >> lane) & 1 ? f(r, other) : r;
      }
      return r;
    }
#pragma unroll
    for (int distance = width / 2; distance > 0; distance /= 2)
      x = f(x, by_words(x, [=](uint w) { return __shfl_xor_sync(0xffffffffu, w, distance); }));
    return x;
  }
  template <typename T, typename F>
  static T scan(T x, F f) {
#pragma unroll
    for (uint distance = 1; distance < width; distance *= 2) {
      T other = shuffle(x, own() - distance);
      x = own() < distance ? x : f(other, x);
    }
    return x;
  }
};

struct sum_of {
  template <typename T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct product_of {
  template <typename T>
  T operator()(T a, T b) const {
    return a * b;
  }
};
struct min_of {
  template <typename T>
  T operator()(T a, T b) const {
    return min(a, b);
  }
};
struct max_of {
  template <typename T>
  T operator()(T a, T b) const {
    return max(a, b);
  }
};
struct and_of {
  template <typename T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct or_of {
  template <typename T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct xor_of {
  template <typename T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};

// The result of a vote among the lanes.
template <int width, typename Bits>
struct vote {
  using vote_t = Bits;
  Bits bits;
  explicit vote(Bits b = 0) : bits(b) {}
  explicit operator Bits() const {
    return bits;
  }
  bool all() const {
    return bits == static_cast<Bits>(lanes<width>::live());
  }
  bool any() const {
    return bits != 0;
  }
};
using simd_vote = vote<32, ulong>;
using quad_vote = vote<4, ushort>;

#define MSL_GROUP(group, width)                                              \
  template <typename T>                                                      \
  T group##_sum(T x) {                                                       \
    return lanes<width>::reduce(x, sum_of());                                \
  }                                                                          \
  template <typename T>                                                      \
  T group##_product(T x) {                                                   \
    return lanes<width>::reduce(x, product_of());                            \
  }                                                                          \
  template <typename T>                                                      \
  T group##_min(T x) {                                                       \
    return lanes<width>::reduce(x, min_of());                                \
  }                                                                          \
  template <typename T>                                                      \
  T group##_max(T x) {                                                       \
    return lanes<width>::reduce(x, max_of());                                \
  }                                                                          \
  template <typename T>                                                      \
  T group##_and(T x) {                                                       \
    return lanes<width>::reduce(x, and_of());                                \
  }                                                                          \
  template <typename T>                                                      \
  T group##_or(T x) {                                                        \
    return lanes<width>::reduce(x, or_of());                                 \
  }                                                                          \
  template <typename T>                                                      \
  T group##_xor(T x) {                                                       \
    return lanes<width>::reduce(x, xor_of());                                \
  }                                                                          \
  template <typename T>                                                      \
  T group##_prefix_inclusive_sum(T x) {                                      \
    return lanes<width>::scan(x, sum_of());                                  \
  }                                                                          \
  template <typename T>                                                      \
  T group##_prefix_inclusive_product(T x) {                                  \
    return lanes<width>::scan(x, product_of());                              \
  }                                                                          \
  template <typename T>                                                      \
  T group##_prefix_exclusive_sum(T x) {                                      \
    T r = lanes<width>::up(group##_prefix_inclusive_sum(x), 1);              \
    return lanes<width>::own() == 0 ? T(0) : r;                              \
  }                                                                          \
  template <typename T>                                                      \
  T group##_prefix_exclusive_product(T x) {                                  \
    T r = lanes<width>::up(group##_prefix_inclusive_product(x), 1);          \
    return lanes<width>::own() == 0 ? T(1) : r;                              \
  }                                                                          \
  template <typename T>                                                      \
  T group##_broadcast(T x, ushort lane) {                                    \
    return lanes<width>::shuffle(x, lane);                                   \
  }                                                                          \
  template <typename T>                                                      \
  T group##_broadcast_first(T x) {                                           \
    return lanes<width>::shuffle(x, __ffs(lanes<width>::live()) - 1);        \
  }                                                                          \
  template <typename T>                                                      \
  T group##_shuffle(T x, ushort lane) {                                      \
    return lanes<width>::shuffle(x, lane);                                   \
  }                                                                          \
  template <typename T>                                                      \
  T group##_shuffle_xor(T x, ushort mask) {                                  \
    return by_words(                                                         \
        x, [=](uint w) { return __shfl_xor_sync(live_lanes(), w, mask); });  \
  }                                                                          \
  template <typename T>                                                      \
  T group##_shuffle_up(T x, ushort delta) {                                  \
    return lanes<width>::up(x, delta);                                       \
  }                                                                          \
  template <typename T>                                                      \
  T group##_shuffle_down(T x, ushort delta) {                                \
    return lanes<width>::down(x, delta);                                     \
  }                                                                          \
  template <typename T>                                                      \
  T group##_shuffle_rotate_up(T x, ushort delta) {                           \
    return lanes<width>::shuffle(x, lane_index() - delta);                   \
  }                                                                          \
  template <typename T>                                                      \
  T group##_shuffle_rotate_down(T x, ushort delta) {                         \
    return lanes<width>::shuffle(x, lane_index() + delta);                   \
  }                                                                          \
  template <typename T>                                                      \
  T group##_shuffle_and_fill_up(T x, T filling, ushort delta, ushort modulo = width) { \
    return lanes<width>::fill_up(x, filling, delta, modulo);                 \
  }                                                                          \
  template <typename T>                                                      \
  T group##_shuffle_and_fill_down(T x, T filling, ushort delta, ushort modulo = width) { \
    return lanes<width>::fill_down(x, filling, delta, modulo);               \
  }                                                                          \
  inline group##_vote group##_ballot(bool x) {                               \
    return group##_vote(lanes<width>::ballot(x));                            \
  }                                                                          \
  inline group##_vote group##_active_threads_mask() {                        \
    return group##_vote(lanes<width>::live());                               \
  }                                                                          \
  inline bool group##_all(bool x) {                                          \
    return lanes<width>::ballot(x) == lanes<width>::live();                  \
  }                                                                          \
  inline bool group##_any(bool x) {                                          \
    return lanes<width>::ballot(x) != 0;                                     \
  }                                                                          \
  inline bool group##_is_first() {                                           \
    return lanes<width>::own() + 1 == __ffs(lanes<width>::live());           \
  }
MSL_GROUP(simd, 32)
MSL_GROUP(quad, 4)
#undef MSL_GROUP

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}
inline void threadgroup_barrier(mem_flags) {
#if MSL_LOCKSTEP
  // The copies of shared_tensor.h have arrived, and tensor cores see them.
  asm volatile("cp.async.wait_all;\n fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncthreads();
}
inline void simdgroup_barrier(mem_flags) {
  __syncwarp(live_lanes());
}

} // namespace mlx::core::cu
