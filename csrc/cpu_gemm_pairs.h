// SPDX-License-Identifier: Apache-2.0
// gemm of bf16 operands by dot products of pairs (AVX512_BF16's vdpbf16ps), twice the products of an instruction on
// floats.
//
// Two neighbours along K make a word, the first in its lower half; a last one without neighbour has zero beside it. A
// word of A meets a vector of words of B. The instruction rounds each sum to nearest even, and keeps infinities and
// NaN. It takes denormal operands and sums as zero, as torch's own bf16 products do: operands below 2^-126 are lost,
// and 2^-126 of a sum. TILE_NO_PAIRS switches it off; products then use floats, and keep denormals.
#pragma once
#include "cpu_gemm_pack.h"

#if defined(__AVX512BF16__) && !defined(TILE_NO_PAIRS)
#define TILE_PAIRS 1
#else
#define TILE_PAIRS 0
#endif

namespace tile {
namespace gemm_detail {

// Whether products of such operands go by pairs.
template <class TA, class TB, class TC>
inline constexpr bool by_pairs = TILE_PAIRS && same<TA, bf16> && same<TB, bf16> && is_float<TC> && !same<TC, double>;

// C[m, n] += op(A) op(B) as `gemm` has it. A is read in place, and packed only if it is stored k by m.
template <class TC, bool TransA, bool TransB>
inline void gemm_of_pairs(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, TC* c, int64_t ldc, int64_t m, int64_t n,
                          int64_t k);

#if TILE_PAIRS
using Words = Vector<uint32_t>::type;
using Sums = Vector<float>::type;
constexpr int kPairColumns = columns<float>();
constexpr int kPairK = 2 * kBlockK;  // a panel then has as many bytes as one of floats

// sum += the dot products of pairs. This is assembler, since names and operand types of intrinsics differ between
// compilers. Their header also takes longer to read than all of ours.
TILE_ALWAYS_INLINE void add_dots(Sums& sum, Words left, Words right) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
}

// A as `rows` by `k`, the pair that begins at element (i, p) at a + i * row + p / 2 * col; B as a panel of words.
template <class TC, int rows>
inline void pair_kernel(const bf16* a, int64_t row, int64_t col, const uint32_t* b, TC* c, int64_t ldc, int64_t k, int64_t width) {
  constexpr int lanes = Vector<uint32_t>::lanes;
  Sums sum[rows][kVectors];
  TILE_UNROLL for (int i = 0; i < rows; ++i) {
    TILE_UNROLL for (int j = 0; j < kVectors; ++j) sum[i][j] = Sums{};
  }
  for (int64_t p = 0; p < k / 2; ++p, a += col, b += kPairColumns) {
    Words right[kVectors];
    TILE_UNROLL for (int j = 0; j < kVectors; ++j) right[j] = load(b + j * lanes);
    TILE_UNROLL for (int i = 0; i < rows; ++i) {
      uint32_t left;
      memcpy(&left, a + i * row, sizeof left);  // at any even address
      TILE_UNROLL for (int j = 0; j < kVectors; ++j) add_dots(sum[i][j], left - Words{}, right[j]);
    }
  }
  if (k % 2) {
    for (int i = 0; i < rows; ++i) {
      uint16_t left;  // elements beyond the row may be anything, NaN too
      memcpy(&left, a + i * row, sizeof left);
      for (int j = 0; j < kVectors; ++j) add_dots(sum[i][j], uint32_t(left) - Words{}, load(b + j * lanes));
    }
  }
  add_sums<float, TC, rows>(sum, c, ldc, width);
}

// Words of pairs of rows of x (k by width): row p / 2 at words + p / 2 * pitch.
inline void pack_pairs_of_rows(const bf16* x, int64_t ldx, int64_t k, int64_t width, uint32_t* words, int64_t pitch) {
  for (int64_t p = 0; p < k / 2; ++p, x += 2 * ldx, words += pitch) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) words[j] = x[j].bits | uint32_t(x[ldx + j].bits) << 16;
  }
  if (k % 2) {
    for (int64_t j = 0; j < width; ++j) words[j] = x[j].bits;
  }
}

