# SPDX-License-Identifier: Apache-2.0
"""Bulk stores by warps: warps that store rows of their own wait for no other warp, all other warps do."""

import pytest
import torch
from mutation import removals

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir.expr import Call
from torch_tile.ir.node import walk
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret


def doubled(length, shift=0, rounds=3, warps=2, rows=16, columns=64):
    """Write `2 A` to a tile, each warp the rows of the warp `shift` ahead, and store it by warps, round by round."""
    own = rows // warps

    @T.prim_func
    def kernel(A: T.Tensor((rounds, length, columns), "float16"), B: T.Tensor((rounds, length, columns), "float16")):
        with T.Kernel(T.ceildiv(length, rows), threads=32 * warps) as block:
            tx = T.get_thread_binding()
            tile = T.alloc_shared((rows, columns), "float16")
            for n in T.serial(rounds):
                for i in T.serial(own * columns // 32):
                    row = (tx // 32 + shift) % warps * own + (i * 32 + tx % 32) // columns
                    column = (i * 32 + tx % 32) % columns
                    tile[row, column] = A[n, T.min(block * rows + row, length - 1), column] * 2
                T.sync_warp()
                T.tma_copy(tile, B[n, block * rows, 0], by_warps=True)

    return kernel


def lowered(kernel):
    return lower(kernel.program, cuda_passes(Build(Target("cuda", 90))))


def calls(flat, name):
    return [n for n in walk(flat) if isinstance(n, Call) and n.name == name]


def operands(length, rounds=3, columns=64):
    return torch.randn(rounds, length, columns).half(), torch.full((rounds, length, columns), torch.nan).half()


def run(flat, kernel, a, b):
    """Run the threads of a lowered program, and return the kinds of faults."""
    return {f.kind for f in interpret(flat, kernel.program, (a, b)).found.values()}


@pytest.mark.parametrize("length, warps, rows, columns", [(16, 2, 16, 64), (37, 2, 16, 64), (45, 4, 32, 128)])
def test_own_rows_need_no_barrier_of_the_block(length, warps, rows, columns):
    """Rows beyond the tensor's end are not stored."""
    kernel = doubled(length, warps=warps, rows=rows, columns=columns)
    flat = lowered(kernel)
    assert calls(flat, "tma_store") and not calls(flat, "barrier")
    a, b = operands(length, columns=columns)
    assert not run(flat, kernel, a, b)
    assert torch.equal(b, a * 2)


def test_rows_of_another_warp_need_a_barrier_of_the_block():
    kernel = doubled(37, shift=1)
    flat = lowered(kernel)
    assert len(calls(flat, "barrier")) == 2  # before they are stored, and before they are written again
    a, b = operands(37)
    assert not run(flat, kernel, a, b)
    assert torch.equal(b, a * 2)
    for removed in removals(flat):
        if removed.name == "barrier":
            assert run(removed.program, kernel, *operands(37)), removed


def test_each_wait_and_barrier_is_needed():
    """Without the wait a warp overwrites rows that its store still reads; so does a lane that meets no waiting lane."""
    kernel = doubled(16)
    flat = lowered(kernel)
    waits = [call.args for call in calls(flat, "bulk_wait")]
    assert len(waits) == 2 and all(len(args) == 3 for args in waits)  # in the loop and behind it: a box of the warp
    found = {}
    for removed in removals(flat):
        found.setdefault(removed.name, []).append(run(removed.program, kernel, *operands(16)))
    for name in ("bulk_wait", "warp_barrier", "fence_proxy_async"):
        assert found[name] and all(found[name]), (name, found)


def test_other_targets_and_warps_without_equal_parts_copy_as_one():
    a, b = operands(16)
    kernel = doubled(16)
    assert not torch_tile.compile(kernel, target="cuda:sm_80").interpret(a, b)
    assert torch.equal(b, a * 2)
    kernel = doubled(16, warps=4)  # four rows are no part of the swizzle
    flat = lowered(kernel)
    assert calls(flat, "tma_store") and calls(flat, "barrier")
    a, b = operands(16)
    assert not run(flat, kernel, a, b)
    assert torch.equal(b, a * 2)


def test_a_load_is_started_by_one_thread():
    @T.prim_func
    def kernel(A: T.Tensor((16, 64), "float16"), B: T.Tensor((16, 64), "float16")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((16, 64), "float16")
            ready = T.alloc_barrier(1)
            T.tma_copy(A[0, 0], tile, barrier=ready[0], by_warps=True)
            T.copy(tile, B[0, 0])

    with pytest.raises(TileError, match="by_warps"):
        torch_tile.compile(kernel, target="cuda:sm_90a")


def boxed(rows=8):
    """Each thread of a warp writes a row of its own, and one thread stores all rows."""

    @T.prim_func
    def kernel(A: T.Tensor((rows, 64), "float16"), B: T.Tensor((rows, 64), "float16")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((rows, 64), "float16")
            if tx < rows:
                for c in T.serial(64):
                    tile[tx, c] = A[tx, c]
            T.tma_copy(tile, B[0, 0])

    return kernel


def test_a_store_reads_all_rows_of_its_box():
    """Threads that wrote rows behind the first one meet the thread that stores."""
    kernel = boxed()
    flat = lowered(kernel)
    a, b = torch.randn(8, 64).half(), torch.full((8, 64), torch.nan).half()
    assert not run(flat, kernel, a, b) and len(calls(flat, "barrier")) == 1
    assert torch.equal(b, a)
