# SPDX-License-Identifier: Apache-2.0
"""Products that stay in flight: what loops become. That values stay as they are is shown in test_split_warps.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics.wgmma import wait_of
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Do, For, If
from torch_tile.lowering.hopper.async_wgmma import async_wgmma
from torch_tile.lowering.hopper.peel_causal import peel_causal
from torch_tile.lowering.hopper.warp_specialize import specialize_warps
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.gemm.wgmma import WgmmaResults
from torch_tile.tileop.uses import writes_of


def product(stages=3, dtype="float16", total="float32", target="cuda:sm_90a"):
    """The program of a plain product after both passes."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), dtype), B: T.Tensor((512, 512), dtype), C: T.Tensor((512, 512), total)):
        with T.Kernel(8, 8, threads=128) as (bx, by):
            a, b, c = (
                T.alloc_shared((64, 64), dtype),
                T.alloc_shared((64, 64), dtype),
                T.alloc_fragment((64, 64), total),
            )
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=stages):
                T.copy(A[by * 64, ko * 64], a)
                T.copy(B[bx * 64, ko * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    build = Build(Target.of(target))
    return async_wgmma(specialize_warps(kernel.program, build), build)


def waits(program) -> list[int]:
    return [n.wg_wait for n in walk(program) if isinstance(n, Gemm)]


def test_a_turn_stays_under_way() -> None:
    assert waits(product()) == [1]


def test_not_if_its_tiles_have_one_stage() -> None:
    """The producer would wait for a turn that waits for the producer."""
    assert waits(product(stages=1)) == [0]


def test_other_targets() -> None:
    assert waits(product(target="cuda:sm_80")) == [0]


def test_integer_zeros_are_there_before_the_first_product() -> None:
    pinned = [n for n in walk(product(dtype="int8", total="int32")) if isinstance(n, Fill | WgmmaResults)]
    assert [type(n) for n in pinned] == [Fill, WgmmaResults, WgmmaResults]
    assert [type(n) for n in walk(product()) if isinstance(n, Fill | WgmmaResults)] == [Fill, WgmmaResults]


def two_parts(stages):
    """Attention whose scores and whose sums are of two products each, with tiles of their own, after both passes."""

    @T.prim_func
    def kernel(Q: T.Tensor((512, 64), T.float16), K: T.Tensor((512, 64), T.float16), O: T.Tensor((512, 64), T.float32)):
        with T.Kernel(8, threads=128) as bx:
            q, k, r, v, w = (T.alloc_shared((64, 64), T.float16) for _ in range(5))
            s, o = T.alloc_fragment((64, 64), T.float32), T.alloc_fragment((64, 64), T.float32)
            p = T.alloc_fragment((64, 64), T.float16)
            T.copy(Q[bx * 64, 0], q)
            T.clear(o)
            for j in T.Pipelined(4, num_stages=stages):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(K[j * 64 + 64, 0], r)
                T.gemm(q, r, s, transpose_B=True)
                for x, y in T.Parallel(64, 64):
                    p[x, y] = T.exp(s[x, y])
                T.copy(K[j * 64 + 128, 0], v)
                T.gemm(p, v, o)
                T.copy(K[j * 64 + 192, 0], w)
                T.gemm(p, w, o)
            T.copy(o, O[bx * 64, 0])

    build = Build(Target.of("cuda:sm_90a"))
    return async_wgmma(specialize_warps(kernel.program, build), build)


@pytest.mark.parametrize("stages", [1, 2])
def test_tiles_are_kept_while_products_that_read_them_are_under_way(stages: int) -> None:
    program = two_parts(stages)
    assert -1 in waits(program)
    loop = next(n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts))
    order = [s.B.buffer.name for s in loop.body.stmts if isinstance(s, Gemm)]
    started: list[str] = []  # tiles that products in flight read
    for one in loop.body.stmts:
        if isinstance(one, Gemm):
            started.append(one.B.buffer.name)
        elif isinstance(one, Do) and one.call.name == "wgmma_wait":
            started = order[len(order) - one.call.options[0] :]
        elif isinstance(one, If):
            (release,) = {n.buffer.name for n in walk(one) if isinstance(n, Address)}
            assert release.removesuffix("_empty") not in started


def one_tile(stages, threads=128):
    """A tile that is keys and values, as in latent attention; what its loop becomes."""

    @T.prim_func
    def kernel(Q: T.Tensor((512, 64), T.float16), K: T.Tensor((512, 64), T.float16), O: T.Tensor((512, 64), T.float32)):
        with T.Kernel(8, threads=threads) as bx:
            q, k = T.alloc_shared((64, 64), T.float16), T.alloc_shared((64, 64), T.float16)
            s, o = T.alloc_fragment((64, 64), T.float32), T.alloc_fragment((64, 64), T.float32)
            p = T.alloc_fragment((64, 64), T.float16)
            T.copy(Q[bx * 64, 0], q)
            T.clear(o)
            for j in T.Pipelined(8, num_stages=stages):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for x, y in T.Parallel(64, 64):
                    p[x, y] = T.exp(s[x, y])
                T.gemm(p, k, o)
            T.copy(o, O[bx * 64, 0])

    build = Build(Target.of("cuda:sm_90a"))
    return async_wgmma(specialize_warps(kernel.program, build), build)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_loop_is_not_turned_if_that_kept_all_stages_of_a_tile(stages: int) -> None:
    """A tile of both products lies in its stage for a turn and a half: with two stages, none would be filled."""
    program = one_tile(stages)
    loop = next(n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts))
    order = [(s.C.buffer.name, s.wg_wait) for s in loop.body.stmts if isinstance(s, Gemm)]
    waited = [s.call.options[0] for s in loop.body.stmts if isinstance(s, Do) and s.call.name == "wgmma_wait"]
    assert order == ([("s", -1), ("o", -1)] if stages == 3 else [("s", 0), ("o", 0)])
    assert waited == ([1, 0] if stages == 3 else [])


