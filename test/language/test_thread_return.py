# SPDX-License-Identifier: Apache-2.0
"""T.thread_return: threads that have nothing more to do."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import contains
from torch_tile.language.thread_return import ThreadReturn


def simulated(kernel, *args):
    """Thread by thread, for two GPUs."""
    assert not contains(kernel.program, ThreadReturn)
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        findings = torch_tile.compile(kernel, target=target).interpret(*args)
        assert not findings, findings.report()


def test_threads_past_the_end():
    @T.prim_func
    def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            at = bx * 32 + T.get_thread_binding()
            if at >= 100:
                T.thread_return()
            own = T.alloc_local((1,), "float32")
            own[0] = A[at] * 2
            B[at] = own[0]

    a, b = torch.randn(100), torch.zeros(100)
    simulated(kernel, a, b)
    assert torch.equal(b, a * 2)


@pytest.mark.parametrize(("warps", "syncs"), [(1, False), (1, True), (2, True)])
def test_warps_that_exchange_values_where_others_have_ended(warps, syncs):
    """One warp a row: all its threads end together. Of several warps, each orders its own threads by T.sync_warp."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 64), "float32"), keep: T.Tensor((8,), "bool"), B: T.Tensor((8, 64), "float32")):
        with T.Kernel(8 // warps, threads=32 * warps) as bx:
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            row = bx * warps + warp
            tile = T.alloc_shared((warps, 64), "float32")
            if not keep[row]:
                T.thread_return()
            for k in T.unroll(2):
                tile[warp, k * 32 + lane] = A[row, k * 32 + lane]
            if syncs:
                T.sync_warp()
            for k in T.unroll(2):
                B[row, k * 32 + lane] = tile[warp, 63 - k * 32 - lane]

    a, b, keep = torch.randn(8, 64), torch.zeros(8, 64), torch.rand(8) < 0.6
    simulated(kernel, a, keep, b)
    assert torch.equal(b, torch.where(keep[:, None], a.flip(1), 0.0))


@pytest.mark.parametrize("across", [False, True])
def test_values_that_no_barrier_orders_where_warps_have_ended(across):
    @T.prim_func
    def kernel(A: T.Tensor((8, 32), "float32"), keep: T.Tensor((8,), "bool"), B: T.Tensor((8, 32), "float32")):
        with T.Kernel(4, threads=64) as bx:
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            row = bx * 2 + warp
            tile = T.alloc_shared((2, 32), "float32")
            if not keep[row]:
                T.thread_return()
            tile[warp, lane] = A[row, lane]
            if across:
                T.sync_warp()
                B[row, lane] = tile[1 - warp, lane]
            else:
                B[row, lane] = tile[warp, 31 - lane]

    with pytest.raises(TileError, match="divergent_hazard"):
        torch_tile.compile(kernel, target="cuda:sm_80")


def test_whole_blocks(way):
    """Operations of all threads may follow, where whole blocks end."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "float32"), keep: T.Tensor((4,), "int32"), B: T.Tensor((4, 64), "float32")):
        with T.Kernel(4, threads=64) as bx:
            if keep[bx] == 0:
                T.fill(B[bx, :], -1)
                T.thread_return()
            tile = T.alloc_shared((64,), "float32")
            T.copy(A[bx, :], tile)
            if keep[bx] == 1:
                for i in T.Parallel(64):
                    B[bx, i] = tile[63 - i]
                T.thread_return()
            else:
                T.copy(tile, B[bx, :])
            for i in T.Parallel(64):
                B[bx, i] = B[bx, i] + 1

    a, b, keep = torch.randn(4, 64), torch.zeros(4, 64), torch.tensor([0, 1, 2, 1], dtype=torch.int32)
    way(kernel, a, keep, b)
    assert torch.equal(b, torch.stack([torch.full((64,), -1.0), a[1].flip(0), a[2] + 1, a[3].flip(0)]))


@pytest.mark.parametrize("nested", [False, True])
def test_in_loops_and_in_parts_of_branches(way, nested):
    """The first positive element ends the block; `late` blocks with none go on."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 8), "int32"), B: T.Tensor((5, 2), "int32")):
        with T.Kernel(5, threads=32) as bx:
            count = T.alloc_var("int32", 0)
            for j in T.serial(4):
                if nested:
                    for k in T.serial(2):
                        if A[bx, j * 2 + k] > 0:
                            B[bx, 0] = j * 2 + k
                            T.thread_return()
                        count += 1
                else:
                    for _ in T.unroll(2):
                        count += 1
                    if A[bx, j * 2 + 1] > 0:
                        B[bx, 0] = j * 2 + 1
                        T.thread_return()
                count += 1
            if A[bx, 0] < -1:
                if A[bx, 0] < -2:
                    T.thread_return()
                B[bx, 0] = 50
            B[bx, 1] = count

    a = -torch.ones(5, 8, dtype=torch.int32)
    a[0, 5], a[1, 7], a[3, 0], a[4, 0] = 1, 1, -2, -3
    b = torch.full((5, 2), 99, dtype=torch.int32)
    way(kernel, a, b)
    assert b.tolist() == [[5, 99], [7, 99], [99, 12], [50, 12], [99, 99]]


def test_not_inside_tile_loops():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=64):
                for i in T.Parallel(64):
                    if A[i] > 0:
                        T.thread_return()
                    A[i] = 1.0

    assert caught.value.code == "not_outermost" and caught.value.diagnostics[0].span.line
    with pytest.raises(TileError) as caught:
        T.thread_return()
    assert caught.value.code in ("outside_kernel", "not_in_kernel")
