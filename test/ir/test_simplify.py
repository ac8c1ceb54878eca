# SPDX-License-Identifier: Apache-2.0

import itertools
import math
import struct

import pytest
from hypothesis import given, settings, strategies as st

import torch_tile.language as T
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import (
    Binary,
    Call,
    Load,
    Unary,
    Var,
    binary,
    cast,
    const,
    maximum,
    minimum,
    select,
)
from torch_tile.ir.node import Rewriter, alike, equal, walk
from torch_tile.ir.simplify import is_exact, simplify, simplify_stmt
from torch_tile.ir.stmt import Block, Break, Continue, For, If, Let, LoopKind, Store

M, N = (Var(n, dt.int32, "dim") for n in "MN")
i, j, k = (Var(n, dt.int32, "loop") for n in "ijk")
x, h = Var("x", dt.float32), Var("h", dt.float16)
memory = Load(Buffer("A", (N,), dt.int32, "global"), (i,))
RANGES = Ranges().loop(i, 0, 16).loop(j, 0, 4).loop(k, 0, N)


def same_value(a, b) -> bool:
    """Same type and value; floats bit by bit, all nans alike."""
    if isinstance(a, float) and isinstance(b, float):
        return (a != a and b != b) or struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and a == b


def check(random, expr, ranges, points) -> None:
    new = simplify(expr, ranges)
    assert simplify(new, ranges) is new, "not idempotent"
    assert new is expr or not equal(new, expr), "a new node without a change"
    assert new.dtype == expr.dtype
    assert len(list(walk(new))) <= len(list(walk(expr)))
    for env in points:
        before = random.value(expr, env)
        if before is not None:
            assert same_value(random.value(new, env), before), (repr(new), env)


