# SPDX-License-Identifier: Apache-2.0
import itertools

from hypothesis import given, settings, strategies as st

import torch_tile.language as T
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.evaluate import evaluate
from torch_tile.ir.expr import Load, Var, const
from torch_tile.ir.node import Rewriter, alike
from torch_tile.ir.simplify_stmt import simplify_stmt
from torch_tile.ir.stmt import Block, Break, Continue, For, If, Let, LoopKind, Store

out = Buffer("out", (const(64, dt.int32),), dt.int32, "global", None, "param")
zero = const(0, dt.int32)


class Leave(Exception):
    """A break or continue on its way to its loop."""


class Machine:
    """Runs statements on integers: the meaning that must not change."""

    def __init__(self, env):
        self.env, self.memory = dict(env), {}

    def value(self, expr):
        class Loads(Rewriter):
            def visit_Load(loads, node):
                return const(self.memory.get(self.value(node.indices[0]), 0), dt.int32)

        return evaluate(Loads()(expr), self.env)

    def run(self, stmt):
        if isinstance(stmt, Block):
            for s in stmt.stmts:
                self.run(s)
        elif isinstance(stmt, Store):
            self.memory[self.value(stmt.indices[0])] = self.value(stmt.value)
        elif isinstance(stmt, Let):
            self.env[stmt.var] = self.value(stmt.value)
        elif isinstance(stmt, If):
            self.run(stmt.then if self.value(stmt.condition) else stmt.otherwise)
        elif isinstance(stmt, Break | Continue):
            raise Leave(type(stmt))
        else:
            for k in range(self.value(stmt.starts[0]), self.value(stmt.stops[0]), stmt.step):
                self.env[stmt.vars[0]] = k
                try:
                    self.run(stmt.body)
                except Leave as leave:
                    if leave.args[0] is Break:
                        break


