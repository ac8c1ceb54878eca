# SPDX-License-Identifier: Apache-2.0
"""Barriers and fences in roles whose authors order them: which are added, and what those of the author become."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir.expr import Call
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Do, Role
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.mutation import removals

SHOWN = ("barrier", "named_barrier", "named_barrier_arrive", "fence_proxy_async", "mbarrier_arrive", "wgmma")


def lowered(kernel):
    return lower(kernel.program, cuda_passes(Build(Target.of("cuda:sm_90a"))))


def order(node):
    """What orders the threads of each role, repeated words left out."""
    calls = [n.call for n in walk(node) if isinstance(n, Do) and isinstance(n.call, Call) and n.call.name in SHOWN]
    words = [f"{c.name}{c.options if c.name.startswith('named') else ''}" for c in calls]
    return [w for n, w in enumerate(words) if n == 0 or words[n - 1] != w]


def roles(kernel):
    return [order(n) for n in walk(lowered(kernel)) if isinstance(n, Role)]


def exchange(prepare, own=lambda: None):
    """Two warpgroups turn a row round, each through a tile of its own."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 128), "float32"), B: T.Tensor((2, 128), "float32")):
        with T.Kernel(1, threads=256) as _:
            tiles = T.alloc_shared((2, 128), "float32")
            prepare()
            for group in [0, 1]:
                with T.ws(group):
                    for i in T.Parallel(128):
                        tiles[group, i] = A[group, i]
                    own()
                    for i in T.Parallel(128):
                        B[group, i] = tiles[group, 127 - i]

    return kernel


def runs(kernel):
    x, y = torch.randn(2, 128), torch.full((2, 128), float("nan"))
    findings = interpret(lowered(kernel), kernel.program, (x, y))
    assert not findings.found, findings.report()
    assert torch.equal(y, x.flip(1))


def test_each_role_has_a_barrier_of_its_own():
    kernel = exchange(lambda: None)
    assert roles(kernel) == [["named_barrier(1, 128)"], ["named_barrier(2, 128)"]]
    runs(kernel)


def test_a_barrier_of_the_block_is_the_roles_inside_it():
    kernel = exchange(lambda: None, T.sync_threads)
    assert roles(kernel) == [["named_barrier(1, 128)"], ["named_barrier(2, 128)"]]
    runs(kernel)


def test_numbers_of_the_author_are_left_to_him():
    def prepare():
        T.sync_threads(1, 256)
        T.sync_threads(3, 256)

    kernel = exchange(prepare)
    assert roles(kernel) == [["named_barrier(2, 128)"], ["named_barrier(4, 128)"]]
    runs(kernel)


def test_a_named_barrier_orders_the_role_that_meets_there_besides_others():
    kernel = exchange(lambda: None, lambda: T.sync_threads(5, 256))
    assert roles(kernel) == [["named_barrier(5, 256)"], ["named_barrier(5, 256)"]]
    runs(kernel)


