// SPDX-License-Identifier: Apache-2.0
// Scalar math of the language. The float versions of exp, exp2, log, log2, tanh, erf, sigmoid and the roundings have no branches and
// no calls, so they vectorise inside `#pragma omp simd` loops without -ffast-math and without a vector math library; errors are
// below 2 ulp (erf, tanh: 3 ulp), and infinities, NaN, overflow and denormal results are right. The rest, and double, go to libm.
// Small floats are computed in float and rounded.
//
// Polynomials are minimax fits by the Remez exchange in 40-digit arithmetic, weighted for the relative error of the function's
// result, coefficients then rounded to float; the fitted expression and its error stand at each one.
#pragma once
#include "cpu_ieee.h"
#include "cpu_random.h"
#include "cpu_types.h"

namespace tile {

// ---- roundings and signs ---------------------------------------------------------------------------------------------------

inline float floor(float x) { return __builtin_floorf(x); }
inline float ceil(float x) { return __builtin_ceilf(x); }
inline float trunc(float x) { return __builtin_truncf(x); }
inline float round(float x) { return __builtin_rintf(x); }  // halves to even
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline double floor(double x) { return __builtin_floor(x); }
inline double ceil(double x) { return __builtin_ceil(x); }
inline double trunc(double x) { return __builtin_trunc(x); }
inline double round(double x) { return __builtin_rint(x); }
inline double sqrt(double x) { return __builtin_sqrt(x); }
inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }

inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) == kInfinity; }
inline bool isinf(double x) { return __builtin_fabs(x) == double(kInfinity); }
inline bool isfinite(float x) { return __builtin_fabsf(x) < kInfinity; }
inline bool isfinite(double x) { return __builtin_fabs(x) < double(kInfinity); }

// a * b + c, rounded once where the machine has an instruction for it.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// ---- exponentials ----------------------------------------------------------------------------------------------------------

// p * 2^n for integral -252 <= n <= 254: in two factors, so that a denormal result is rounded once.
inline float scale_by_power(float p, int32_t n) {
  int32_t half = n >> 1;
  return p * bits_float(uint32_t(half + 127) << 23) * bits_float(uint32_t(n - half + 127) << 23);
}

// Adding it moves the nearest integer (halves to even) of a float below 2^22 into the low mantissa bits.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
inline int32_t rounded_int(float shifted) { return int32_t(float_bits(shifted)) - 0x4b400000; }

inline float exp2(float x) {
  x = x > 129.0f ? 129.0f : x;  // beyond: infinity, and 0
  x = x < -151.0f ? -151.0f : x;
  float shifted = x + kRounder;
  float f = x - (shifted - kRounder);
  // (2^f - 1) / f on |f| <= 1/2, error 2.0e-9
  float p = 1.5353341587e-4f;
  p = fused(p, f, 1.3398900628e-3f);
  p = fused(p, f, 9.6184378490e-3f);
  p = fused(p, f, 5.5503323674e-2f);
  p = fused(p, f, 2.4022647738e-1f);
  p = fused(p, f, 6.9314718246e-1f);
  return scale_by_power(fused(p, f, 1.0f), rounded_int(shifted));
}

inline float exp(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -105.0f ? -105.0f : x;
  float shifted = fused(x, 1.44269504089f, kRounder);
  float n = shifted - kRounder;
  float r = fused(n, -0.693359375f, x);  // ln 2 in two parts, the first short enough for an exact product
  r = fused(n, 2.12194440055e-4f, r);
  // (e^r - 1 - r) / r^2 on |r| <= ln(2)/2, error 3.1e-9
  float p = 1.3814560370e-3f;
  p = fused(p, r, 8.3687352017e-3f);
  p = fused(p, r, 4.1668388993e-2f);
  p = fused(p, r, 1.6666521132e-1f);
  p = fused(p, r, 4.9999994040e-1f);
  return scale_by_power(fused(p, r * r, r) + 1.0f, rounded_int(shifted));
}

