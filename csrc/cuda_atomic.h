// SPDX-License-Identifier: Apache-2.0
// Atomic read-modify-write on any scalar type, on the whole GPU's scale; each gives the value that stood there before.
// Order is relaxed, but for arrivals. Where the chip has no instruction for a type, compare-and-swap is tried until no other thread was faster.
#pragma once
#include "cuda_types.h"

namespace tile {

namespace atomic_detail {

template <bool wide> struct Word { using type = uint32_t; };
template <> struct Word<true> { using type = uint64_t; };

// Replaces the T at p by update(old), both in `compute<T>`. Types below 4 bytes are changed inside their aligned word.
template <class T, class Update> TILE_DEVICE T replace(T* p, Update update) {
  using W = typename Word<(sizeof(T) == 8)>::type;
  uint64_t address = reinterpret_cast<uint64_t>(p);
  int shift = 8 * int(address % sizeof(W));
  W* word = reinterpret_cast<W*>(address - address % sizeof(W));
  W mask = W(~W(0) >> (8 * (sizeof(W) - sizeof(T)))) << shift;
  W seen = *reinterpret_cast<volatile W*>(word), expected;
  T old;
  do {
    expected = seen;
    W part = (expected & mask) >> shift;
    memcpy(&old, &part, sizeof(T));
    T next = convert<T>(update(convert<compute<T>>(old)));
    part = 0;
    memcpy(&part, &next, sizeof(T));
    seen = atomicCAS(word, expected, (expected & ~mask) | (part << shift));
  } while (seen != expected);
  return old;
}

template <class T> inline constexpr bool is_word = same<T, int32_t> || same<T, uint32_t> || same<T, uint64_t>;

}  // namespace atomic_detail

template <class T> TILE_DEVICE T atomic_add(T* p, T value) {
  if constexpr (atomic_detail::is_word<T> || is_native_float<T>) {
    return atomicAdd(p, value);
  } else if constexpr (same<T, int64_t>) {
    return T(atomicAdd(reinterpret_cast<uint64_t*>(p), uint64_t(value)));
  } else if constexpr (same<T, f16>) {
    f16 old;
    asm volatile("atom.add.noftz.f16 %0, [%1], %2;" : "=h"(old.bits) : "l"(p), "h"(value.bits) : "memory");
    return old;
#if __CUDA_ARCH__ >= 900
  } else if constexpr (same<T, bf16>) {
    bf16 old;
    asm volatile("atom.add.noftz.bf16 %0, [%1], %2;" : "=h"(old.bits) : "l"(p), "h"(value.bits) : "memory");
    return old;
#endif
  } else {
    auto x = convert<compute<T>>(value);
    return atomic_detail::replace(p, [x](compute<T> old) { return compute<T>(old + x); });
  }
}

// NaN: the old value stays if either is NaN.
template <class T> TILE_DEVICE T atomic_max(T* p, T value) {
  if constexpr (atomic_detail::is_word<T> || same<T, int64_t>) return atomicMax(p, value);
  auto x = convert<compute<T>>(value);
  return atomic_detail::replace(p, [x](compute<T> old) { return x > old ? x : old; });
}

template <class T> TILE_DEVICE T atomic_min(T* p, T value) {
  if constexpr (atomic_detail::is_word<T> || same<T, int64_t>) return atomicMin(p, value);
  auto x = convert<compute<T>>(value);
  return atomic_detail::replace(p, [x](compute<T> old) { return x < old ? x : old; });
}

// Integers and bool only.
#define TILE_BITWISE(name, function, op)                                                                        \
  template <class T> TILE_DEVICE T name(T* p, T value) {                                                        \
    if constexpr (atomic_detail::is_word<T>) return function(p, value);                                         \
    else if constexpr (same<T, int64_t>) return T(function(reinterpret_cast<uint64_t*>(p), uint64_t(value)));   \
    else return atomic_detail::replace(p, [value](T old) { return T(old op value); });                          \
  }
TILE_BITWISE(atomic_and, atomicAnd, &)
TILE_BITWISE(atomic_or, atomicOr, |)
TILE_BITWISE(atomic_xor, atomicXor, ^)
#undef TILE_BITWISE

template <class T> TILE_DEVICE T atomic_exchange(T* p, T value) {
  if constexpr (atomic_detail::is_word<T> || same<T, float>) {
    return atomicExch(p, value);
  } else {
    auto x = convert<compute<T>>(value);
    return atomic_detail::replace(p, [x](compute<T>) { return x; });
  }
}

// Loads that are made where they stand, of 1, 2, 4 or 8 bytes.
#define TILE_LOAD(name, mode)                                                                                   \
  template <class T> TILE_DEVICE T name(const T* p) {                                                           \
    T value;                                                                                                    \
    if constexpr (sizeof(T) == 8) {                                                                             \
      uint64_t bits;                                                                                            \
      asm volatile("ld." mode ".gpu.b64 %0, [%1];" : "=l"(bits) : "l"(p) : "memory");                           \
      memcpy(&value, &bits, 8);                                                                                 \
    } else if constexpr (sizeof(T) == 4) {                                                                      \
      uint32_t bits;                                                                                            \
      asm volatile("ld." mode ".gpu.b32 %0, [%1];" : "=r"(bits) : "l"(p) : "memory");                           \
      memcpy(&value, &bits, 4);                                                                                 \
    } else {                                                                                                    \
      uint16_t bits;                                                                                            \
      if constexpr (sizeof(T) == 2) asm volatile("ld." mode ".gpu.b16 %0, [%1];" : "=h"(bits) : "l"(p) : "memory"); \
      else asm volatile("ld." mode ".gpu.b8 %0, [%1];" : "=h"(bits) : "l"(p) : "memory");                       \
      memcpy(&value, &bits, sizeof(T));                                                                         \
    }                                                                                                           \
    return value;                                                                                               \
  }
TILE_LOAD(atomic_load_relaxed, "relaxed")
TILE_LOAD(atomic_load_acquire, "acquire")
#undef TILE_LOAD

TILE_DEVICE void memory_fence() { __threadfence(); }

template <class T> TILE_DEVICE T atomic_load_seq_cst(const T* p) {
  memory_fence();
  return atomic_load_acquire(p);
}

namespace atomic_detail {

#if __CUDA_ARCH__ >= 900
inline constexpr bool has_vectors = true;  // of up to 16 bytes; and pairs of bf16
#else
inline constexpr bool has_vectors = false;
#endif

// Adds pairs of 16-bit floats, each pair in one word.
#define TILE_ADD_PAIRS(T, kind)                                                                                   \
  template <int count> TILE_DEVICE void add_pairs(T* p, const uint32_t* v) {                                      \
    if constexpr (count == 8 && has_vectors) {                                                                    \
      asm volatile("red.global.add.noftz.v4." kind " [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v[0]), "r"(v[1]),     \
                   "r"(v[2]), "r"(v[3]) : "memory");                                                              \
    } else if constexpr (count == 4 && has_vectors) {                                                             \
      asm volatile("red.global.add.noftz.v2." kind " [%0], {%1, %2};" ::"l"(p), "r"(v[0]), "r"(v[1]) : "memory"); \
    } else {                                                                                                      \
      _Pragma("unroll") for (int i = 0; i < count / 2; ++i)                                                       \
        asm volatile("red.global.add.noftz." kind " [%0], %1;" ::"l"(p + 2 * i), "r"(v[i]) : "memory");           \
    }                                                                                                             \
  }
TILE_ADD_PAIRS(f16, "f16x2")
TILE_ADD_PAIRS(bf16, "bf16x2")
#undef TILE_ADD_PAIRS

}  // namespace atomic_detail

// Adds the neighbours values[0 .. count) to p[0 .. count), each atomically, in as few instructions as the chip has; both
// are aligned to all of them (at most 16 bytes). Nothing is given back.
template <int count, class T> TILE_DEVICE void atomic_add_vector(T* p, const T* values) {
  using namespace atomic_detail;
  if constexpr (same<T, float> && count == 4 && has_vectors) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]) : "memory");
  } else if constexpr (same<T, float> && count == 2 && has_vectors) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(values[0]), "f"(values[1]) : "memory");
  } else if constexpr (count % 2 == 0 && (same<T, f16> || (same<T, bf16> && has_vectors))) {
    add_pairs<count>(p, reinterpret_cast<const uint32_t*>(values));
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) atomic_add(p + i, values[i]);
  }
}

// Count arrivals of blocks from 0 to count - 1, then start again at 0. Return whether this arrival was the last. The
// calling thread releases all writes ordered before it, and acquires those that the other arrivals released. This holds
// for bulk copies as well, which do not queue behind loads and stores. Results of bulk stores must be complete before.
TILE_DEVICE int arrive_last(int32_t* counter, int count) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(unsigned(count - 1)) : "memory");
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
  return old == unsigned(count - 1);
}

}  // namespace tile
