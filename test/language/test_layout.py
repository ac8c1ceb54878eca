# SPDX-License-Identifier: Apache-2.0
import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.language.layout import LayoutRequest


def test_requests_name_a_layout_and_its_buffer():
    made = {}

    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float16")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8, 8), "float16")
            made["swizzled"] = T.make_swizzled_layout(tile, k_major=True)
            made["linear"] = tilelang.layout.make_linear_layout(tile)
            T.clear(tile)

    assert all(isinstance(x, LayoutRequest) and x.kind == kind for kind, x in made.items())
    assert made["linear"].buffer.name == "tile"
