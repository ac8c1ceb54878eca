// SPDX-License-Identifier: Apache-2.0
// Arithmetic rounded in a direction: 0 to nearest even, 1 to zero, 2 up, 3 down. That of float is computed in double. An
// inexact double is made odd, so that rounding it again is right. That of double sets the processor's own mode.
#pragma once
#include <cfenv>
#include "cpu_types.h"

namespace tile {

template <int mode> inline float directed(double exact) {
  float near = float(exact);
  if (mode == 0 || !(exact == exact)) return near;
  uint32_t bits = float_bits(near);
  bool below = bits >> 31;
  double found = double(near);
  if (mode == 1) return __builtin_fabs(found) > __builtin_fabs(exact) ? bits_float(bits - 1) : near;
  if (mode == 2) return found < exact ? bits_float(below ? bits - 1 : bits + 1) : near;
  return found > exact ? bits_float(below ? bits + 1 : bits - 1) : near;
}

// a + b, where a may be a product: -0 if it is 0 and rounded down, but for 0 + 0.
template <int mode> inline float directed_sum(double a, double b) {
  double total = a + b, shifted = total - a;
  double rest = (a - (total - shifted)) + (b - shifted);
  if (mode == 3 && total == 0 && (a != 0 || __builtin_signbit(a) || __builtin_signbit(b))) return -0.0f;
  int64_t bits;
  __builtin_memcpy(&bits, &total, 8);
  if (rest != 0 && rest == rest && total - total == 0 && !(bits & 1)) bits += (rest > 0) == (total > 0) ? 1 : -1;
  __builtin_memcpy(&total, &bits, 8);
  return directed<mode>(total);
}

template <int mode> inline float ieee_add(float a, float b) { return directed_sum<mode>(a, b); }
template <int mode> inline float ieee_sub(float a, float b) { return directed_sum<mode>(a, -double(b)); }
template <int mode> inline float ieee_mul(float a, float b) { return directed<mode>(double(a) * double(b)); }
template <int mode> inline float ieee_fmaf(float a, float b, float c) { return directed_sum<mode>(double(a) * double(b), c); }
template <int mode> inline float ieee_frcp(float a) { return directed<mode>(1.0 / double(a)); }
template <int mode> inline float ieee_fsqrt(float a) { return directed<mode>(__builtin_sqrt(double(a))); }
template <int mode> inline float ieee_frsqrt(float a) { return directed<mode>(1.0 / __builtin_sqrt(double(a))); }
template <int mode> inline float ieee_fdiv(float a, float b) { return directed<mode>(double(a) / double(b)); }

// f(a, b, c) of double. Operands and result are volatile, so that the operation stays between the changes of the mode.
template <int mode, typename F> inline double directed_double(F f, double a, double b = 0, double c = 0) {
  if (mode == 0) return f(a, b, c);
  const int modes[4] = {FE_TONEAREST, FE_TOWARDZERO, FE_UPWARD, FE_DOWNWARD};
  int before = std::fegetround();
  std::fesetround(modes[mode]);
  volatile double x = a, y = b, z = c;
  volatile double result = f(x, y, z);
  std::fesetround(before);
  return result;
}

#define TILE_IEEE(name, parameters, value, ...) \
  template <int mode> inline double name parameters { \
    return directed_double<mode>([](double a, double b, double c) { (void)b, (void)c; return value; }, __VA_ARGS__); \
  }
TILE_IEEE(ieee_add, (double a, double b), a + b, a, b)
TILE_IEEE(ieee_sub, (double a, double b), a - b, a, b)
TILE_IEEE(ieee_mul, (double a, double b), a * b, a, b)
TILE_IEEE(ieee_fmaf, (double a, double b, double c), __builtin_fma(a, b, c), a, b, c)
TILE_IEEE(ieee_frcp, (double a), 1.0 / a, a)
TILE_IEEE(ieee_fsqrt, (double a), __builtin_sqrt(a), a)
TILE_IEEE(ieee_fdiv, (double a, double b), a / b, a, b)
#undef TILE_IEEE
template <int mode> inline double ieee_frsqrt(double a) { return 1.0 / __builtin_sqrt(a); }

}  // namespace tile
