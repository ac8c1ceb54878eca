# SPDX-License-Identifier: Apache-2.0
"""Products of warps by hand, where TileLang has them: `from torch_tile.cuda.intrinsics import ...`."""

from torch_tile.language.emitters import (
    TensorCoreIntrinEmitter,
    WGMMATensorCoreIntrinEmitter,
    get_ldmatrix_offset,
    get_mma_micro_size,
    get_swizzle_layout,
    make_mma_swizzle_layout,
    mma_store_index_map,
)

__all__ = [
    "TensorCoreIntrinEmitter", "WGMMATensorCoreIntrinEmitter", "get_ldmatrix_offset", "get_mma_micro_size",
    "get_swizzle_layout", "make_mma_swizzle_layout", "mma_store_index_map",
]  # fmt: skip
