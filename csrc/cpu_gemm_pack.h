// SPDX-License-Identifier: Apache-2.0
// Panels of B for gemm's micro-kernels: as many columns as a micro-kernel has, one row after the other.
#pragma once
#include "cpu_gemm_kernels.h"

namespace tile {
namespace gemm_detail {

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

// Prefetch the `turn`th of `turns` shares of the panel of B that begins at column j0 and has at most `most` columns.
// The products of the previous panel run meanwhile. Rows of B are short and far apart in memory, which hardware does
// not foresee.
template <bool turned, class TB>
inline void prefetch_panel(const TB* b, int64_t ldb, int64_t k, int64_t j0, int64_t n, int64_t most, int64_t turn, int64_t turns) {
  int64_t width = n - j0 < most ? n - j0 : most;
  if (width <= 0) return;
  int64_t rows = turned ? width : k, bytes = int64_t(sizeof(TB)) * (turned ? k : width);
  b += j0 * (turned ? ldb : 1);
  for (int64_t p = rows * turn / turns; p < rows * (turn + 1) / turns; ++p) {
    const char* row = reinterpret_cast<const char*>(b + p * ldb);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
  }
}

}  // namespace gemm_detail
}  // namespace tile
