# SPDX-License-Identifier: Apache-2.0
"""Lines and scopes of generated text."""

from dataclasses import replace

import pytest

from torch_tile.codegen.lines import GUARDED, MOST, Lines, iterations_of, picks_registers, pragma, size_of
from torch_tile.diagnostics.errors import Span
from torch_tile.intrinsics.base import effect
from torch_tile.intrinsics.bulk import mbarrier_wait
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Binary, Const, Expr, Load, Select, Var, const
from torch_tile.ir.stmt import Block, For, If, LoopKind, Store, While


def test_scopes_are_indented_and_lines_say_where_they_come_from():
    out = Lines()
    out.open("if (a)", Span("/some/where/kernel.py", 3, 3, 0, 1))
    out.open()
    out.line("b;", Span("kernel.py", 4, 5, 0, 1))
    out.close()
    out.otherwise("if (c)")
    out.line("d;")
    out.otherwise()
    out.close("} // end")
    assert out.depth == 0
    assert out.lines == [
        "if (a) {  // kernel.py:3",
        "  {",
        "    b;  // kernel.py:4",
        "  }",
        "} else if (c) {",
        "  d;",
        "} else {",
        "} // end",
    ]


def buffer(name: str, scope: str) -> Buffer:
    return Buffer(name, (const(4096, dt.int32),), dt.float32, scope)


SHARED, LOCAL, GLOBAL = buffer("s", "shared"), buffer("r", "local"), buffer("g", "global")
ONE = Const(1.0, dt.float32)


def loop(turns: int | Expr, *body, kind: LoopKind = LoopKind.UNROLLED, var: Var | None = None, step: int = 1) -> For:
    stop = const(turns, dt.int32) if isinstance(turns, int) else turns
    return For(
        kind,
        (Var("i", dt.int32, "loop") if var is None else var,),
        (const(0, dt.int32),),
        (stop,),
        Block(body),
        step=step,
    )


def store(target: Buffer = SHARED, at: Expr | None = None, value: Expr = ONE) -> Store:
    return Store(target, (const(0, dt.int32) if at is None else at,), value)


def guarded() -> Store:
    inside = Binary("<", Var("thread", dt.int32, "thread"), const(5, dt.int32))
    return store(value=Select(inside, Load(GLOBAL, (const(0, dt.int32),)), ONE))


def test_small_bodies_are_unrolled_fully():
    assert pragma(loop(MOST, store())) == "#pragma unroll"
    assert pragma(loop(MOST // 2, store(), store(), kind=LoopKind.VECTOR)) == "#pragma unroll"
    assert pragma(loop(MOST, store(), kind=LoopKind.SERIAL)) is None
    assert pragma(loop(0, guarded())) == "#pragma unroll"


@pytest.mark.parametrize(
    "turns, size, factor", [(2 * MOST, 1, MOST), (36, 7, 18), (3, MOST, 1), (5, MOST // 2, 1), (7, 40, 1)]
)
def test_large_ones_in_part(turns, size, factor):
    """As far as it divides the turns, so that there is no rest."""
    assert pragma(loop(turns, *[store() for _ in range(size)])) == f"#pragma unroll {factor}"


def test_guarded_elements_count_more():
    assert size_of(Block((guarded(), store()))) == GUARDED + 1
    assert pragma(loop(32, guarded())) == f"#pragma unroll {MOST // GUARDED}"


def test_loops_inside_count_as_often_as_they_are_repeated():
    inner = loop(8, store(), store())
    assert size_of(inner) == 16
    assert size_of(loop(8, store(), kind=LoopKind.SERIAL)) == 1
    assert size_of(If(Const(True, dt.bool_), Block((inner,)), Block((store(),)))) == 18
    assert pragma(loop(MOST // 8, inner)) == f"#pragma unroll {MOST // 16}"


def test_registers_are_never_indexed_at_run_time():
    i = Var("i", dt.int32, "loop")
    picking = loop(100 * MOST, store(LOCAL, i), kind=LoopKind.SERIAL, var=i)
    assert picks_registers(picking) and pragma(picking) == "#pragma unroll"
    assert size_of(picking) == 100 * MOST
    other = loop(4, store(LOCAL), kind=LoopKind.SERIAL, var=i)
    assert not picks_registers(other) and pragma(other) is None


def test_turns():
    n = Var("n", dt.int32, "dim")
    assert iterations_of(loop(7, store(), step=2)) == 4 and iterations_of(loop(n, store())) is None
    assert pragma(loop(n, store())) == "#pragma unroll"  # as its author asks


def test_loops_that_wait_are_not_unrolled():
    barrier = Buffer("full", (const(2, dt.int32),), dt.uint64, "barrier", arrivals=1)
    wait = mbarrier_wait(Address(barrier, (const(0, dt.int32),)), const(0, dt.int32))
    assert pragma(loop(Var("n", dt.int32, "size"), wait, kind=LoopKind.SERIAL)) == "#pragma unroll 1"
    assert pragma(loop(2, wait)) == "#pragma unroll"


def test_the_author_chooses_how_often_a_body_is_repeated():
    i = Var("i", dt.int32, "loop")
    for factor in (1, 4):
        plain = replace(loop(8, store(), kind=LoopKind.SERIAL, var=i), factor=factor)
        assert pragma(plain) == f"#pragma unroll {factor}"
        assert pragma(replace(plain, body=Block((store(LOCAL, i),)))) == "#pragma unroll"  # it picks registers
    assert pragma(replace(loads(8, count=3), factor=1)) == "#pragma unroll 1"


def loads(turns: int | Expr, *more, count: int = 1) -> For:
    read = [store(value=Load(GLOBAL, (const(n, dt.int32),))) for n in range(count)]
    return loop(turns, *read, *more, kind=LoopKind.SERIAL)


def test_loads_of_short_loops_are_under_way_together():
    assert pragma(loads(8, count=3)) == "#pragma unroll"
    assert pragma(loads(8, loop(4, store()))) == "#pragma unroll"
    assert pragma(loop(8, store(value=Load(SHARED, (const(0, dt.int32),))), kind=LoopKind.SERIAL)) is None


@pytest.mark.parametrize(
    "slow",
    [
        loads(MOST + 1), loads(MOST // 2 + 1, count=2), loads(Var("n", dt.int32, "dim")), loads(8, effect("barrier")),
        loads(15, loads(14)),  # each alone is short
        loads(8, loads(Var("n", dt.int32, "dim"))), loads(8, While(Const(True, dt.bool_), Block((store(),)))),
    ],
)  # fmt: skip
def test_loops_that_unrolling_makes_no_faster(slow):
    assert pragma(slow) is None
