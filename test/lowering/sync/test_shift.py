# SPDX-License-Identifier: Apache-2.0
"""Accesses as later iterations see them: what moves, what is forgotten, and that alike ones become one."""

import pytest

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load, Var, const
from torch_tile.ir.node import equal, symbols
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Block, For, LoopKind
from torch_tile.lowering.sync.accesses import Access
from torch_tile.lowering.sync.shift import ITERATIONS, Shifts

SIZE = 64
TILE = Buffer("tile", (const(SIZE, dt.int32),), dt.float32, "shared")
K, LOST = Var("k", dt.int32, "loop"), Var("earlier_k", dt.int32, "let")
ORIGIN = Load(TILE, (const(0, dt.int32),))


def loop(var, step=1):
    return For(LoopKind.SERIAL, (var,), (const(0, dt.int32),), (const(8, dt.int32),), Block(()), step=step)


@pytest.fixture
def shifts():
    simplified = []

    def counting(e):
        simplified.append(e)
        return simplify(e)

    made = Shifts(lambda around: {id(K): LOST}, counting)
    made.simplified = simplified
    return made


def access(index, **more):
    return Access(TILE, (index,), "w", ORIGIN, **more)


def test_the_next_iteration_counts_from_its_own_variable(shifts):
    later = shifts.of(loop(K, step=2), leave=False)(access(K * 4))
    assert equal(later.indices[0], simplify((K - 2) * 4)) and later.age == 1


def test_nothing_is_known_after_the_loop_or_after_many_iterations(shifts):
    around = loop(K)
    left = shifts.of(around, leave=True)(access(K * 4))
    old = shifts.of(around, leave=False)(access(K * 4, age=ITERATIONS))
    assert equal(left.indices[0], LOST * 4) and left.age == 0
    assert equal(old.indices[0], LOST * 4) and old.age == ITERATIONS + 1


def test_what_does_not_use_the_variable_stays_the_same_object(shifts):
    fixed = access(const(3, dt.int32))
    assert shifts.of(loop(K), leave=False)(fixed) is fixed and not shifts.simplified


def test_an_inner_loop_has_all_its_turns_in_any_iteration(shifts):
    """Its variable is among what the loop around forgets, but here it stands for all of its values."""
    inner, n = loop(K), Var("n", dt.int32, "loop")
    shift = Shifts(lambda around: {id(K): LOST, id(n): LOST}, simplify).of(loop(n), leave=False)
    later = shift(access(K + n, loops=(inner,)))
    free = shift(access(K + n))
    assert id(K) in symbols(later.indices[0]) and id(LOST) not in symbols(later.indices[0])
    assert id(LOST) in symbols(free.indices[0])


def test_alike_accesses_become_one_and_are_computed_once(shifts):
    """A loop is walked many times: the cost is that of what differs, however often a turn makes it anew."""
    shift = shifts.of(loop(K), leave=False)
    first, second = shift(access(K * 4, conditions=(K < 3,))), shift(access(K * 4, conditions=(K < 3,)))
    assert first is second and len(shifts.simplified) == 1
    for kind in ({"asynchronous": True}, {"age": 1}, {"conditions": (K < 4,)}):
        assert shift(access(K * 4, **kind)) is not first
    assert len(shifts.simplified) == 1