def handed_over(arrive, meet):
    """A warpgroup writes a tile by ordinary stores, another multiplies it."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256) as _:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            ready = T.alloc_barrier(128)
            with T.ws(1):
                T.copy(A, a)
                arrive(ready)
            with T.ws(0):
                T.clear(c)
                meet(ready)
                T.gemm(a, a, c)
                T.copy(c, C)

    return kernel


def after_a_fence(ready):
    T.fence_proxy_async()
    T.mbarrier_arrive(ready)


HANDED = {
    "mbarrier": (T.mbarrier_arrive, lambda b: T.mbarrier_wait_parity(b, 0), ["fence_proxy_async", "mbarrier_arrive"]),
    "by the author": (after_a_fence, lambda b: T.barrier_wait(b, 0), ["fence_proxy_async", "mbarrier_arrive"]),
    "named": (
        lambda b: T.named_barrier_arrive(7, 256), lambda b: T.sync_threads(7, 256),
        ["fence_proxy_async", "named_barrier_arrive(7, 256)"],
    ),
    "named, both wait": (
        lambda b: T.sync_threads(7, 256), lambda b: T.sync_threads(7, 256),
        ["fence_proxy_async", "named_barrier(7, 256)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDED)
def test_engines_are_shown_what_is_handed_over(name):
    arrive, meet, want = HANDED[name]
    kernel = handed_over(arrive, meet)
    assert roles(kernel)[0] == want
    x, y = torch.randn(64, 64).half(), torch.empty(64, 64)
    findings = interpret(lowered(kernel), kernel.program, (x, y))
    assert not findings.found, findings.report()
    torch.testing.assert_close(y, x.float() @ x.float(), rtol=1e-3, atol=1e-3)


def refilled(let_go, turns=4):
    """A warpgroup reads by ordinary loads what another one's bulk copies bring, and lets each tile go."""

    @T.prim_func
    def kernel(A: T.Tensor((turns * 64, 64), "float16"), C: T.Tensor((turns * 64, 64), "float16")):
        with T.Kernel(1, threads=256) as _:
            tile = T.alloc_shared((64, 64), "float16")
            full, empty = T.alloc_barrier(1), T.alloc_barrier([4 if let_go is by_warps else 128])
            with T.ws(1):
                for turn in T.serial(turns):
                    if let_go is by_number:
                        T.sync_threads(7, 256)
                    else:
                        T.mbarrier_wait_parity(empty, (turn + 1) % 2)
                    T.tma_copy(A[turn * 64, 0], tile, barrier=full[0])
                    if T.shuffle_elect(128):
                        T.mbarrier_arrive(full)
                if let_go is by_number:
                    T.sync_threads(7, 256)
            with T.ws(0):
                if let_go is by_number:
                    T.sync_threads(7, 256)
                for turn in T.serial(turns):
                    T.mbarrier_wait_parity(full, turn % 2)
                    T.copy(tile, C[turn * 64, 0])
                    let_go(empty)

    return kernel


def by_threads(empty):
    T.mbarrier_arrive(empty)


@T.macro
def by_warps(empty):
    T.sync_warp()
    if T.get_lane_idx() == 0:
        T.mbarrier_arrive(empty)


def by_author(empty):
    T.fence_proxy_async()
    T.mbarrier_arrive(empty)


def by_number(empty):
    T.sync_threads(7, 256)


@pytest.mark.parametrize("let_go", [by_threads, by_warps, by_author, by_number])
def test_what_threads_have_read_is_shown_to_copies_that_overwrite_it(let_go):
    kernel = refilled(let_go)
    flat = lowered(kernel)
    fences = [n for n in walk(flat) if isinstance(n, Call) and n.name == "fence_proxy_async"]
    assert len(fences) == 1
    x, y = torch.randn(256, 64).half(), torch.full((256, 64), torch.nan).half()
    findings = interpret(flat, kernel.program, (x, y))
    assert not findings.found, findings.report()
    assert torch.equal(x, y)
    (missing,) = (r.program for r in removals(flat) if r.name == "fence_proxy_async")
    assert {f.kind for f in interpret(missing, kernel.program, (x, y)).found.values()} == {"missing_fence"}


def test_no_fence_for_what_is_copied_once():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((64, 64), "float16")
            full = T.alloc_barrier(1)
            T.tma_copy(A[0, 0], tile, barrier=full[0])
            if T.get_thread_binding() == 0:
                T.mbarrier_arrive(full)
            T.mbarrier_wait_parity(full, 0)
            T.copy(tile, C[0, 0])
            T.sync_threads()

    assert not [n for n in walk(lowered(kernel)) if isinstance(n, Call) and n.name == "fence_proxy_async"]


def test_no_fence_for_what_threads_read():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256) as _:
            tile = T.alloc_shared((128,), "float32")
            ready = T.alloc_barrier(128)
            with T.ws(1):
                T.copy(A, tile)
                T.mbarrier_arrive(ready)
            with T.ws(0):
                T.barrier_wait(ready, 0)
                T.copy(tile, B)

    assert roles(kernel) == [["mbarrier_arrive"], []]


def test_all_numbers_taken():
    def prepare():
        for n in list(range(1, 16)):
            T.sync_threads(n, 256)

    with pytest.raises(TileError, match="leaves no number"):
        lowered(exchange(prepare))
