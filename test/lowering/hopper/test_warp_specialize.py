# SPDX-License-Identifier: Apache-2.0
"""Kernels with a warp that copies: what they become, and that every statement reads the copies it read before."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target, equal_share
from torch_tile.intrinsics.bulk import mbarrier_wait
from torch_tile.ir.node import Rewriter, walk
from torch_tile.ir.stmt import Alloc, Block, Do, Let, Role
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.hopper.async_wgmma import async_wgmma
from torch_tile.lowering.hopper.warp_specialize import specialize_warps
from torch_tile.tileop.atomic import ArriveLast
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.copy.tma import TmaCopy

sys.path.insert(0, str(Path(__file__).parents[1]))
from role_oracle import same_reads

H, F = T.float16, T.float32


def build(target="cuda:sm_90a", **options):
    return Build(Target.of(target), PassOptions(**options))


def roles(program):
    return [s for s in program.kernels[0].body.stmts if isinstance(s, Role)]


@pytest.fixture(params=["specialize_warps", "async_wgmma"])
def split(request):
    """`split(kernel, dims, tables)`: the program with roles, which do what the kernel did."""

    def check(kernel, dims=None, tables=None, seeds=range(6), blocks=((1, 2, 3),)):
        made = build()
        program = specialize_warps(kernel.program, made)
        assert len(roles(program)) == 2, made.schedule(program.name)
        if request.param == "async_wgmma":
            program = async_wgmma(program, made)
        verify(program, Stage.TILE)
        for block in blocks:

            def names(k, block=block):
                found = dict(zip(k.blocks, block, strict=False))
                sizes = {n: dims[n.name] for n in walk(kernel.program) if getattr(n, "role", "") == "dim"}
                return found | sizes

            for before, after in zip(kernel.program.kernels, program.kernels, strict=True):
                same_reads(before, after, names, tables, seeds)
        return program

    return check


def plain(stages=3, bm=128, bn=64, bk=64, k=512, threads=256):
    @T.prim_func
    def kernel(A: T.Tensor((512, k), H), B: T.Tensor((512, k), H), C: T.Tensor((512, 512), H)):
        with T.Kernel(512 // bn, 512 // bm, threads=threads) as (bx, by):
            a, b, c = T.alloc_shared((bm, bk), H), T.alloc_shared((bn, bk), H), T.alloc_fragment((bm, bn), F)
            T.clear(c)
            for ko in T.Pipelined(k // bk, num_stages=stages):
                T.copy(A[by * bm, ko * bk], a)
                T.copy(B[bx * bn, ko * bk], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * bm, bx * bn])

    return kernel


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_plain_products(split, stages: int) -> None:
    split(plain(stages))


def test_registers_of_roles_leave_room_for_all_blocks() -> None:
    shares = {(128, 1): [0, 0], (256, 1): [240, 24], (128, 2): [232, 24], (128, 3): [136, 24], (128, 12): []}
    for (threads, blocks), given in shares.items():
        program = plain(bm=threads, threads=threads).program
        found = roles(
            specialize_warps(replace(program, kernels=(replace(program.kernels[0], min_blocks=blocks),)), build())
        )
        assert [r.registers for r in found] == given
        assert sum(r.count * r.registers for r in found) <= (threads + 128) * equal_share(threads + 128, blocks)


def test_what_a_product_becomes() -> None:
    assert_expected_inline(
        repr(specialize_warps(plain(threads=128).program, build())),
        """\
