# SPDX-License-Identifier: Apache-2.0
"""Loops of products beside large accumulators get a thread index of their own; others stay as they are."""

from __future__ import annotations

from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics.matrix import mma
from torch_tile.intrinsics.wgmma import Descriptor, wgmma
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Var, const
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Block, For, Kernel, Let, LoopKind, Program, Store
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering.threads.recompute_indices import (
    MANY,
    PLENTY,
    recompute_indices,
    registers_of,
)

ZERO = const(0, dt.int32)


def program(size: int, multiplies: bool = True) -> Program:
    """A product in an unrolled loop in a serial loop in another one, and a store by the thread's index in each."""
    thread = Var("t", dt.int32, "thread")
    local = Buffer("acc", (const(size, dt.int32),), dt.float32, "local")
    half = Buffer("half", (const(16, dt.int32),), dt.float16, "local")
    shared = Buffer("s", (const(64, dt.int32),), dt.float32, "shared", offset=0)
    at = Address(half, (ZERO,))
    product = mma(Address(local, (ZERO,)), at, at, "m16n8k16", ("float16", "float16", "float32"))

    def loop(name, kind, *stmts):
        return For(kind, (Var(name, dt.int32, "loop"),), (ZERO,), (const(4, dt.int32),), Block(stmts))

    store = Store(shared, (thread + 1,), const(1, dt.float32))
    unrolled = loop("u", LoopKind.UNROLLED, *([product] if multiplies else []), store)
    body = loop("outer", LoopKind.SERIAL, store, loop("inner", LoopKind.SERIAL, unrolled))
    allocs = Alloc(local), Alloc(half), Alloc(shared)
    blocks = (Var("bx", dt.int32, "block"),)
    kernel = Kernel((const(1, dt.int32),), blocks, (32,), Block((*allocs, body)), None, thread, 256)
    return Program("p", (), (kernel,), (), ())


def test_the_innermost_loop_of_products_hides_the_thread() -> None:
    before = program(PLENTY)
    assert registers_of(before.kernels[0]) == PLENTY + 8
    after = recompute_indices(before)
    verify(after, Stage.FLAT)
    outer, inner = [n for n in walk(after) if isinstance(n, For) and n.kind is LoopKind.SERIAL]
    thread = after.kernels[0].thread
    assert not isinstance(outer.body.stmts[0], Let)
    let = inner.body.stmts[0]
    assert isinstance(let, Let) and isinstance(let.value, Call) and let.value.name == "here"
    assert let.value.args[0] is thread
    used = set(walk(inner.body.stmts[1]))
    assert thread not in used and let.var in used
    text = emit_cuda(after, Build(Target.of("sm_90"))).text
    assert text.count("tile::here(") == 1


def walked(steps: int, moves: bool) -> Program:
    """Products by wgmma of `steps` steps of K in a serial loop; the second operand's tile `moves` with the turns."""
    turn, ks = Var("turn", dt.int32, "loop"), Var("ks", dt.int32, "loop")
    total = Buffer("acc", (const(32, dt.int32),), dt.float32, "local")
    left, right = (Buffer(n, (const(8192, dt.int32),), dt.float16, "shared", offset=0) for n in "ab")
    walk_ = Descriptor(128, 16, 1024, False)
    b = Address(right, (turn * 4096 if moves else ZERO,))
    types = ("float16", "float16", "float32")
    product = wgmma(Address(total, (ZERO,)), Address(left, (ZERO,)), b, 64, types, walk_, walk_, ks * 32, ks * 32)
    unrolled = For(LoopKind.UNROLLED, (ks,), (ZERO,), (const(steps, dt.int32),), Block((product,)))
    loop = For(LoopKind.SERIAL, (turn,), (ZERO,), (const(2, dt.int32),), Block((unrolled,)))
    body = Block((Alloc(total), Alloc(left), Alloc(right), loop))
    thread = Var("t", dt.int32, "thread")
    kernel = Kernel((const(1, dt.int32),), (Var("bx", dt.int32, "block"),), (128,), body, None, thread, 256)
    return Program("p", (), (kernel,), (), ())


def test_operands_that_many_products_walk_each_turn() -> None:
    after = recompute_indices(walked(MANY + 1, moves=True))
    verify(after, Stage.FLAT)
    (loop,) = [n for n in walk(after) if isinstance(n, For) and n.kind is LoopKind.SERIAL]
    let = loop.body.stmts[0]
    assert isinstance(let, Let) and isinstance(let.value, Call) and let.value.name == "here"
    (call,) = [n for n in walk(after) if isinstance(n, Call) and n.name == "wgmma"]
    assert [any(n is let.var for n in walk(x)) for x in call.args[:3]] == [False, True, False]


def test_few_descriptors_are_kept() -> None:
    for kept in (walked(MANY, moves=True), walked(MANY // 2, moves=False)):
        assert recompute_indices(kept) is kept
    moved = walked(MANY // 2 + 1, moves=False)
    assert recompute_indices(moved) is not moved


def test_others_stay() -> None:
    for kept in (program(PLENTY - 8), program(PLENTY, multiplies=False)):
        assert recompute_indices(kept) is kept
