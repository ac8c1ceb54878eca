# SPDX-License-Identifier: Apache-2.0
"""Branches on the thread that hold operations of tiles are roles of warps."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Role

TARGETS = ["cuda:sm_80", "cuda:sm_90a"]


def roles(kernel):
    return [(role.first, role.count, role.registers) for role in find(kernel.program, Role)]


def check(kernel, target, *args):
    findings = torch_tile.compile(kernel, target=target).interpret(*args)
    assert not findings, findings.report()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("synced", [False, True])
def test_one_after_the_other(target, synced):
    """Without T.sync_threads between them, a barrier is put there."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((64, 64), "float16")
            if tx < 128:
                T.copy(A, tile)
            if synced:
                T.sync_threads()
            if tx >= 128:
                own = T.alloc_fragment((64, 64), "float32")
                T.copy(tile, B)
                T.clear(own)
                T.gemm(tile, tile, own)
                for i, j in T.Parallel(64, 64):
                    C[i, j] = own[i, j] * 2.0

    assert roles(kernel) == [(0, 128, 0), (128, 128, 0)]
    a, b, c = torch.randn(64, 64).half(), torch.zeros(64, 64).half(), torch.zeros(64, 64)
    check(kernel, target, a, b, c)
    assert torch.equal(a, b)
    torch.testing.assert_close(c, 2 * a.float() @ a.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("target", TARGETS)
def test_chains_and_names(target):
    @T.prim_func
    def kernel(A: T.Tensor((4, 32), "int32")):
        with T.Kernel(1, threads=(32, 4)):
            warp = T.get_thread_binding(1)
            if warp == 0:
                for i in T.Parallel(32):
                    A[0, i] = i
            elif warp >= 1 and warp < 3:
                T.fill(A[1:3, :], 7)
            else:
                A[3, T.get_thread_binding(0)] = warp

    assert roles(kernel) == [(0, 32, 0), (32, 64, 0), (96, 32, 0)]
    again = torch_tile.compile(kernel, target=target)
    a = torch.zeros(4, 32, dtype=torch.int32)
    check(kernel, target, a)
    assert torch.equal(a[0], torch.arange(32, dtype=torch.int32)) and (a[1:3] == 7).all() and (a[3] == 3).all()
    assert "by_hand=True" in again.script()


@pytest.mark.parametrize("by_warps", [False, True])
def test_producers_and_consumers(by_warps):
    """A loop of each role, ordered by mbarriers; registers move from the producer to the consumers."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            group = tx // 128
            a = T.alloc_shared((2, 64, 64), "float16")
            b = T.alloc_shared((2, 64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            full, empty = T.alloc_barrier([128] * 2), T.alloc_barrier([128] * 2)
            if tx >= 128:
                T.dec_max_nreg(24)
                for k in T.serial(4):
                    T.mbarrier_wait_parity(empty[k % 2], (k // 2 + 1) % 2)
                    T.tma_copy(A[0, k * 64], a[k % 2, :, :], barrier=full[k % 2])
                    T.tma_copy(B[k * 64, 0], b[k % 2, :, :], barrier=full[k % 2])
                    T.mbarrier_arrive(full[k % 2])
            elif group == 0:
                T.inc_max_nreg(240)
                T.clear(c)
                for k in T.serial(4):
                    T.mbarrier_wait_parity(full[k % 2], k // 2 % 2)
                    T.gemm(a[k % 2, :, :], b[k % 2, :, :], c)
                    T.mbarrier_arrive(empty[k % 2])
                T.copy(c, C)

    assert roles(kernel) == [(128, 128, 24), (0, 128, 240)]
    a, b, c = torch.randn(64, 256).half(), torch.randn(256, 64).half(), torch.zeros(64, 64)
    check(kernel, "cuda:sm_90a", a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-2, atol=2e-2)


def test_roles_inside_a_loop_need_mbarriers():
    def made(ordered):
        @T.prim_func
        def kernel(A: T.Tensor((4, 128), "float32"), B: T.Tensor((4, 128), "float32")):
            with T.Kernel(1, threads=256):
                tx = T.get_thread_binding()
                tile = T.alloc_shared((128,), "float32")
                if ordered:
                    full, empty = T.alloc_barrier(128), T.alloc_barrier(128)
                for k in T.serial(4):
                    if tx < 128:
                        if ordered:
                            T.mbarrier_wait_parity(empty[0], (k + 1) % 2)
                        T.copy(A[k, :], tile)
                        if ordered:
                            T.mbarrier_arrive(full[0])
                    else:
                        if ordered:
                            T.mbarrier_wait_parity(full[0], k % 2)
                        T.copy(tile, B[k, :])
                        if ordered:
                            T.mbarrier_arrive(empty[0])

        return kernel

    a, b = torch.randn(4, 128), torch.zeros(4, 128)
    check(made(True), "cuda:sm_90a", a, b)
    assert torch.equal(a, b) and roles(made(True)) == [(0, 128, 0), (128, 128, 0)]
    with pytest.raises(TileError) as caught:
        torch_tile.compile(made(False), target="cuda:sm_90a")
    assert {each.code for each in caught.value.diagnostics} == {"parted_threads"}


@pytest.mark.parametrize(
    "condition",
    [
        lambda tx, n: tx < 40,  # parts a warp
        lambda tx, n: tx % 64 < 32,  # warps that do not follow each other
        lambda tx, n: tx < n,  # known at run time
    ],
)
def test_other_branches_stay(condition):
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            if condition(tx, n):
                T.clear(A)

    assert not roles(kernel)
    with pytest.raises(TileError) as caught:
        torch_tile.compile(kernel, target="cuda:sm_80")
    assert caught.value.code == "parted_threads"


def test_branches_of_all_threads_and_of_elements_stay():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            tile = T.alloc_fragment((128,), "float32")
            if tx < 128:
                T.copy(A, tile)
            if tx < 64:
                B[tx] = 1.0
            for i in T.Parallel(128):
                B[i] = B[i] + tile[i]

    assert not roles(kernel)
    a, b = torch.randn(128), torch.zeros(128)
    check(kernel, "cuda:sm_80", a, b)
    torch.testing.assert_close(b, a + (torch.arange(128) < 64))


def test_registers_are_of_warpgroups():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((128,), "float32")):
            with T.Kernel(1, threads=128):
                if T.get_thread_binding() < 32:
                    T.set_max_nreg(240, 1)
                    T.clear(A)

    assert caught.value.code == "bad_argument" and "warpgroups" in str(caught.value)
    with pytest.raises(TileError, match="is said outside"):

        @T.prim_func
        def outside(A: T.Tensor((128,), "float32")):
            with T.Kernel(1, threads=128):
                T.set_max_nreg(240, 1)


def producers_of_a_warp(steps=3):
    """A warpgroup gives its registers away, and each of its warps brings another tile."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 192), "float16"), B: T.Tensor((192, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            a = T.alloc_shared((2, 64, 64), "float16")
            b = T.alloc_shared((2, 64, 64), "float16")
            scale = T.alloc_shared((2, 64), "float32")
            c = T.alloc_fragment((64, 64), "float32")
            full, empty = T.alloc_barrier([96] * 2), T.alloc_barrier([128] * 2)
            if tx < 128:
                T.set_max_nreg(208, 1)
                T.clear(c)
                for k in T.serial(steps):
                    T.barrier_wait(full[k % 2], k // 2 % 2)
                    T.gemm(a[k % 2, :, :], b[k % 2, :, :], c)
                    for i, j in T.Parallel(64, 64):
                        c[i, j] = c[i, j] * scale[k % 2, i]
                    T.barrier_arrive(empty[k % 2])
                T.copy(c, C)
            else:
                T.set_max_nreg(24, 0)
                late = T.alloc_var("int32", 1)
                last = steps - late
                if tx < 160:
                    for k in T.serial(last + 1):
                        T.barrier_wait(empty[k % 2], (k // 2 + 1) % 2)
                        T.tma_copy(A[0, k * 64], a[k % 2, :, :], barrier=full[k % 2])
                        T.barrier_arrive(full[k % 2])
                elif tx < 192:
                    for k in T.serial(last + 1):
                        T.barrier_wait(empty[k % 2], (k // 2 + 1) % 2)
                        for i, j in T.Parallel(64, 64):
                            b[k % 2, i, j] = B[k * 64 + i, j]
                        T.fence_proxy_async()
                        T.barrier_arrive(full[k % 2])
                elif tx < 224:
                    for k in T.serial(last + 1):
                        T.barrier_wait(empty[k % 2], (k // 2 + 1) % 2)
                        T.fill(scale[k % 2, :], T.cast(k, "float32") * 0.5 + 1)
                        T.barrier_arrive(full[k % 2])

    return kernel


def test_warps_of_a_branch_part_again():
    kernel = producers_of_a_warp()
    assert roles(kernel) == [(0, 128, 208), (128, 32, 24), (160, 32, 24), (192, 32, 24), (224, 32, 24)]
    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    a, b, c = torch.randn(64, 192).half(), torch.randn(192, 64).half(), torch.zeros(64, 64)
    findings = compiled.interpret(a, b, c)
    assert not findings, findings.report()
    want = torch.zeros(64, 64)
    for k, scale in enumerate((1.0, 1.5, 2.0)):
        want = (want + a[:, 64 * k : 64 * k + 64].float() @ b[64 * k : 64 * k + 64].float()) * scale
    torch.testing.assert_close(c, want, rtol=2e-2, atol=5e-2)
    text = compiled.get_kernel_source()  # all four warps of the group say what registers they have, together
    assert text.count("set_registers<24") == 1


def test_what_all_threads_of_a_branch_do_keeps_it_whole():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((128,), "float32")
            if tx < 128:
                T.copy(A, tile)
                T.sync_threads()
                if tx < 64:
                    T.copy(tile, B)

    with pytest.raises(TileError) as caught:
        torch_tile.compile(kernel, target="cuda:sm_90a")
    assert caught.value.code == "parted_threads"


@pytest.mark.parametrize("target", TARGETS)
def test_what_all_threads_do_in_a_loop_of_roles(target):
    """A tile is filled for both roles at each iteration, and overwritten when neither reads it any more."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 128), "float16"), B: T.Tensor((128, 64), "float16"), C: T.Tensor((64, 64), "float32"),
        sums: T.Tensor((4,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=256):
            a, marks = T.alloc_shared((64, 32), "float16"), T.alloc_shared((256,), "float32")
            left, right = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float16")
            c, d = T.alloc_fragment((64, 32), "float32"), T.alloc_fragment((64, 32), "float32")
            with T.ws(0):
                T.clear(c)
            with T.ws(1):
                T.clear(d)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], left)
                marks[T.get_thread_binding()] = k + 1
                with T.ws(1):
                    T.copy(B[k * 32, 32], right)
                    T.gemm(a, right, d)
                with T.ws(0):
                    T.gemm(a, left, c)
                    if T.get_thread_binding() == 0:
                        sums[k] = marks[255] + marks[128]
                T.sync_threads()
            with T.ws(0):
                T.copy(c, C[0, 0])
            with T.ws(1):
                T.copy(d, C[0, 32])

    assert sorted(roles(kernel)) == [(0, 128, 0), (128, 128, 0)]
    a, b, c, sums = torch.randn(64, 128).half(), torch.randn(128, 64).half(), torch.zeros(64, 64), torch.zeros(4)
    check(kernel, target, a, b, c, sums)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)
    assert sums.tolist() == [2.0, 4.0, 6.0, 8.0]


def handing_over(form, lost=0):
    """Half of the threads hands numbers to the other half by mbarriers; each thread works by itself.

    They never give the first `lost` stages back; with None A says how many.
    """

    @T.macro
    def give(n, a, bx, tx, s, full, free):
        T.mbarrier_wait_parity(free[n % 2], n // 2 % 2 ^ 1)
        s[n % 2, tx] = a[bx, tx] * (n + 1)
        T.mbarrier_arrive(full[n % 2])

    @T.macro
    def take(n, sums, tx, s, full, free, fewest):
        T.mbarrier_wait_parity(full[n % 2], n // 2 % 2)
        sums[0] = sums[0] + s[n % 2, 127 - tx]
        if n >= fewest:
            T.mbarrier_arrive(free[n % 2])

    @T.prim_func
    def kernel(A: T.Tensor((2, 64), "int32"), B: T.Tensor((2, 64), "int32")):
        with T.Kernel(2, threads=128) as bx:
            tx = T.get_thread_binding()
            s, sums = T.alloc_shared((2, 64), "int32"), T.alloc_local((1,), "int32")
            full, free = T.alloc_barrier([64, 64]), T.alloc_barrier([64, 64])
            sums[0] = 0
            if form == "else":
                if tx < 64:
                    for n in T.serial(5):
                        give(n, A, bx, tx, s, full, free)
                else:
                    for n in T.serial(5):
                        take(n, sums, tx, s, full, free, A[0, 0] if lost is None else lost)
            elif form == "two branches":
                if tx >= 64:
                    for n in T.serial(5):
                        take(n, sums, tx, s, full, free, A[0, 0] if lost is None else lost)
                if tx < 64:
                    for n in T.serial(5):
                        give(n, A, bx, tx, s, full, free)
            else:
                for n in T.serial(5):
                    if tx >= 64:
                        take(n, sums, tx, s, full, free, A[0, 0] if lost is None else lost)
                    else:
                        give(n, A, bx, tx, s, full, free)
            T.sync_threads()
            if tx >= 64:
                B[bx, tx - 64] = sums[0]

    return kernel


@pytest.mark.parametrize("form", ["else", "two branches", "in a loop"])
def test_threads_that_work_by_themselves_wait_for_each_other(form, seed):
    """Warps of one branch go on while those of another wait, though neither branch is a role."""
    a, b = torch.randint(-9, 9, (2, 64), dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    found = torch_tile.compile(handing_over(form), target="cuda:sm_90a").interpret(a, b)
    assert not found, found.report()
    assert torch.equal(b, 15 * a.flip(1))


def test_threads_that_wait_for_ever_are_still_found():
    """By the compiler, and where only data tell by the interpreter."""
    with pytest.raises(TileError, match="stuck_wait"):
        torch_tile.compile(handing_over("else", lost=1), target="cuda:sm_90a")
    a, b = torch.ones(2, 64, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    found = torch_tile.compile(handing_over("else", lost=None), target="cuda:sm_90a").interpret(a, b)
    assert "deadlock" in found.kinds, found.report()


def test_branches_inside_of_roles_keep_their_variables(seed):
    """Warps of two roles wait in branches, and each role has variables that the other one does not know."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 64), "int32"), B: T.Tensor((2, 64), "int32")):
        with T.Kernel(2, threads=256) as bx:
            tx = T.get_thread_binding()
            s = T.alloc_shared((2, 64), "int32")
            full, free = T.alloc_barrier([64, 64]), T.alloc_barrier([64, 64])
            with T.ws(0):
                given = T.alloc_var("int32", 1)
                for n in T.serial(5):
                    if tx < 64:
                        T.mbarrier_wait_parity(free[n % 2], n // 2 % 2 ^ 1)
                        s[n % 2, tx] = A[bx, tx] * given
                        given = given + 1
                        T.mbarrier_arrive(full[n % 2])
            with T.ws(1):
                taken, turns = T.alloc_var("int32", 0), T.alloc_var("int32", 0)
                for n in T.serial(5):
                    if tx >= 192:
                        T.mbarrier_wait_parity(full[n % 2], n // 2 % 2)
                        taken = taken + s[n % 2, 255 - tx]
                        turns = turns + 1
                        T.mbarrier_arrive(free[n % 2])
                if tx >= 192:
                    B[bx, tx - 192] = taken * turns

    a, b = torch.randint(-9, 9, (2, 64), dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    found = torch_tile.compile(kernel, target="cuda:sm_90a").interpret(a, b)
    assert not found, found.report()
    assert torch.equal(b, 75 * a.flip(1))


@pytest.mark.parametrize("by_warps", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("target", TARGETS)
def test_roles_load_what_all_threads_computed_for_a_tile_of_one_element(target, dtype, by_warps):
    """Each thread has a copy: in conditions, loops, operations, and again after all threads changed it."""

    @T.prim_func
    def kernel(A: T.Tensor((37,), dtype), C: T.Tensor((4, 64), dtype)):
        with T.Kernel(1, threads=256 if by_warps else 96):
            tx = T.get_thread_binding()
            total = T.alloc_fragment(1, dtype)
            total[0] = 0
            for i in T.serial(37):
                total[0] += A[i]
            if tx < (128 if by_warps else 32):
                own = T.alloc_fragment((64,), dtype)
                T.fill(own, total[0])
                if total[0] >= 20:
                    for j in T.Parallel(64):
                        own[j] = own[j] + j
                T.copy(own, C[0, :])
            else:
                for j in T.Parallel(64):
                    C[1, j] = total[0] * 2 - j
            T.sync_threads()
            total[0] = total[0] + 3
            if tx < (128 if by_warps else 32):
                for j in T.Parallel(64):
                    C[2, j] = total[0]
            else:
                for j in T.Parallel(64):
                    C[3, j] = total[0] * j

    for seed in (0, 1):  # below and above 20
        a = (torch.arange(37) % 2 + seed).to(getattr(torch, dtype))
        c, n, j = torch.full((4, 64), 99).to(a), a.sum(), torch.arange(64)
        check(kernel, target, a, c)
        rows = [n + (j if n >= 20 else 0 * j), n * 2 - j, (n + 3).expand(64), (n + 3) * j]
        assert torch.equal(c, torch.stack(rows).to(c))


@pytest.mark.parametrize("size", [1, 2])
def test_roles_neither_change_nor_share_parts_of_what_all_threads_hold(size):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((2,), "float32"), C: T.Tensor((32,), "float32")):
            with T.Kernel(1, threads=64):
                tx, held = T.get_thread_binding(), T.alloc_fragment(size, "float32")
                T.fill(held, A[0])
                if tx < 32:
                    if size == 1:
                        held[0] = held[0] + 1
                    for j in T.Parallel(32):
                        C[j] = held[size - 1]

    assert {each.code for each in caught.value.diagnostics} == {"mixed_roles"}