@T.prim_func
def kernel(A: T.Tensor((512, 512), T.float16), B: T.Tensor((512, 512), T.float16), C: T.Tensor((512, 512), T.float16)):
    with T.Kernel(8, 4, threads=160) as (bx, by):
        thread = T.thread_index()
        a = T.alloc_shared((3, 128, 64), T.float16)
        b = T.alloc_shared((3, 64, 64), T.float16)
        a_b_full = T.alloc_barrier(1, (3,))
        a_b_empty = T.alloc_barrier(4, (3,))
        with T.role(0, 128):
            c = T.alloc_fragment((128, 64), T.float32)
            T.fill(c, 0.0)
            for ko in T.serial(8):
                T.evaluate(T.call("mbarrier_wait", T.address_of(a_b_full[ko % 3]), ko // 3 % 2, dtype=T.int32))
                T.gemm(a[ko % 3, 0:128, 0:64], b[ko % 3, 0:64, 0:64], c, transpose_B=True)
                if thread % 32 == 0:
                    T.evaluate(T.call("mbarrier_arrive", T.address_of(a_b_empty[ko % 3]), dtype=T.int32))
            T.copy(c, C[by * 128:by * 128 + 128, bx * 64:bx * 64 + 64])
        with T.role(128, 32):
            for ko in T.serial(8):
                T.evaluate(T.call("mbarrier_wait", T.address_of(a_b_empty[ko % 3]), (ko // 3 + 1) % 2, dtype=T.int32))
                T.tma_copy(A[by * 128:by * 128 + 128, ko * 64:ko * 64 + 64], a[ko % 3, 0:128, 0:64], a_b_full[ko % 3])
                T.tma_copy(B[bx * 64:bx * 64 + 64, ko * 64:ko * 64 + 64], b[ko % 3, 0:64, 0:64], a_b_full[ko % 3])
                if thread == 128:
                    T.evaluate(T.call("mbarrier_arrive", T.address_of(a_b_full[ko % 3]), dtype=T.int32))""",
    )


def test_loops_that_start_elsewhere(split) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(bx, 8, num_stages=3):
                T.copy(A[by * 64, ko * 64], a)
                T.copy(A[ko * 64, bx * 64], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    split(kernel, blocks=[(0, 0), (3, 1), (1, 2)])


def test_steps(split) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for turn in T.serial(by, 5, 2):
                for ko in T.Pipelined(turn + bx, num_stages=2):
                    T.copy(A[by * 64, ko * 64 + turn * 8], a)
                    T.copy(A[ko * 64, bx * 64], b)
                    T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    split(kernel, blocks=[(0, 0), (3, 1), (1, 2), (0, 4)])


def test_loops_that_are_run_again_go_on_counting(split) -> None:
    """Blocks that take tile after tile, their inner loops of varying length, some of none, some of fewer."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(3, threads=256) as bx:
            q, a, c = T.alloc_shared((128, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((128, 64), F)
            b = T.alloc_shared((64, 64), H)
            for tile in T.serial(bx + 4):
                T.copy(A[tile * 128, bx * 64], q)
                T.clear(c)
                for ko in T.Pipelined(tile * 5 % 4, num_stages=3):
                    T.copy(A[ko * 64, tile * 64], a)
                    T.gemm(q, a, c)
                for ko in T.Pipelined(2, tile * 3 % 5, num_stages=2):
                    T.copy(A[ko * 64, tile * 64 + 8], b)
                    T.gemm(q, b, c)
                T.copy(c, C[tile * 128, bx * 64])

    split(kernel, blocks=[(0,), (2,)])


def attention(causal=False, split_tiles=False):
    @T.prim_func
    def kernel(Q: T.Tensor((1, 2, 512, 64), H), K: T.Tensor((1, 2, 512, 64), H), O: T.Tensor((1, 2, 512, 64), H)):
        with T.Kernel(4, 2, threads=128) as (bx, by):
            q, k, v = T.alloc_shared((128, 64), H), T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H)
            s, p, o = T.alloc_fragment((128, 64), F), T.alloc_fragment((128, 64), H), T.alloc_fragment((128, 64), F)
            m = T.alloc_fragment((128,), F)
            T.copy(Q[0, by, bx * 128, 0], q)
            T.clear(o)
            T.fill(m, -T.infinity(F))
            for j in T.Pipelined(bx * 2 + 2 if causal else 8, num_stages=2):
                T.copy(K[0, by, j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.reduce_max(s, m, dim=1, clear=False)
                for x, y in T.Parallel(128, 64):
                    p[x, y] = T.exp(s[x, y] - m[x])
                for x, y in T.Parallel(128, 64):
                    o[x, y] = o[x, y] * m[x]
                T.copy(K[0, by, j * 64 + 256, 0], v)
                T.gemm(p, v, o)
            T.copy(o, O[0, by, bx * 128, 0])

    return kernel


@pytest.mark.parametrize("causal", [False, True])
def test_attention(split, causal: bool) -> None:
    program = split(attention(causal), blocks=[(0, 0), (3, 1)])
    names = [
        s.buffer.name for s in program.kernels[0].body.stmts if isinstance(s, Alloc) and s.buffer.scope == "barrier"
    ]
    assert names == ["q_full", "k_full", "v_full", "k_empty", "v_empty"]  # q is loaded once


def test_copies_under_conditions(split) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(7, num_stages=3):
                if ko % 2 == 0:
                    T.copy(A[by * 64, ko * 64], a)
                else:
                    T.copy(A[bx * 64, ko * 8], a)
                if ko != by:
                    T.copy(A[ko * 64, bx * 64], b)
                    T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    split(kernel)


def test_names_and_block_tables(split) -> None:
    @T.prim_func
    def kernel(
        A: T.Tensor((512, 512), H),
        table: T.Tensor((4, 16), T.int32),
        lengths: T.Tensor((4,), T.int32),
        C: T.Tensor((512, 512), F),
    ):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            length = lengths[bx]
            for ko in T.Pipelined(T.ceildiv(length, 64), num_stages=3):
                page = table[bx, ko]
                offset = page * 64
                T.copy(A[offset, by * 64], a)
                T.copy(A[ko * 64, bx * 64], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    tables = {"table": lambda at: (at[0] * 5 + at[1] * 3) % 8, "lengths": lambda at: 100 + 64 * at[0]}
    split(kernel, tables=tables)


def test_dynamic_sizes(split) -> None:
    m, k = T.dynamic("m"), T.dynamic("k", multiple_of=8)

    @T.prim_func
    def kernel(A: T.Tensor((m, k), H), B: T.Tensor((512, k), H), C: T.Tensor((m, 512), F)):
        with T.Kernel(8, T.ceildiv(m, 64), threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(k, 64), num_stages=3):
                T.copy(A[by * 64, ko * 64], a)
                T.copy(B[bx * 64, ko * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    split(kernel, {"m": 100, "k": 200})


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_89", "cuda:sm_100a", "cuda:sm_120a"])
def test_other_targets(target: str) -> None:
    assert specialize_warps((program := plain().program), build(target)) is program


def body(inside, threads=128):
    """A kernel with tiles a and b and accumulators c around what `inside(k, A, B, a, b, c, bx)` does each iteration."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(4, 4, threads=threads) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=3):
                inside(ko, A, B, a, b, c, bx)
            T.copy(c, C[by * 64, bx * 64])

    return kernel


def test_tiles_are_handed_over_in_the_order_of_their_first_use(split) -> None:
    """Two products in an iteration: what the second one reads has barriers of its own."""

    @T.macro
    def two(ko, A, B, a, b, c, bx):
        d, e = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H)
        T.copy(A[ko * 64, bx * 64], a)
        T.copy(B[ko * 64, bx * 64], b)
        T.copy(B[ko * 64, bx * 64 + 64], d)
        T.copy(A[ko * 64, bx * 64 + 64], e)
        T.gemm(a, b, c)
        T.gemm(d, e, c)

    made = split(body(two))
    names = [n.buffer.name for n in made.kernels[0].body.stmts if isinstance(n, Alloc) and n.buffer.scope == "barrier"]
    assert names == ["a_b_full", "d_e_full", "a_b_empty", "d_e_empty"]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_one_tile_for_both_products(split, stages: int) -> None:
    """As in latent attention: it is released after the second."""

    @T.prim_func
    def kernel(Q: T.Tensor((512, 64), H), K: T.Tensor((512, 64), H), O: T.Tensor((512, 64), H)):
        with T.Kernel(4, threads=128) as bx:
            q, k = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H)
            s, p, o = T.alloc_fragment((64, 64), F), T.alloc_fragment((64, 64), H), T.alloc_fragment((64, 64), F)
            T.copy(Q[bx * 64, 0], q)
            T.clear(o)
            for j in T.Pipelined(8, num_stages=stages):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for x, y in T.Parallel(64, 64):
                    p[x, y] = T.exp(s[x, y])
                T.gemm(p, k, o)
            T.copy(o, O[bx * 64, 0])

    split(kernel, blocks=[(1,)])


def test_names_from_tiles_stay_with_those_that_compute(split) -> None:
    def inside(ko, A, B, a, b, c, bx):
        T.copy(A[0, ko * 64], a)
        T.copy(B[ko * 64, bx * 64], b)
        T.gemm(a, b, c)
        x = a[0, 0] * 2
        for i, j in T.Parallel(64, 64):
            c[i, j] += x

    made = split(body(inside))
    assert not any(isinstance(n, Let) for n in walk(roles(made)[1]))


class Without(Rewriter):
    """Leaves a statement out, or moves a wait to the other parity."""

    def __init__(self, one, flip):
        self.one, self.flip = one, flip

    def visit_Do(self, do):
        if do is not self.one:
            return do
        return mbarrier_wait(do.call.args[0], (do.call.args[1] + 1) % 2) if self.flip else Block(())


def second_block(kernel):
    return dict.fromkeys(kernel.blocks, 1)


@pytest.mark.parametrize("kernel", [plain(k=512), attention()], ids=["product", "attention"])
def test_every_wait_and_arrival_matters(kernel) -> None:
    """So that the tests above can fail."""
    program = specialize_warps(kernel.program, build())
    (before,), (after,) = kernel.program.kernels, program.kernels
    marked = [n for n in walk(after) if isinstance(n, Do)]
    assert len(marked) >= 4
    for one in marked:
        for flip in (False, True)[: 1 + (one.call.name == "mbarrier_wait")]:
            with pytest.raises(AssertionError):
                same_reads(before, Without(one, flip)(after), second_block, seeds=range(30))


@pytest.mark.parametrize("reads", [False, True])
def test_tensors_that_the_kernel_reads_are_stored_by_threads(reads: bool) -> None:
    """Nobody would wait until the results of bulk stores are there."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((8, 64, 64), F), counter: T.Tensor((1,), T.int32)):
        with T.Kernel(8, threads=128) as bx:
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            left = T.alloc_shared((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=2):
                T.copy(A[bx * 64, ko * 64], a)
                T.copy(A[0, ko * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, left)
            T.copy(left, C[bx, 0, 0])
            if T.arrive_last(counter[0], 8) and reads:
                T.copy(C[0, 0:64, 0:64], c)
                T.copy(c, left)

    made = build()
    program = specialize_warps(kernel.program, made)
    stores = [type(n) for n in walk(program) if isinstance(n, Copy) and n.dst.buffer.name == "C"]
    assert stores == [Copy if reads else TmaCopy]
    assert ("the kernel reads `C`" in str(made.schedule("kernel"))) is reads
    reading, copying = roles(program)
    assert sum(isinstance(n, ArriveLast) for n in walk(reading)) == 1
    assert not any(isinstance(n, ArriveLast) for n in walk(copying))


def test_branches_of_a_producer_fill_a_tile_that_consumers_change() -> None:
    """The compiler's mbarriers order these copies among each other: no barrier is missing."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 128, 192), H), B: T.Tensor((64, 192), H), C: T.Tensor((128, 64), F), turns: T.int32):
        with T.Kernel(1, threads=128):
            total = T.alloc_fragment((128, 64), F)
            T.clear(total)
            a, b = T.alloc_shared((128, 64), H), T.alloc_shared((64, 64), H)
            for _ in T.serial(turns):
                for k in T.Pipelined(3, num_stages=2):
                    T.copy(B[0, k * 64], b)
                    if k % 2 == 0:
                        T.copy(A[0, 0, k * 64], a)
                    else:
                        T.copy(A[1, 0, k * 64], a)
                    for i, j in T.Parallel(128, 64):
                        a[i, j] = T.max(a[i, j], T.cast(0, H))
                    T.gemm(a, b, total, transpose_B=True)
            T.copy(total, C)

    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    assert "tma_load" in compiled.get_kernel_source()
    a, b, c = torch.randn(2, 128, 192).half(), torch.randn(64, 192).half(), torch.full((128, 64), float("nan"))
    findings = compiled.interpret(a, b, c, 2)
    assert not findings, findings.report()
    parts = [
        a[k % 2, :, k * 64 : k * 64 + 64].relu().double() @ b[:, k * 64 : k * 64 + 64].double().T for k in range(3)
    ]
    torch.testing.assert_close(c.double(), 2 * sum(parts), rtol=1e-4, atol=1e-4)


def product_in_memory_for(stage, begins=False, turns=1):
    """A product whose result goes through a tile of 64 KiB, with operands of `stage` columns a turn.

    With `begins` another such tile brings what the sums begin at.
    """

    @T.macro
    def turn(A, B, C, a, b, c, acc, n):
        T.clear(acc)
        if begins:
            old = T.alloc_shared((256, 128), H)
            for i, j in T.Parallel(256, 128):
                old[i, j] = C[i, j]
            T.copy(old, acc)
        for k in T.Pipelined(512 // stage, num_stages=1):
            T.copy(A[0, k * stage], a)
            T.copy(B[k * stage, 0], b)
            T.gemm(a, b, acc)
        T.copy(acc, c)
        T.copy(c, C[n * 256, 0])

    @T.prim_func
    def kernel(A: T.Tensor((256, 512), H), B: T.Tensor((512, 128), H), C: T.Tensor((turns * 256, 128), H)):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((256, stage), H), T.alloc_shared((stage, 128), H)
            c, acc = T.alloc_shared((256, 128), H), T.alloc_fragment((256, 128), F)
            if turns == 1:
                turn(A, B, C, a, b, c, acc, 0)
            else:
                for n in T.serial(turns):
                    turn(A, B, C, a, b, c, acc, n)

    return kernel


def right_product(kernel, begins=False, turns=1):
    """Run a kernel of `product_in_memory_for` by threads, and compare its result."""
    a, b, c = torch.randn(256, 512).half(), torch.randn(512, 128).half(), torch.randn(turns * 256, 128).half()
    wanted = (a.float() @ b.float()).repeat(turns, 1) + (c.float() if begins else 0)
    assert "nothing found" in kernel.interpret(a, b, c).report()
    torch.testing.assert_close(c.float(), wanted, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("turns, shares", [(1, True), (2, False)])
def test_results_lie_where_the_last_operands_did(turns, shares):
    """Who reads a tile of the producer warps has waited for it. In a loop around, these fill it again meanwhile."""
    kernel = product_in_memory_for(64, turns=turns)
    program = lower(kernel.program, cuda_passes(build()))
    at = {n.buffer.name: n.buffer.offset for n in walk(program) if isinstance(n, Alloc)}
    assert (at["c"] == at["a"]) == shares
    right_product(torch_tile.compile(kernel, target="cuda:sm_90a"), turns=turns)


def test_no_producers_where_their_tiles_leave_no_room():
    """A tile from before the loop lies where those of the operands do; with a producer warp it cannot."""
    short = torch_tile.compile(product_in_memory_for(256, begins=True), target="cuda:sm_90a")
    assert "needs more shared memory than there is" in str(short.schedule)
    assert "by a warp of its own" in str(torch_tile.compile(product_in_memory_for(256), target="cuda:sm_90a").schedule)
    right_product(short, begins=True)
    with pytest.raises(torch_tile.TileError, match="shared memory"):
        torch_tile.compile(product_in_memory_for(512), target="cuda:sm_90a")
