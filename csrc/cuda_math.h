// SPDX-License-Identifier: Apache-2.0
// Scalar math of the language on float and double; small floats are held in float. Results are within 2 ulp (sigmoid 4; erf, pow:
// see CUDA's tables) with denormals right, unless TILE_FAST_MATH is defined: then exp, exp2, log2, tanh and quotients are the chip's approximations
// and denormals become 0.
#pragma once
#include "cuda_types.h"
#include "wrapping.h"

namespace tile {

// Signs and roundings.
TILE_DEVICE float floor(float x) { return ::floorf(x); }
TILE_DEVICE float ceil(float x) { return ::ceilf(x); }
TILE_DEVICE float trunc(float x) { return ::truncf(x); }
TILE_DEVICE float round(float x) { return ::rintf(x); }  // halves to even
TILE_DEVICE double floor(double x) { return ::floor(x); }
TILE_DEVICE double ceil(double x) { return ::ceil(x); }
TILE_DEVICE double trunc(double x) { return ::trunc(x); }
TILE_DEVICE double round(double x) { return ::rint(x); }
TILE_DEVICE bool isnan(float x) { return x != x; }
TILE_DEVICE bool isnan(double x) { return x != x; }
TILE_DEVICE bool isinf(float x) { return (float_bits(x) & 0x7fffffffu) == 0x7f800000u; }
TILE_DEVICE bool isinf(double x) { return (__double_as_longlong(x) & 0x7fffffffffffffffll) == 0x7ff0000000000000ll; }
TILE_DEVICE bool isfinite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }
TILE_DEVICE bool isfinite(double x) { return (__double_as_longlong(x) & 0x7ff0000000000000ll) != 0x7ff0000000000000ll; }

// 2 to the power x, within 2 ulp.
TILE_DEVICE float exp2(float x) {
  float y;
#ifdef TILE_FAST_MATH
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
#else
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
#endif
  return y;
}

TILE_DEVICE float rsqrt(float x) { return ::rsqrtf(x); }
TILE_DEVICE float sqrt(float x) { return ::sqrtf(x); }
TILE_DEVICE double rsqrt(double x) { return ::rsqrt(x); }
TILE_DEVICE double sqrt(double x) { return ::sqrt(x); }
TILE_DEVICE double exp2(double x) { return ::exp2(x); }

TILE_DEVICE float tanh(float x) {
#ifdef TILE_FAST_MATH
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return ::tanhf(x);
#endif
}
TILE_DEVICE double tanh(double x) { return ::tanh(x); }

#ifdef TILE_FAST_MATH
TILE_DEVICE float exp(float x) { return exp2(x * 1.44269504089f); }
TILE_DEVICE float log2(float x) { return __log2f(x); }
TILE_DEVICE float log(float x) { return __logf(x); }
TILE_DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp(-x)); }
#else
TILE_DEVICE float exp(float x) { return ::expf(x); }
TILE_DEVICE float log2(float x) { return ::log2f(x); }
TILE_DEVICE float log(float x) { return ::logf(x); }
TILE_DEVICE float sigmoid(float x) {
  float e = ::expf(-::fabsf(x)), y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));  // of a number between 1 and 2: within 1 ulp
  return (x < 0.0f ? e : 1.0f) * y;
}
#endif
// For results of 16 bits: within 4 + |x| ulp, below 2^-126 0. A quarter of sigmoid's instructions.
TILE_DEVICE float quick_sigmoid(float x) {
  float e, y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.44269504089f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));
  return y;
}
// For results of 16 bits: within 3e-7 (Abramowitz and Stegun, 7.1.26). Half of erf's instructions, and none depends on x.
TILE_DEVICE float quick_erf(float x) {
  float a = ::fabsf(x), t, e;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(::fmaf(0.3275911f, a, 1.0f)));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a * a * -1.44269504089f));
  float p = ::fmaf(t, 1.061405429f, -1.453152027f);
  p = ::fmaf(t, p, 1.421413741f), p = ::fmaf(t, p, -0.284496736f), p = ::fmaf(t, p, 0.254829592f);
  return ::copysignf(::fmaf(-p * t, e, 1.0f), x);
}
// For caps: within 5e-7, where tanh.approx is within 5e-4. A third of tanhf's instructions, and no branch.
TILE_DEVICE float quick_tanh(float x) {
  float e, y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 2.88539008178f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));
  return ::fmaf(-2.0f, y, 1.0f);
}
TILE_DEVICE double exp(double x) { return ::exp(x); }
TILE_DEVICE double log2(double x) { return ::log2(x); }
TILE_DEVICE double log(double x) { return ::log(x); }
TILE_DEVICE double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }
TILE_DEVICE double quick_sigmoid(double x) { return sigmoid(x); }
TILE_DEVICE double quick_erf(double x) { return ::erf(x); }
TILE_DEVICE double quick_tanh(double x) { return ::tanh(x); }

