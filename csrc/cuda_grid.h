// SPDX-License-Identifier: Apache-2.0
// The order in which blocks are visited: in bands of `panel` rows (or columns), so that blocks that run at the same time share
// operands in the L2 cache. Every second band is walked backwards, so that neighbours in time are neighbours at the turn, too.
#pragma once
#include "cuda_types.h"

namespace tile {

struct BlockIndex { int x, y; };

// Block `linear` of a grid of `wide` times `high`, bands of `panel` of the `high` ones; x runs along the band.
template <int panel> TILE_DEVICE BlockIndex in_bands(unsigned linear, unsigned wide, unsigned high) {
  static_assert(panel >= 1, "a panel has at least one row");
  unsigned band = linear / (panel * wide), inside = linear % (panel * wide);
  unsigned rest = high - band * panel, rows = rest < panel ? rest : panel;
  unsigned x = inside / rows;
  return {int(band % 2 ? wide - 1 - x : x), int(band * panel + inside % rows)};
}

template <int panel> TILE_DEVICE BlockIndex swizzled_rows() {
  return in_bands<panel>(blockIdx.y * gridDim.x + blockIdx.x, gridDim.x, gridDim.y);
}

template <int panel> TILE_DEVICE BlockIndex swizzled_columns() {
  BlockIndex turned = in_bands<panel>(blockIdx.y * gridDim.x + blockIdx.x, gridDim.y, gridDim.x);
  return {turned.y, turned.x};
}

}  // namespace tile
