// SPDX-License-Identifier: Apache-2.0
// Storage types of 16 and 8 bits and conversions between every pair of scalar types.
// Conversions are branch-free integer code on one lane, so compilers vectorise them inside `#pragma omp simd` loops.
// They equal torch's `.to` on every defined value: round to nearest even, denormals kept, NaN stays NaN.
#pragma once
#include <stdint.h>
#include <string.h>

namespace tile {

struct f16 { uint16_t bits; };   // IEEE binary16
struct bf16 { uint16_t bits; };  // the upper half of a float
struct e4m3 { uint8_t bits; };   // float8_e4m3fn: no infinities, S.1111.111 is NaN, largest 448
struct e5m2 { uint8_t bits; };   // float8_e5m2: infinities and NaN as in IEEE formats, largest 57344

constexpr float kInfinity = __builtin_inff();
constexpr float kNaN = __builtin_nanf("");

template <class A, class B> inline constexpr bool same = false;
template <class A> inline constexpr bool same<A, A> = true;
template <class T> inline constexpr bool is_small = same<T, f16> || same<T, bf16> || same<T, e4m3> || same<T, e5m2>;
template <class T> inline constexpr bool is_native_float = same<T, float> || same<T, double>;
template <class T> inline constexpr bool is_float = is_native_float<T> || is_small<T>;

template <bool> struct Require {};
template <> struct Require<true> { using type = int; };
template <bool condition> using require = typename Require<condition>::type;

inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
// The bits of x as a To of the same size.
template <class To, class From> inline To reinterpret(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}
inline float float_from_bits(int32_t bits, int32_t mask, int32_t flip) { return bits_float(uint32_t((bits & mask) ^ flip)); }
inline float nibble(int32_t word, int byte, int upper) { return float(uint32_t(word) >> (8 * byte + 4 * upper) & 15); }
inline float nibble_in_place(int32_t word, int place, int half) {
  return float(uint32_t(word) >> (16 * half + 4 * place) & 15) * (place % 2 ? 0x1p-20f : 0x1p-24f);
}
template <class... Bits> inline float table_nibble(int32_t word, int byte, int upper, Bits... bits) {
  const int32_t table[16] = {bits...};
  return bits_float(uint32_t(table[uint32_t(word) >> (8 * byte + 4 * upper) & 15]));
}
inline int table_place(int32_t word, int byte, int lane, int part) {
  return int(uint32_t(word) >> 8 * byte & 255) * 64 + 2 * lane + part;
}

// A small format has E exponent and M mantissa bits. With `infinities` the top exponent is IEEE's. Without, the format
// is "fn": only the all-ones code is NaN, and larger values become the largest number (as on GPUs and in newer torch;
// 2.11 gives NaN).
template <int E, int M, bool infinities> struct Format {
  static constexpr int bias = (1 << (E - 1)) - 1;
  static constexpr int shift = 23 - M;                        // from a float's mantissa to this one's
  static constexpr uint32_t rebias = uint32_t(127 - bias) << 23;
  static constexpr uint32_t sign = 1u << (E + M);
  static constexpr uint32_t top = infinities ? ((1u << E) - 1) << M : sign - 1;  // code of infinity, or of the only NaN
  static constexpr uint32_t overflow = infinities ? top : top - 1;
  static constexpr uint32_t limit = rebias + (overflow << shift);  // floats from here on (as bits) become `overflow`
  static constexpr uint32_t nan = infinities ? top | (1u << (M - 1)) : top;
  static constexpr uint32_t smallest = uint32_t(128 - bias) << 23;                 // least normal magnitude, as bits
  static constexpr uint32_t magic = uint32_t(127 + 24 - bias - M) << 23;           // a float whose ulp is our denormal unit
  static constexpr uint32_t unit = uint32_t(127 + 1 - bias - M) << 23;             // that unit

  static uint32_t encode(float x) {
    uint32_t w = float_bits(x), a = w & 0x7fffffffu;
    uint32_t normal = (a - rebias + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1u)) >> shift;
    uint32_t denormal = float_bits(bits_float(a) + bits_float(magic)) - magic;  // the addition rounds to the unit
    uint32_t code = a < smallest ? denormal : normal;
    code = a >= limit ? overflow : code;
    code = a > 0x7f800000u ? nan : code;
    return code | ((w >> (31 - E - M)) & sign);
  }

