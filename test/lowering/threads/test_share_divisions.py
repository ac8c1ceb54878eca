# SPDX-License-Identifier: Apache-2.0
"""Persistent roles whose lanes find the places of tiles for each other; values are those of the loops as written."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.expr import Binary, Call, Const, Var
from torch_tile.ir.node import Node, Rewriter, find
from torch_tile.ir.stmt import Block, For, If, Let, LoopKind, Program, Role
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.threads.share_divisions import share_divisions
from torch_tile.simulator.interpret import interpret

ROWS, KEYS = 128, 128


def products(blocks: int, use: str = "") -> Any:
    """`out = (q k^T / 8) v` by persistent blocks, for many q of each k. `use` changes how a tile is found."""
    outer, middle, inner, m = T.dynamic("outer, middle, inner, m")

    @T.prim_func
    def kernel(
        q: T.Tensor((outer, middle, inner, m, 64), T.float16),
        k: T.Tensor((outer, KEYS, 64), T.float16),
        v: T.Tensor((outer, KEYS, 64), T.float16),
        order: T.Tensor((outer * middle * inner * m,), T.int32),
        out: T.Tensor((outer, middle, inner, m, 64), T.float32),
    ):
        with T.Kernel(blocks, threads=256) as block:
            rows = T.ceildiv(m, ROWS)
            tiles = rows * outer * middle * inner
            for wave in T.serial(T.ceildiv(T.max(tiles - block, 0), blocks)):
                tile = wave * blocks + block
                if use == "order in memory":
                    tile = order[tile]
                if use == "two orders":
                    tile = T.if_then_else(wave < T.max(tiles // 7, 1), tile, tile // m * m + tile % m)
                row, number = tile % rows, tile // rows
                z, rest = number % inner, number // inner
                y, x = (rest % 2, rest // 2) if use == "two in a row" else (rest % middle, rest // middle)
                queries = T.alloc_shared((ROWS, 64), T.float16)
                keys, values = (T.alloc_shared((64, 64), T.float16) for _ in range(2))
                scores = T.alloc_fragment((ROWS, 64), T.float32)
                weights = T.alloc_fragment((ROWS, 64), T.float16)
                acc = T.alloc_fragment((ROWS, 64), T.float32)
                T.copy(q[x, y, z, row * ROWS, 0], queries)
                T.clear(acc)
                for i in T.Pipelined(KEYS // 64, num_stages=2, ping_pong=use != "no turns"):
                    T.copy(k[x, i * 64, 0], keys)
                    T.copy(v[x, i * 64, 0], values)
                    T.gemm(queries, keys, scores, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(ROWS, 64):
                        weights[i, j] = scores[i, j] / 8
                    T.gemm(weights, values, acc)
                T.copy(acc, out[x, y, z, row * ROWS, 0])

    return kernel


def found(kernel: Any, target: str = "cuda:sm_90a") -> Program:
    """Return a program as the pass finds it."""
    passes = cuda_passes(Build(Target.of(target)))
    names = [step.__name__ for step, _ in passes]
    return lower(kernel.program, passes[: names.index("share_divisions")])


def over_tiles(program: Program) -> list[For]:
    """Return the outermost loops of roles: consumers' and producers'."""
    loops: list[For] = []
    for role in find(program, Role):
        inner = {x for loop in find(role, For) for x in find(loop.body, For)}
        loops += [x for x in find(role, For) if x not in inner and x.kind is LoopKind.SERIAL]
    return loops


def divisions(node: Node) -> int:
    """Count divisions by what is no constant."""
    return sum(x.op in ("//", "%") and not isinstance(x.b, Const) for x in find(node, Binary))


def shuffles(node: Node) -> int:
    return sum(x.name == "shuffle" for x in find(node, Call))


def test_each_role_divides_once_for_all_lanes() -> None:
    before = found(products(3))
    after = share_divisions(before)
    verify(after, Stage.THREAD)
    loops = over_tiles(after)
    assert len(loops) == len(over_tiles(before)) > 1
    for loop in loops:
        first, *rest = loop.body.stmts
        assert isinstance(first, If) and divisions(first) >= 3
        assert not any(map(divisions, rest)) and sum(map(shuffles, rest)) in (1, 4) and not shuffles(first)
    assert share_divisions(after) is after


def before_loops(program: Program) -> list[tuple[list[Any], bool]]:
    """Return what comes before the loops over tiles in their blocks, and whether products run in the loop."""
    loops = over_tiles(program)
    found = [
        (block.stmts, block.stmts.index(loop))
        for block in find(program, Block)
        for loop in loops
        if loop in block.stmts
    ]
    return [(list(stmts[:n]), any(x.name == "turn_take" for x in find(stmts[n], Call))) for stmts, n in found]


def test_first_places_come_before_waits_and_take_few_divisions() -> None:
    """A role that copies makes no division that its first tile does not need; one that multiplies divides early."""
    plain, orders = (share_divisions(found(products(3, use))) for use in ("", "two orders"))
    assert not any(map(divisions, (s for stmts, _ in before_loops(plain) for s in stmts if isinstance(s, If))))
    needed = [divisions(loop.body.stmts[0]) for loop in over_tiles(plain)]
    roles = before_loops(orders)
    assert len(roles) == len(needed) > 2 and {multiplies for _, multiplies in roles} == {False, True}
    for stmts, multiplies in roles:
        (first,) = (s for s in stmts if isinstance(s, If) and divisions(s))
        assert divisions(first) > max(needed) if multiplies else divisions(first) in needed
        waits = [n for n, s in enumerate(stmts) if any(x.name == "mbarrier_wait" for x in find(s, Call))]
        assert not waits or stmts.index(first) < waits[0]


@pytest.mark.parametrize("use", ["two in a row", "no turns", "order in memory"])
def test_loops_that_stay(use: str) -> None:
    program = found(products(3, use))
    assert share_divisions(program) is program


class ByHand(Rewriter):
    """Roles as those of an author."""

    def visit_Role(self, role: Role) -> Role:
        return replace(role, by_hand=True)


def test_roles_of_the_author_stay() -> None:
    program = ByHand()(found(products(3)))
    assert share_divisions(program) is program


@pytest.mark.parametrize("named", [False, True])
def test_places_that_differ_between_lanes_stay(named: bool) -> None:
    """Of a block's index that is the thread's, by itself or by a name outside of the loop."""
    program = found(products(3))
    (kernel,) = program.kernels
    assert kernel.thread is not None
    own = Var("own", kernel.thread.type, "let")
    value = kernel.blocks[0] + kernel.thread // 8
    body = Substitute({kernel.blocks[0]: own if named else value})(kernel.body)
    body = Block((Let(own, value), body)) if named else body
    changed = replace(program, kernels=(replace(kernel, body=body),))
    assert share_divisions(changed) is changed


def test_kernels_without_roles_stay() -> None:
    program = found(products(3), "cuda:sm_80")
    assert share_divisions(program) is program


@pytest.mark.parametrize("case", range(3))
def test_values(case: int, seed: int) -> None:
    """Thread by thread, with blocks of no tile, of some, and of more tiles than a warp has lanes."""
    draw, g = random.Random(seed + case), torch.Generator().manual_seed(seed + case)
    sizes, blocks = ([draw.randint(1, 3) for _ in range(3)], 2) if case else (draw.sample([3, 3, 4], 3), 1)
    m = draw.randint(1, 2 * ROWS if case else ROWS)
    q, k, v = (torch.randn(*n, 64, generator=g).half() for n in ((*sizes, m), (sizes[0], KEYS), (sizes[0], KEYS)))
    kernel = products(blocks, draw.choice(["", "two orders"]))
    flat = lower(kernel.program, cuda_passes(Build(Target("cuda", 90))))
    assert any(map(shuffles, over_tiles(flat)))
    out = torch.full(q.shape, float("nan"))
    assert not interpret(flat, kernel.program, (q, k, v, torch.zeros(out.numel() // 64, dtype=torch.int32), out))
    k, v = (x.double()[:, None, None] for x in (k, v))
    torch.testing.assert_close(out.double(), (q.double() @ k.mT / 8) @ v, atol=3e-2, rtol=1e-2)