def in_a_row(seen=None):
    """Scores of two products, and sums of two: a tile that is keys and values lies in two parts. The kernel's loop."""

    @T.prim_func
    def kernel(Q: T.Tensor((512, 128), T.float16), K: T.Tensor((512, 128), T.float16), limit: T.int32):
        with T.Kernel(8, threads=128) as bx:
            q = T.alloc_shared((64, 128), T.float16)
            left, right = (T.alloc_shared((64, 64), T.float16) for _ in range(2))
            s, p = T.alloc_fragment((64, 64), T.float32), T.alloc_fragment((64, 64), T.float16)
            sums = [T.alloc_fragment((64, 64), T.float32) for _ in range(2)]
            T.copy(Q[bx * 64, 0], q)
            for each in sums:
                T.clear(each)
            for j in T.Pipelined(8, num_stages=2):
                T.copy(K[j * 64, 0], left)
                T.copy(K[j * 64, 64], right)
                T.gemm(q[:, :64], left, s, transpose_B=True, clear_accum=True)
                T.gemm(q[:, 64:], right, s, transpose_B=True)
                if seen is not None and seen(j, limit):
                    T.clear(s)
                for x, y in T.Parallel(64, 64):
                    p[x, y] = T.exp(s[x, y])
                T.gemm(p, left, sums[0])
                T.gemm(p, right, sums[1])

    build = Build(Target.of("cuda:sm_90a"))
    program = peel_causal(async_wgmma(specialize_warps(kernel.program, build), build), build)
    return [n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts)]


def test_products_in_a_row_are_under_way_together() -> None:
    """The assembler's queue is not empty between them, and each tile is released once those that read it are done."""
    (loop,) = in_a_row()
    found: list[str] = []
    for one in loop.body.stmts:
        if isinstance(one, Gemm):
            found.append(f"{one.B.buffer.name} {one.wg_wait}")
        elif isinstance(one, Do) and one.call.name == "wgmma_wait":
            found.append(f"wait {one.call.options[0]}")
        elif isinstance(one, If):
            found += {n.buffer.name for n in walk(one) if isinstance(n, Address)}
    scores, sums = found[: found.index("wait 0") + 1], found[found.index("wait 0") + 1 :]
    assert scores == ["left -1", "right -1", "wait 0"]
    assert sums == ["left -1", "right -1", "wait 1", "left_empty", "wait 0", "right_empty"]


