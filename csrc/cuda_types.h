// SPDX-License-Identifier: Apache-2.0
// Storage types of 16 and 8 bits and conversions between every pair of scalar types, by PTX's own instructions.
// Conversions round to nearest even and keep denormals; NaN stays NaN. Values of small floats are held in float.
// No CUDA header is needed: NVRTC brings what is used here.
#pragma once
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned uint32_t;
typedef unsigned long long uint64_t;
#define INT64_MIN (-9223372036854775807ll - 1)
#else
#include <stdint.h>
#endif
#define TILE_DEVICE __device__ __forceinline__
#pragma nv_diag_suppress 177, 550  // names that an author's kernel gives and does not use

namespace tile {

struct alignas(2) f16 { uint16_t bits; };   // IEEE binary16
struct alignas(2) bf16 { uint16_t bits; };  // the upper half of a float
struct e4m3 { uint8_t bits; };              // float8_e4m3fn: no infinities, S.1111.111 is NaN, largest 448
struct e5m2 { uint8_t bits; };              // float8_e5m2: infinities and NaN as in IEEE formats, largest 57344

template <class A, class B> inline constexpr bool same = false;
template <class A> inline constexpr bool same<A, A> = true;
template <class T> inline constexpr bool is_small = same<T, f16> || same<T, bf16> || same<T, e4m3> || same<T, e5m2>;
template <class T> inline constexpr bool is_native_float = same<T, float> || same<T, double>;

TILE_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
TILE_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }
TILE_DEVICE float float_from_bits(uint32_t bits, uint32_t mask, uint32_t flip) {  // two constants: else two instructions
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(bits), "r"(mask), "r"(flip));  // (a & b) ^ c
  return __uint_as_float(y);
}
// The bits of x as a To of the same size.
template <class To, class From> TILE_DEVICE To reinterpret(From x) {
  static_assert(sizeof(To) == sizeof(From));
  union { From from; To to; } both{x};
  return both.to;
}
TILE_DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
TILE_DEVICE float nan() { return __uint_as_float(0x7fffffffu); }

// ---- widening, which is exact ----------------------------------------------------------------------------------------------

TILE_DEVICE float widen(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
TILE_DEVICE float widen(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }
TILE_DEVICE float widen(e5m2 x) { return widen(f16{uint16_t(x.bits << 8)}); }  // the upper half of a binary16
TILE_DEVICE float widen(e4m3 x) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16_t(x.bits)));
  return widen(f16{uint16_t(pair)});
#else
  uint32_t a = x.bits & 0x7fu;
  float y = a < 8u ? float(a) * bits_float(0x3b000000u) : bits_float((a << 20) + (120u << 23));  // denormals: a * 2^-9
  y = a == 0x7fu ? bits_float(0x7fffffffu) : y;
  return bits_float(float_bits(y) | uint32_t(x.bits & 0x80u) << 24);
#endif
}

// Element i of a local array of even length: two share a register, and the upper one of them only needs a mask.
template <class T> TILE_DEVICE float widen(const T* p, int i) { return widen(p[i]); }
TILE_DEVICE float widen(const bf16* p, int i) {
  uint32_t pair = reinterpret_cast<const uint32_t*>(p)[i / 2];
  return bits_float(i % 2 ? pair & 0xffff0000u : pair << 16);
}

TILE_DEVICE float widen(const f16* p, int i) {
  uint32_t pair = reinterpret_cast<const uint32_t*>(p)[i / 2];
  float y;
  if (i % 2)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(y) : "r"(pair));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(y) : "r"(pair));
  return y;
}

#if __CUDA_ARCH__ >= 890
TILE_DEVICE float widen(const e4m3* p, int i) {  // one conversion for both elements of a pair
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(reinterpret_cast<const uint16_t*>(p)[i / 2]));
  return widen(f16{uint16_t(i % 2 ? pair >> 16 : pair)});
}
#endif

// ---- narrowing, to nearest even --------------------------------------------------------------------------------------------

// Chips without fp8 instructions: E exponent and M mantissa bits; `overflow` is the code of values that do not fit.
template <int E, int M, uint32_t overflow, uint32_t nan> TILE_DEVICE uint8_t encode(float x) {
  constexpr int bias = (1 << (E - 1)) - 1, shift = 23 - M;
  constexpr uint32_t rebias = uint32_t(127 - bias) << 23;
  constexpr uint32_t magic = uint32_t(127 + 24 - bias - M) << 23;  // a float whose ulp is our denormal unit
  uint32_t w = float_bits(x), a = w & 0x7fffffffu;
  uint32_t normal = (a - rebias + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1u)) >> shift;
  uint32_t denormal = float_bits(bits_float(a) + bits_float(magic)) - magic;
  uint32_t code = a < (uint32_t(128 - bias) << 23) ? denormal : normal;
  code = a >= rebias && normal > overflow ? overflow : code;
  code = a > 0x7f800000u ? nan : code;
  return uint8_t(code | ((w >> 24) & 0x80u));
}

