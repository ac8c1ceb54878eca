# SPDX-License-Identifier: Apache-2.0
"""Barriers in branches that only some threads enter: the author's, or placed ones."""

import itertools
from functools import partial

import pytest
import torch
from emulate import emulate

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def suffix_sums(met, behind, count=64):
    """Suffix sums by some of the threads, which meet at barriers of their own; then all threads read them."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding(0)
            sums, value = T.alloc_shared((64,), "int32"), T.alloc_var("int32")
            T.copy(A, sums)
            if tx < count:
                for k in T.serial(6):
                    T.sync_threads(3, 64)
                    if tx < 64 - (1 << k):
                        value = sums[tx] + sums[tx + (1 << k)]
                    if met:
                        T.sync_threads(3, 64)
                    if tx < 64 - (1 << k):
                        sums[tx] = value
                T.sync_threads(3, 64)
                B[tx] = sums[63 - tx]
            if behind:
                T.sync_threads()
            B[tx] = sums[tx % 64] if tx >= 64 else B[tx]

    return kernel


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("met", [True, False], ids=["barriers_of_the_author", "one_is_placed"])
@pytest.mark.parametrize("behind", [True, False], ids=["barrier_behind", "no_barrier_behind"])
def test_threads_of_a_branch_meet_at_barriers_of_their_own(target, met, behind):
    kernel = torch_tile.compile(suffix_sums(met, behind), target=target)
    a, b = torch.randint(-9, 9, (64,), dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    assert not kernel.interpret(a, b)
    sums = a.flip(0).cumsum(0).int().flip(0)
    assert torch.equal(b, torch.cat([sums.flip(0), sums]))


def test_a_part_of_a_warp_cannot_meet():
    with pytest.raises(TileError, match="parted_warp"):
        torch_tile.compile(suffix_sums(False, True, 40), target="cuda:sm_80")


@pytest.mark.parametrize("count", [32, 96])
def test_a_barrier_is_placed_for_the_warps_of_a_branch(count):
    """These threads pass values on twice, with no barrier of the author's."""

    @T.prim_func
    def kernel(A: T.Tensor((count,), "int32"), B: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding(0)
            s = T.alloc_shared((count,), "int32")
            if tx < count:
                s[tx] = A[tx]
                value = s[count - 1 - tx] * 2
                s[tx] = value
                B[tx] = s[(tx + 1) % count]
            if tx >= count:
                B[tx] = s[tx % count]

    made = torch_tile.compile(kernel, target="cuda:sm_80")
    a, b = torch.randint(-9, 9, (count,), dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    assert not made.interpret(a, b)
    s = a.flip(0) * 2
    assert torch.equal(b, torch.cat([s.roll(-1), s[torch.arange(count, 128) % count]]))


@pytest.mark.parametrize("met", [True, False], ids=["barriers_of_the_author", "they_are_placed"])
@pytest.mark.parametrize(
    "bounds", [(0, 64, 128), (0, 32, 128), (0, 64, 96, 128), (0, 32, 64, 96, 128), (0, 96, 96, 128)]
)
def test_each_branch_of_consecutive_threads_has_barriers_of_its_own(bounds, met):
    """Branches of `if`, `elif` and `else`; behind them a barrier orders what the other threads wrote."""
    parts = [(lo, hi) for lo, hi in itertools.pairwise(bounds) if lo < hi]

    @T.macro
    def mirror(A, s, B, tx, lo, hi, number):
        for turn in T.serial(2):
            s[tx] = A[tx] + turn
            if met:
                T.sync_threads(number, hi - lo)
            B[tx] += s[hi - 1 - (tx - lo)] * (turn + number)
            if met:
                T.sync_threads(number, hi - lo)

    @T.macro
    def chosen(A, s, B, tx, left):
        (lo, hi), *rest = left
        number = len(parts) - len(rest)
        if not rest:
            mirror(A, s, B, tx, lo, hi, number)
        else:
            if tx < hi:
                mirror(A, s, B, tx, lo, hi, number)
            else:
                chosen(A, s, B, tx, rest)

    @T.prim_func
    def kernel(A: T.Tensor((128,), "int32"), B: T.Tensor((128,), "int32"), C: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding(0)
            s = T.alloc_shared((128,), "int32")
            chosen(A, s, B, tx, parts)
            C[tx] = s[127 - tx]

    a = torch.randint(-9, 9, (128,), dtype=torch.int32)
    wanted = torch.empty_like(a)
    for number, (lo, hi) in enumerate(parts, 1):
        wanted[lo:hi] = a[lo:hi].flip(0) * number + (a[lo:hi].flip(0) + 1) * (number + 1)
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        made = torch_tile.compile(kernel, target=target)
        for run in (made.interpret, partial(emulate, made)):
            b, c = torch.zeros(2, 128, dtype=torch.int32)
            assert not run(a, b, c)
            assert torch.equal(b, wanted) and torch.equal(c, a.flip(0) + 1)


def handed(producer, consumer):
    """A warp writes a number each turn, and a warpgroup reads it: `producer` and `consumer` say how each is written."""

    @T.prim_func
    def kernel(out: T.Tensor((8, 128), "int32")):
        with T.Kernel(1, threads=256):
            notes = T.alloc_shared((2, 4), "int32")
            full, empty = T.alloc_barrier([32] * 2), T.alloc_barrier([128] * 2)
            tx = T.get_thread_binding()

            @T.macro
            def produce():
                for turn in T.serial(8):
                    T.mbarrier_wait_parity(empty[turn % 2], turn // 2 % 2 ^ 1)
                    if tx == 128:
                        notes[turn % 2, 0] = turn
                    T.mbarrier_arrive(full[turn % 2])

            @T.macro
            def consume():
                for turn in T.serial(8):
                    T.mbarrier_wait_parity(full[turn % 2], turn // 2 % 2)
                    out[turn, tx] = notes[turn % 2, 0]
                    T.mbarrier_arrive(empty[turn % 2])

            if producer == "branch":
                if tx >= 128 and tx < 160:
                    produce()
            else:
                with T.ws(1):
                    if tx < 160:
                        produce()
            if consumer == "branch":
                if tx < 128:
                    consume()
            else:
                with T.ws(0):
                    consume()

    return kernel


@pytest.mark.parametrize("producer", ["branch", "role"])
@pytest.mark.parametrize("consumer", ["branch", "role"])
def test_no_barrier_parts_threads_that_wait_for_each_other(producer, consumer):
    """A barrier of the block between a producer and its consumer would stop both, whichever way each is written."""
    kernel = torch_tile.compile(handed(producer, consumer), target="cuda:sm_90a")
    for run in (kernel.interpret, partial(emulate, kernel)):
        out = torch.full((8, 128), -1, dtype=torch.int32)
        assert not run(out)
        assert torch.equal(out, torch.arange(8, dtype=torch.int32)[:, None].expand(8, 128))