@pytest.mark.parametrize("touches", [None, "result", "operand"])
def test_products_are_under_way_beside_what_does_not_touch_them(touches) -> None:
    """Operands in registers are made for the next product; what needs a result or changes an operand waits for it."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 512), T.float16), B: T.Tensor((512, 512), T.float16)):
        with T.Kernel(8, threads=128) as bx:
            a, b = T.alloc_shared((64, 64), T.float16), T.alloc_shared((64, 64), T.float16)
            c = T.alloc_fragment((64, 64), T.float32)
            halves = [T.alloc_fragment((64, 32), T.float16) for _ in range(2)]
            T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[bx * 64, k * 64], b)
                for n, half in enumerate(halves):
                    for i, j in T.Parallel(64, 32):
                        half[i, j] = a[i, n * 32 + j] * 2
                    if n and touches == "result":
                        for i, j in T.Parallel(64, 64):
                            c[i, j] = c[i, j] * 0.5
                    if n and touches == "operand":
                        T.clear(halves[0])
                    T.gemm(half, b[:, n * 32 : n * 32 + 32], c, transpose_B=True)

    build = Build(Target.of("cuda:sm_90a"))
    program = async_wgmma(specialize_warps(kernel.program, build), build)
    assert waits(program) == ([-1, -1] if touches is None else [-1, 0])
    (loop,) = (n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts))
    kinds = [type(s).__name__ for s in loop.body.stmts if isinstance(s, Gemm | WgmmaResults)]
    if touches is None:
        assert kinds == ["Gemm", "Gemm", "WgmmaResults"]
    else:
        assert kinds == ["Gemm", "WgmmaResults", "Gemm"]
        behind = loop.body.stmts[[isinstance(s, WgmmaResults) for s in loop.body.stmts].index(True) + 1]
        assert isinstance(behind, For if touches == "result" else Fill)  # which touches them


def test_a_statement_waits_for_the_products_that_it_touches_alone() -> None:
    """Younger products stay in flight, and each tile is released behind the wait that covers its product."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 512), T.float16), B: T.Tensor((64, 512), T.float16), C: T.Tensor((64, 512))):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((64, 64), T.float16), T.alloc_shared((64, 64), T.float16)
            left = T.alloc_fragment((64, 64), T.float16)
            one, two = (T.alloc_fragment((64, 64), T.float32) for _ in range(2))
            numbers = T.alloc_fragment((64, 64), T.float32)
            T.clear(numbers)
            T.clear(left)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[0, k * 64], b)
                T.gemm(left, a, one, clear_accum=True)
                T.gemm(left, b, two, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    numbers[i, j] += one[i, j]
                for i, j in T.Parallel(64, 64):
                    numbers[i, j] *= two[i, j]
            T.copy(numbers, C[0, 0])

    build = Build(Target.of("cuda:sm_90a"))
    program = async_wgmma(specialize_warps(kernel.program, build), build)
    (loop,) = (n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts))
    found: list[str] = []
    for s in loop.body.stmts:
        if isinstance(s, Gemm):
            found.append(f"{s.B.buffer.name} {s.wg_wait}")
        elif isinstance(s, Do) and s.call.name == "wgmma_wait":
            found.append(f"wait {s.call.options[0]}")
        elif isinstance(s, WgmmaResults):
            found.append(f"results of {s.C.buffer.name}")
        elif isinstance(s, For):
            found.append("arithmetic")
        elif isinstance(s, If):
            found += sorted({n.buffer.name for n in walk(s) if isinstance(n, Address)})
    assert found == [
        "a -1", "b -1", "wait 1", "a_empty", "results of one", "arithmetic",
        "wait 0", "b_empty", "results of two", "arithmetic",
    ]  # fmt: skip


def test_a_branch_with_nothing_under_way_is_not_worth_another_loop() -> None:
    (loop,) = in_a_row(lambda step, limit: step * 64 > limit)
    assert any(isinstance(s, If) and any(isinstance(n, Fill) for n in walk(s)) for s in loop.body.stmts)