// The code of `low` in the lower byte, of `high` in the upper one; values that do not fit become the largest number.
TILE_DEVICE uint16_t encode_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return uint16_t(encode<4, 3, 0x7e, 0x7f>(low) | encode<4, 3, 0x7e, 0x7f>(high) << 8);
#endif
}

TILE_DEVICE uint16_t encode_e5m2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  // From halfway between the largest number and the next power of two on, rounding gives infinity, not saturation.
  uint16_t low_over = fabsf(low) >= 61440.0f ? 0x007c : 0, high_over = fabsf(high) >= 61440.0f ? 0x7c00 : 0;
  pair = low_over ? uint16_t((pair & 0xff80) | low_over) : pair;
  return high_over ? uint16_t((pair & 0x80ff) | high_over) : pair;
#else
  return uint16_t(encode<5, 2, 0x7c, 0x7e>(low) | encode<5, 2, 0x7c, 0x7e>(high) << 8);
#endif
}

template <class To> TILE_DEVICE To narrow(float x);
template <> TILE_DEVICE f16 narrow<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> TILE_DEVICE bf16 narrow<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> TILE_DEVICE e4m3 narrow<e4m3>(float x) { return {uint8_t(encode_e4m3(x, 0.0f))}; }
template <> TILE_DEVICE e5m2 narrow<e5m2>(float x) { return {uint8_t(encode_e5m2(x, 0.0f))}; }

// Two neighbours at once, which costs as much as one: p[0] = a, p[1] = b; p is aligned to both together.
TILE_DEVICE void narrow_pair(f16* p, float a, float b) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*reinterpret_cast<uint32_t*>(p)) : "f"(b), "f"(a));
}
TILE_DEVICE void narrow_pair(bf16* p, float a, float b) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*reinterpret_cast<uint32_t*>(p)) : "f"(b), "f"(a));
}
TILE_DEVICE void narrow_pair(e4m3* p, float a, float b) { *reinterpret_cast<uint16_t*>(p) = encode_e4m3(a, b); }
TILE_DEVICE void narrow_pair(e5m2* p, float a, float b) { *reinterpret_cast<uint16_t*>(p) = encode_e5m2(a, b); }

// Two numbers of 16 bits in one register, the first in its lower half. An operation rounds each of both once. That is what
// `narrow` of the float operation gives: floats have the digits for it. Only a product below 2^-126 is then rounded twice.
template <class T> TILE_DEVICE uint32_t pair_of(T a, T b) { return a.bits | uint32_t(b.bits) << 16; }
template <class T> TILE_DEVICE uint32_t pair_of(T x) { return x.bits * 0x10001u; }
template <class T> TILE_DEVICE uint32_t pair_at(const T* p) { return *reinterpret_cast<const uint32_t*>(p); }  // of p[0], p[1]
template <class T> TILE_DEVICE void store_pair(T* p, uint32_t pair) { *reinterpret_cast<uint32_t*>(p) = pair; }

template <class T> TILE_DEVICE uint32_t pair_narrowed(float a, float b) {
  uint32_t y;
  narrow_pair(reinterpret_cast<T*>(&y), a, b);
  return y;
}

template <class T> TILE_DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  if constexpr (same<T, f16>) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// Plus -0, which keeps the sign of a zero. sm_80 has no other operation on pairs of bf16.
template <class T> TILE_DEVICE uint32_t pair_product(uint32_t a, uint32_t b) {
  uint32_t y;
  if constexpr (same<T, f16>) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  else y = pair_fma<T>(a, b, 0x80008000u);
  return y;
}

template <class T> TILE_DEVICE uint32_t pair_sum(uint32_t a, uint32_t b) {
  uint32_t y;
  if constexpr (same<T, f16>) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  else y = pair_fma<T>(a, 0x3f803f80u, b);
  return y;
}

template <class T> TILE_DEVICE uint32_t pair_difference(uint32_t a, uint32_t b) {
  uint32_t y;
  if constexpr (same<T, f16>) asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  else y = pair_fma<T>(b, 0xbf80bf80u, a);
  return y;
}

// Two numbers rounded to float16, and 0 for what is below 0. NaN is 0x7fff.
TILE_DEVICE void narrow_positive_pair(f16* p, float a, float b) {
  asm volatile("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(*reinterpret_cast<uint32_t*>(p)) : "f"(b), "f"(a));
}
TILE_DEVICE float positive_half(float x) {
  uint32_t half;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(half) : "f"(0.0f), "f"(x));
  return widen(f16{uint16_t(half)});
}
// Four numbers whose codes are pairs of float16 times 2^-24: each is its code, as 2^-24 is float16's least number.
// Volatile: conversions stay in front of a wait for products, and bytes are gathered behind it.
TILE_DEVICE void store_codes(e4m3* p, const f16* low, const f16* high) {
  asm volatile("prmt.b32 %0, %1, %2, 0x6420;"
               : "=r"(*reinterpret_cast<uint32_t*>(p))
               : "r"(*reinterpret_cast<const uint32_t*>(low)), "r"(*reinterpret_cast<const uint32_t*>(high)));
}
TILE_DEVICE float float8_of_code(float x) {
  uint32_t code;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(code) : "f"(0.0f), "f"(x));
  return widen(e4m3{uint8_t(code)});
}

