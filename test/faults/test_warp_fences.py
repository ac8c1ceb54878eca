# SPDX-License-Identifier: Apache-2.0
"""Tiles that threads of a warp write, order by T.sync_warp and hand to bulk copies."""

import pytest
import torch

import torch_tile
import torch_tile.language as T


def doubled(rows, warps, fenced, looped, all_lanes):
    """Write `2 A` to a tile by the lanes of the first warp, and store it by a bulk copy, in one or more rounds."""
    rounds = 3 if looped else 1

    @T.prim_func
    def kernel(A: T.Tensor((rounds, rows, 64), "float16"), B: T.Tensor((rounds, rows, 64), "float16")):
        with T.Kernel(1, threads=32 * warps):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((rows, 64), "float16")
            for n in T.serial(rounds) if looped else (0,):
                if tx < 32 or all_lanes:
                    for i in T.serial(tx, rows * 64, 32):
                        tile[i // 64, i % 64] = A[n, i // 64, i % 64] * 2
                    if fenced:
                        T.fence_proxy_async()
                    T.sync_warp()
                    T.tma_copy(tile, B[n, 0, 0])
                    T.sync_warp()

    return kernel


@pytest.mark.parametrize("rows", [8, 24])
@pytest.mark.parametrize("looped", [False, True], ids=["once", "in_a_loop"])
@pytest.mark.parametrize("fenced", [False, True], ids=["fence_is_placed", "fence_of_the_author"])
@pytest.mark.parametrize("warps, all_lanes", [(1, True), (1, False), (3, False)])
def test_bulk_copies_see_what_a_warp_wrote(rows, looped, fenced, warps, all_lanes):
    kernel = torch_tile.compile(doubled(rows, warps, fenced, looped, all_lanes), target="cuda:sm_90a")
    a = torch.randn(3 if looped else 1, rows, 64, dtype=torch.float16)
    b = torch.zeros_like(a)
    assert not kernel.interpret(a, b)
    assert torch.equal(b, a * 2)
    if not looped and warps == 1:  # in a branch of some threads, the second barrier has a fence, too
        assert kernel.get_kernel_source().count("fence_proxy_async()") == 1
