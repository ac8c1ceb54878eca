// SPDX-License-Identifier: Apache-2.0
// Reductions and scans of one contiguous row. Reductions keep kLanes partial results, enough vectors to hide the latency of an add,
// and fold them pairwise at the end, so a float sum is also more accurate than a serial one.
#pragma once
#include "cpu_vector.h"

namespace tile {

// Each operation: how a value enters the accumulator, and the result of an empty row. A NaN makes the accumulator NaN.
struct Sum {
  template <class A> static A start() { return A(0); }
  template <class A> static A apply(A acc, A x) { return A(acc + x); }
  template <class A> static A merge(A a, A b) { return A(a + b); }
};
struct Max {
  template <class A> static A start() { return lowest<A>(); }
  template <class A> static A apply(A acc, A x) { return ((x > acc) | (x != x)) ? x : acc; }
  template <class A> static A merge(A a, A b) { return apply(a, b); }
};
struct Min {
  template <class A> static A start() { return highest<A>(); }
  template <class A> static A apply(A acc, A x) { return ((x < acc) | (x != x)) ? x : acc; }
  template <class A> static A merge(A a, A b) { return apply(a, b); }
};
// The same of numbers only: the accumulator never is NaN, and values that compare false to it are left out.
struct MaxNumber {
  template <class A> static A start() { return lowest<A>(); }
  template <class A> static A apply(A acc, A x) { return x > acc ? x : acc; }
  template <class A> static A merge(A a, A b) { return apply(a, b); }
};
struct MinNumber {
  template <class A> static A start() { return highest<A>(); }
  template <class A> static A apply(A acc, A x) { return x < acc ? x : acc; }
  template <class A> static A merge(A a, A b) { return apply(a, b); }
};
struct AbsMaxNumber {
  template <class A> static A start() { return A(0); }
  template <class A> static A apply(A acc, A x) { return MaxNumber::apply(acc, x < A(0) ? A(A(0) - x) : x); }
  template <class A> static A merge(A a, A b) { return MaxNumber::apply(a, b); }
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

// Operations that are spelled alike for vectors of floats.
template <class Op> inline constexpr bool has_vectors = same<Op, Sum> || same<Op, Max> || same<Op, Min>;

// v with lane i in the place of lane i - `by`, around.
template <class A, int by> inline typename Vector<A>::type rotated(typename Vector<A>::type v) {
  using Index = decltype(v < v);
  constexpr int n = Vector<A>::lanes, m = n - 1, b = by;
  if constexpr (n == 16)
    return TILE_SHUFFLE(Index, v, v, b, (b + 1) & m, (b + 2) & m, (b + 3) & m, (b + 4) & m, (b + 5) & m, (b + 6) & m, (b + 7) & m,
                        (b + 8) & m, (b + 9) & m, (b + 10) & m, (b + 11) & m, (b + 12) & m, (b + 13) & m, (b + 14) & m,
                        (b + 15) & m);
  else if constexpr (n == 8)
    return TILE_SHUFFLE(Index, v, v, b, (b + 1) & m, (b + 2) & m, (b + 3) & m, (b + 4) & m, (b + 5) & m, (b + 6) & m, (b + 7) & m);
  else if constexpr (n == 4) return TILE_SHUFFLE(Index, v, v, b, (b + 1) & m, (b + 2) & m, (b + 3) & m);
  else return TILE_SHUFFLE(Index, v, v, b, (b + 1) & m);
}

// The lanes of v reduced by Op, halves with halves.
template <class Op, class A, int half = Vector<A>::lanes / 2> inline A folded(typename Vector<A>::type v) {
  v = Op::template merge<typename Vector<A>::type>(v, rotated<A, half>(v));
  if constexpr (half > 1) return folded<Op, A, half / 2>(v);
  else return v[0];
}

// `reduce` of rows that need no conversion, kept in registers up to the last lane.
template <class Op, class A> inline A reduce_vectors(const A* x, int64_t n) {
  using V = typename Vector<A>::type;
  constexpr int w = Vector<A>::lanes, count = 256 / kVectorBytes;
  V lane[count];
  TILE_UNROLL for (int j = 0; j < count; ++j) lane[j] = load(x + j * w);
  int64_t i = count * w;
  for (; i + count * w <= n; i += count * w) {
    TILE_UNROLL for (int j = 0; j < count; ++j) lane[j] = Op::template apply<V>(lane[j], load(x + i + j * w));
  }
  TILE_UNROLL for (int half = count / 2; half > 0; half /= 2) {
    TILE_UNROLL for (int j = 0; j < half; ++j) lane[j] = Op::template merge<V>(lane[j], lane[j + half]);
  }
  A result = folded<Op, A>(lane[0]);
  for (; i < n; ++i) result = Op::apply(result, x[i]);
  return result;
}

// The reduction of x[0..n) by Op, each element converted to Acc first: float, double, or an integer type for integer rows.
template <class Op, class Acc, class T> inline Acc reduce(const T* x, int64_t n) {
  constexpr int kLanes = 256 / int(sizeof(Acc));
  if constexpr (has_vectors<Op> && is_native_float<Acc> && same<T, Acc>) {
    if (n >= kLanes) return reduce_vectors<Op>(x, n);
  }
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
