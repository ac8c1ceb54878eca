// SPDX-License-Identifier: Apache-2.0
// The micro-kernels of gemm: ROWS x (COLS vectors) of C in registers, on operands that are converted and in order.
#pragma once
#include "cpu_vector.h"

namespace tile {
namespace gemm_detail {

#if defined(__AVX512F__) || !defined(__x86_64__)
constexpr int kRows = 8;  // rows of C in registers, of which there are 32
#else
constexpr int kRows = 6;  // of which there are 16
#endif
#define TILE_ALWAYS_INLINE inline __attribute__((always_inline))  // parameters by reference that must stay in registers

constexpr int kVectors = 2;   // vectors of C in registers, per row
constexpr int kBlockK = 128;  // one panel of B (kBlockK x kVectors vectors) stays in the first-level cache
constexpr int kBlockM = 128;  // rows of a converted block of A

template <class Acc> constexpr int columns() { return kVectors * Vector<Acc>::lanes; }

// C[rows, width] += sum; the last columns of the vectors are left out if `width` is less than columns<Acc>().
template <class Acc, class TC, int rows>
TILE_ALWAYS_INLINE void add_sums(const typename Vector<Acc>::type (&sum)[rows][kVectors], TC* c, int64_t ldc, int64_t width) {
  constexpr int lanes = Vector<Acc>::lanes;
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

// Has products meet their sums in one instruction: kernels are compiled without that (see host_compiler.py).
#if defined(__GNUC__) && !defined(__clang__)
#define TILE_CONTRACT __attribute__((optimize("fp-contract=fast")))
#else
#define TILE_CONTRACT
#endif

// A as `rows` by `k`, element (i, p) at a[i * row + p * col]; B as one panel, row p at b + p * ldb.
template <class Acc, class TC, int rows>
TILE_CONTRACT inline void micro_kernel(const Acc* a, int64_t row, int64_t col, const Acc* b, int64_t ldb, TC* c, int64_t ldc, int64_t k,
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
  add_sums<Acc, TC, rows>(sum, c, ldc, width);
}

}  // namespace gemm_detail
}  // namespace tile
