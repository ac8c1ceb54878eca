# SPDX-License-Identifier: Apache-2.0
"""Which loads the blocks of a cluster share, who sends what to whom, and what is said of those they do not share."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

import torch_tile.language as T
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target
from torch_tile.intrinsics.bulk import reaches_others
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.expr import Call, Const, Var
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Kernel, Role
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.hopper.cluster_multicast import Sharers
from torch_tile.lowering.hopper.warp_specialize import specialize_warps
from torch_tile.tileop.copy.tma import TmaCopy

sys.path.insert(0, str(Path(__file__).parents[2] / "golden"))
import in_clusters

H, F = T.float16, T.float32


def build(target="cuda:sm_90a", **options):
    return Build(Target.of(target), PassOptions(**options))


def split(kernel, target="cuda:sm_90a"):
    """The kernel with roles, and what is said of each copy of it and of the whole, in order."""
    made = build(target)
    program = specialize_warps(kernel.program, made)
    return program.kernels[0], [n.became for n in made.remarks if "cluster" in n.became or "cluster" in n.why_not], made


def loads(kernel):
    """The bulk loads by the name of their tile."""
    return {n.dst.buffer.name: n for n in walk(kernel) if isinstance(n, TmaCopy) and n.barrier is not None}


def arrivals(kernel):
    """Of each array of mbarriers."""
    allocs = [s.buffer for s in kernel.body.stmts if isinstance(s, Alloc) and s.buffer.scope == "barrier"]
    return {b.name: b.arrivals for b in allocs}


def test_what_a_product_becomes() -> None:
    kernel = in_clusters.gemm(128, 128, 256, (2, 1, 1), threads=128)
    assert_expected_inline(
        repr(specialize_warps(kernel.program, build())).replace(" T.int32(3)", "\n" + " " * 20 + "T.int32(3)"),
        """\
