// SPDX-License-Identifier: Apache-2.0
// Numbers of a few bits out of words, one or two at a time. Two neighbours of 4 bits are one byte. It is put into both
// halves of a register, so that each half holds one of them in the mantissa of a power of two. That power is then
// subtracted.
#pragma once
#include "cuda_types.h"

namespace tile {

TILE_DEVICE float nibble(uint32_t word, int byte, int upper) { return float(word >> (8 * byte + 4 * upper) & 15); }

TILE_DEVICE float nibble_in_place(uint32_t word, int place, int half) {
  return float(word >> (16 * half + 4 * place) & 15) * (place % 2 ? 0x1p-20f : 0x1p-24f);
}

// The float whose bits have that number among 16.
template <class... Bits> TILE_DEVICE float table_nibble(uint32_t word, int byte, int upper, Bits... bits) {
  const int table[16] = {int(bits)...};  // -2^31 is written as a long
  const uint32_t code = word >> (8 * byte + 4 * upper);
  int eight[8], four[4], two[2];  // by selections: an array that is indexed would lie in memory
  #pragma unroll
  for (int i = 0; i < 8; ++i) eight[i] = code & 1 ? table[2 * i + 1] : table[2 * i];
  #pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = code & 2 ? eight[2 * i + 1] : eight[2 * i];
  #pragma unroll
  for (int i = 0; i < 2; ++i) two[i] = code & 4 ? four[2 * i + 1] : four[2 * i];
  return __int_as_float(code & 8 ? two[1] : two[0]);
}

TILE_DEVICE uint32_t masked_with(uint32_t x, uint32_t mask, uint32_t with) {  // of two constants: else two instructions
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(with));  // (a & b) ^ c
  return y;
}

TILE_DEVICE uint32_t times_4097(uint32_t x) {  // and more in the highest bits, or it would be a shift and an addition
  uint32_t y;
  asm("mad.lo.u32 %0, %1, 4097, 0x10000000;" : "=r"(y) : "r"(x));
  return y;
}

// Both numbers of a byte, with the bits of `flips` turned over in it, each less `surplus`, exactly. The one of the upper
// bits comes first if `upper_first`. The mask's instruction turns bits over at no cost. `single`: of a word's bytes a thread
// takes this one alone.
template <class T, int surplus, bool upper_first, int flips, bool single> TILE_DEVICE uint32_t nibble_pair(uint32_t word, int byte) {
  constexpr uint32_t lower = flips & 15, upper = flips >> 4;
  uint32_t y;
  if constexpr (same<T, f16>) {  // of 1024, and of 64 with the upper bits in place
    constexpr uint32_t one = 0xe400 + surplus, other = 0xd400 + 16 * surplus;  // -(1024 + surplus), -(64 + surplus)
    constexpr uint32_t mask = upper_first ? 0x000f00f0 : 0x00f0000f, low = 0x6400 ^ lower, high = 0x5400 ^ upper << 4;
    y = masked_with(__byte_perm(word, 0, byte * 0x101), mask, upper_first ? low << 16 | high : high << 16 | low);
    return pair_sum<T>(y, upper_first ? one << 16 | other : other << 16 | one);
  } else {  // of 128, whose mantissa has no room for the upper bits in place
    constexpr uint32_t less = 0xc300 + surplus, low = 0x4300 ^ lower, high = 0x4300 ^ upper;  // -(128 + surplus)
    constexpr uint32_t with = upper_first ? low << 16 | high : high << 16 | low;
    if constexpr (single && !upper_first) {  // a multiplication: permutations and shifts share units of half the rate
      y = times_4097(__byte_perm(word, 0, 0x4440 + byte));
    } else {  // one shift for all bytes of a word
      y = __byte_perm(word, word >> 4, byte * 0x101 + (upper_first ? 0x004 : 0x400));
    }
    y = masked_with(y, 0x000f000f, with);
    return pair_sum<T>(y, less << 16 | less);
  }
}

// Two halves whose lowest bits are field `place` of both halves of a word, as they lie in a byte: numbers below the least
// normal one. So no exponent is set and none subtracted. Both fields of a byte share a shift, and two bytes need none.
template <int flips> TILE_DEVICE uint32_t pair_in_place(uint32_t word, int place) {
  if constexpr (flips != 0) asm("xor.b32 %0, %0, %1;" : "+r"(word) : "n"(flips * 0x01010101u));  // once, not for each field
  return (place > 1 ? word >> 8 : word) & (place % 2 ? 0x00f000f0 : 0x000f000f);
}

TILE_DEVICE uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t select) {  // of eight, four by number
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(select));
  return y;
}

// Both numbers of a byte by a table of 16: l0..l3 are the lower bytes of its numbers, h0..h3 the upper ones. Four codes are
// looked up at once, from the first eight numbers and from the last; neighbouring bytes share what is common to both.
template <class T, bool upper_first, uint32_t l0, uint32_t l1, uint32_t l2, uint32_t l3, uint32_t h0, uint32_t h1, uint32_t h2, uint32_t h3>
TILE_DEVICE uint32_t table_pair(uint32_t word, int byte) {
  const uint32_t codes = word >> (byte / 2 * 16), inside = codes & 0x7777;
  const uint32_t half = masked_with(codes >> 1, 0x4444, 0x3210);  // takes byte i of the first or of the second four
  const uint32_t low = bytes_of(bytes_of(l0, l1, inside), bytes_of(l2, l3, inside), half);
  const uint32_t high = bytes_of(bytes_of(h0, h1, inside), bytes_of(h2, h3, inside), half);
  return bytes_of(low, high, (upper_first ? 0x4051 : 0x5140) + byte % 2 * 0x2222);
}

// The index of one number of the pair that a byte selects, in a table of 256 pairs with a copy for each lane.
TILE_DEVICE int table_place(uint32_t word, int byte, int lane, int part) { return int(word >> 8 * byte & 255) * 64 + 2 * lane + part; }

// That pair. A permutation takes the byte, and a multiplication and addition make the address.
template <class T> TILE_DEVICE uint32_t pair_at(const T* table, uint32_t word, int byte, int lane) {
  const char* of_lane = reinterpret_cast<const char*>(table) + 4 * lane;
  return *reinterpret_cast<const uint32_t*>(of_lane + __byte_perm(word, 0, 0x4440 + byte) * 128);
}

template <class T> TILE_DEVICE uint32_t pair_less(uint32_t pair, T x) {
  constexpr uint32_t minus_one = same<T, f16> ? 0xbc00bc00 : 0xbf80bf80;
  return pair_fma<T>(pair_of(x), minus_one, pair);
}

template <class T> TILE_DEVICE uint32_t pair_times(uint32_t pair, T x) { return pair_fma<T>(pair, pair_of(x), 0x80008000); }

// By a float32 factor, whose range and bits 16 bits do not have. It is rounded once.
template <class T> TILE_DEVICE uint32_t pair_times(uint32_t pair, float x) {
  uint32_t y;
  narrow_pair(reinterpret_cast<T*>(&y), widen(T{uint16_t(pair)}) * x, widen(T{uint16_t(pair >> 16)}) * x);
  return y;
}

}  // namespace tile
