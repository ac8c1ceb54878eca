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


def test_turns_of_loops(way):
    """Each turn of a relaxation reads what all blocks wrote in the turn before; a loop inside, names and tiles."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 4, 16), "float32")):
        with T.Kernel(4, threads=32) as bx:
            for step in T.serial(5):
                scale = step + 1
                for half in range(2):
                    row = T.alloc_shared((16,), "float32")
                    left = (bx + 1 + half) % 4
                    T.copy(A[(step + half) % 2, left, :], row)
                    for i in T.Parallel(16):
                        A[(step + half + 1) % 2, bx, i] = row[i] + T.cast(scale * i, "float32")
                    T.sync_grid()

    a = torch.randn(2, 4, 16)
    wanted = a.clone()
    for step in range(5):
        for half in range(2):
            turned = wanted[(step + half) % 2].roll(-1 - half, 0)
            wanted[(step + half + 1) % 2] = turned + (step + 1) * torch.arange(16.0)
    way(kernel, a)
    torch.testing.assert_close(a, wanted, rtol=0, atol=0)