@T.prim_func
def kernel(A: T.Tensor((128, 256), T.float16), B: T.Tensor((128, 256), T.float16), C: T.Tensor((128, 128), T.float16)):
    with T.Kernel(2, 2, threads=160, cluster_dims=(2, 1, 1)) as (bx, by):
        thread = T.thread_index()
        a = T.alloc_shared((3, 64, 64), T.float16)
        b = T.alloc_shared((3, 64, 64), T.float16)
        a_b_full = T.alloc_barrier(1, (3,))
        a_b_empty = T.alloc_barrier(8, (3,))
        with T.role(0, 128):
            c = T.alloc_fragment((64, 64), T.float32)
            T.fill(c, 0.0)
            for ko in T.serial(4):
                T.evaluate(T.call("mbarrier_wait", T.address_of(a_b_full[ko % 3]), ko // 3 % 2, dtype=T.int32))
                T.gemm(a[ko % 3, 0:64, 0:64], b[ko % 3, 0:64, 0:64], c, transpose_B=True)
                if thread % 32 < 2:
                    T.evaluate(T.call("mbarrier_arrive", T.address_of(a_b_empty[ko % 3]), thread % 32, dtype=T.int32))
            T.copy(c, C[by * 64:by * 64 + 64, bx * 64:bx * 64 + 64])
        with T.role(128, 32):
            for ko in T.serial(4):
                T.evaluate(T.call("mbarrier_wait", T.address_of(a_b_empty[ko % 3]), (ko // 3 + 1) % 2, dtype=T.int32))
                T.tma_copy(A[by * 64:by * 64 + 64, ko * 64:ko * 64 + 64], a[ko % 3, 0:64, 0:64], a_b_full[ko % 3],
                    T.int32(3), bx % 2, shares=2)
                T.tma_copy(B[bx * 64:bx * 64 + 64, ko * 64:ko * 64 + 64], b[ko % 3, 0:64, 0:64], a_b_full[ko % 3])
                if thread == 128:
                    T.evaluate(T.call("mbarrier_arrive", T.address_of(a_b_full[ko % 3]), dtype=T.int32))
        T.evaluate(T.call("cluster_arrive", dtype=T.int32))
        T.evaluate(T.call("cluster_wait", dtype=T.int32))""",
    )


@pytest.mark.parametrize("cluster", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (4, 2, 1), (1, 8, 1)])
def test_who_sends_what_to_whom(cluster) -> None:
    """Each block of a part of the cluster loads another share, for all of the part, whose stages it waits for."""
    kernel, notes, _ = split(in_clusters.gemm(1024, 1024, 256, cluster))
    along = {"a": cluster[0], "b": cluster[1]}
    assert [("loaded once for" in n) for n in notes] == [n > 1 for n in along.values()]
    places = list(itertools.product(*map(range, cluster[1::-1])))  # y, x: by rank
    sent: dict[int, set[int]] = {}
    for name, count in along.items():
        load = loads(kernel)[name]
        if count == 1:
            assert load.blocks is load.share is None and load.shares == 1
            continue
        shares = {}
        for rank, (y, x) in enumerate(places):
            here = {kernel.blocks[0]: x + cluster[0] * 3, kernel.blocks[1]: y + cluster[1] * 5}
            bits = evaluate(load.blocks, here)
            to = {n for n in range(8) if bits >> n & 1}
            same = {n for n, place in enumerate(places) if place[name == "b"] == (y, x)[name == "b"]}
            assert to == same and len(to) == count == load.shares
            sent.setdefault(rank, set()).update(to)
            shares.setdefault(frozenset(to), []).append(evaluate(load.share, here))
        assert all(sorted(found) == list(range(count)) for found in shares.values())
    (several,) = {len(to) for to in sent.values()}
    assert arrivals(kernel) == {"a_b_full": 1, "a_b_empty": 4 * several}
    assert all((r in sent[s]) == (s in sent[r]) for r in sent for s in sent)  # so that who sends is let know


def cube(sizes, axes):
    blocks = tuple(Var(n, dt.int32, "block") for n in ("bx", "by", "bz"))
    template = in_clusters.gemm(64, 64, 64, (1, 1, 1)).program.kernels[0]
    kernel = replace(template, blocks=blocks, cluster=sizes)
    return kernel, Sharers(kernel, frozenset(axes))


@pytest.mark.parametrize("axes", [[(0,), (1,)], [(0,), (2,)], [(0, 1), (2,)], [(0,), (1,), (2,)], [(1, 2)]])
def test_blocks_that_lie_around_one(axes) -> None:
    """Along any of several sets of axes: how many there are, their bits, and for each rank whether it is one."""
    kernel, sharers = cube((2, 2, 2), axes)
    for rank in range(8):
        here = {v: rank >> n & 1 for n, v in enumerate(kernel.blocks)}
        bits = evaluate(sharers.blocks, here)
        want = {
            n for n in range(8) if any(all((n ^ rank) >> a & 1 == 0 or a in some for a in range(3)) for some in axes)
        }
        assert {n for n in range(8) if bits >> n & 1} == want and len(want) == sharers.count
        lane = Var("lane", dt.int32, "thread")
        assert {n for n in range(32) if evaluate(sharers.include(lane), {**here, lane: n})} == want


def test_parts_within_others_are_none_of_their_own() -> None:
    kernel, small = cube((2, 2, 1), [(0,)])
    whole = small.union(Sharers(kernel, frozenset([(0, 1)])))
    assert whole.axes == {(0, 1)} and isinstance(whole.blocks, Const) and whole.blocks.value == 15


def test_no_cluster_no_word() -> None:
    kernel = in_clusters.gemm(256, 256, 256, (1, 1, 1))
    _, notes, made = split(kernel)
    assert not notes
    flat = lower(kernel.program, cuda_passes(made))
    assert not any(isinstance(n, Call) and (reaches_others(n) or n.name.startswith("cluster")) for n in walk(flat))


def body(inside, cluster=(2, 1, 1), tile=(64, 64), turns=8, grid=(8, 8), begin=lambda: None):
    """A kernel with tiles a and b and accumulators c around what `inside(k, A, B, a, b, c, bx, by)` does each
    iteration.
    """

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(*grid, threads=128, cluster_dims=cluster) as (bx, by):
            begin()
            a, b, c = T.alloc_shared(tile, H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for ko in T.Pipelined(turns(bx, by) if callable(turns) else turns, num_stages=3):
                inside(ko, A, B, a, b, c, bx, by)
            T.copy(c, C[by * 64, bx * 64])

    return kernel


def product(rows, columns):
    """What `body` does with rows of A and columns of B that depend on `(k, bx, by)`."""

    def inside(k, A, B, a, b, c, bx, by):
        T.copy(A[rows(k, bx, by), k * 64], a)
        T.copy(B[columns(k, bx, by), k * 64], b)
        T.gemm(a, b, c, transpose_B=True)

    return inside


OWN = "each block of a cluster loads its own"
ONCE = "loaded once for 2 blocks of a cluster, along x"
PLACES = {
    "of another axis": (lambda k, bx, by: by * 64, ONCE),
    "of nothing": (lambda k, bx, by: k * 8, ONCE),
    "of the cluster": (lambda k, bx, by: bx // 2 * 64, ONCE),
    "of larger groups": (lambda k, bx, by: bx // 4 * 64 + by, ONCE),
    "of the first of the cluster": (lambda k, bx, by: (bx - bx % 2) * 64, ONCE),
    "of the block": (lambda k, bx, by: bx * 64, f"{OWN}: along x where it reads depends on `bx`"),
    "of the rank": (lambda k, bx, by: bx % 2 * 64, f"{OWN}: along x where it reads depends on `bx`"),
    "of other groups": (lambda k, bx, by: (bx + 1) // 2 * 64, f"{OWN}: along x where it reads depends on `bx`"),
    "of three": (lambda k, bx, by: bx // 3 * 64, f"{OWN}: along x where it reads depends on `bx`"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLACES)
def test_places_that_depend_on(what: str) -> None:
    place, note = PLACES[what]
    kernel, notes, _ = split(body(product(place, lambda k, bx, by: bx * 64)))
    assert notes == [note, PLACES["of the block"][1]]
    assert (loads(kernel)["a"].blocks is not None) == note.startswith("loaded once")


def test_names_are_looked_through() -> None:
    def inside(k, A, B, a, b, c, bx, by):
        pair, mine = bx // 2, bx % 2
        T.copy(A[pair * 64, k * 64], a)
        T.copy(B[mine * 64, k * 64], b)
        T.gemm(a, b, c, transpose_B=True)

    assert split(body(inside))[1] == [ONCE, f"{OWN}: along x where it reads depends on `bx`"]


def test_tables_are_read_where_they_are_indexed() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), table: T.Tensor((8,), T.int32), C: T.Tensor((512, 512), F)):
        with T.Kernel(8, 8, threads=128, cluster_dims=(2, 1, 1)) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[table[bx // 2] * 64, k * 64], a)
                T.copy(A[table[bx] * 64, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    assert split(kernel)[1] == [ONCE, f"{OWN}: along x where it reads depends on `bx`"]


SAME = product(lambda k, bx, by: by * 64, lambda k, bx, by: bx * 64)


@pytest.mark.parametrize(
    ("turns", "shared"),
    [(lambda bx, by: by + 1, True), (lambda bx, by: bx // 2 + 1, True), (lambda bx, by: bx + 1, False)],
)
def test_how_often_depends_on(turns, shared: bool) -> None:
    kernel, notes, _ = split(body(SAME, turns=turns))
    assert notes[0] == (ONCE if shared else f"{OWN}: along x how often it is made depends on `bx`")
    assert arrivals(kernel)["a_b_empty"] == (8 if shared else 4)
    assert any(isinstance(n, Call) and n.name == "cluster_arrive" for n in walk(kernel)) == shared


def test_guards_depend_on() -> None:
    def inside(k, A, B, a, b, c, bx, by):
        if k % 2 == by:
            T.copy(A[by * 64, k * 64], a)
        else:
            T.copy(A[0, k * 64], a)
        if k % 2 == bx % 2:
            T.copy(B[by * 64, k * 64], b)
        else:
            T.copy(B[0, k * 64], b)
        T.gemm(a, b, c, transpose_B=True)

    depends = f"{OWN}: along x whether it is made depends on `bx`"
    assert split(body(T.macro(inside)))[1] == [ONCE, ONCE, depends, depends]


def test_outer_loops_count_too() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(8, 8, threads=128, cluster_dims=(2, 2, 1)) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for _ in T.serial(bx + 1):
                for k in T.Pipelined(8, num_stages=2):
                    T.copy(A[0, k * 64], a)
                    T.copy(A[by * 64, k * 64], b)
                    T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    often = "along x how often it is made depends on `bx`"
    assert split(kernel)[1] == [
        f"loaded once for 2 blocks of a cluster, along y; {often}",
        f"{OWN}: {often}; along y where it reads depends on `by`",
    ]


def test_both_axes() -> None:
    kernel, notes, _ = split(body(product(lambda k, bx, by: 0, lambda k, bx, by: bx * 64), cluster=(2, 2, 1)))
    first = "loaded once for 4 blocks of a cluster, along x and y"
    assert notes == [first, "loaded once for 2 blocks of a cluster, along y; along x where it reads depends on `bx`"]
    assert loads(kernel)["a"].shares == 4 and arrivals(kernel)["a_b_empty"] == 16


def test_tiles_that_cannot_be_cut() -> None:
    """24 rows are 3 patterns of the swizzle."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((512, 512), F)):
        with T.Kernel(8, 8, threads=128, cluster_dims=(4, 1, 1)) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((24, 64), H), T.alloc_fragment((64, 24), F)
            T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[by * 64, k * 64], a)
                T.copy(B[by * 24, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 24])

    split_kernel, notes, made = split(kernel)
    assert notes == ["loaded once for 4 blocks of a cluster, along x", OWN]
    assert [n.why_not for n in made.remarks if n.why_not] == ["`b` has no 4 equal parts of whole boxes"]
    assert loads(split_kernel)["b"].blocks is None


WHOLE = f"{OWN} tiles: "


def scattered(k, A, B, a, b, c, bx, by):
    for i, j in T.Parallel(64, 64):
        a[i, j] = A[by * 64 + i, (k * 64 + j * 3) % 512]
    T.copy(B[bx * 64, k * 64], b)
    T.gemm(a, b, c, transpose_B=True)


KERNELS = {
    "no bulk copy": (body(T.macro(scattered)), "cuda:sm_90a", "not every pipelined copy is a bulk copy"),
    "by hand": (body(SAME, begin=T.cluster_sync), "cuda:sm_90a", "its author orders threads by hand"),
    "another chip": (body(SAME), "cuda:sm_100a", "cuda:sm_100a has no roles of warps"),
    "an odd grid": (body(SAME, grid=(7, 8)), "cuda:sm_90a", "along x 7 blocks are no clusters of 2"),
}


@pytest.mark.parametrize("what", KERNELS)
def test_what_is_not_shared_is_said(what: str) -> None:
    kernel, target, why = KERNELS[what]
    found, notes, _ = split(kernel, target)
    assert notes and all(n.startswith(OWN) for n in notes) and why in notes[0]
    assert not any(
        isinstance(n, Call) and (reaches_others(n) or n.name == "cluster_wait") for n in walk(found.body)
    ) or (what == "by hand")


def test_no_pipelined_loop() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512,), F)):
        with T.Kernel(4, threads=128, cluster_dims=2) as bx:
            for i in T.Parallel(128):
                A[bx * 128 + i] += 1.0

    assert split(kernel)[1] == [WHOLE + "no pipelined loop of blocks of whole groups of 128 threads"]


def test_the_cluster_meets_at_both_ends() -> None:
    flat = lower(in_clusters.gemm(256, 256, 256, (2, 1, 1)).program, cuda_passes(build()))
    (kernel,) = flat.kernels
    assert isinstance(kernel, Kernel)
    names = [s.call.name for s in kernel.body.stmts if isinstance(getattr(s, "call", None), Call)]
    assert names == ["cluster_arrive_relaxed", "cluster_wait", "cluster_arrive", "cluster_wait"]
    assert isinstance(kernel.body.stmts[-3], Role)


def test_what_blocks_share_changes_nothing_else() -> None:
    """The roles are those of the same kernel without clusters, but for who loads what and arrives where."""

    def shape(cluster):
        (kernel,) = lower(in_clusters.gemm(256, 256, 256, cluster).program, cuda_passes(build())).kernels
        return [n.name for n in walk(kernel) if isinstance(n, Call) and not n.name.startswith("cluster_")]

    alone = shape((1, 1, 1))
    assert shape((2, 1, 1)) == [n for n in alone if n != "barrier"]