@st.composite
def programs(draw, random, names, depth=2):
    """A block over the integer variables `names`; nothing divides, so that everything has a value."""
    number = st.sampled_from([*names, random.N]) | st.integers(-3, 9).map(lambda v: const(v, dt.int32))

    def integer():
        a, b, c = draw(number), draw(number), draw(st.integers(1, 4))
        memory = Load(out, (a % 8,))
        return draw(st.sampled_from([a, a + b, a - b, a * c, (a * c + b) // c, (a + b) % (c + 1), memory, memory + a]))

    def condition():
        a, b = integer(), integer()
        return draw(st.sampled_from([a < b, a <= b, a == b, a != b]))

    stmts = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["store", "store", "let", "if", "for", "leave"]))
        if kind == "let":
            var = Var("v", dt.int32)
            stmts.append(Let(var, integer()))
            names = [*names, var]
            number = st.sampled_from([*names, random.N])
        elif kind == "if" and depth:
            then, other = draw(programs(random, names, depth - 1)), draw(programs(random, names, depth - 1))
            stmts.append(If(condition(), then, draw(st.sampled_from([other, Block(())]))))
        elif kind == "for" and depth:
            var = Var("k", dt.int32, "loop")
            start, step = draw(number), draw(st.integers(1, 3))
            body = draw(programs(random, [*names, var], depth - 1))
            stop = draw(st.sampled_from([start + 1, start + 4, random.N, zero]))
            stmts.append(For(LoopKind.SERIAL, (var,), (start,), (stop,), body, step))
        elif kind == "leave":
            leave = draw(st.sampled_from([Break(), Continue()]))
            stmts.append(If(condition(), Block((leave,)), Block(())))
        else:
            stmts.append(Store(out, (integer() % 8,), integer()))
    return Block(tuple(stmts))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_programs_do_the_same(random, data):
    body = data.draw(programs(random, [random.i]))
    program = For(LoopKind.SERIAL, (random.i,), (zero,), (random.N,), body)
    new = simplify_stmt(program)
    assert simplify_stmt(new) is new
    for n in (1, 2, 5):
        before, after = Machine({random.N: n}), Machine({random.N: n})
        before.run(program)
        after.run(new)
        assert before.memory == after.memory, (program, new)


def both(before: T.PrimFunc, after: T.PrimFunc) -> None:
    """`before` simplifies to `after`, which stays the same object."""
    simple = simplify_stmt(before.program)
    assert alike(simple.kernels, after.program.kernels), repr(simple)
    assert simplify_stmt(simple) is simple


def test_dead_code_goes():
    @T.prim_func
    def before(A: T.Tensor((64,), T.float32), n: T.int32):
        with T.Kernel(4, threads=32) as bx:
            for i in T.serial(16):
                if bx * 16 + i < 64:
                    A[bx * 16 + i] = 1.0
                else:
                    A[0] = 2.0
                if i > 20:
                    A[1] = 3.0
                if n > 3:  # noqa: SIM102
                    if n > 2:
                        A[2] = 4.0
            for k in T.serial(n, n - 1):
                A[k] = 5.0
            for k in T.serial(n):
                if k < 0:
                    A[k] = 6.0
            T.device_assert(bx < 4, "never")
            for k in T.serial(1):
                A[k + bx] = 7.0
            for k in T.serial(n):
                A[k] = 8.0
                break
            assert n > 0, "kept"

    @T.prim_func
    def after(A: T.Tensor((64,), T.float32), n: T.int32):
        with T.Kernel(4, threads=32) as bx:
            for i in T.serial(16):
                A[bx * 16 + i] = 1.0
                if n > 3:
                    A[2] = 4.0
            for _ in T.serial(1):
                A[bx] = 7.0
            for k in T.serial(n):
                A[k] = 8.0
                break
            assert n > 0, "kept"

    both(before, after)


def test_only_the_else_branch_remains():
    @T.prim_func
    def before(A: T.Tensor((64,), T.float32), n: T.int32):
        with T.Kernel(4, threads=32) as bx:
            if bx + n < 3:
                if bx > 5:
                    A[0] = 1.0
            else:
                A[1] = 2.0

    @T.prim_func
    def after(A: T.Tensor((64,), T.float32), n: T.int32):
        with T.Kernel(4, threads=32) as bx:
            if bx + n >= 3:
                A[1] = 2.0

    both(before, after)


def test_each_branch_knows_its_side_of_the_condition():
    @T.prim_func
    def before(A: T.Tensor((64,), T.float32), n: T.int32):
        with T.Kernel(4, threads=32) as bx:
            if n < 3:
                if n <= 2:
                    A[bx] = 1.0
            else:
                if n < 3:
                    A[bx] = 2.0
                elif n > 2:
                    A[bx] = 3.0

    @T.prim_func
    def after(A: T.Tensor((64,), T.float32), n: T.int32):
        with T.Kernel(4, threads=32) as bx:
            if n < 3:
                A[bx] = 1.0
            else:
                A[bx] = 3.0

    both(before, after)


def test_names_of_literals_are_replaced():
    v, w, i = Var("v", dt.int32), Var("w", dt.int32), Var("i", dt.int32, "loop")
    index = Store(out, (w + i,), v * 2)
    before = For(LoopKind.SERIAL, (i,), (zero,), (v + 3,), Block((Let(w, v + 2), index)))
    new = simplify_stmt(Block((Let(v, const(4, dt.int32)), before)))
    after = For(
        LoopKind.SERIAL, (i,), (zero,), (const(7, dt.int32),), Block((Store(out, (i + 6,), const(8, dt.int32)),))
    )
    assert alike(new, Block((after,))), repr(new)


def test_what_memory_said_is_forgotten_after_a_store():
    i = Var("i", dt.int32, "loop")
    full = Load(out, (zero,)) >= 5
    inner = If(full, Block((Store(out, (i,), zero),)), Block(()))
    program = If(full, Block((Store(out, (zero,), zero), inner)), Block(()))
    assert simplify_stmt(program, Ranges().loop(i, 0, 4)) is program


def test_nothing_to_do_gives_the_same_program():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), T.float32), n: T.int32):
        with T.Kernel(4, T.ceildiv(n, 16), threads=32) as (bx, by):
            tile = T.alloc_shared((16, 16), T.float32)
            T.copy(A[bx * 16, by * 16], tile)
            for i, j in T.Parallel(16, 16):
                tile[i, j] = T.exp2(tile[i, j]) + 1.0
            while tile[0, 0] < 3.0:
                tile[0, 0] = tile[0, 0] * 2.0
            T.copy(tile, A[bx * 16, by * 16])

    assert simplify_stmt(kernel.program) is kernel.program


def test_ranges_of_the_caller_are_used():
    i = Var("i", dt.int32, "loop")
    guarded = If(i < 8, Block((Store(out, (i,), zero),)), Block(()))
    for low, high in itertools.combinations([0, 4, 8, 12], 2):
        new = simplify_stmt(guarded, Ranges().loop(i, low, high))
        if high <= 8:
            assert alike(new, guarded.then)
        else:
            assert new is guarded if low < 8 else alike(new, Block(()))
