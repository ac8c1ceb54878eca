// SPDX-License-Identifier: Apache-2.0
// gemm: C += op(A) op(B) on row-major tiles that lie in cache.
//
// The product is computed by a micro-kernel that keeps ROWS x (COLS vectors) of C in registers, on operands of one arithmetic type
// (`Acc`). An operand that already has that type and order is read in place; others are converted, and B is transposed if need be,
// block by block into scratch on the stack (at most 96 KiB), so a call needs no memory of its own and any thread may make it.
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

namespace gemm_detail {

template <class T> inline constexpr bool is_byte = same<T, int8_t> || same<T, uint8_t>;

// The type in which products are summed: double if a double takes part; float for small floats and for bytes (a block of at most
// kBlockK byte products is exact in float); otherwise the integer type of C.
template <class TA, class TB, class TC> constexpr int arithmetic() {
  if (same<TA, double> || same<TB, double> || same<TC, double>) return 2;
  return is_float<TA> || is_float<TB> || is_float<TC> || (is_byte<TA> && is_byte<TB>) ? 1 : 0;
}
template <class TC, int kind> struct Arithmetic { using type = TC; };
template <class TC> struct Arithmetic<TC, 1> { using type = float; };
template <class TC> struct Arithmetic<TC, 2> { using type = double; };

#if defined(__AVX512F__) || !defined(__x86_64__)
constexpr int kRows = 8;  // rows of C in registers, of which there are 32
#else
constexpr int kRows = 6;  // of which there are 16
#endif
constexpr int kVectors = 2;   // vectors of C in registers, per row
constexpr int kBlockK = 128;  // one panel of B (kBlockK x kVectors vectors) stays in the first-level cache
constexpr int kBlockM = 128;  // rows of a converted block of A

template <class Acc> constexpr int columns() { return kVectors * Vector<Acc>::lanes; }

// A as `rows` by `k`, element (i, p) at a[i * row + p * col]; B as one panel, row p at b + p * ldb.
template <class Acc, class TC, int rows>
inline void micro_kernel(const Acc* a, int64_t row, int64_t col, const Acc* b, int64_t ldb, TC* c, int64_t ldc, int64_t k,
                         int64_t width) {
  using V = typename Vector<Acc>::type;
  constexpr int lanes = Vector<Acc>::lanes;
  V sum[rows][kVectors];
  TILE_UNROLL for (int i = 0; i < rows; ++i) {
    TILE_UNROLL for (int j = 0; j < kVectors; ++j) sum[i][j] = V{};
  }
  for (int64_t p = 0; p < k; ++p, a += col, b += ldb) {
    V right[kVectors];
    TILE_UNROLL for (int j = 0; j < kVectors; ++j) right[j] = load(b + j * lanes);
    TILE_UNROLL for (int i = 0; i < rows; ++i) {
      Acc left = a[i * row];
      TILE_UNROLL for (int j = 0; j < kVectors; ++j) sum[i][j] += left * right[j];
    }
  }
  if constexpr (same<TC, Acc>) {
    if (width == columns<Acc>()) {
      TILE_UNROLL for (int i = 0; i < rows; ++i) {
        TILE_UNROLL for (int j = 0; j < kVectors; ++j)
          store(c + i * ldc + j * lanes, load(c + i * ldc + j * lanes) + sum[i][j]);
      }
      return;
    }
  }
  alignas(kVectorBytes) Acc out[rows * columns<Acc>()];
  TILE_UNROLL for (int i = 0; i < rows; ++i) {
    TILE_UNROLL for (int j = 0; j < kVectors; ++j) store(out + i * columns<Acc>() + j * lanes, sum[i][j]);
  }
  for (int i = 0; i < rows; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      if constexpr (is_float<TC>) c[i * ldc + j] = convert<TC>(convert<Acc>(c[i * ldc + j]) + out[i * columns<Acc>() + j]);
      else c[i * ldc + j] = TC(c[i * ldc + j] + convert<TC>(out[i * columns<Acc>() + j]));
    }
  }
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

// `panel` (k by columns<Acc>(), zero beyond `width`) from B stored k by n.
template <class Acc, class TB> inline void pack_rows(const TB* b, int64_t ldb, int64_t k, int64_t width, Acc* panel) {
  constexpr int full = columns<Acc>();
  if (width == full) {
    for (int64_t p = 0; p < k; ++p) {
#pragma omp simd
      for (int j = 0; j < full; ++j) panel[p * full + j] = convert<Acc>(b[p * ldb + j]);
    }
    return;
  }
  for (int64_t p = 0; p < k; ++p) {
    for (int64_t j = 0; j < width; ++j) panel[p * full + j] = convert<Acc>(b[p * ldb + j]);
    for (int64_t j = width; j < full; ++j) panel[p * full + j] = Acc(0);
  }
}

// The same from B stored n by k: squares of one vector's size are transposed in registers.
template <class Acc, class TB> inline void pack_columns(const TB* b, int64_t ldb, int64_t k, int64_t width, Acc* panel) {
  constexpr int full = columns<Acc>(), n = Vector<Acc>::lanes;
  int64_t whole_k = k - k % n, whole = width - width % n;
  for (int64_t j = 0; j < whole; j += n) {
    for (int64_t p = 0; p < whole_k; p += n) {
      alignas(kVectorBytes) Acc rows[n * n];
      for (int i = 0; i < n; ++i) {
#pragma omp simd
        for (int q = 0; q < n; ++q) rows[i * n + q] = convert<Acc>(b[(j + i) * ldb + p + q]);
      }
      typename Vector<Acc>::type x[n];
      TILE_UNROLL for (int i = 0; i < n; ++i) x[i] = load(rows + i * n);
      transpose_square<Acc>(x);
      TILE_UNROLL for (int i = 0; i < n; ++i) store(panel + (p + i) * full + j, x[i]);
    }
  }
  for (int64_t j = 0; j < full; ++j) {
    for (int64_t p = j < whole ? whole_k : 0; p < k; ++p)
      panel[p * full + j] = j < width ? convert<Acc>(b[j * ldb + p]) : Acc(0);
  }
}

}  // namespace gemm_detail