def masked(bound, target="cuda:sm_90a"):
    """Attention whose first keys are masked, in turns `j` with `j * 64 < bound(limit)`; what its loop becomes."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((512, 64), T.float16), K: T.Tensor((512, 64), T.float16), O: T.Tensor((512, 64), T.float32),
        limit: T.int32,
    ):  # fmt: skip
        with T.Kernel(8, threads=128) as bx:
            q, k, v = (T.alloc_shared((64, 64), T.float16) for _ in range(3))
            s, o = T.alloc_fragment((64, 64), T.float32), T.alloc_fragment((64, 64), T.float32)
            p = T.alloc_fragment((64, 64), T.float16)
            T.copy(Q[bx * 64, 0], q)
            T.clear(o)
            for j in T.Pipelined(8, num_stages=2):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                if j * 64 < bound(limit):
                    for x, y in T.Parallel(64, 64):
                        s[x, y] = T.if_then_else(j * 64 + y < limit, 0, s[x, y])
                for x, y in T.Parallel(64, 64):
                    p[x, y] = s[x, y]
                T.copy(K[j * 64, 0], v)
                T.gemm(p, v, o)
            T.copy(o, O[bx * 64, 0])

    build = Build(Target.of(target))
    program = async_wgmma(specialize_warps(kernel.program, build), build)
    return [n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts)]


def asks(loop) -> int:
    """Branches of a loop that compute something."""
    return sum(isinstance(s, If) and any(isinstance(n, For | Gemm) for n in walk(s)) for s in loop.body.stmts)


def weighted(rows: int, total: str = "float32"):
    """Products of products whose sums are `total`, by a warpgroup for each 64 rows, after both passes."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((rows, 64), T.float16), K: T.Tensor((512, 64), T.float16), O: T.Tensor((rows, 64), T.float32)
    ):
        with T.Kernel(1, threads=2 * rows):
            q, k, v = T.alloc_shared((rows, 64), T.float16), *(T.alloc_shared((64, 64), T.float16) for _ in range(2))
            s, p, o = (T.alloc_fragment((rows, 64), x) for x in (total, "float16", "float32"))
            T.copy(Q, q)
            T.clear(o)
            for ko in T.Pipelined(8, num_stages=2):
                T.copy(K[ko * 64, 0], k)
                T.copy(K[ko * 64, 0], v)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, 64):
                    p[i, j] = s[i, j] / 8
                T.gemm(p, v, o)
            T.copy(o, O)

    build = Build(Target("cuda", 90))
    return async_wgmma(specialize_warps(kernel.program, build), build)


@pytest.mark.parametrize("rows, total, held", [(64, "float32", 1), (128, "float32", 0), (64, "float16", 0)])
def test_a_lone_warpgroup_keeps_arithmetic_in_front_of_second_products(rows: int, total: str, held: int) -> None:
    """The mark stands right before the wait for them. Of two warpgroups, each has the other one's arithmetic beside."""
    loops = [n.body.stmts for n in walk(weighted(rows, total)) if isinstance(n, For)]
    (body,) = (stmts for stmts in loops if sum(isinstance(one, Gemm) for one in stmts) == 2)
    marks = [n for n, one in enumerate(body) if isinstance(one, WgmmaResults) and one.held]
    assert len(marks) == held
    assert all((wait := wait_of(body[n + 1])) is not None and not wait.pending for n in marks)


def test_few_turns_that_branch_lead_a_turned_loop() -> None:
    """They are waited for; the second products of the last of them belong to the turned loop, which never asks."""
    lead, turned = masked(lambda limit: T.min(limit, 160))
    assert [(s.C.buffer.name, s.wg_wait) for s in lead.body.stmts if isinstance(s, Gemm)] == [("s", 0)]
    rest = lead.body.stmts[-1]
    assert isinstance(rest, If) and str(rest.condition) == "j + 1 < j_lead"
    assert [(n.C.buffer.name, n.wg_wait) for n in walk(rest) if isinstance(n, Gemm)] == [("o", 0)]
    assert asks(lead) == 2 and asks(turned) == 0
    assert (str(lead.starts[0]), str(lead.stops[0])) == ("0", "j_lead")
    assert (str(turned.starts[0]), str(turned.stops[0])) == ("j_lead - 1", "7")


def test_a_single_such_turn_needs_no_loop() -> None:
    (turned,) = masked(lambda limit: T.min(limit, 64))
    assert asks(turned) == 0 and str(turned.starts[0]) == "0"


def test_turns_that_may_be_many_are_turned_with_their_branch() -> None:
    (turned,) = masked(lambda limit: limit)
    assert asks(turned) == 1 and str(turned.starts[0]) == "0"


