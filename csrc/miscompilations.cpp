// SPDX-License-Identifier: Apache-2.0
// Known ways in which C++ compilers get kernels wrong, each as a function that returns 1 where this compiler gets it
// right. Compiled once by each compiler, with the flags of kernels (torch_tile/runtime/host_compiler.py).
#include <cstdint>
#include <cstring>

namespace {

constexpr int ROWS = 4, MOST = 64;

template <int columns, int first, typename F>
[[gnu::noinline]] void store_by_branches(F* a, const F* b, F less, F more) {
  for (int n = 0; n < ROWS * columns; ++n) {
    const int i = n / columns, j = n % columns;
    if (j >= first) {
      a[i * columns + j] = b[i * columns + j] - less;
    } else {
      a[i * columns + j] = a[i * columns + j] * more;
    }
  }
}

template <int columns, int first, typename F>
bool branches_are_right(F less, F more) {
  F a[ROWS * MOST], b[ROWS * MOST];
  for (int n = 0; n < ROWS * columns; ++n) a[n] = F(n + 1), b[n] = F(3 * n);
  store_by_branches<columns, first, F>(a, b, less, more);
  for (int n = 0; n < ROWS * columns; ++n) {  // small whole numbers and quarters: every result is exact
    volatile F start = n % columns >= first ? F(3 * n) : F(n + 1);
    if (a[n] != (n % columns >= first ? start - less : start * more)) return false;
  }
  return true;
}

template <typename F>
bool all_branches_are_right() {
  return branches_are_right<48, 13, F>(2.0f, 0.25f) && branches_are_right<48, 32, F>(1.5f, 7.0f) &&
         branches_are_right<64, 16, F>(0.25f, 1.5f) && branches_are_right<7, 3, F>(2.0f, 0.25f);
}

[[gnu::noinline]] void add_products(float* sums, const float* x, const float* y) {
  for (int n = 0; n < MOST; ++n) sums[n] = x[n] * y[n] + sums[n];
}

[[gnu::noinline]] void take_maximum(float* most, const float* x, const float* y) {
  for (int n = 0; n < MOST; ++n) most[n] = x[n] > y[n] || x[n] != x[n] ? x[n] : y[n];
}

[[gnu::noinline]] void add_zero_times(float* sums, const float* x, float zero) {
  for (int n = 0; n < MOST; ++n) sums[n] = x[n] * zero + (x[n] - x[n]);
}

uint32_t bits(float x) {
  uint32_t found;
  std::memcpy(&found, &x, sizeof found);
  return found;
}

bool is_nan(float x) { return (bits(x) & 0x7fffffffu) > 0x7f800000u; }

}  // namespace

// g++ 12 with AVX-512 fuses a product with the difference that another branch stores.
extern "C" int branches() { return all_branches_are_right<float>() && all_branches_are_right<double>(); }

// (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 where the product is not rounded, and 0 where it is.
extern "C" int rounded_products() {
  float x[MOST], sums[MOST];
  for (int n = 0; n < MOST; ++n) x[n] = 1 + 0x1p-12f, sums[n] = -(1 + 0x1p-11f);
  add_products(sums, x, x);
  for (float sum : sums) {
    if (bits(sum) != 0) return 0;
  }
  return 1;
}

// Options like -ffast-math, the default of some compilers, drop NaN, infinities and the signs of zeros.
extern "C" int special_numbers() {
  volatile uint32_t pattern = 0x7fc00000u, infinite = 0x7f800000u, negative = 0x80000000u;
  const uint32_t nan_bits = pattern, infinity_bits = infinite, zero_bits = negative;
  float nan, infinity, zero, x[MOST], y[MOST], out[MOST];
  std::memcpy(&nan, &nan_bits, 4), std::memcpy(&infinity, &infinity_bits, 4), std::memcpy(&zero, &zero_bits, 4);
  for (int n = 0; n < MOST; ++n) x[n] = n % 2 ? nan : float(n), y[n] = float(n + n % 3 - 1);
  take_maximum(out, x, y);
  for (int n = 0; n < MOST; ++n) {
    if (n % 2 ? !is_nan(out[n]) : out[n] != (x[n] > y[n] ? x[n] : y[n])) return 0;
  }
  for (int n = 0; n < MOST; ++n) x[n] = n % 2 ? infinity : float(n);
  add_zero_times(out, x, zero);
  for (int n = 0; n < MOST; ++n) {
    if (n % 2 ? !is_nan(out[n]) : out[n] != 0) return 0;
  }
  for (int n = 0; n < MOST; ++n) x[n] = y[n] = out[n] = zero;  // -0 * -0 + -0 is 0, and 1 * -0 + -0 is -0
  add_products(out, x, y);
  for (float sum : out) {
    if (bits(sum) != 0) return 0;
  }
  for (int n = 0; n < MOST; ++n) x[n] = 1, out[n] = zero;
  add_products(out, x, y);
  for (float sum : out) {
    if (bits(sum) != zero_bits) return 0;
  }
  return 1;
}
