// SPDX-License-Identifier: Apache-2.0
// gemm: C += op(A) op(B) on row-major tiles that lie in cache.
//
// The product is computed by a micro-kernel that keeps ROWS x (COLS vectors) of C in registers, on operands of one arithmetic type
// (`Acc`). An operand that already has that type and order is read in place; others are converted, and B is transposed if need be,
// block by block into scratch on the stack (at most 96 KiB), so a call needs no memory of its own and any thread may make it.
// Products of bf16 with bf16 go by cpu_gemm_pairs.h where the machine has its instruction.
#pragma once
#include "cpu_gemm_pack.h"
#include "cpu_gemm_pairs.h"

namespace tile {

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

// `gemm` by multiply-adds of elements.
template <class TA, class TB, class TC, bool TransA, bool TransB>
inline void gemm_of_elements(const TA* a, int64_t lda, const TB* b, int64_t ldb, TC* c, int64_t ldc, int64_t m, int64_t n,
                             int64_t k) {
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
        for (; i + kRows <= height; i += kRows) {
          if constexpr (!direct_b)
            prefetch_panel<TransB>(b + p0 * (TransB ? 1 : ldb), ldb, depth, j0 + full, n, full, i / kRows, height / kRows);
          micro_kernel<Acc, TC, kRows>(left + i * row, row, col, right, pitch, out + i * ldc, ldc, depth, width);
        }
        for (; i + 4 <= height; i += 4)
          micro_kernel<Acc, TC, 4>(left + i * row, row, col, right, pitch, out + i * ldc, ldc, depth, width);
        for (; i < height; ++i)
          micro_kernel<Acc, TC, 1>(left + i * row, row, col, right, pitch, out + i * ldc, ldc, depth, width);
      }
    }
  }
}

}  // namespace gemm_detail

// C[m, n] += op(A)[m, k] op(B)[k, n]. A is stored m by k (k by m if TransA), B k by n (n by k if TransB); ld* count elements between
// rows. Operands: any float type, or integers. C: float or double; a small float (sums are kept in float and rounded after every
// 128 or, by pairs, 256 products); or an integer type (8-bit operands are exact whatever k is). The tiles must not overlap.
template <class TA, class TB, class TC, bool TransA, bool TransB>
inline void gemm(const TA* a, int64_t lda, const TB* b, int64_t ldb, TC* c, int64_t ldc, int64_t m, int64_t n, int64_t k) {
  using namespace gemm_detail;
  if constexpr (by_pairs<TA, TB, TC>) gemm_of_pairs<TC, TransA, TransB>(a, lda, b, ldb, c, ldc, m, n, k);
  else gemm_of_elements<TA, TB, TC, TransA, TransB>(a, lda, b, ldb, c, ldc, m, n, k);
}

}  // namespace tile