@pytest.mark.parametrize("arrives", [False, True])
def test_a_loop_with_an_arrival_is_not_turned(arrives: bool) -> None:
    """What is written before it would come after it, if it has to wait for products and the arrival has not."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((512, 64), T.float16), K: T.Tensor((512, 64), T.float16), O: T.Tensor((512, 64), T.float32),
        seen: T.Tensor((512, 64), T.float32), counters: T.Tensor((4,), T.int32),
    ):  # fmt: skip
        with T.Kernel(8, threads=128) as bx:
            q, k, v = (T.alloc_shared((64, 64), T.float16) for _ in range(3))
            s, o = T.alloc_fragment((64, 64), T.float32), T.alloc_fragment((64, 64), T.float32)
            p = T.alloc_fragment((64, 64), T.float16)
            T.copy(Q[bx * 64, 0], q)
            T.clear(o)
            for j in T.Pipelined(4, num_stages=3):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(o, seen[bx * 64, 0])
                if arrives:
                    T.arrive_last(counters[j], 8)
                T.copy(s, p)
                T.copy(K[j * 64, 0], v)
                T.gemm(p, v, o)
            T.copy(o, O[bx * 64, 0])

    build = Build(Target.of("cuda:sm_90a"))
    program = async_wgmma(specialize_warps(kernel.program, build), build)
    turned = "beside the arithmetic of the iteration before" in str(build.schedule("kernel"))
    assert turned is not arrives
    loop = next(n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts))
    if arrives:
        names = [type(s).__name__ for s in loop.body.stmts]
        assert names.count("ArriveLast") == 1 and "Copy" in names[: names.index("ArriveLast")]


def biased(late: bool):
    """Attention whose arithmetic reads a tile of its own: with `late` where it touches the second products' sums."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((128, 64), T.float16), K: T.Tensor((512, 64), T.float16), B: T.Tensor((128, 512), T.float16),
        O: T.Tensor((128, 64), T.float32),
    ):  # fmt: skip
        with T.Kernel(2, threads=128) as bx:
            q, k, v, bias = (T.alloc_shared((64, 64), T.float16) for _ in range(4))
            s, o = T.alloc_fragment((64, 64), T.float32), T.alloc_fragment((64, 64), T.float32)
            p = T.alloc_fragment((64, 64), T.float16)
            T.copy(Q[bx * 64, 0], q)
            T.clear(o)
            for j in T.Pipelined(8, num_stages=2):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(B[bx * 64, j * 64], bias)
                for x, y in T.Parallel(64, 64):
                    if late:
                        o[x, y] += bias[x, y]
                    else:
                        s[x, y] += bias[x, y]
                for x, y in T.Parallel(64, 64):
                    p[x, y] = s[x, y] * 0.125
                T.copy(K[j * 64, 0], v)
                T.gemm(p, v, o)
            T.copy(o, O[bx * 64, 0])

    return kernel


def order(kernel) -> str:
    """What the turned loop does, one after another: Products, (W)aits for them, waits for <tiles>, arithmetic, and >
    where they are released.
    """
    build = Build(Target.of("cuda:sm_90a"))
    program = async_wgmma(specialize_warps(kernel.program, build), build)
    (loop,) = (n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts))
    said = []
    for one in loop.body.stmts:
        names = [n.buffer.name for n in walk(one) if isinstance(n, Address) and n.buffer.scope == "barrier"]
        if isinstance(one, Gemm):
            said.append(f"P{one.C.buffer.name}")
        elif names:
            said.append(names[0])
        elif isinstance(one, For):
            said.append("arithmetic")
        elif isinstance(one, Do) and one.call.name == "wgmma_wait":
            said.append("W")
    return " ".join(said)


def test_arithmetic_waits_for_a_tile_of_its_own() -> None:
    kernel = biased(late=False)
    assert order(kernel) == ("k_full Ps v_full Po W k_empty bias_full arithmetic bias_empty W v_empty arithmetic")


def test_such_a_tile_is_let_go_after_arithmetic_that_waits_for_the_second_products() -> None:
    kernel = biased(late=True)
    assert order(kernel) == "k_full Ps v_full Po W k_empty bias_full W v_empty arithmetic bias_empty arithmetic"


