# SPDX-License-Identifier: Apache-2.0
import re
from dataclasses import replace

import pytest

import torch_tile.language as T
from torch_tile.diagnostics.errors import InternalError, Span
from torch_tile.intrinsics.memory import here
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Range, Region, TensorMap
from torch_tile.ir.expr import (
    Address,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    Var,
    const,
    natural,
)
from torch_tile.ir.stmt import (
    Alloc,
    Assert,
    Block,
    Break,
    Continue,
    Do,
    For,
    If,
    Kernel,
    Let,
    LoopKind,
    Print,
    Program,
    Role,
    Stmt,
    Store,
    While,
)  # fmt: skip
from torch_tile.ir.verify import Stage, verify
from torch_tile.tileop import tile_ops

M = Var("M", dt.int32, "dim")
i, j, k = (Var(n, dt.int32, "loop") for n in "ijk")
bx = Var("bx", dt.int32, "block")
x, n = Var("x", dt.float32), Var("n", dt.int32, "param")
zero, one, half = const(0, dt.int32), const(1, dt.int32), natural(0.5)
A = Buffer("A", (M,), dt.float32, "global", None, "param")
square = Buffer("S", (M, M), dt.float32, "global", None, "param")
tile = Buffer("tile", (const(8, dt.int32),), dt.float32, "shared")
v = Buffer("v", (), dt.int32, "var")
nothing = Block(())
true = const(True, dt.bool_)


def program(*stmts: Stmt, grid: tuple[Expr, ...] = (one,), blocks: tuple[Var, ...] = (bx,)) -> Program:
    return Program("main", (A, square, n), (Kernel(grid, blocks, (32,), Block(stmts)),), (), ())


def loop(*stmts: Stmt, var: Var = i, kind: LoopKind = LoopKind.SERIAL, stop: Expr = M, **fields) -> For:
    return For(kind, (var,), (zero,), (stop,), Block(stmts), **fields)


def put(value: Expr, index: Expr = zero) -> Store:
    return Store(A, (index,), value)


def both(var: Var = i) -> tuple[tuple[Var, ...], tuple[Expr, ...], tuple[Expr, ...]]:
    return (var, j), (zero, zero), (M, M)


def roles(*given: Role) -> Program:
    """A kernel of 384 threads."""
    whole = program(*given)
    return replace(whole, kernels=(replace(whole.kernels[0], threads=(384,)),))


def box(*sizes: int, swizzle: int = 128, of: Buffer = square) -> Program:
    """A copy of a box of a matrix of floats."""
    seen = TensorMap(of, (M,) * len(sizes), (M,) * (len(sizes) - 1) + (one,), sizes, swizzle)
    call = Call(
        "tma_load", (Address(tile, (zero,)), seen, Address(ready, (zero,)), *(zero for _ in sizes)), dt.int32, ("",)
    )
    return program(Alloc(tile), Alloc(ready), Do(call))


ready = Buffer("ready", (const(2, dt.int32),), dt.uint64, "barrier", arrivals=1)
warp = Role(0, 32, nothing)
whole = Region(tile, (Range(zero, const(8, dt.int32)),))
fill = tile_ops()["fill"].build(whole, 0)

