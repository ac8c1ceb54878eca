# SPDX-License-Identifier: Apache-2.0
"""Pairs of 4-bit numbers compile for every chip; what they are is shown on a GPU, by products with such weights."""

import pytest
from cuda_shim import compile_everywhere


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_compile(kind):
    compile_everywhere(f"""
#include "fields.h"
extern "C" __global__ void pairs(const unsigned* in, const tile::{kind}* factor, tile::{kind}* out, float* one) {{
  alignas(16) tile::{kind} local[8];
  const unsigned word = in[threadIdx.x];
  const int byte = threadIdx.x % 4;
  tile::store_pair(&local[0], tile::nibble_pair<tile::{kind}, 8, false, 0x88, true>(word, byte));
  tile::store_pair(&local[2], tile::nibble_pair<tile::{kind}, 64, true, 0, true>(word, byte));
  const unsigned other = tile::nibble_pair<tile::{kind}, 0, true, 0x5a, false>(word, 1);
  tile::store_pair(&local[4], tile::pair_less<tile::{kind}>(other, factor[0]));
  tile::store_pair(&local[6], tile::pair_times<tile::{kind}>(other, factor[1]));
  const unsigned looked = tile::table_pair<tile::{kind}, true, 1, 2, 3, 4, 5, 6, 7, 8>(word, byte);
  tile::store_pair(&local[6], tile::pair_times<tile::{kind}>(looked, one[threadIdx.x]));
  __shared__ tile::{kind} table[256 * 64];
  tile::store_pair(&local[2], tile::pair_at(table, word, byte, threadIdx.x % 32));
  local[4] = table[tile::table_place(word, byte, threadIdx.x % 32, 1)];
  const unsigned in_place = tile::pair_in_place<0>(word, 1) + tile::pair_in_place<0x88>(word, byte);
  for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = local[i];
  one[threadIdx.x] = tile::nibble_in_place(word, byte, 1) + float(in_place);
  one[threadIdx.x] += tile::nibble(word, byte, 1) + tile::table_nibble(word, byte, 1, {", ".join(map(str, range(16)))});
}}
""")
