# SPDX-License-Identifier: Apache-2.0
"""Loops of products that are cut where a branch begins. That values stay as they are is shown in test_attention.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import const
from torch_tile.ir.node import Rewriter, walk
from torch_tile.ir.stmt import For, If, Let, Program
from torch_tile.lowering.hopper.peel_causal import peel_causal
from torch_tile.lowering.hopper.warp_specialize import specialize_warps
from torch_tile.tileop.gemm.op import Gemm


class UnderWay(Rewriter):
    """Products that their loop goes on beside."""

    def visit_Gemm(self, op: Gemm) -> Gemm:
        return replace(op, wg_wait=1)


def peeled(
    masked: Callable[[T.Var, T.Var], object], named: bool = False, target: str = "cuda:sm_90a", waits: bool = False
) -> Program:
    """Products that are masked in the steps `masked(step, limit)`; with `named` steps are counted by another name.

    With `waits` they are waited for at once.
    """

    @T.prim_func
    def kernel(A: T.Tensor((64, 512), T.float16), B: T.Tensor((512, 512), T.float16), limit: T.int32):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((64, 64), T.float16), T.alloc_shared((64, 64), T.float16)
            c = T.alloc_fragment((64, 64), T.float32)
            for k in T.Pipelined(8, num_stages=2):
                step = k + 3 if named else k
                T.copy(A[0, k * 64], a)
                T.copy(B[0, k * 64], b)
                T.gemm(a, b, c, clear_accum=True)
                if masked(step, limit):
                    for x, y in T.Parallel(64, 64):
                        c[x, y] = 0

    build = Build(Target.of(target))
    program = specialize_warps(kernel.program, build)
    return peel_causal(program if waits else UnderWay()(program), build)


def loops(program: Program) -> list[For]:
    return [n for n in walk(program) if isinstance(n, For) and any(isinstance(s, Gemm) for s in n.body.stmts)]


def has_branch(loop: For) -> bool:
    """Whether work of a loop is under a condition."""
    return any(isinstance(s, If) and any(isinstance(n, For) for n in walk(s)) for s in loop.body.stmts)


def ranges(program: Program) -> list[tuple[str, str]]:
    return [(str(loop.starts[0]), str(loop.stops[0])) for loop in loops(program)]


@pytest.mark.parametrize("named", [False, True])
def test_what_holds_from_a_step_on(named: bool) -> None:
    """Neither loop asks any more, whatever the step is called."""
    program = peeled(lambda step, limit: step * 64 >= limit, named)
    assert ranges(program) == [("0", "k_more"), ("k_more", "8")]
    assert not any(map(has_branch, loops(program)))
    works = [sum(isinstance(s, For) for s in loop.body.stmts) for loop in loops(program)]
    assert works == [0, 1]


@pytest.mark.parametrize(
    "masked",
    [
        lambda step, limit: step * 64 >= limit,
        lambda step, limit: step * 64 > limit,
        lambda step, limit: limit < step * 48 + 5,
        lambda step, limit: limit <= step * 48 + 5,
        lambda step, limit: T.logical_or(step * 64 + 63 > limit, step * 3 >= limit - 7),
    ],
)
def test_where_it_begins(masked: Callable[[T.Var, T.Var], object], seed: int) -> None:
    """The cut is at the first step whose condition holds, and within the loop."""
    program = peeled(masked)
    (limit,) = (p for p in program.params if p.name == "limit")
    (cut,) = (n for n in walk(program) if isinstance(n, Let) and n.var.name == "k_more")
    near = [m + d for k in range(9) for m in (k * 64, k * 48 + 5) for d in (-1, 0, 1)]
    for value in [*near, *random.Random(seed).choices(range(-600, 1200), k=50)]:
        holds = [step for step in range(8) if evaluate(masked(const(step, int32), limit), {limit: value})]
        assert evaluate(cut.value, {limit: value}) == min(holds, default=8), value


@pytest.mark.parametrize(
    "masked",
    [
        lambda step, limit: T.cast(step, T.uint32) * 64 > T.cast(limit, T.uint32),  # differences wrap
        lambda step, limit: step * 64 <= limit,  # holds up to a step
        lambda step, limit: step == limit,
        lambda step, limit: T.logical_and(step >= limit, step > 1),
        lambda step, limit: (step % 2) * 64 >= limit,
    ],
)
def test_what_comes_and_goes(masked: Callable[[T.Var, T.Var], object]) -> None:
    (loop,) = loops(peeled(masked))
    assert has_branch(loop)


def test_products_that_are_waited_for_leave_nothing_to_interleave() -> None:
    """A branch behind the wait costs less than a second copy of the loop."""
    (loop,) = loops(peeled(lambda step, limit: step * 64 >= limit, waits=True))
    assert has_branch(loop)


def test_other_targets() -> None:
    assert len(loops(peeled(lambda step, limit: step * 64 >= limit, target="cuda:sm_80"))) == 1