// C[m, n] += op(A)[m, k] op(B)[k, n]. A is stored m by k (k by m if TransA), B k by n (n by k if TransB); ld* count elements between
// rows. Operands: any float type, or integers. C: float or double; a small float (sums are kept in float and rounded after every
// kBlockK products); or an integer type (8-bit operands are exact whatever k is). The tiles must not overlap.
template <class TA, class TB, class TC, bool TransA, bool TransB>
inline void gemm(const TA* a, int64_t lda, const TB* b, int64_t ldb, TC* c, int64_t ldc, int64_t m, int64_t n, int64_t k) {
  using namespace gemm_detail;
  using Acc = typename Arithmetic<TC, arithmetic<TA, TB, TC>()>::type;
  constexpr int full = columns<Acc>();
  constexpr bool direct_a = same<TA, Acc>, direct_b = same<TB, Acc> && !TransB;
  alignas(64) Acc block[direct_a ? 1 : kBlockM * kBlockK];
  alignas(64) Acc panel[full * kBlockK];
  for (int64_t p0 = 0; p0 < k; p0 += kBlockK) {
    int64_t depth = k - p0 < kBlockK ? k - p0 : kBlockK;
    for (int64_t i0 = 0; i0 < m; i0 += kBlockM) {
      int64_t height = m - i0 < kBlockM ? m - i0 : kBlockM;
      const Acc* left;
      int64_t row = TransA ? 1 : lda, col = TransA ? lda : 1;
      if constexpr (direct_a) {
        left = a + i0 * row + p0 * col;
      } else {
        int64_t outer = TransA ? depth : height, inner = TransA ? height : depth;
        for (int64_t i = 0; i < outer; ++i) {
          const TA* from = a + i0 * row + p0 * col + i * lda;
#pragma omp simd
          for (int64_t j = 0; j < inner; ++j) block[i * inner + j] = convert<Acc>(from[j]);
        }
        left = block;
        (TransA ? col : row) = inner;
      }
      for (int64_t j0 = 0; j0 < n; j0 += full) {
        int64_t width = n - j0 < full ? n - j0 : full;
        const Acc* right = panel;
        int64_t pitch = full;
        if constexpr (TransB) {
          pack_columns<Acc>(b + j0 * ldb + p0, ldb, depth, width, panel);
        } else if (direct_b && width == full) {
          right = reinterpret_cast<const Acc*>(b + p0 * ldb + j0);
          pitch = ldb;
        } else {
          pack_rows<Acc>(b + p0 * ldb + j0, ldb, depth, width, panel);
        }
        int64_t i = 0;
        TC* out = c + i0 * ldc + j0;
        for (; i + kRows <= height; i += kRows)
          micro_kernel<Acc, TC, kRows>(left + i * row, row, col, right, pitch, out + i * ldc, ldc, depth, width);
        for (; i + 4 <= height; i += 4)
          micro_kernel<Acc, TC, 4>(left + i * row, row, col, right, pitch, out + i * ldc, ldc, depth, width);
        for (; i < height; ++i)
          micro_kernel<Acc, TC, 1>(left + i * row, row, col, right, pitch, out + i * ldc, ldc, depth, width);
      }
    }
  }
}

}  // namespace tile
