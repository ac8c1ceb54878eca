// SPDX-License-Identifier: Apache-2.0
// Exchange of values between the 32 lanes of a warp. All lanes must take part.
#pragma once
#include "cuda_types.h"

namespace tile {

// Applies `exchange` (of 32 bits) to each 32-bit word of a value of any type up to 8 bytes.
template <class T, class F> __device__ __forceinline__ T by_words(T value, F exchange) {
  static_assert(sizeof(T) <= 8, "lanes exchange values of at most 8 bytes");
  unsigned words[2] = {0, 0};
  memcpy(words, &value, sizeof(T));
  words[0] = exchange(words[0]);
  if constexpr (sizeof(T) > 4) words[1] = exchange(words[1]);
  memcpy(&value, words, sizeof(T));
  return value;
}

#define TILE_SHUFFLE(name, mode, clamp)                                                                             \
  template <class T> __device__ __forceinline__ T name(T value, int operand) {                                      \
    return by_words(value, [operand](unsigned word) {                                                               \
      unsigned got;                                                                                                 \
      asm volatile("shfl.sync." mode ".b32 %0, %1, %2, " clamp ", -1;" : "=r"(got) : "r"(word), "r"(operand));      \
      return got;                                                                                                   \
    });                                                                                                             \
  }
TILE_SHUFFLE(shuffle_xor, "bfly", "0x1f")
TILE_SHUFFLE(shuffle, "idx", "0x1f")
TILE_SHUFFLE(shuffle_up, "up", "0")
TILE_SHUFFLE(shuffle_down, "down", "0x1f")
#undef TILE_SHUFFLE

__device__ __forceinline__ unsigned vote_ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }
__device__ __forceinline__ bool vote_any(bool condition) { return __any_sync(0xffffffffu, condition); }
__device__ __forceinline__ bool vote_all(bool condition) { return __all_sync(0xffffffffu, condition); }

}  // namespace tile