@settings(max_examples=200)
@given(st.data())
def test_integers_keep_their_value(random, data):
    expr = data.draw(random.integers(9))
    low, high = sorted([data.draw(random.small), data.draw(random.small)])
    ranges = Ranges().loop(random.i, low, high + 1).loop(random.j, 0, random.N)
    points = [
        {random.i: a, random.j: b, random.M: m, random.N: n, random.u: data.draw(st.integers(0, 255))}
        for a, m, n in itertools.product({low, (low + high) // 2, high}, (1, 4), (1, 3, 8))
        for b in {0, n - 1}
    ]
    check(random, expr, ranges, points)


@settings(max_examples=150)
@given(st.data())
def test_conditions_keep_their_value(random, data):
    expr = data.draw(random.conditions())
    ranges = Ranges().loop(random.i, -3, 9).loop(random.j, 0, random.N)
    points = [
        {random.i: a, random.j: b, random.M: m, random.N: n, random.u: data.draw(st.integers(0, 255))}
        for a, m, n in itertools.product((-3, 0, 8), (1, 4), (1, 3, 8))
        for b in {0, n - 1}
    ]
    check(random, expr, ranges, points)


@settings(max_examples=200)
@given(st.data())
def test_floats_keep_every_bit(random, data):
    expr = data.draw(random.floats())
    value = st.floats(width=16) | st.sampled_from(random.SPECIAL[:-5])
    points = [
        {random.x: data.draw(st.floats(width=32)), random.y: data.draw(value), random.h: data.draw(value), random.i: a}
        for a in (-3, 0, 100)
    ]
    check(random, expr, Ranges(), points)


RULES = {
    "constants meet": ((i + 3) + 4, i + 7),
    "constants cancel": ((i + 3) - 3, i),
    "constants on the left": (3 + (4 + i), i + 7),
    "literals come last": (binary("*", 3, M // i), (M // i) * 3),
    "like terms": (i * 2 + i * 3, i * 5),
    "extent of a slice": ((M * 128 + 128) - M * 128, const(128, dt.int32)),
    "extent of a slice, distributed": ((M + 1) * 128 - M * 128, const(128, dt.int32)),
    "difference with itself": ((i + j) - (j + i), const(0, dt.int32)),
    "neutral": ((i * 1 + 0) // 1, i),
    "zero": (i * 0, const(0, dt.int32)),
    "minus minus": (Unary("-", Unary("-", M)), M),
    "product over factor": ((M * 8) // 8, M),
    "digits, high": ((M * 4 + j) // 4, M),
    "digits, low": ((M * 4 + j) % 4, j),
    "multiples leave a quotient": ((M * 4 + i) // 4, M + i // 4),
    "multiples leave a remainder": ((M * 4 + i + 8) % 4, i % 4),
    "common factor": ((M * 4 + j) // 8, M // 2),
    "nested quotients": ((M // 4) // 8, M // 32),
    "nested remainders": ((M % 32) % 8, M % 8),
    "small remainder": (i % 16, i),
    "small quotient": (i // 16, const(0, dt.int32)),
    "remainder below a symbolic size": (k % N, k),
    "comparison by bounds": (binary("and", i < 16, k < N), const(True, dt.bool_)),
    "comparison of the same": ((M + 1) > M, const(True, dt.bool_)),
    "negated comparison": (Unary("not", Binary("<", M, i)), Binary(">=", M, i)),
    "minimum by bounds": (minimum(k, N), k),
    "maximum by bounds": (maximum(k, N), N),
    "nested minima": (minimum(minimum(M, 5), 3), minimum(M, 3)),
    "known in the second operand": (binary("and", M < 5, binary("and", M < 6, N < 3)), binary("and", M < 5, N < 3)),
    "known in a branch": (select(M < 5, minimum(M, 5), 7), select(M < 5, M, 7)),
    "select by a decided condition": (select(i >= 0, M, N), M),
    "select of the same": (select(M < N, i + 1, i + 1), i + 1),
    "select of truth values": (select(M < N, const(True, dt.bool_), const(False, dt.bool_)), M < N),
    "twice the same condition": (Binary("and", memory < 3, memory < 3), memory < 3),
    "through a wider integer": (cast(cast(M, dt.int64), dt.int32), M),
    "through a wider float": (cast(cast(h, dt.float32), dt.float16), h),
    "one cast is enough": (cast(cast(h, dt.float32), dt.float64), cast(h, dt.float64)),
    "float times one": (x * 1.0, x),
    "float plus minus zero": (x + -0.0, x),
    "float minus zero": (x - 0.0, x),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    before, after = RULES[name]
    assert equal(simplify(before, RANGES), after), simplify(before, RANGES)


KEPT = {
    "float plus zero changes -0.0": x + 0.0,
    "float times zero": x * 0.0,
    "float minus itself": Binary("-", x, x),
    "float sums are not reordered": (x + 1.0) + 2.0,
    "zeros of two signs": select(M < N, x * 0.0, x * -0.0),
    "float equal to itself": Binary("==", x, x),
    "negated float comparison": Unary("not", Binary("<", x, h)),
    "through a narrower float": cast(cast(x, dt.float16), dt.float32),
    "through a narrower integer": cast(cast(M, dt.int8), dt.int32),
    "remainders that do not nest": (M % 6) % 4,
    "common factor beside too much": (M * 4 + i) // 8,
    "ceiling": (M + 127) // 128,
    "ragged comparison": i < N,
    "remainder of something negative": (i - 1) % 16,
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_as_it_is(name):
    assert simplify(KEPT[name], RANGES) is KEPT[name]


def test_one_iteration_fixes_the_variable():
    assert equal(simplify(i + 3, Ranges().loop(i, 2, 3)), const(5, dt.int32))


def test_literals_stay_in_their_type():
    big = const(2**31 - 1, dt.int32)
    kept = (M + big) + big
    assert simplify(kept) is kept
    byte = Var("b", dt.uint8, "param")
    assert equal(simplify((byte + const(200, dt.uint8)) + const(100, dt.uint8)), byte + const(44, dt.uint8))
    assert equal(simplify((byte + 200) + 100), byte + 300)


def test_calls_are_entered():
    call = Call("exp2", (x * 1.0,), dt.float32)
    assert equal(simplify(call), Call("exp2", (x,), dt.float32))


def test_exact_casts():
    for source in dt.ALL:
        for to in dt.ALL:
            if source.is_float and to.is_float:
                digits, exponent = dt.FORMATS[source.name]
                least = math.ldexp(1, 2 - (1 << (exponent - 1)) - (digits - 1))
                values = [1 + math.ldexp(1, 1 - digits), least, dt.rounded(1e308, source)]
            elif source.is_float:
                assert not is_exact(source, to)
                continue
            elif source.kind == "bool":
                values = [True]
            else:
                low = -(1 << (source.bits - 1)) if source.kind == "int" else 0
                values = [low, low + (1 << source.bits) - 1, low + (1 << source.bits) - 3]
            kept = all(to.kind != "bool" and const(v, to).value == v for v in values)
            assert is_exact(source, to) == (kept or source == to), (source, to)


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


@settings(max_examples=150)
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
