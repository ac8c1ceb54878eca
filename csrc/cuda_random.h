// SPDX-License-Identifier: Apache-2.0
// Random bits that follow from their place alone.
#pragma once
#include "cuda_types.h"

namespace tile {

// Word number `place` of Philox 4x32-10 for a counter of four words and a key of two.
TILE_DEVICE uint32_t philox_word(uint32_t place, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t k, uint32_t m) {
  for (int round = 0; round < 10; ++round) {
    uint64_t first = uint64_t(a) * 0xD2511F53u, second = uint64_t(c) * 0xCD9E8D57u;
    a = uint32_t(second >> 32) ^ b ^ k, b = uint32_t(second), c = uint32_t(first >> 32) ^ d ^ m, d = uint32_t(first);
    k += 0x9E3779B9u, m += 0xBB67AE85u;
  }
  return place == 0 ? a : place == 1 ? b : place == 2 ? c : d;
}

}  // namespace tile
