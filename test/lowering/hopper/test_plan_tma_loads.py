# SPDX-License-Identifier: Apache-2.0
"""Which kernels keep all their threads together, and what the schedule says of them."""

from __future__ import annotations

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Role, Stmt, calls
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.hopper.warp_specialize import specialize_warps
from torch_tile.tileop.copy.op import Copy

H, F = T.float16, T.float32


def build(target="cuda:sm_90a", **options):
    return Build(Target.of(target), PassOptions(**options))


def why_whole(kernel, **options) -> str:
    """Why a kernel keeps its threads together, as its schedule says; "" without a word."""
    made = build(**options)
    assert specialize_warps(kernel.program, made) is kernel.program
    return "; ".join(sorted({note.why_not for note in made.remarks}))


def body(inside, threads=128, begin=lambda: None):
    """A kernel with tiles a and b and accumulators c around what `inside(k, A, B, a, b, c, bx)` does each iteration,
    after what `begin()` does once.
    """

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=threads) as (bx, by):
            begin()
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=3):
                inside(ko, A, B, a, b, c, bx)
            T.copy(c, C[by * 64, bx * 64])

    return kernel


def test_products_that_do_not_go_by_wgmma() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), F), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 32), F), T.alloc_shared((64, 32), F), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=3):
                T.copy(A[by * 64, ko * 32], a)
                T.copy(A[bx * 64, ko * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    assert why_whole(kernel) == ""
    assert any(isinstance(s, Role) for s in specialize_warps(kernel.program, build(tf32=True)).kernels[0].body.stmts)


def test_the_next_kernel_may_begin() -> None:
    def inside(k, A, B, a, b, c, bx):
        T.copy(A[bx * 64, k * 64], a)
        T.copy(B[bx * 64, k * 64], b)
        T.gemm(a, b, c, transpose_B=True)

    kernel = body(inside, begin=T.pdl_trigger)
    assert any(isinstance(s, Role) for s in specialize_warps(kernel.program, build()).kernels[0].body.stmts)
    source = torch_tile.compile(kernel, target="cuda:sm_90a").source
    assert "wgmma" in source and "grid_launch" in source


def test_all_roles_wait_for_the_kernel_before() -> None:
    def inside(k, A, B, a, b, c, bx):
        T.copy(A[bx * 64, k * 64], a)
        T.copy(B[bx * 64, k * 64], b)
        T.gemm(a, b, c, transpose_B=True)

    program = specialize_warps(body(inside, begin=T.pdl_sync).program, build())
    roles = [s for s in program.kernels[0].body.stmts if isinstance(s, Role)]
    assert len(roles) == 2
    for role in roles:  # before anything that reads memory
        found = [n for n, one in enumerate(role.body.stmts) if calls(one, "grid_wait")]
        reads = [n for n, one in enumerate(role.body.stmts) if any(isinstance(s, Copy) for s in find(one, Stmt))]
        assert len(found) == 1 and found[0] < min(reads)

    def late(k, A, B, a, b, c, bx):
        T.pdl_sync()
        inside(k, A, B, a, b, c, bx)

    assert why_whole(body(late)) == ""  # which is no roles


def test_tiles_that_are_read_after_the_loop() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=3):
                T.copy(A[by * 64, ko * 64], a)
                T.copy(A[ko * 64, bx * 64], b)
                T.gemm(a, b, c)
            for i, j in T.Parallel(64, 64):
                c[i, j] += a[i, j]
            T.copy(c, C[by * 64, bx * 64])

    assert why_whole(kernel) == "`a` is read outside the loop that fills it"


def scaled(ko, A, B, a, b, c, bx):
    T.copy(A[0, ko * 64], a)
    T.copy(B[ko * 64, bx * 64], b)
    for i, j in T.Parallel(64, 64):
        a[i, j] = a[i, j] * 2
    T.gemm(a, b, c)


def scaled_late(ko, A, B, a, b, c, bx):
    T.copy(A[0, ko * 64], a)
    T.copy(B[ko * 64, bx * 64], b)
    T.gemm(a, b, c)
    for i, j in T.Parallel(64, 64):
        a[i, j] = a[i, j] * 2


def gathered(ko, A, B, a, b, c, bx):
    for i, j in T.Parallel(64, 64):
        a[i, j] = A[i * 8, ko * 64 + j]
    T.copy(B[ko * 64, bx * 64], b)
    T.gemm(a, b, c)


def written(ko, A, B, a, b, c, bx):
    T.copy(A[0, ko * 64], a)
    T.copy(B[ko * 64, bx * 64], b)
    T.gemm(a, b, c)
    B[ko, bx] = 0


def again(ko, A, B, a, b, c, bx):
    T.copy(A[0, ko * 64], a)
    T.copy(B[ko * 64, bx * 64], b)
    T.gemm(a, b, c)
    T.copy(A[64, ko * 64], a)
    T.gemm(a, b, c)


def twice(ko, A, B, a, b, c, bx):
    T.copy(A[0, ko * 64], a)
    T.copy(A[64, ko * 64], a)
    T.copy(B[ko * 64, bx * 64], b)
    T.gemm(a, b, c)


@T.macro
def sometimes(ko, A, B, a, b, c, bx):
    if ko % 2 == 0:
        T.copy(A[0, ko * 64], a)
    T.copy(B[ko * 64, bx * 64], b)
    T.gemm(a, b, c)


def half(ko, A, B, a, b, c, bx):
    T.copy(A[0:32, ko * 64 : ko * 64 + 64], a[0:32, :])
    T.copy(B[ko * 64, bx * 64], b)
    T.gemm(a, b, c)


def before(ko, A, B, a, b, c, bx):
    T.gemm(a, b, c)
    T.copy(A[0, ko * 64], a)
    T.copy(B[ko * 64, bx * 64], b)


def unwanted(ko, A, B, a, b, c, bx):
    T.copy(A[0, ko * 64], a, disable_tma=True)
    T.copy(B[ko * 64, bx * 64], b)
    T.gemm(a, b, c)


@T.macro
def of_a_thread(ko, A, B, a, b, c, bx):
    T.copy(A[0, ko * 64], a)
    if T.get_thread_binding() < 500:
        T.copy(B[ko * 64, bx * 64], b)
    T.gemm(a, b, c)


def from_a_tile(ko, A, B, a, b, c, bx):
    T.copy(A[0, ko * 64], a)
    start = T.cast(a[0, 0], "int32")
    T.copy(B[ko * 64 + start, bx * 64], b)
    T.gemm(a, b, c)


def by_hand(ko, A, B, a, b, c, bx):
    T.copy(A[0, ko * 64], a)
    T.copy(B[ko * 64, bx * 64], b)
    T.sync_threads()
    T.gemm(a, b, c)


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (scaled_late, "`a` is written by the kernel's threads, too"),
        (gathered, "it gathers elements"),
        (written, "the kernel writes `B`"),
        (again, "`a` is filled again after it was used"),
        (twice, "`a` is filled twice"),
        (sometimes, "`a` holds values of an earlier iteration"),
        (half, "`a` holds values of an earlier iteration"),
        (before, "`a` holds values of an earlier iteration; `b` holds values of an earlier iteration"),
        (unwanted, "its author does not want it"),
        (of_a_thread, "whether or where it reads depends on the thread"),
        (from_a_tile, "where it reads depends on `a`, which the kernel's threads compute"),
        (by_hand, ""),
    ],
)
def test_kernels_that_stay_whole(inside, why: str) -> None:
    assert why_whole(body(inside)) == why


