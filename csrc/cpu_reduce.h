// SPDX-License-Identifier: Apache-2.0
// Reductions and scans of one contiguous row. Reductions keep kLanes partial results, enough vectors to hide the latency of an add,
// and fold them pairwise at the end, so a float sum is also more accurate than a serial one.
#pragma once
#include "cpu_types.h"

namespace tile {

// Each operation: how the accumulator meets a value, and what an empty row gives. NaN: whatever meets it becomes NaN.
struct Sum {
  template <class A> static A start() { return A(0); }
  template <class A> static A apply(A acc, A x) { return A(acc + x); }
  template <class A> static A merge(A a, A b) { return A(a + b); }
};
struct Max {
  template <class A> static A start() { return lowest<A>(); }
  template <class A> static A apply(A acc, A x) { return (x > acc) | (x != x) ? x : acc; }
  template <class A> static A merge(A a, A b) { return apply(a, b); }
};
struct Min {
  template <class A> static A start() { return highest<A>(); }
  template <class A> static A apply(A acc, A x) { return (x < acc) | (x != x) ? x : acc; }
  template <class A> static A merge(A a, A b) { return apply(a, b); }
};
struct AbsMax {
  template <class A> static A start() { return A(0); }
  template <class A> static A apply(A acc, A x) { return Max::apply(acc, x < A(0) ? A(A(0) - x) : x); }
  template <class A> static A merge(A a, A b) { return Max::apply(a, b); }
};
struct AbsSum {
  template <class A> static A start() { return A(0); }
  template <class A> static A apply(A acc, A x) { return A(acc + (x < A(0) ? A(A(0) - x) : x)); }
  template <class A> static A merge(A a, A b) { return A(a + b); }
};
struct BitAnd {
  template <class A> static A start() { return A(~A(0)); }
  template <class A> static A apply(A acc, A x) { return A(acc & x); }
  template <class A> static A merge(A a, A b) { return A(a & b); }
};
struct BitOr {
  template <class A> static A start() { return A(0); }
  template <class A> static A apply(A acc, A x) { return A(acc | x); }
  template <class A> static A merge(A a, A b) { return A(a | b); }
};
struct BitXor {
  template <class A> static A start() { return A(0); }
  template <class A> static A apply(A acc, A x) { return A(acc ^ x); }
  template <class A> static A merge(A a, A b) { return A(a ^ b); }
};

// The reduction of x[0..n) by Op, each element converted to Acc first: float, double, or an integer type for integer rows.
template <class Op, class Acc, class T> inline Acc reduce(const T* x, int64_t n) {
  constexpr int kLanes = 256 / int(sizeof(Acc));
  Acc result = Op::template start<Acc>();
  int64_t i = 0;
  if (n >= kLanes) {
    Acc lane[kLanes];
    for (int j = 0; j < kLanes; ++j) lane[j] = result;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
      for (int j = 0; j < kLanes; ++j) lane[j] = Op::apply(lane[j], convert<Acc>(x[i + j]));
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma omp simd
      for (int j = 0; j < half; ++j) lane[j] = Op::merge(lane[j], lane[j + half]);
    }
    result = lane[0];
  }
  for (; i < n; ++i) result = Op::apply(result, convert<Acc>(x[i]));
  return result;
}

// Running reduction: y[i] = x[0] op ... op x[i], or from the end if `reverse`. The running value is an Acc; y may be x.
template <class Op, class Acc, class T, class To> inline void scan(const T* x, To* y, int64_t n, bool reverse = false) {
  Acc running = Op::template start<Acc>();
  int64_t step = reverse ? -1 : 1;
  for (int64_t count = 0, i = reverse ? n - 1 : 0; count < n; ++count, i += step) {
    running = Op::apply(running, convert<Acc>(x[i]));
    y[i] = convert<To>(running);
  }
}

template <class Acc, class T, class To> inline void cumsum(const T* x, To* y, int64_t n, bool reverse = false) {
  scan<Sum, Acc>(x, y, n, reverse);
}

template <class Acc, class T, class To> inline void cummax(const T* x, To* y, int64_t n, bool reverse = false) {
  scan<Max, Acc>(x, y, n, reverse);
}

}  // namespace tile