// p[0] and p[1] become elements i and j of a local array of a multiple of four: one conversion for both, and one byte
// permutation for each four elements where j is not next to i.
TILE_DEVICE void widen_pair(f16* p, const e4m3* from, int i, int j) {
#if __CUDA_ARCH__ >= 890
  uint32_t word = from[i].bits | from[j].bits << 8;
  bool upper = false;
  if (j == i + 1 && i % 2 == 0) {
    word = reinterpret_cast<const uint32_t*>(from)[i / 4], upper = i % 4 == 2;
  } else if (j == i + 2 && i % 4 < 2) {
    word = __byte_perm(reinterpret_cast<const uint32_t*>(from)[i / 4], 0, 0x3120), upper = i % 2;
  }
  uint32_t& pair = *reinterpret_cast<uint32_t*>(p);
  if (upper)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(pair) : "r"(word));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(pair) : "r"(word));
#else
  narrow_pair(p, widen(from[i]), widen(from[j]));
#endif
}

// x rounded to the storage type T, still held in a float: the result of an operation in T.
template <class T> TILE_DEVICE float rounded(float x) { return widen(narrow<T>(x)); }
template <> TILE_DEVICE float rounded<bf16>(float x) {  // beside a zero: alone it is converted at a quarter of the speed
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x), "f"(0.0f));
  return bits_float(y);
}

// x limited to the numbers of T: what a conversion to it saturates to. NaN stays NaN.
template <class T> TILE_DEVICE float finite(float x) {
  static_assert(same<T, e5m2>);
  return x > 57344.0f ? 57344.0f : x < -57344.0f ? -57344.0f : x;
}

// x truncated to an integer. PTX takes the greatest or least value for what is too large or too small, and 0 for NaN, but
// not where either type has 64 bits. C++ leaves all of these undefined.
template <class To, class From> struct Truncated;
#define TILE_TRUNCATED(To, to, Held, held, From, from, of)      \
  template <> struct Truncated<To, From> {                      \
    static TILE_DEVICE To of_number(From x) {                   \
      Held y;                                                   \
      asm("cvt.rzi." to "." from " %0, %1;" : held(y) : of(x)); \
      return To(y);                                             \
    }                                                           \
  };
#define TILE_TRUNCATED_OF(From, from, of)                         \
  TILE_TRUNCATED(int8_t, "s8", int, "=r", From, from, of)         \
  TILE_TRUNCATED(int16_t, "s16", int16_t, "=h", From, from, of)   \
  TILE_TRUNCATED(int32_t, "s32", int, "=r", From, from, of)       \
  TILE_TRUNCATED(int64_t, "s64", int64_t, "=l", From, from, of)   \
  TILE_TRUNCATED(uint8_t, "u8", uint32_t, "=r", From, from, of)   \
  TILE_TRUNCATED(uint16_t, "u16", uint16_t, "=h", From, from, of) \
  TILE_TRUNCATED(uint32_t, "u32", uint32_t, "=r", From, from, of) \
  TILE_TRUNCATED(uint64_t, "u64", uint64_t, "=l", From, from, of)
TILE_TRUNCATED_OF(float, "f32", "f")
TILE_TRUNCATED_OF(double, "f64", "d")
#undef TILE_TRUNCATED_OF
#undef TILE_TRUNCATED
template <class To, class From> TILE_DEVICE To truncated(From x) {
  const To found = Truncated<To, From>::of_number(x);
  if constexpr (sizeof(To) == 8 || sizeof(From) == 8) return x == x ? found : To(0);
  else return found;
}

// x as a To. Doubles and integers reach small floats through float, as in torch.
template <class To, class From> TILE_DEVICE To convert(From x) {
  if constexpr (same<To, From>) return x;
  else if constexpr (is_small<From>) return convert<To>(widen(x));
  else if constexpr (is_small<To>) return narrow<To>(float(x));
  else if constexpr (same<To, bool>) return x != From(0);
  else if constexpr (is_native_float<From> && !is_native_float<To>) return truncated<To>(x);
  else return To(x);
}

// The type in which arithmetic on T is done: float for small floats, T itself otherwise.
template <class T, bool small = is_small<T>> struct Compute { using type = T; };
template <class T> struct Compute<T, true> { using type = float; };
template <class T> using compute = typename Compute<T>::type;

}  // namespace tile