def roles_of(kernel) -> list[Role]:
    return [s for s in specialize_warps(kernel.program, build()).kernels[0].body.stmts if isinstance(s, Role)]


def test_tiles_that_threads_change_before_a_product() -> None:
    """The fence in front of the product also shows the change to the copies of later iterations."""
    assert len(roles_of(body(scaled))) == 2


def test_tiles_of_no_loop_may_hold_results_later() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), H)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.copy(A[by * 64, 0], a)
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=3):
                T.copy(A[ko * 64, bx * 64], b)
                T.gemm(a, b, c)
            T.copy(c, a)
            T.copy(a, C[by * 64, bx * 64])

    made = build()
    assert len(roles_of(kernel)) == 2
    lower(kernel.program, cuda_passes(made))
    assert "a: bulk copies by a warp of its own, 1 stage" in str(made.schedule("kernel"))


def test_loops_that_are_left_early() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for tile in T.serial(8):
                if tile > bx:
                    break
                for ko in T.Pipelined(8, num_stages=3):
                    T.copy(A[by * 64, ko * 64], a)
                    T.copy(A[ko * 64, tile * 64], b)
                    T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    assert why_whole(kernel) == ""


def test_mbarriers_of_the_author() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            ready = T.alloc_barrier(1)
            q = T.alloc_shared((64, 64), H)
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            T.tma_copy(A[by * 64, 0], q, barrier=ready[0])
            for ko in T.Pipelined(8, num_stages=3):
                T.copy(A[by * 64, ko * 64], a)
                T.copy(A[ko * 64, bx * 64], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    assert why_whole(kernel) == ""


@pytest.mark.parametrize("combine", [None, "add"])
def test_bulk_stores_of_the_author_leave_loads_to_producers(combine: str | None) -> None:
    """A store waits for itself, so it orders no threads."""

    @T.prim_func
    def kernel(A: T.Tensor((256, 256), H), C: T.Tensor((256, 256), H)):
        with T.Kernel(2, 2, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((128, 64), H), T.alloc_shared((64, 128), H), T.alloc_fragment((128, 128), F)
            out = T.alloc_shared((128, 128), H)
            T.clear(c)
            for ko in T.Pipelined(4, num_stages=3):
                T.copy(A[by * 128, ko * 64], a)
                T.copy(A[ko * 64, bx * 128], b)
                T.gemm(a, b, c)
            T.copy(c, out)
            T.tma_copy(out, C[by * 128, bx * 128], combine=combine)

    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    assert "bulk copies by a warp of its own" in str(compiled.schedule)
    a, c = torch.randn(256, 256).half(), torch.randn(256, 256).half()
    want = a.float() @ a.float() + (c.float() if combine else 0)
    findings = compiled.interpret(a, c)
    assert not findings, findings.report()
    torch.testing.assert_close(c.float(), want, rtol=1e-2, atol=1e-1)


def test_strict_kernels_say_why_they_stay_whole() -> None:
    with pytest.raises(TileError, match="filled again after it was used"):
        torch_tile.compile(body(again), target="cuda:sm_90a", strict=True)


def test_tiles_of_several_loops() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(bx, num_stages=3):
                T.copy(A[by * 64, ko * 64], a)
                T.copy(A[ko * 64, bx * 64], b)
                T.gemm(a, b, c)
            for ko in T.Pipelined(bx, num_stages=3):
                T.copy(A[by * 64, ko * 64 + 8], a)
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    assert why_whole(kernel) == "`a` is filled in several loops; `b` is read outside the loop that fills it"


@pytest.mark.parametrize(("wanted", "got"), [(2, 2), (3, 3), (4, 3), (7, 3)])
@pytest.mark.parametrize("before", [True, False])
def test_as_many_stages_as_there_is_room_for(wanted: int, got: int, before: bool) -> None:
    """48 KiB a turn, beside 64 KiB for the results: of 227 KiB three turns fit, or four if results only come later."""
    got = got if before else min(wanted, 4)

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((512, 512), H)):
        with T.Kernel(2, 4, threads=256) as (bx, by):
            a, b, c = T.alloc_shared((128, 64), H), T.alloc_shared((256, 64), H), T.alloc_fragment((128, 256), F)
            out = T.alloc_shared((128, 256), H)
            T.clear(c)
            if before:
                T.clear(out)
                T.copy(out, c)
            for ko in T.Pipelined(8, num_stages=wanted):
                T.copy(A[by * 128, ko * 64], a)
                T.copy(B[bx * 256, ko * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, out)
            T.copy(out, C[by * 128, bx * 256])

    made = build()
    program = lower(kernel.program, cuda_passes(made))
    assert made.remarks[0].became == f"a, b: bulk copies by a warp of its own, {got} stages"
    assert (f"num_stages={wanted} does not fit" in made.remarks[0].why_not) is (got < wanted)
    assert program.kernels[0].shared_bytes <= made.target.shared_limit


def test_copiers_do_not_load_what_other_blocks_write() -> None:
    """Also where only the last block to arrive reads it, outside pipelined loops."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((8, 64, 64), H), counter: T.Tensor((1,), T.int32)):
        with T.Kernel(8, threads=128) as bx:
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            part = T.alloc_shared((64, 64), H)
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=2):
                T.copy(A[bx * 64, ko * 64], a)
                T.copy(A[0, ko * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[bx, 0, 0])
            if T.arrive_last(counter[0], 8):
                for z in T.serial(8):
                    T.copy(C[z, 0:64, 0:64], part)
                    T.gemm(part, part, c)

    program = specialize_warps(kernel.program, build())
    _, copying = find(program, Role)
    assert {n.src.buffer.name for n in find(copying, Copy)} == {"A"}


def test_versions_that_do_not_begin_where_bulk_copies_may() -> None:
    """Of a row of 64 bytes, whose second version no bulk copy could fill."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 512), H), B: T.Tensor((512, 512), H), S: T.Tensor((512,), T.uint8),
               C: T.Tensor((64, 512), F)):  # fmt: skip
        with T.Kernel(8, threads=128) as bx:
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            s = T.alloc_shared((64,), T.uint8)
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=2):
                T.copy(A[0, ko * 64], a)
                T.copy(B[bx * 64, ko * 64], b)
                T.copy(S[ko * 64], s)
                T.gemm(a, b, c, transpose_B=True)
                for i, j in T.Parallel(64, 64):
                    c[i, j] = T.if_then_else(s[j] != 0, c[i, j], 0.0)
            T.copy(c, C[0, bx * 64])

    assert why_whole(kernel) == "versions of `s`, of 64 bytes, do not begin at multiples of 128"
    lower(kernel.program, cuda_passes(build()))