  // decode(encode(x)), in fewer steps.
  static float round(float x) {
    uint32_t w = float_bits(x), a = w & 0x7fffffffu;
    uint32_t normal = (a + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1u)) & (~0u << shift);
    uint32_t denormal = float_bits((bits_float(a) + bits_float(magic)) - bits_float(magic));
    uint32_t r = a < smallest ? denormal : normal;
    r = r >= limit ? (infinities ? 0x7f800000u : limit) : r;
    return bits_float((a > 0x7f800000u ? a : r) | (w & 0x80000000u));
  }

  static float decode(uint32_t code) {
    uint32_t a = code & (sign - 1);
    uint32_t normal = (a << shift) + rebias;
    uint32_t denormal = float_bits(float(int32_t(a)) * bits_float(unit));  // exact, and no float denormal is touched
    uint32_t w = a < (1u << M) ? denormal : normal;
    w = a >= top ? (a << shift) | 0x7f800000u : w;
    return bits_float(w | ((code & sign) << (31 - E - M)));
  }
};

using FormatF16 = Format<5, 10, true>;
using FormatE4M3 = Format<4, 3, false>;
using FormatE5M2 = Format<5, 2, true>;

inline float widen(f16 x) { return FormatF16::decode(x.bits); }
inline float widen(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }
inline float widen(e4m3 x) { return FormatE4M3::decode(x.bits); }
inline float widen(e5m2 x) { return FormatE5M2::decode(x.bits); }

template <class To> inline To narrow(float x);
template <> inline f16 narrow<f16>(float x) { return {uint16_t(FormatF16::encode(x))}; }
template <> inline e4m3 narrow<e4m3>(float x) { return {uint8_t(FormatE4M3::encode(x))}; }
template <> inline e5m2 narrow<e5m2>(float x) { return {uint8_t(FormatE5M2::encode(x))}; }
inline float positive_half(float x) { return x < 0 ? 0.0f : widen(narrow<f16>(x)); }
inline float float8_of_code(float x) {
  if (x != x) return x;
  return widen(e4m3{uint8_t(x > 0 ? FormatF16::encode(x) & 127 : 0)});
}
template <> inline bf16 narrow<bf16>(float x) {
  uint32_t w = float_bits(x);
  uint32_t rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
  return {uint16_t((w & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

// The same bits; compilers do not vectorise loops that copy structures.
template <class T> inline T copied(T x) { return {x.bits}; }

// x rounded to the storage type T, still held in a float: the result of an operation in T.
template <class T> inline float rounded(float x) {
  if constexpr (same<T, f16>) return FormatF16::round(x);
  else if constexpr (same<T, e4m3>) return FormatE4M3::round(x);
  else if constexpr (same<T, e5m2>) return FormatE5M2::round(x);
  else return widen(narrow<T>(x));
}

// x limited to the numbers of T: what a conversion to it saturates to. NaN stays NaN.
template <class T> inline float finite(float x) {
  static_assert(same<T, e5m2>);
  return x > 57344.0f ? 57344.0f : x < -57344.0f ? -57344.0f : x;
}

// x truncated to an integer. What is too large or too small becomes the greatest or least value, NaN 0: C++ leaves them
// undefined.
template <class To, class From> inline To truncated(From x) {
  constexpr int bits = 8 * sizeof(To);
  constexpr bool is_signed = To(-1) < To(0);
  constexpr uint64_t top = ~uint64_t(0) >> (64 - bits + is_signed);
  constexpr To high = To(top), low = is_signed ? To(~top) : To(0);
  if constexpr (bits <= (sizeof(From) == 8 ? 53 : 24)) {  // both are exact as floats
    From limited = x < From(low) ? From(low) : x;
    limited = limited > From(high) ? From(high) : limited;
    limited = limited == limited ? limited : From(0);
    if constexpr (bits < 32) return To(int32_t(limited));
    else return To(limited);
  } else {
    constexpr From beyond = From(top / 2 + 1) * From(2);  // a power of two
    const bool fits = x >= From(low) && x < beyond;
    const To found = To(fits ? x : From(0));
    return x >= beyond ? high : x < From(low) ? low : found;
  }
}

// x as a To. Doubles and integers reach small floats through float, as in torch.
template <class To, class From> inline To convert(From x) {
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

// The value below (or above) which no T lies: an infinity where T has one.
template <class T> inline T lowest() {
  if constexpr (is_native_float<T>) return T(-kInfinity);
  else if constexpr (same<T, e4m3>) return {0xfe};
  else if constexpr (is_small<T>) return narrow<T>(-kInfinity);
  else if constexpr (T(-1) < T(0)) return T(uint64_t(1) << (8 * sizeof(T) - 1));
  else return T(0);
}

template <class T> inline T highest() {
  if constexpr (is_native_float<T>) return T(kInfinity);
  else if constexpr (same<T, e4m3>) return {0x7e};
  else if constexpr (is_small<T>) return narrow<T>(kInfinity);
  else if constexpr (same<T, bool>) return true;
  else if constexpr (T(-1) < T(0)) return T((uint64_t(1) << (8 * sizeof(T) - 1)) - 1);
  else return T(~T(0));
}

}  // namespace tile
