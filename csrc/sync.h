// SPDX-License-Identifier: Apache-2.0
// Threads wait for each other; what they wrote to shared and global memory before is seen by all of them after.
#pragma once
#include "cuda_types.h"

namespace tile {

TILE_DEVICE void barrier() { __syncthreads(); }      // all threads of the block
TILE_DEVICE void warp_barrier() { __syncwarp(); }    // the 32 threads of a warp

}  // namespace tile