GOOD = {
    "loops, names, buffers": (
        program(Alloc(tile), loop(Let(x, half), put(x, i)), loop(put(half, k), var=k), Alloc(v, one), While(
            Load(v, ()) < n, Block((Store(v, (), Load(v, ()) + bx), If(n < 3, Block((Break(),)), nothing))),
        )),
        Stage.FLAT,
    ),
    "a tile op": (program(Alloc(tile), fill, Print("t", whole)), Stage.TILE),
    "a printed region": (program(Alloc(tile), Print("t", whole)), Stage.LOOPS),
    "a parallel nest": (program(For(LoopKind.PARALLEL, *both(), nothing)), Stage.LOOPS),
    "the grid uses sizes and scalars": (program(grid=(M // 4, n), blocks=(bx, k)), Stage.FLAT),
    "two dimensions": (program(Store(square, (zero, zero), half)), Stage.LOOPS),
    "roles": (roles(Role(256, 128, nothing, 24), Role(0, 256, nothing, 240), put(half), warp), Stage.FLAT),
    "boxes": (box(64, 32), Stage.THREAD),
    "an mbarrier of a tile op": (program(Alloc(ready), put(Cast(dt.float32, Load(ready, (one,))))), Stage.TILE),
    "a hidden 0, and what is hidden again": (program(Let(k, here(zero)), Let(j, here(k))), Stage.FLAT),
    "sizes of flattened buffers": (program(put(half, Var("stride", dt.int32, "dim") * 2)), Stage.FLAT),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_well_formed(name):
    verify(*GOOD[name])


unsafe_add = Binary("+", x, one)
BAD = {
    # scoping
    "a loop variable after its loop": (program(loop(put(half, i)), put(half, i)), "`i` is used where it is not bound"),
    "a name after its block": (program(loop(Let(x, half)), put(x)), "`x` is used where"),
    "a name before its value": (program(put(x), Let(x, half)), "`x` is used where"),
    "a buffer before its allocation": (program(Store(tile, (zero,), half), Alloc(tile)), "`tile` is used where"),
    "a loop variable in its own bound": (program(loop(stop=i)), "`i` is used where"),
    "a block index in the grid": (program(grid=(bx,)), "`bx` is used where"),
    "an unknown size": (program(put(half, Var("K", dt.int32, "dim"))), "`K` is used where"),
    "a size of a later name": (program(Alloc(Buffer("t", (k,), dt.int8, "local"))), "`k` is used where"),
    "a loop variable bound twice": (program(loop(), loop()), "`i` is bound twice"),
    "nested loops of one variable": (program(loop(loop())), "`i` is bound twice"),
    "a name bound twice": (program(Let(x, half), Let(x, half)), "`x` is bound twice"),
    "a buffer bound twice": (program(Alloc(tile), Alloc(tile)), "`tile` is bound twice"),
    "a nest of one variable": (program(For(LoopKind.PARALLEL, *both(j), nothing)), "`j` is bound twice"),
    # accesses
    "too many indices": (program(Store(A, (zero, zero), half)), "`A` has 1 dimensions"),
    "too few indices": (program(put(Load(square, (zero,)))), "`S` has 2 dimensions"),
    "an index of a region missing": (program(Print("", Region(square, (Range(zero, one),)))), "`S` has 2 dimensions"),
    "a float index": (program(put(half, half)), "indices are integers"),
    "a float extent": (program(Print("", Region(A, (Range(zero, half),)))), "ranges are integers"),
    "a store of another type": (program(put(one)), "`A` holds float32"),
    # types
    "operands of two types": (program(Let(x, half), put(unsafe_add)), "`+` of float32 and int32"),
    "a logical operator on numbers": (program(Assert(Binary("and", n, n), "")), "`and` of int32"),
    "a bitwise operator on floats": (program(put(Binary("&", half, half))), "`&` of float32"),
    "a division of integers": (program(put(Cast(dt.float32, Binary("/", n, n)))), "`/` of int32"),
    "an unknown operator": (program(put(Binary("***", half, half))), "no such operator"),
    "not of a number": (program(Assert(Unary("not", n), "")), "`not` cannot take int32"),
    "a complement of a float": (program(put(Unary("~", half))), "`~` cannot take float32"),
    "a branch on a number": (program(If(n, nothing, nothing)), "a condition of type int32"),
    "a while on a number": (program(While(n, nothing)), "a condition of type int32"),
    "a choice on a number": (program(put(Select(n, half, half))), "a condition of type int32"),
    "a choice between two types": (program(put(Select(true, half, n))), "a choice between float32 and int32"),
    "a name of another type": (program(Let(x, one)), "a float32 named for a int32"),
    "a float as an integer literal": (program(put(half, Const(1.0, dt.int32))), "a int32 is a Python int"),
    "a bool as an integer literal": (program(put(half, Const(True, dt.int32))), "a int32 is a Python int"),
    "an initial value of another type": (program(Alloc(v, half)), "`v` cannot be initialised"),
    "an initial value of a tile": (program(Alloc(tile, half)), "`tile` cannot be initialised"),
    "a hidden index of a block": (program(Let(k, here(bx))), "`here` hides a thread's index or 0"),
    "a hidden number": (program(Let(k, here(const(1024, dt.int32)))), "`here` hides a thread's index or 0"),
    "a hidden index of a loop": (program(loop(Let(k, here(i)))), "`here` hides a thread's index or 0"),
    "a hidden sum": (program(Let(k, here(zero)), Let(j, here(k + 1))), "`here` hides a thread's index or 0"),
    # loops
    "a serial nest": (program(For(LoopKind.SERIAL, *both(), nothing)), "only T.Parallel has several variables"),
    "a loop without a stop": (program(For(LoopKind.SERIAL, (i,), (zero,), (), nothing)), "a loop has a start, a stop"),
    "a step backwards": (program(loop(step=-1)), "a positive step"),
    "a float bound": (program(loop(stop=half)), "loop bounds are integers"),
    "break outside a loop": (program(If(n < 3, Block((Break(),)), nothing)), "break outside a loop"),
    "continue after a loop": (program(loop(Continue()), Continue()), "continue outside a loop"),
    # roles, mbarriers, tensor maps
    "a role in a loop": (program(loop(Role(0, 32, nothing))), "roles are statements of the kernel itself"),
    "a role in a role": (program(Role(0, 32, Block((Role(0, 32, nothing),)))), "roles are statements of the kernel"),
    "a role beyond the block": (roles(Role(256, 160, nothing)), "a role has threads of 384 by 32"),
    "a part of a warp": (roles(Role(0, 48, nothing)), "a role has threads of 384 by 32"),
    "registers of a part of a warpgroup": (roles(Role(0, 32, nothing, 240)), "change their registers together"),
    "registers that there are not": (roles(Role(0, 128, nothing, 260)), "registers are a multiple of 8 from 24 to 256"),
    "two roles of a warp": (roles(Role(0, 256, nothing), Role(128, 128, nothing)), "a warp has one role"),
    "an mbarrier in a role": (program(Role(0, 32, Block((Alloc(ready),)))), "mbarriers are for the whole block"),
    "an mbarrier for nobody": (program(Alloc(replace(ready, arrivals=0))), "`ready` waits for nobody"),
    "a store to an mbarrier": (
        program(Alloc(ready), Store(ready, (zero,), Const(1, dt.uint64))),
        "`ready` is no memory",
    ),
    "a box of too many dimensions": (box(1, 1, 1, 1, 1, 8), "a tensor map has one to five dimensions"),
    "a box without a size": (box(0, 32), "boxes have 1 to 256 elements a side"),
    "a box of a part of 16 bytes": (box(8, 6, swizzle=0), "boxes have 1 to 256 elements a side"),
    "a box wider than its swizzle": (box(8, 64), "rows of boxes no more"),
    "an unknown swizzle": (box(8, 16, swizzle=100), "a swizzle spans 32, 64 or 128 bytes"),
    "a box of shared memory": (box(8, of=tile), "tensor maps are of global memory"),
    "a grid of another rank": (program(grid=(one, one)), "one block index per grid extent"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed(name):
    broken, problem = BAD[name]
    with pytest.raises(InternalError, match=re.escape(problem)):
        verify(broken, Stage.TILE)


LATER = {
    "a tile op among loops": (program(Alloc(tile), fill), Stage.LOOPS, "Fill may not appear"),
    "a region in flat code": (program(Alloc(tile), Print("", whole)), Stage.FLAT, "Region may not appear"),
    "a parallel loop in flat code": (program(loop(kind=LoopKind.PARALLEL)), Stage.FLAT, "T.Parallel may not appear"),
    "an mbarrier as a value": (
        program(Alloc(ready), put(Cast(dt.float32, Load(ready, (zero,))))),
        Stage.LOOPS,
        "`ready` is no memory",
    ),
    "two dimensions in flat code": (program(Store(square, (zero, zero), half)), Stage.FLAT, "`S` is not flat"),
    "an address in flat code": (
        program(put(Cast(dt.float32, Address(square, (zero, zero))))),
        Stage.FLAT,
        "is not flat",
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_gone_at_a_later_stage(name):
    broken, stage, problem = LATER[name]
    verify(broken, Stage(stage.value - 1))
    with pytest.raises(InternalError, match=re.escape(problem)):
        verify(broken, stage)


def test_the_message_names_the_node_and_the_line():
    span = Span("kernel.py", 7, 7, 4, 9)
    bad = Store(A, (zero,), one, span=span)
    with pytest.raises(InternalError) as caught:
        verify(program(bad), Stage.TILE)
    assert "at stage TILE: A[0] = T.int32(1) (while compiling kernel.py:7:5)" in str(caught.value)


def test_a_traced_kernel_is_well_formed():
    @T.prim_func
    def kernel(X: T.Tensor((M, 64), T.float16), count: T.int32):
        with T.Kernel(T.ceildiv(M, 8), threads=32) as b:
            t = T.alloc_shared((8, 64), T.float16)
            total = T.alloc_var(T.float32, 0.0)
            for s in T.Pipelined(count, num_stages=2):
                T.copy(X[b * 8, 0], t)
                for r, c in T.Parallel(8, 64):
                    t[r, c] = T.exp2(t[r, c]) if s > 0 else T.float16(0)
                total += t[0, 0]
                if total > 3.0:
                    break
            T.print(total, "total")

    verify(kernel.program, Stage.TILE)


def test_what_held_before_is_asked_again_for_its_names_and_stage():
    """Nodes keep the stage at which they held; a name may not be bound elsewhere, and a later stage has more rules."""
    inside = put(half, i + one)
    verify(program(loop(inside)), Stage.LOOPS)
    for again in (program(inside), program(loop(inside), inside), program(loop(inside, var=j))):
        with pytest.raises(InternalError, match="`i` is used where it is not bound"):
            verify(again, Stage.LOOPS)
    of_two = Store(square, (zero, zero), Load(square, (zero, zero)))
    verify(program(of_two), Stage.LOOPS)
    with pytest.raises(InternalError, match="is not flat"):
        verify(program(of_two), Stage.FLAT)