// A panel of words, zero beyond `width`, from B stored k by n.
inline void pack_pair_rows(const bf16* b, int64_t ldb, int64_t k, int64_t width, uint32_t* panel) {
  if (width == kPairColumns) return pack_pairs_of_rows(b, ldb, k, kPairColumns, panel, kPairColumns);
  memset(panel, 0, size_t((k + 1) / 2) * kPairColumns * sizeof(uint32_t));
  pack_pairs_of_rows(b, ldb, k, width, panel, kPairColumns);
}

// The same from B stored n by k, whose rows are words already: squares of them are transposed in registers.
inline void pack_pair_columns(const bf16* b, int64_t ldb, int64_t k, int64_t width, uint32_t* panel) {
  constexpr int n = Vector<float>::lanes;
  for (int64_t j = 0; j < kPairColumns; j += n) {
    for (int64_t p = 0; p < k; p += 2 * n) {
      Sums x[n];
      if (j + n <= width && p + 2 * n <= k) {
        TILE_UNROLL for (int i = 0; i < n; ++i) memcpy(&x[i], b + (j + i) * ldb + p, sizeof x[i]);
      } else {
        alignas(kVectorBytes) uint16_t rows[n][2 * n] = {};
        int64_t there = k - p < 2 * n ? k - p : 2 * n;
        for (int64_t i = 0; i < n && j + i < width; ++i) memcpy(rows[i], b + (j + i) * ldb + p, size_t(there) * sizeof(bf16));
        TILE_UNROLL for (int i = 0; i < n; ++i) memcpy(&x[i], rows[i], sizeof x[i]);
      }
      transpose_square<float>(x);
      uint32_t* to = panel + p / 2 * kPairColumns + j;
      if (p + 2 * n <= k) {
        TILE_UNROLL for (int i = 0; i < n; ++i) memcpy(to + i * kPairColumns, &x[i], sizeof x[i]);
      } else {
        for (int64_t i = 0; i < (k - p + 1) / 2; ++i) memcpy(to + i * kPairColumns, &x[i], sizeof x[i]);
      }
    }
  }
}

template <class TC, bool TransA, bool TransB>
inline void gemm_of_pairs(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, TC* c, int64_t ldc, int64_t m, int64_t n,
                          int64_t k) {
  alignas(64) uint32_t block[TransA ? kBlockM * kPairK / 2 : 1];
  alignas(64) uint32_t panel[kPairColumns * kPairK / 2];
  int64_t most = TransA ? kBlockM : m;
  for (int64_t p0 = 0; p0 < k; p0 += kPairK) {
    int64_t depth = k - p0 < kPairK ? k - p0 : kPairK;
    for (int64_t i0 = 0; i0 < m; i0 += most) {
      int64_t height = m - i0 < most ? m - i0 : most;
      const bf16* left = a + i0 * lda + p0;
      int64_t row = lda, col = 2;
      if constexpr (TransA) {
        pack_pairs_of_rows(a + p0 * lda + i0, lda, depth, height, block, height);
        left = reinterpret_cast<const bf16*>(block);
        row = 2, col = 2 * height;
      }
      for (int64_t j0 = 0; j0 < n; j0 += kPairColumns) {
        int64_t width = n - j0 < kPairColumns ? n - j0 : kPairColumns;
        if constexpr (TransB) pack_pair_columns(b + j0 * ldb + p0, ldb, depth, width, panel);
        else pack_pair_rows(b + p0 * ldb + j0, ldb, depth, width, panel);
        TC* out = c + i0 * ldc + j0;
        int64_t i = 0;
        for (; i + kRows <= height; i += kRows) {
          prefetch_panel<TransB>(b + p0 * (TransB ? 1 : ldb), ldb, depth, j0 + kPairColumns, n, kPairColumns, i / kRows,
                                 height / kRows);
          pair_kernel<TC, kRows>(left + i * row, row, col, panel, out + i * ldc, ldc, depth, width);
        }
        for (; i + 4 <= height; i += 4) pair_kernel<TC, 4>(left + i * row, row, col, panel, out + i * ldc, ldc, depth, width);
        for (; i < height; ++i) pair_kernel<TC, 1>(left + i * row, row, col, panel, out + i * ldc, ldc, depth, width);
      }
    }
  }
}
#endif

}  // namespace gemm_detail
}  // namespace tile
