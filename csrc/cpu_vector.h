// SPDX-License-Identifier: Apache-2.0
// Vectors as wide as the machine's registers, in compilers' own notation, and squares of them transposed in registers.
#pragma once
#include "cpu_types.h"

namespace tile {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#if defined(__clang__)
#define TILE_UNROLL _Pragma("unroll")
#else
#define TILE_UNROLL _Pragma("GCC unroll 64")
#endif

template <class T> struct Vector {
  static constexpr int lanes = kVectorBytes / int(sizeof(T));
  typedef T type __attribute__((vector_size(kVectorBytes)));
  // The same without an alignment demand, for tiles whose rows start anywhere.
  typedef T loose __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};

template <class T> inline typename Vector<T>::type load(const T* p) {
  return *reinterpret_cast<const typename Vector<T>::loose*>(p);
}

template <class T> inline void store(T* p, typename Vector<T>::type v) {
  *reinterpret_cast<typename Vector<T>::loose*>(p) = v;
}

#if defined(__clang__) || __GNUC__ >= 12
#define TILE_SHUFFLE(index, u, v, ...) __builtin_shufflevector(u, v, __VA_ARGS__)
#else
#define TILE_SHUFFLE(index, u, v, ...) __builtin_shuffle(u, v, index{__VA_ARGS__})
#endif

// Pairs (x[i], x[i + n/2]) are interleaved log2(n) times: the n x n matrix whose rows are x is then transposed.
template <class Acc> inline void transpose_square(typename Vector<Acc>::type* x) {
  using V = typename Vector<Acc>::type;
  using Index = decltype(V{} < V{});  // integers of the width of Acc
  constexpr int n = Vector<Acc>::lanes;
  TILE_UNROLL for (int step = 1; step < n; step *= 2) {
    V y[n];
    TILE_UNROLL for (int i = 0; i < n / 2; ++i) {
      V u = x[i], v = x[i + n / 2];
      if constexpr (n == 16) {
        y[2 * i] = TILE_SHUFFLE(Index, u, v, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        y[2 * i + 1] = TILE_SHUFFLE(Index, u, v, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      } else if constexpr (n == 8) {
        y[2 * i] = TILE_SHUFFLE(Index, u, v, 0, 8, 1, 9, 2, 10, 3, 11);
        y[2 * i + 1] = TILE_SHUFFLE(Index, u, v, 4, 12, 5, 13, 6, 14, 7, 15);
      } else if constexpr (n == 4) {
        y[2 * i] = TILE_SHUFFLE(Index, u, v, 0, 4, 1, 5);
        y[2 * i + 1] = TILE_SHUFFLE(Index, u, v, 2, 6, 3, 7);
      } else {
        y[2 * i] = TILE_SHUFFLE(Index, u, v, 0, 2);
        y[2 * i + 1] = TILE_SHUFFLE(Index, u, v, 1, 3);
      }
    }
    TILE_UNROLL for (int i = 0; i < n; ++i) x[i] = y[i];
  }
}

}  // namespace tile
