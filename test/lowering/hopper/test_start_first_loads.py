# SPDX-License-Identifier: Apache-2.0
"""Persistent blocks whose first operands are loaded ahead of all other tiles; values are those of other blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from test.lowering.hopper.test_start_next_tiles import MOST_STEPS, chained, chained_values
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.traits import Engine, Sync
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Call, Load, Var, binary, cast, const
from torch_tile.ir.node import Node, Rewriter, find
from torch_tile.ir.stmt import Block, Do, If, Kernel, Let, Program, Role, Stmt
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.hopper.start_first_loads import start_first_loads
from torch_tile.simulator.interpret import interpret

HOPPER = Target("cuda", 90)
AHEAD = "of a block's first operands ahead of all other copies"


def before(kernel: Any) -> tuple[Program, Build]:
    """Return a program as the pass finds it."""
    build = Build(HOPPER)
    passes = cuda_passes(build)
    number = next(n for n, (step, _) in enumerate(passes) if step.__name__ == "start_first_loads")
    return lower(kernel.program, passes[:number]), build


def syncs(node: Node, sync: Sync) -> list[str]:
    """Return the names of the mbarriers at which calls of a kind act."""
    found = [call for call in find(node, Do) if (traits := intrinsic_of(call)) is not None and traits.sync is sync]
    return [x.buffer.name for call in found for x in find(call, Address) if x.buffer.scope == "barrier"]


def copies(node: Node) -> int:
    """Return the number of bulk copies in a node."""
    traits = [intrinsic_of(call) for call in find(node, Do)]
    return sum(t is not None and t.starts and t.engine is Engine.BULK and "load" in t.name for t in traits)


def parts_of(program: Program) -> tuple[Stmt, Role, Role]:
    """Return what the first thread initialises, the consumers and the producers."""
    (kernel,) = program.kernels
    consumer, producer = (one for one in kernel.body.stmts if isinstance(one, Role))
    first = next(one for one in kernel.body.stmts if isinstance(one, If) and syncs(one, Sync.INIT))
    return first, consumer, producer


def test_the_first_thread_loads_the_operands_of_the_first_product() -> None:
    program, build = before(chained(512, 2))
    after = start_first_loads(program, build)
    verify(after, Stage.THREAD)
    first, consumer, producer = parts_of(after)
    old_first, old_consumer, old_producer = parts_of(program)
    assert consumer is old_consumer and copies(producer) == copies(old_producer) and not copies(old_first)
    assert syncs(first, Sync.EXPECT) == ["q_full", "k_full"] == syncs(first, Sync.ARRIVE) and copies(first) == 2
    calls = [x.name for x in find(first, Call)]
    assert calls.index("fence_barrier_init") < calls.index("tma_load")
    assert [one.became for one in build.remarks].count(AHEAD) == 1


def test_other_loads_wait_for_the_first_operand() -> None:
    """Each producer once, in front of its first load behind those of the first thread."""
    program, build = before(chained(512, 2))
    _, _, producer = parts_of(start_first_loads(program, build))
    assert len(producer.body.stmts) == 3
    for part in producer.body.stmts:
        waits = syncs(part, Sync.WAIT)
        assert waits[0] == "q_full" and waits.count("q_full") == 1


class ByHand(Rewriter):
    """Roles as those of an author."""

    def visit_Role(self, role: Role) -> Role:
        return replace(role, by_hand=True)


class NamedFrom(Rewriter):
    """A name between the barrier and the roles: a number, or one that the block loads."""

    def __init__(self, loads: bool):
        self.loads = loads

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        number = next(n for n, one in enumerate(kernel.body.stmts) if isinstance(one, Role))
        *stmts, consumer, producer = kernel.body.stmts
        assert number == len(stmts)
        value = kernel.blocks[0] + 0
        made: list[Stmt] = [Let(Var("named", value.dtype, "let"), value)]
        if self.loads:
            made = [next(one for one in find(consumer, Do))]
        return replace(kernel, body=Block((*stmts, *made, consumer, producer)))


@pytest.mark.parametrize("use", ["", "late sums", "outer sums"])
@pytest.mark.parametrize("least", [0, 1])
def test_kernels_without_an_early_product_stay(use: str, least: int) -> None:
    program, build = before(chained(512, 2, use=use, least=least))
    early = use == "" and least == 1
    assert (start_first_loads(program, build) is not program) == early


def test_products_whose_loops_stand_in_their_branch_stay() -> None:
    """Loops of steps that may be none: the first product, and the loop with all others, stand in one branch."""
    program, build = before(chained(512, 2))
    (kernel,) = program.kernels
    *stmts, consumer, producer = kernel.body.stmts
    assert isinstance(consumer, Role)
    branch = If(binary("<", kernel.blocks[0], const(1, int32)), consumer.body, Block(()))
    body = Block((*stmts, replace(consumer, body=Block((branch,))), producer))
    changed = replace(program, kernels=(replace(kernel, body=body),))
    assert start_first_loads(changed, build) is changed


def test_kernels_without_statements_stay() -> None:
    program, build = before(chained(512, 2))
    empty = replace(program, kernels=tuple(replace(kernel, body=Block(())) for kernel in program.kernels))
    assert start_first_loads(empty, build).kernels == empty.kernels


def test_roles_of_the_author_stay() -> None:
    program, build = before(chained(512, 2))
    changed = ByHand()(program)
    assert start_first_loads(changed, build) is changed


def test_names_in_front_of_roles_are_copied_and_other_work_keeps_its_place() -> None:
    program, build = before(chained(512, 2))
    named, other = (NamedFrom(loads)(program) for loads in (False, True))
    assert start_first_loads(named, build) is not named
    assert start_first_loads(other, build) is other


@pytest.mark.parametrize("of", ["memory", "thread"])
def test_places_that_other_threads_know_stay(of: str) -> None:
    """A table in memory is not read before the barrier, and the first thread may find another place."""
    program, build = before(chained(512, 2))
    (kernel,) = program.kernels
    assert kernel.thread is not None
    place = Load(program.params[0], (const(0, int32), const(0, int32)))
    value = {"memory": cast(place, int32), "thread": kernel.blocks[0] + kernel.thread // 8}[of]
    changed = replace(program, kernels=(replace(kernel, body=Substitute({kernel.blocks[0]: value})(kernel.body)),))
    assert start_first_loads(changed, build) is changed


# Blocks with one tile of one step, with later tiles of more steps, without tiles, and with many tiles.
@pytest.mark.parametrize(("rows", "blocks"), [(242, 3), (233, 3), (128, 4), (640, 1), (1000, 2)])
@pytest.mark.parametrize("use", ["", "backwards"])
def test_values(rows: int, blocks: int, use: str, seed: int) -> None:
    """Thread by thread. Consumers may release a stage before its producer begins: that must not stop the producer."""
    g = torch.Generator().manual_seed(random.Random(seed).randrange(2**31))
    q, k, v = (torch.randn(n, 64, generator=g).half() for n in (rows, MOST_STEPS * 64 + 64, MOST_STEPS * 64 + 64))
    kernel, build = chained(rows, blocks, use=use), Build(HOPPER)
    flat = lower(kernel.program, cuda_passes(build))
    assert AHEAD in {one.became for one in build.remarks}
    out = torch.full((rows, 64), float("nan"))
    assert not interpret(flat, kernel.program, (q, k, v, out))
    torch.testing.assert_close(out.double(), chained_values(q, k, v), atol=2e-2, rtol=1e-2)