// The rest is CUDA's own library, which NVRTC has built in.
#define TILE_UNARY(name)                                         \
  TILE_DEVICE float name(float x) { return ::name##f(x); }       \
  TILE_DEVICE double name(double x) { return ::name(x); }
#define TILE_BINARY(name)                                                    \
  TILE_DEVICE float name(float x, float y) { return ::name##f(x, y); }       \
  TILE_DEVICE double name(double x, double y) { return ::name(x, y); }
TILE_UNARY(log10) TILE_UNARY(log1p) TILE_UNARY(expm1) TILE_UNARY(sin) TILE_UNARY(cos) TILE_UNARY(tan) TILE_UNARY(asin)
TILE_UNARY(acos) TILE_UNARY(atan) TILE_UNARY(sinh) TILE_UNARY(cosh) TILE_UNARY(asinh) TILE_UNARY(acosh) TILE_UNARY(atanh)
TILE_UNARY(erf) TILE_UNARY(erfc)
TILE_BINARY(pow) TILE_BINARY(atan2) TILE_BINARY(fmod) TILE_BINARY(copysign) TILE_BINARY(hypot)
#undef TILE_UNARY
#undef TILE_BINARY
TILE_DEVICE float fma(float x, float y, float z) { return ::fmaf(x, y, z); }
TILE_DEVICE double fma(double x, double y, double z) { return ::fma(x, y, z); }

// Any type.
template <class T> inline constexpr bool is_signed = same<T, int8_t> || same<T, int16_t> || same<T, int32_t> || same<T, int64_t>;

template <class T> TILE_DEVICE T abs(T x) {
  if constexpr (same<T, float>) return ::fabsf(x);
  else if constexpr (same<T, double>) return ::fabs(x);
  else if constexpr (is_signed<T>) return x < T(0) ? wrapping_sub<T>(0, x) : x;
  else return x;
}

// A NaN on either side gives NaN.
template <class T> TILE_DEVICE T minimum(T a, T b) {
  if constexpr (same<T, float>) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  } else {
    return a < b || a != a ? a : b;
  }
}
template <class T> TILE_DEVICE T maximum(T a, T b) {
  if constexpr (same<T, float>) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  } else {
    return a > b || a != a ? a : b;
  }
}

// T.min and T.max: a NaN on either side gives NaN, and -0.0 is below 0.0 (minimum and maximum of IEEE 754-2019).
template <class T> TILE_DEVICE T min(T a, T b) {
  if constexpr (same<T, double>) {
    if (a == b) return __longlong_as_double(__double_as_longlong(a) | __double_as_longlong(b));
  }
  return minimum(a, b);
}
template <class T> TILE_DEVICE T max(T a, T b) {
  if constexpr (same<T, double>) {
    if (a == b) return __longlong_as_double(__double_as_longlong(a) & __double_as_longlong(b));
  }
  return maximum(a, b);
}

// A number if either is one.
template <class T> TILE_DEVICE T fmin(T a, T b) {
  if constexpr (same<T, float>) {
    float y;
    asm("min.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  } else {
    return a < b || b != b ? a : b;
  }
}
template <class T> TILE_DEVICE T fmax(T a, T b) {
  if constexpr (same<T, float>) {
    float y;
    asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  } else {
    return a > b || b != b ? a : b;
  }
}

// An integer and a literal of another width.
template <class A, class B> TILE_DEVICE auto fmin(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return fmin(static_cast<T>(a), static_cast<T>(b));
}
template <class A, class B> TILE_DEVICE auto fmax(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return fmax(static_cast<T>(a), static_cast<T>(b));
}
template <class A, class B> TILE_DEVICE auto minimum(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return minimum(static_cast<T>(a), static_cast<T>(b));
}
template <class A, class B> TILE_DEVICE auto maximum(A a, B b) -> decltype(a + b) {
  using T = decltype(a + b);
  return maximum(static_cast<T>(a), static_cast<T>(b));
}

// A divisor that no compiler takes for 0, by which C++ leaves a quotient undefined: 1 in the place of 0.
template <class T> TILE_DEVICE T divisor(T b) { return b == T(0) ? T(1) : b; }

// Quotient rounded down, and its remainder, which has the sign of b; a // 0 is a, and a % 0 is 0. Of floats as
// torch.floor_divide and torch.remainder: from the exact remainder, since a / b may round up to an integer.
template <class T> TILE_DEVICE T floordiv(T a, T b) {
  if constexpr (same<T, float> || same<T, double>) {
    T r = fmod(a, b), q = (a - r) / b;
    if (r != T(0) && (r < T(0)) != (b < T(0))) q -= T(1);
    T down = floor(q), nearest = q - down > T(0.5) ? down + T(1) : down;
    return b == T(0) ? a / b : q == T(0) ? copysign(T(0), a / b) : nearest;
  } else if constexpr (is_signed<T>) {
    const T d = divisor(b);
    if (d == T(-1)) return wrapping_sub<T>(0, a);  // the least number has no quotient
    return T(a / d - ((a % d != 0) & ((a < 0) != (d < 0))));
  } else {
    return T(a / divisor(b));
  }
}
template <class T> TILE_DEVICE T floormod(T a, T b) {
  if constexpr (same<T, float> || same<T, double>) {
    T r = fmod(a, b);
    return r != T(0) && (r < T(0)) != (b < T(0)) ? r + b : r;
  } else if constexpr (is_signed<T>) {
    const T d = divisor(b), r = d == T(-1) ? T(0) : T(a % d);
    return T(r + (((r != 0) & ((r < 0) != (d < 0))) ? d : T(0)));
  } else {
    return T(a % divisor(b));
  }
}

// x % N of 0 <= x < 2 * N.
template <int N> TILE_DEVICE int wrapped(int x) { return x < N ? x : x - N; }

}  // namespace tile
