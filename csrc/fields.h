// SPDX-License-Identifier: Apache-2.0
// Numbers of a few bits out of words, one or two at a time. Two neighbours of 4 bits are one byte. It is put into both
// halves of a register, so that each half holds one of them in the mantissa of a power of two. That power is then
// subtracted.
#pragma once
#include "cuda_types.h"

namespace tile {

TILE_DEVICE float nibble(uint32_t word, int byte, int upper) { return float(word >> (8 * byte + 4 * upper) & 15); }

template <class T> TILE_DEVICE uint32_t pair_of(T x) { return x.bits * 0x10001u; }

template <class T> TILE_DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  if constexpr (same<T, f16>) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

TILE_DEVICE uint32_t masked_with(uint32_t x, uint32_t mask, uint32_t with) {  // of two constants: else two instructions
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(with));  // (a & b) | c
  return y;
}

// Both numbers of a byte, each less `surplus`, exactly; the one of the upper bits comes first if `upper_first`.
template <class T, int surplus, bool upper_first> TILE_DEVICE uint32_t nibble_pair(uint32_t word, int byte) {
  uint32_t y;
  if constexpr (same<T, f16>) {  // of 1024, and with the upper bits in place sixteen times as large
    constexpr uint32_t one = 0xe400 + surplus, other = 0xd400 + 16 * surplus;  // -(1024 + surplus), -(64 + surplus)
    constexpr uint32_t mask = upper_first ? 0x000f00f0 : 0x00f0000f;
    constexpr uint32_t scale = upper_first ? 0x3c002c00 : 0x2c003c00;  // 1 and 1/16
    y = masked_with(__byte_perm(word, 0, byte * 0x101), mask, 0x64006400);
    return pair_fma<T>(y, scale, upper_first ? one << 16 | other : other << 16 | one);
  } else {  // of 128, whose mantissa has no room for the upper bits in place
    constexpr uint32_t less = 0xc300 + surplus;  // -(128 + surplus)
    const int select = byte * 0x101 + (upper_first ? 0x004 : 0x400);
    y = masked_with(__byte_perm(word, word >> 4, select), 0x000f000f, 0x43004300);
    return pair_fma<T>(y, 0x3f803f80, less << 16 | less);
  }
}

template <class T> TILE_DEVICE uint32_t pair_less(uint32_t pair, T x) {
  constexpr uint32_t minus_one = same<T, f16> ? 0xbc00bc00 : 0xbf80bf80;
  return pair_fma<T>(pair_of(x), minus_one, pair);
}

template <class T> TILE_DEVICE uint32_t pair_times(uint32_t pair, T x) { return pair_fma<T>(pair, pair_of(x), 0x80008000); }

template <class T> TILE_DEVICE void store_pair(T* p, uint32_t pair) { *reinterpret_cast<uint32_t*>(p) = pair; }

}  // namespace tile