def read_by_arithmetic():
    """Attention whose arithmetic reads the keys after the first product and the values before the second."""

    @T.prim_func
    def kernel(Q: T.Tensor((128, 64), T.float16), K: T.Tensor((512, 64), T.float16), O: T.Tensor((128, 64), T.float32)):
        with T.Kernel(2, threads=128) as bx:
            q, k, v = (T.alloc_shared((64, 64), T.float16) for _ in range(3))
            s, o = T.alloc_fragment((64, 64), T.float32), T.alloc_fragment((64, 64), T.float32)
            p = T.alloc_fragment((64, 64), T.float16)
            T.copy(Q[bx * 64, 0], q)
            T.clear(o)
            for j in T.Pipelined(8, num_stages=3):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for x, y in T.Parallel(64, 64):
                    s[x, y] += k[x, y]
                T.copy(K[j * 64, 0], v)
                for x, y in T.Parallel(64, 64):
                    p[x, y] = s[x, y] * v[x, y]
                T.gemm(p, v, o)
            T.copy(o, O[bx * 64, 0])

    return kernel


def ordered(kernel, names: dict[str, str]) -> list[str]:
    """`order` of a kernel whose tiles have other names, said in the old ones."""
    tiles = {n.buffer.name: n.buffer for n in walk(kernel.program) if isinstance(n, Alloc) and n.buffer.name in names}
    for old, tile in tiles.items():
        object.__setattr__(tile, "name", names[old])
    build = Build(Target.of("cuda:sm_90a"))
    program = async_wgmma(specialize_warps(kernel.program, build), build)
    old_names = {tile: old for old, tile in tiles.items()}
    (loop,) = (n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts))
    said = []
    for one in loop.body.stmts:
        barriers = [n.buffer for n in walk(one) if isinstance(n, Address) and n.buffer.scope == "barrier"]
        what = [one.call.name] if isinstance(one, Do) else []
        said.append(" ".join([type(one).__name__, *what, *(old_names[b.guards] for b in barriers)]))
    return said


@pytest.mark.parametrize(
    "make", [partial(biased, False), partial(biased, True), read_by_arithmetic], ids=["early", "late", "arithmetic"]
)
@pytest.mark.parametrize(
    "names",
    [
        {"k": "v", "v": "k", "bias": "q", "q": "bias"},
        {"k": "same", "v": "same", "bias": "same"},
        {"k": "x", "v": "x_full", "bias": "x_empty"},
        {"k": "x_empty", "v": "x", "bias": "x_full"},
        {"k": "bias_full", "bias": "bias_empty"},
    ],
    ids=str,
)
def test_schedules_do_not_depend_on_names(make, names: dict[str, str]) -> None:
    same = {name: name for name in ("q", "k", "v", "bias")}
    assert ordered(make(), same | names) == ordered(make(), same)


@pytest.mark.parametrize("late", [False, True])
def test_values_with_a_tile_of_its_own(late: bool) -> None:
    q, k, bias = (torch.randn(shape).half() for shape in ((128, 64), (512, 64), (128, 512)))
    out = torch.empty(128, 64)
    assert not torch_tile.compile(biased(late), target="cuda:sm_90a").interpret(q, k, bias, out)
    scores = q.float() @ k.float().T
    want = ((scores if late else scores + bias) * 0.125).half().float() @ k.float()
    want += bias.float().unflatten(1, (8, 64)).sum(1) if late else 0
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-1)


