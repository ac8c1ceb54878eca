# SPDX-License-Identifier: Apache-2.0
"""Loops over tiles that start the next tile's first product early; values are those of the loops as written."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics.wgmma import wait_of
from torch_tile.ir.node import Node, Rewriter, contains, find
from torch_tile.ir.stmt import Block, Do, For, If, Program, Role, Stmt, calls
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.hopper.async_wgmma import async_wgmma
from torch_tile.lowering.hopper.start_next_tiles import start_next_tiles
from torch_tile.lowering.hopper.warp_specialize import specialize_warps
from torch_tile.simulator.interpret import interpret
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.gemm.wgmma import WgmmaResults

MOST_STEPS = 3


def chained(
    rows: int = 512, blocks: int = 2, *, ahead: int = 2, ping_pong: bool = True, least: int = 1, use: str = ""
) -> Any:
    """Products of products, `out = (q k^T / 8) v`, where tile `n` sees the first `least + n % MOST_STEPS` key tiles.

    `ahead` is the number of versions of q. `use` changes the kernel so that the next tile may not start early.
    """
    tiles = -(-rows // 128)

    @T.prim_func
    def kernel(
        Q: T.Tensor((rows, 64), T.float16),
        K: T.Tensor((MOST_STEPS * 64 + 64, 64), T.float16),
        V: T.Tensor((MOST_STEPS * 64 + 64, 64), T.float16),
        out: T.Tensor((rows, 64), T.float32),
    ):
        with T.Kernel(blocks, threads=256) as block:
            rank = blocks - 1 - block if use == "backwards" else block
            count = tiles // blocks + T.if_then_else(rank < tiles % blocks, 1, 0)
            s = T.alloc_fragment((128, 64), T.float32)
            for wave in T.Pipelined(count, num_stages=ahead) if ahead else T.serial(count):
                tile = wave * blocks + rank
                q = T.alloc_shared((128, 64), T.float16)
                k, v = (T.alloc_shared((64, 64), T.float16) for _ in range(2))
                scores = s if use == "outer sums" else T.alloc_fragment((128, 64), T.float32)
                weights = T.alloc_fragment((128, 64), T.float16)
                acc = T.alloc_fragment((128, 64), T.float32)
                T.copy(Q[tile * 128, 0], q)
                operand = q
                if use == "registers":
                    operand = T.alloc_fragment((128, 64), T.float16)
                    T.copy(q, operand)
                T.clear(acc)
                for i in T.Pipelined(least + tile % MOST_STEPS, num_stages=2, ping_pong=ping_pong):
                    T.copy(K[i * 64, 0], k)
                    T.copy(V[i * 64, 0], v)
                    T.gemm(operand, k, scores, transpose_B=True, clear_accum=True)
                    for x, y in T.Parallel(128, 64):
                        weights[x, y] = scores[x, y] / 8
                    T.gemm(weights, v, acc)
                if use == "late sums":
                    for x, y in T.Parallel(128, 64):
                        acc[x, y] += scores[x, y]
                T.copy(acc, out[tile * 128, 0])

    return kernel


def chained_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute what `chained` stores, in float64."""
    want = torch.zeros(*q.shape, dtype=torch.float64)
    for tile in range(-(-len(q) // 128)):
        here, keys = slice(tile * 128, tile * 128 + 128), 64 * (1 + tile % MOST_STEPS)
        want[here] = (q[here].double() @ k[:keys].double().T / 8) @ v[:keys].double()
    return want


def shifted(kernel: Any, target: str = "cuda:sm_90a") -> tuple[Program, Build]:
    """Return a program as the pass finds it."""
    build = Build(Target.of(target))
    return async_wgmma(specialize_warps(kernel.program, build), build), build


def consumer(program: Program) -> Role:
    return next(role for role in find(program, Role) if role.first == 0)


def over_tiles(program: Program) -> For:
    """Return the loop over tiles of the role that multiplies."""
    return next(one for one in find(consumer(program), For) if contains(one, Gemm))


def flat(block: Block) -> list[Stmt]:
    return [one for s in block.stmts for one in (flat(s) if isinstance(s, Block) else [s])]


def trace(node: Node) -> list[str]:
    """Return turns, products and loops in their order; a product that is not waited for at once has a dash."""
    found = []
    for one in find(node, Do, Gemm, For):
        if isinstance(one, Gemm):
            found.append(one.C.buffer.name + ("" if one.wg_wait == 0 else "-"))
        elif isinstance(one, For) and contains(one, Gemm):
            found.append("for")
        elif isinstance(one, Do):
            found += [name for name in ("open", "take", "pass", "close") if calls(one, f"turn_{name}")]
    return found


def test_a_tile_starts_in_the_turn_of_the_last_product_before_it() -> None:
    before, build = shifted(chained())
    after = start_next_tiles(before, build)
    step = ["for", "take", "scores-", "acc-", "pass"]
    assert trace(consumer(before).body) == ["for", "scores", "open", *step, "close", "acc"]
    first, last = ["open", "take", "scores-", "pass"], ["take", "acc-", "scores-", "pass", "close"]
    assert trace(consumer(after).body) == [*first, "for", *step, *last]
    assert start_next_tiles(after, build) is after


def test_arithmetic_begins_in_front_of_waits_for_second_products() -> None:
    """A mark holds it there: the assembler moves waits up."""
    (step,) = (one for one in find(over_tiles(start_next_tiles(*shifted(chained()))), For) if one.ping_pong)
    held = [n for n, one in enumerate(flat(step.body)) if isinstance(one, WgmmaResults) and one.held]
    waits = [n for n, one in enumerate(flat(step.body)) if (found := wait_of(one)) is not None and not found.pending]
    assert len(waits) == 1 and held == [waits[0] - 1]


def test_no_branch_is_around_the_product_behind_the_last_tile() -> None:
    """Behind such a branch the assembler waits for each product at once."""
    loop = over_tiles(start_next_tiles(*shifted(chained())))
    assert not any(contains(one, Gemm) for one in find(loop, If))


@pytest.mark.parametrize(
    "change",
    [
        {"ahead": 0},  # the copy of the next queries begins when these are free
        {"ahead": 1},
        {"ping_pong": False},
        {"least": 0},  # a tile may have no step
        {"use": "registers"},  # operands that threads read from shared memory when the tile begins
        {"use": "late sums"},  # the tile's end reads what the next product would write
        {"use": "outer sums"},
    ],
    ids=str,
)
def test_tiles_that_start_when_they_begin(change: dict[str, Any]) -> None:
    program, build = shifted(chained(**change))
    assert start_next_tiles(program, build) is program


class ByHand(Rewriter):
    """Roles as those of an author."""

    def visit_Role(self, role: Role) -> Role:
        return replace(role, by_hand=True)


def test_roles_of_the_author_stay() -> None:
    program, build = shifted(chained())
    by_hand = ByHand()(program)
    assert start_next_tiles(by_hand, build) is by_hand


@pytest.mark.parametrize("case", range(6))
def test_values(case: int, seed: int) -> None:
    """Thread by thread, with blocks that have several tiles, one, or none, of one to three steps."""
    draw, g = random.Random(seed + case), torch.Generator().manual_seed(seed + case)
    rows, blocks = draw.randint(1, 640), draw.randint(1, 4)
    q, k, v = (torch.randn(n, 64, generator=g).half() for n in (rows, MOST_STEPS * 64 + 64, MOST_STEPS * 64 + 64))
    kernel = chained(rows, blocks, use=draw.choice(["", "backwards"]))
    build = Build(Target("cuda", 90))
    flat = lower(kernel.program, cuda_passes(build))
    assert any(remark.became == "of the next tile beside the last product of a tile" for remark in build.remarks)
    out = torch.full((rows, 64), float("nan"))
    assert not interpret(flat, kernel.program, (q, k, v, out))
    torch.testing.assert_close(out.double(), chained_values(q, k, v), atol=2e-2, rtol=1e-2)
