// SPDX-License-Identifier: Apache-2.0
// Atomic read-modify-write on any scalar type, small floats included. Each function returns the previous value. Order
// is relaxed, except for arrivals: the end of a kernel, a barrier of OpenMP, publishes results.
#pragma once
#include "cpu_types.h"

namespace tile {

namespace atomic_detail {

// Replaces *p by update(old), in float for small floats, trying again whenever another thread was faster.
template <class T, class Update> inline T replace(T* p, Update update) {
  T old, next;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do {
    next = convert<T>(update(convert<compute<T>>(old)));
  } while (!__atomic_compare_exchange(p, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

}  // namespace atomic_detail

template <class T> inline T atomic_add(T* p, T value) {
  if constexpr (is_float<T>) {
    compute<T> x = convert<compute<T>>(value);
    return atomic_detail::replace(p, [x](compute<T> old) { return old + x; });
  } else {
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
  }
}

// NaN: the old value stays if either is NaN.
template <class T> inline T atomic_max(T* p, T value) {
  compute<T> x = convert<compute<T>>(value);
  return atomic_detail::replace(p, [x](compute<T> old) { return x > old ? x : old; });
}

template <class T> inline T atomic_min(T* p, T value) {
  compute<T> x = convert<compute<T>>(value);
  return atomic_detail::replace(p, [x](compute<T> old) { return x < old ? x : old; });
}

// Integers and bool only.
#define TILE_BITWISE(name, function, op)                                                                         \
  template <class T> inline T name(T* p, T value) {                                                              \
    if constexpr (same<T, bool>) return atomic_detail::replace(p, [value](T old) { return T(old op value); });   \
    else return function(p, value, __ATOMIC_RELAXED);                                                            \
  }
TILE_BITWISE(atomic_and, __atomic_fetch_and, &)
TILE_BITWISE(atomic_or, __atomic_fetch_or, |)
TILE_BITWISE(atomic_xor, __atomic_fetch_xor, ^)
#undef TILE_BITWISE

template <class T> inline T atomic_exchange(T* p, T value) {
  T old;
  __atomic_exchange(p, &value, &old, __ATOMIC_RELAXED);
  return old;
}

template <class T, int order> inline T atomic_load(const T* p) {
  T value;
  __atomic_load(p, &value, order);
  return value;
}

inline void memory_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Count arrivals from 0 to count - 1, then start again at 0. Return whether this arrival was the last. The last one
// sees all writes before the other arrivals.
inline int32_t cpu_arrive_last(int32_t* counter, int32_t count) {
  int32_t old = __atomic_load_n(counter, __ATOMIC_RELAXED), next;
  do {
    next = old >= count - 1 ? 0 : old + 1;
  } while (!__atomic_compare_exchange_n(counter, &old, next, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
  return old == count - 1;
}

}  // namespace tile
