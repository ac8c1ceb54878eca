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


@pytest.mark.parametrize("scope", ["shared", "fragment"])
def test_tiles_outlive_the_meeting(way, scope):
    """Tiles that are read, changed in part, or set under a condition behind one meeting or two."""
    alloc = {"shared": T.alloc_shared, "fragment": T.alloc_fragment}[scope]

    @T.prim_func
    def kernel(A: T.Tensor((4, 2, 24), "float32"), B: T.Tensor((4, 2, 24), "float32")):
        with T.Kernel(4, threads=64) as bx:
            tile, other = alloc((2, 24), "float32"), alloc((2, 24), "float32")
            T.copy(A[bx, :, :], tile)
            T.copy(A[3 - bx, :, :], other)
            T.sync_grid()
            for i, j in T.Parallel(2, 24):
                A[3 - bx, i, j] = tile[i, j]
            for i in T.Parallel(24):
                tile[1, i] = tile[1, i] + 1
            T.sync_grid()
            if bx > 1:
                T.clear(other)
            T.sync_grid()
            for i, j in T.Parallel(2, 24):
                B[bx, i, j] = tile[i, j] + 10 * other[i, j] + A[bx, i, j]

    a, b = torch.randn(4, 2, 24), torch.empty(4, 2, 24)
    wanted = a.clone() + a.flip(0) * torch.tensor([11.0, 11, 1, 1]).view(4, 1, 1)
    wanted[:, 1] += 1
    way(kernel, a, b)
    torch.testing.assert_close(b, wanted, rtol=1e-5, atol=1e-5)


def test_values_outlive_the_meeting(way):
    """Variables, and names whose memory changes meanwhile."""

    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            v = T.alloc_var("float32", 1.0)
            x = A[bx]
            v = v + x
            T.sync_grid()
            A[3 - bx] = x
            T.sync_grid()
            B[bx] = v + 10 * x + 100 * A[bx]

    a, b = torch.randn(4), torch.empty(4)
    wanted = 1 + 11 * a + 100 * a.flip(0)
    way(kernel, a, b)
    torch.testing.assert_close(b, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_values_of_threads_outlive_the_meeting(target):
    import torch_tile

    @T.prim_func
    def kernel(A: T.Tensor((2, 32), "int32"), B: T.Tensor((2, 32), "int32")):
        with T.Kernel(2, threads=32) as bx:
            tx = T.get_thread_binding()
            mine, v = T.alloc_local((2, 2), "int32"), T.alloc_var("int32", 7)
            for i, j in T.grid(2, 2):
                mine[i, j] = A[bx, tx] * (i * 2 + j)
            v += A[bx, tx]
            T.sync_grid()
            A[1 - bx, 31 - tx] = v
            T.sync_grid()
            B[bx, tx] = mine[1, 1] + mine[0, 1] + 1000 * A[bx, tx] + 100000 * v

    a, b = torch.randint(0, 9, (2, 32), dtype=torch.int32), torch.zeros(2, 32, dtype=torch.int32)
    v = a + 7
    wanted = 4 * a + 1000 * v.flip(0, 1) + 100000 * v
    found = torch_tile.compile(kernel, target=target).interpret(a, b)
    assert not found, found.report()
    assert torch.equal(b, wanted)
