# SPDX-License-Identifier: Apache-2.0
"""Copies in flight, by the groups committed after theirs; against a list of single copies."""

from dataclasses import replace

import pytest

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load, Var, const
from torch_tile.ir.node import equal, symbols
from torch_tile.ir.polynomial import structure
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Block, For, LoopKind
from torch_tile.lowering.sync.accesses import Access
from torch_tile.lowering.sync.state import ITERATIONS, Shifts, State

TILE = Buffer("s", (const(8, dt.int32),), dt.float32, "shared")
COPY = Load(TILE, (const(0, dt.int32),))


def access(place=0, asynchronous=True):
    return Access(TILE, (const(place, dt.int32),), "w", COPY, asynchronous=asynchronous)


def numbers(state):
    return [sorted(younger) for _, younger in state.flying.values()]


def test_a_copy_lands_with_the_wait_for_its_group():
    state = State(2)
    state.add(access())
    state.wait(0)
    assert numbers(state) == [[-1]] and not state.since, "its group is still open"
    state.commit()
    state.wait(1)
    assert numbers(state) == [[0]] and not state.since
    state.commit()
    state.wait(1)
    assert not state.flying and [a.asynchronous for a in state.since.values()] == [False]


def test_a_product_reads_from_its_start_to_its_wait():
    state = State(1)
    read = Access(TILE, (const(0, dt.int32),), "r", COPY, asynchronous=True)
    state.add(read)
    assert [a.asynchronous for a in state.since.values()] == [False]
    state.commit(copies=False)
    state.since.clear()  # a barrier, which does not end it
    state.commit()
    state.wait(0)
    assert numbers(state) == [[0]] and not state.since, "commits and waits of copies are not for products"
    state.wait(1, copies=False)
    assert numbers(state) == [[0]] and not state.since
    state.wait(0, copies=False)
    assert not state.flying and [a.kind for a in state.since.values()] == ["r"]


def test_of_copies_alike_the_older_ones_land_first():
    state = State(1)
    for _ in range(3):
        state.add(access())
        state.commit()
    assert numbers(state) == [[0, 1]], "one and more are not told apart"
    state.wait(1)
    assert numbers(state) == [[0]] and len(state.since) == 1


def test_either_way_counts():
    one, other = State(3), State(3)
    one.add(access())
    other.add(access())
    for _ in range(2):
        other.commit()
    other.add(access(1, asynchronous=False))
    joined = one.join(other)
    assert numbers(joined) == [[-1, 1]] and len(joined.since) == 1
    assert joined.same(other.join(one)) and not joined.same(one)
    assert numbers(one) == [[-1]] and not one.since, "joining changes neither"


def test_accesses_that_look_alike_from_later_on_are_one():
    state = State(3)
    state.add(access(0))
    state.commit()
    state.add(access(1))
    later = state.earlier(lambda a: access(5))
    assert numbers(later) == [[-1, 0]] and numbers(state) == [[0], [-1]]


def test_the_turn_of_a_loop_before_stays_unknown_in_each_loop_after():
    """Counted from the loop's own turns again and again, one access would become endlessly many."""
    k, lost = Var("k", dt.int32, "loop"), Var("earlier_k", dt.int32, "let")
    inside = [replace(access(), indices=(k % 8,))]
    for index, want in [(const(3, dt.int32), (k + 3) % 8), (lost % 8, lost % 8)]:
        state = State(3)
        state.add(replace(access(), indices=(index,)))
        around = For(LoopKind.SERIAL, (k,), (const(0, dt.int32),), (const(9, dt.int32),), Block(()))
        enter = Shifts(lambda around: {}, simplify).into(around, inside)
        [(found, _)] = state.earlier(enter).flying.values()
        assert structure(found.indices) == structure((want,))


def test_random_copies(rng_numbers):
    state, single = State(4), []
    for number in rng_numbers:
        if number < 3:
            state.add(access())
            single.append(-1)
        elif number < 7:
            state.commit()
            single = [min(n + 1, 4) for n in single]
        else:
            pending = number - 7
            had = bool(state.since)
            state.wait(pending)
            assert bool(state.since) == (had or any(n >= pending for n in single))
            single = [n for n in single if n < pending]
        assert numbers(state) == ([sorted(set(single))] if single else [])


@pytest.fixture
def rng_numbers(seed):
    import random

    source = random.Random(seed)
    return [source.randrange(12) for _ in range(300)]


SIZE = 64
SHIFTED_TILE = Buffer("tile", (const(SIZE, dt.int32),), dt.float32, "shared")
K, LOST = Var("k", dt.int32, "loop"), Var("earlier_k", dt.int32, "let")
ORIGIN = Load(SHIFTED_TILE, (const(0, dt.int32),))


def loop(var, step=1):
    return For(LoopKind.SERIAL, (var,), (const(0, dt.int32),), (const(8, dt.int32),), Block(()), step=step)


@pytest.fixture
def shifts():
    simplified = []

    def counting(e):
        simplified.append(e)
        return simplify(e)

    made = Shifts(lambda around: {K: LOST}, counting)
    made.simplified = simplified
    return made


def shifted_access(index, **more):
    return Access(SHIFTED_TILE, (index,), "w", ORIGIN, **more)


def test_the_next_iteration_counts_from_its_own_variable(shifts):
    later = shifts.of(loop(K, step=2), leave=False)(shifted_access(K * 4))
    assert equal(later.indices[0], simplify((K - 2) * 4)) and later.age == 1


def test_nothing_is_known_after_the_loop_or_after_many_iterations(shifts):
    around = loop(K)
    left = shifts.of(around, leave=True)(shifted_access(K * 4))
    old = shifts.of(around, leave=False)(shifted_access(K * 4, age=ITERATIONS))
    assert equal(left.indices[0], LOST * 4) and left.age == 0
    assert equal(old.indices[0], LOST * 4) and old.age == ITERATIONS + 1


def test_what_does_not_use_the_variable_stays_the_same_object(shifts):
    fixed = shifted_access(const(3, dt.int32))
    assert shifts.of(loop(K), leave=False)(fixed) is fixed and not shifts.simplified


def test_an_inner_loop_has_all_its_turns_in_any_iteration(shifts):
    """Its variable is among what the loop around forgets, but here it stands for all of its values."""
    inner, n = loop(K), Var("n", dt.int32, "loop")
    shift = Shifts(lambda around: {K: LOST, n: LOST}, simplify).of(loop(n), leave=False)
    later = shift(shifted_access(K + n, loops=(inner,)))
    free = shift(shifted_access(K + n))
    assert K in symbols(later.indices[0]) and LOST not in symbols(later.indices[0])
    assert LOST in symbols(free.indices[0])


def test_alike_accesses_become_one_and_are_computed_once(shifts):
    """A loop is walked many times: the cost is that of what differs, however often a turn makes it anew."""
    shift = shifts.of(loop(K), leave=False)
    first, second = shift(shifted_access(K * 4, conditions=(K < 3,))), shift(shifted_access(K * 4, conditions=(K < 3,)))
    assert first is second and len(shifts.simplified) == 1
    for kind in ({"asynchronous": True}, {"age": 1}, {"conditions": (K < 4,)}):
        assert shift(shifted_access(K * 4, **kind)) is not first
    assert len(shifts.simplified) == 1
