// SPDX-License-Identifier: Apache-2.0
// The order of blocks: in bands of `panel` rows (or columns), so that blocks that run at the same time share operands
// in the L2 cache. Every second band is walked backwards, so that the last blocks of a band and the first of the next
// one are neighbours, too.
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

// Where a block lies in its grid, and how many blocks the grid has in x and y.
struct GridIndex { int x, y, z, wide, high; };

// The place of a block in a grid of `wide` columns, which may have been launched with all its blocks in x.
TILE_DEVICE GridIndex unfolded(int wide) {
  if (gridDim.x == wide) return {int(blockIdx.x), int(blockIdx.y), 0, wide, int(gridDim.y)};
  return {int(blockIdx.x % wide), int(blockIdx.x / wide), 0, wide, int(gridDim.x / wide)};
}

TILE_DEVICE GridIndex unfolded(int wide, int high) {
  if (gridDim.x == wide) return {int(blockIdx.x), int(blockIdx.y), int(blockIdx.z), wide, high};
  unsigned row = blockIdx.x / wide;
  return {int(blockIdx.x % wide), int(row % high), int(row / high), wide, high};
}

TILE_DEVICE GridIndex as_launched() {
  return {int(blockIdx.x), int(blockIdx.y), int(blockIdx.z), int(gridDim.x), int(gridDim.y)};
}

template <int panel> TILE_DEVICE BlockIndex swizzled_rows(GridIndex at = as_launched()) {
  return in_bands<panel>(at.y * at.wide + at.x, at.wide, at.high);
}

template <int panel> TILE_DEVICE BlockIndex swizzled_columns(GridIndex at = as_launched()) {
  BlockIndex turned = in_bands<panel>(at.y * at.wide + at.x, at.high, at.wide);
  return {turned.y, turned.x};
}

}  // namespace tile