inline float sigmoid(float x) {
  float e = exp(-__builtin_fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

inline float tanh(float x) {
  float a = __builtin_fabsf(x);
  // (tanh x - x) / x^3 in x^2 on |x| <= 5/8, error 4.4e-9
  float t = x * x;
  float p = -5.7045309804e-3f;
  p = fused(p, t, 2.0638694987e-2f);
  p = fused(p, t, -5.3739599884e-2f);
  p = fused(p, t, 1.3331441581e-1f);
  p = fused(p, t, -3.3333280683e-1f);
  float near = fused(p, t * a, a);
  float clipped = a > 10.0f ? 10.0f : a;  // the result is 1 from 9.02 on; NaN passes
  float far = 1.0f - 2.0f / (exp(2.0f * clipped) + 1.0f);
  return __builtin_copysignf(a < 0.625f ? near : far, x);
}

inline float erf(float x) {
  float a = __builtin_fabsf(x);
  // erf(x) / x - 1 in x^2 on |x| <= 0.96, error 7e-10
  float t = x * x;
  float p = 8.1190519268e-5f;
  p = fused(p, t, -8.0809748033e-4f);
  p = fused(p, t, 5.1953727379e-3f);
  p = fused(p, t, -2.6857022196e-2f);
  p = fused(p, t, 1.1283650994e-1f);
  p = fused(p, t, -3.7612631917e-1f);
  p = fused(p, t, 1.2837922573e-1f);
  float near = fused(p, a, a);
  // log2(erfc(a)) on 0.95 <= a <= 4, error of erf 1.3e-9
  float b = a > 4.0f ? 4.0f : a;
  float q = 2.7761046658e-4f;
  q = fused(q, b, -4.3403864838e-3f);
  q = fused(q, b, 3.1865671277e-2f);
  q = fused(q, b, -1.4952126145e-1f);
  q = fused(q, b, -9.1974276304e-1f);
  q = fused(q, b, -1.6266025305f);
  q = fused(q, b, -3.5306368949e-4f);
  float far = 1.0f - exp2(q);
  return __builtin_copysignf(a < 0.96f ? near : far, x);
}

// ---- logarithms ------------------------------------------------------------------------------------------------------------

struct Split { float exponent, fraction; };

// Positive x (denormals too) as 2^exponent * (1 + fraction), sqrt(1/2) <= 1 + fraction < sqrt(2).
inline Split split_float(float x) {
  bool tiny = x < 1.17549435e-38f;
  uint32_t w = float_bits(tiny ? x * 8388608.0f : x) - 0x3f3504f3u;
  float exponent = float(int32_t(w) >> 23) - (tiny ? 23.0f : 0.0f);
  return {exponent, bits_float((w & 0x7fffffu) + 0x3f3504f3u) - 1.0f};
}

// (log(1 + f) - f + f^2/2) / f^3 on the interval above, error 7.5e-10 of log(1 + f).
inline float log_tail(float f) {
  float p = 6.7477419972e-2f;
  p = fused(p, f, -1.1677518487e-1f);
  p = fused(p, f, 1.1888693273e-1f);
  p = fused(p, f, -1.2405339628e-1f);
  p = fused(p, f, 1.4219453931e-1f);
  p = fused(p, f, -1.6668005288e-1f);
  p = fused(p, f, 2.0002123714e-1f);
  p = fused(p, f, -2.5000008941e-1f);
  return fused(p, f, 3.3333313465e-1f);
}

// A logarithm's value at the edges: -inf at 0, NaN below, and infinity and NaN as they are.
inline float log_edges(float x, float y) {
  y = x > 0.0f ? y : (x == 0.0f ? -kInfinity : kNaN);
  return x < kInfinity || x != x ? y : x;
}

inline float log(float x) {
  Split s = split_float(x);
  float f = s.fraction, square = f * f;
  float y = fused(log_tail(f), square * f, s.exponent * -2.12194440055e-4f);
  y = fused(-0.5f, square, y);
  return log_edges(x, fused(s.exponent, 0.693359375f, y + f));
}

inline float log2(float x) {
  Split s = split_float(x);
  float f = s.fraction, square = f * f;
  float rest = fused(-0.5f, square, log_tail(f) * (square * f));
  // log2(e) = 1.4375 + 0.0051950408889634
  float y = fused(rest, 0.0051950408889634f, f * 0.0051950408889634f);
  y = fused(rest, 1.4375f, y);
  return log_edges(x, fused(f, 1.4375f, y) + s.exponent);
}

// ---- the rest of the language, by libm -------------------------------------------------------------------------------------

#define TILE_LIBM(name) inline float name(float x) { return __builtin_##name##f(x); }
#define TILE_LIBM_DOUBLE(name) inline double name(double x) { return __builtin_##name(x); }
#define TILE_LIBM_BINARY(name)                                                  \
  inline float name(float x, float y) { return __builtin_##name##f(x, y); }     \
  inline double name(double x, double y) { return __builtin_##name(x, y); }
#define TILE_EACH_LIBM(f) \
  f(log10) f(log1p) f(expm1) f(sin) f(cos) f(tan) f(asin) f(acos) f(atan) f(sinh) f(cosh) f(asinh) f(acosh) f(atanh) f(erfc)
#define TILE_EACH_OWN(f) f(exp) f(exp2) f(log) f(log2) f(tanh) f(erf)
#define TILE_EACH_BINARY(f) f(pow) f(atan2) f(fmod) f(copysign) f(hypot)

TILE_EACH_LIBM(TILE_LIBM)
TILE_EACH_LIBM(TILE_LIBM_DOUBLE)
TILE_EACH_OWN(TILE_LIBM_DOUBLE)
TILE_EACH_BINARY(TILE_LIBM_BINARY)
inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }

#define TILE_SMALL(name) \
  template <class T, require<is_small<T>> = 0> inline T name(T x) { return narrow<T>(name(widen(x))); }
#define TILE_SMALL_TEST(name) \
  template <class T, require<is_small<T>> = 0> inline bool name(T x) { return name(widen(x)); }
#define TILE_SMALL_BINARY(name) \
  template <class T, require<is_small<T>> = 0> inline T name(T x, T y) { return narrow<T>(name(widen(x), widen(y))); }

TILE_EACH_LIBM(TILE_SMALL)
TILE_EACH_OWN(TILE_SMALL)
TILE_EACH_BINARY(TILE_SMALL_BINARY)
TILE_SMALL(floor) TILE_SMALL(ceil) TILE_SMALL(trunc) TILE_SMALL(round) TILE_SMALL(sqrt) TILE_SMALL(rsqrt) TILE_SMALL(sigmoid)
TILE_SMALL_TEST(isnan) TILE_SMALL_TEST(isinf) TILE_SMALL_TEST(isfinite)
template <class T, require<is_small<T>> = 0> inline T fma(T x, T y, T z) { return narrow<T>(fma(widen(x), widen(y), widen(z))); }

#undef TILE_LIBM
#undef TILE_LIBM_DOUBLE
#undef TILE_LIBM_BINARY
#undef TILE_EACH_LIBM
#undef TILE_EACH_OWN
#undef TILE_EACH_BINARY
#undef TILE_SMALL
#undef TILE_SMALL_TEST
#undef TILE_SMALL_BINARY

// ---- any type --------------------------------------------------------------------------------------------------------------

template <class T> inline T abs(T x) {
  if constexpr (same<T, float>) return __builtin_fabsf(x);
  else if constexpr (same<T, double>) return __builtin_fabs(x);
  else if constexpr (is_small<T>) return narrow<T>(__builtin_fabsf(widen(x)));
  else return x < T(0) ? T(uint64_t(0) - uint64_t(x)) : x;
}

// T.min and T.max: a NaN on either side gives NaN, and -0.0 is below 0.0 (minimum and maximum of IEEE 754-2019).
// The sum of two zeros is the greater one. Compilers vectorise these ternaries.
template <class T> inline T max(T a, T b) {
  if constexpr (is_small<T>) return narrow<T>(max(widen(a), widen(b)));
  else if constexpr (is_native_float<T>) return (a == T(0)) & (b == T(0)) ? a + b : ((a > b) | (a != a)) ? a : b;
  else return a > b ? a : b;
}

template <class T> inline T min(T a, T b) {
  if constexpr (is_small<T>) return narrow<T>(min(widen(a), widen(b)));
  else if constexpr (is_native_float<T>) return (a == T(0)) & (b == T(0)) ? -(-a - b) : ((a < b) | (a != a)) ? a : b;
  else return a < b ? a : b;
}

// A NaN on either side gives NaN.
template <class T> inline T minimum(T a, T b) {
  if constexpr (is_small<T>) return narrow<T>(minimum(widen(a), widen(b)));
  else return ((a < b) | (a != a)) ? a : b;
}

template <class T> inline T maximum(T a, T b) {
  if constexpr (is_small<T>) return narrow<T>(maximum(widen(a), widen(b)));
  else return ((a > b) | (a != a)) ? a : b;
}

// A number if either is one. Not C's function, which no compiler vectorises.
template <class T> inline T fmin(T a, T b) {
  if constexpr (is_small<T>) return narrow<T>(fmin(widen(a), widen(b)));
  else return ((a < b) | (b != b)) ? a : b;
}

template <class T> inline T fmax(T a, T b) {
  if constexpr (is_small<T>) return narrow<T>(fmax(widen(a), widen(b)));
  else return ((a > b) | (b != b)) ? a : b;
}

// An integer and a literal of another width.
template <class A, class B> inline auto fmin(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return fmin(static_cast<T>(a), static_cast<T>(b));
}
template <class A, class B> inline auto fmax(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return fmax(static_cast<T>(a), static_cast<T>(b));
}
template <class A, class B> inline auto minimum(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return minimum(static_cast<T>(a), static_cast<T>(b));
}
template <class A, class B> inline auto maximum(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return maximum(static_cast<T>(a), static_cast<T>(b));
}

// A divisor on which no machine stops: 1 instead of 0, and instead of -1, whose quotient is the wrapped negative.
// Ragged tiles are padded with 0, and unused lanes are divided as well.
template <class T> inline T divisor(T b) {
  if constexpr (T(-1) < T(0)) return ((b == T(0)) | (b == T(-1))) ? T(1) : b;
  else return b == T(0) ? T(1) : b;
}
template <class T> inline T negative(T a) { return T(uint64_t(0) - uint64_t(a)); }

// Quotient rounded down; a // 0 is a, as the simulators have it, and the least number over -1 is itself.
// Of floats as torch.floor_divide: from the exact remainder, since a / b may round up to an integer.
template <class T> inline T floordiv(T a, T b) {
  if constexpr (is_native_float<T>) {
    T r = fmod(a, b), q = (a - r) / b;
    if (r != T(0) && (r < T(0)) != (b < T(0))) q -= T(1);
    T down = floor(q), nearest = q - down > T(0.5) ? down + T(1) : down;
    return b == T(0) ? a / b : q == T(0) ? copysign(T(0), a / b) : nearest;
  } else if constexpr (T(-1) < T(0)) {
    T d = divisor(b), q = T(a / d), r = T(a % d);
    return b == T(-1) ? negative(a) : T(q - ((r != 0) & ((a < 0) != (b < 0))));
  } else {
    return T(a / divisor(b));
  }
}

// a - floordiv(a, b) * b: has the sign of b; a % 0 is 0. Of floats as torch.remainder.
template <class T> inline T floormod(T a, T b) {
  if constexpr (is_native_float<T>) {
    T r = fmod(a, b);
    return r != T(0) && (r < T(0)) != (b < T(0)) ? r + b : r;
  } else if constexpr (T(-1) < T(0)) {
    T r = T(a % divisor(b));
    return T(r + (((r != 0) & ((r < 0) != (b < 0))) ? b : T(0)));
  } else {
    return T(a % divisor(b));
  }
}

// Quotient rounded up, a >= 0, b > 0.
template <class T> inline T ceildiv(T a, T b) { return T((a + b - 1) / b); }

}  // namespace tile