def scaled(stages=3, tile=(64, 64), clear=True, shared_sums=False, steps=8):
    """The program of a product whose steps are scaled before they are added up, after both passes."""
    bm, bn = tile

    @T.prim_func
    def kernel(
        A: T.Tensor((512, 512), "float16"), B: T.Tensor((512, 512), "float16"), S: T.Tensor((8,), "float32"),
        C: T.Tensor((512, 512), "float32"),
    ):  # fmt: skip
        with T.Kernel(512 // bn, 512 // bm, threads=128) as (bx, by):
            a, b = T.alloc_shared((bm, 64), "float16"), T.alloc_shared((bn, 64), "float16")
            part, total = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            T.clear(total)
            for ko in T.Pipelined(steps, num_stages=stages):
                T.copy(A[by * bm, ko * 64], a)
                T.copy(B[bx * bn, ko * 64], b)
                T.gemm(a, b, part, transpose_B=True, clear_accum=clear)
                for i, j in T.Parallel(bm, bn):
                    total[i, j] += part[i, j] * S[ko]
            T.copy(part if shared_sums else total, C[by * bm, bx * bn])

    build = Build(Target.of("cuda:sm_90a"))
    return async_wgmma(specialize_warps(kernel.program, build), build)


def pending(program) -> list[int]:
    """How many products each wait leaves in flight."""
    return [n.call.options[0] for n in walk(program) if isinstance(n, Do) and n.call.name == "wgmma_wait"]


def sums(program) -> list[Buffer]:
    """The accumulators that products write, in their order."""
    return [n.C.buffer for n in walk(program) if isinstance(n, Gemm)]


def test_two_accumulators_take_turns() -> None:
    """The first product, two in the loop, and one in front of the last sums where the steps are even in number."""
    program = scaled()
    one, two, again, last = sums(program)
    assert one is again and two is last and one is not two
    assert waits(program) == [-1] * 4 and pending(program) == [1, 1, 1, 0]
    assert waits(scaled(steps=7)) == [-1] * 3 and pending(scaled(steps=7)) == [1, 1, 0]


@pytest.mark.parametrize(
    "change",
    [{"stages": 2}, {"tile": (64, 192)}, {"clear": False}, {"shared_sums": True}],
    ids=["no room for tiles", "no registers", "sums that go on", "sums that are read behind the loop"],
)
def test_one_accumulator_otherwise(change) -> None:
    assert waits(scaled(**change)) == [0]


@pytest.mark.parametrize("of_columns", [False, True])
def test_numbers_of_columns_are_read_behind_the_next_product(of_columns: bool) -> None:
    """Those of rows are read in front of it, as they fill two registers of a thread."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 512), "float16"), B: T.Tensor((64, 512), "float16"), S: T.Tensor((8, 64), "float32"),
               C: T.Tensor((64, 64), "float32")):  # fmt: skip
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            part, total = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            scales = T.alloc_fragment((64,), "float32")
            T.clear(total)
            for ko in T.Pipelined(8, num_stages=3):
                T.copy(A[0, ko * 64], a)
                T.copy(B[0, ko * 64], b)
                for n in T.Parallel(64):
                    scales[n] = S[ko, n]
                T.gemm(a, b, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    total[i, j] += part[i, j] * scales[j if of_columns else i]
            T.copy(total, C)

    build = Build(Target.of("cuda:sm_90a"))
    program = async_wgmma(specialize_warps(kernel.program, build), build)
    (body,) = [n.body for n in walk(program) if isinstance(n, For) and [type(s) for s in n.body.stmts].count(Gemm) == 2]
    product = next(n for n, s in enumerate(body.stmts) if isinstance(s, Gemm))
    scaled = next(n for n, s in enumerate(body.stmts) if any(b.name == "scales" for b in writes_of(s)))
    assert (product < scaled) == of_columns


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("widened", [False, True])
def test_values_of_sums_that_are_scaled(inside: bool, widened: bool) -> None:
    """Accumulators of the loop, and operands that the iteration writes into registers before its product."""
    stored = "int8" if widened else "float16"

    @T.prim_func
    def kernel(A: T.Tensor((64, 512), stored), B: T.Tensor((64, 512), "float16"), S: T.Tensor((8,), "float32"),
               C: T.Tensor((64, 64), "float32")):  # fmt: skip
        with T.Kernel(1, threads=128):
            words = T.alloc_shared((64, 64), stored)
            a, b = T.alloc_fragment((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            outside, total = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.clear(total)
            for ko in T.Pipelined(8, num_stages=3):
                T.copy(A[0, ko * 64], words)
                T.copy(B[0, ko * 64], b)
                if widened:
                    for i, j in T.Parallel(64, 64):
                        a[i, j] = T.cast(words[i, j], "float16")
                part = T.alloc_fragment((64, 64), "float32") if inside else outside
                T.gemm(a if widened else words, b, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    total[i, j] += part[i, j] * S[ko]
            T.copy(total, C)

    a, b, s = torch.randint(-8, 8, (64, 512)).to(torch.int8), torch.randn(64, 512).half(), torch.rand(8)
    out = torch.empty(64, 64)
    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    assert not compiled.interpret(a if widened else a.half(), b, s, out)
    want = torch.einsum("mgk,ngk,g->mn", a.float().unflatten(1, (8, 64)), b.float().unflatten(1, (8, 64)), s)
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-1)
