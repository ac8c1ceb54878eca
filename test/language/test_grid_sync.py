# SPDX-License-Identifier: Apache-2.0
"""T.sync_grid: all blocks of a grid meet."""

import pytest
import torch

import torch_tile.language as T


def test_blocks_see_what_others_wrote(way):
    """A tile that is set anew, values named before, a second meeting, and a thread's index behind it."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "float32"), B: T.Tensor((4, 64), "float32"), S: T.Tensor((1,), "float32")):
        sums = T.alloc_global((4,), "float32")
        with T.Kernel(4, threads=64) as bx:
            tile = T.alloc_fragment((64,), "float32")
            total = T.alloc_fragment((1,), "float32")
            left = 3 - bx
            first = A[left, 0]
            T.copy(A[bx, :], tile)
            T.reduce_sum(tile, total, dim=0)
            sums[bx] = total[0]
            T.sync_grid()
            T.copy(A[left, :], tile)
            for i in T.Parallel(64):
                B[bx, i] = tile[i] + sums[left] + first
            T.sync_grid()
            if bx == 0:
                whole = T.alloc_fragment((4,), "float32")
                T.copy(sums, whole)
                T.reduce_sum(whole, total, dim=0)
                S[0] = total[0]

    a, b, s = torch.randn(4, 64), torch.empty(4, 64), torch.empty(1)
    way(kernel, a, b, s)
    torch.testing.assert_close(b, (a + a.sum(1, keepdim=True) + a[:, :1]).flip(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(s[0], a.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_threads_meet_across_blocks(target):
    import torch_tile

    @T.prim_func
    def kernel(A: T.Tensor((2, 32), "int32"), B: T.Tensor((2, 32), "int32")):
        with T.Kernel(2, threads=32) as bx:
            tx = T.get_thread_binding()
            A[bx, tx] = bx * 32 + tx
            T.sync_grid()
            B[bx, tx] = A[1 - bx, 31 - tx]

    a, b = torch.zeros(2, 32, dtype=torch.int32), torch.zeros(2, 32, dtype=torch.int32)
    found = torch_tile.compile(kernel, target=target).interpret(a, b)
    assert not found, found.report()
    assert torch.equal(b.flatten(), torch.arange(63, -1, -1, dtype=torch.int32))
