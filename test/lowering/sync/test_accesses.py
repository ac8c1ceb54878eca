# SPDX-License-Identifier: Apache-2.0
"""Which accesses meet: computed for all threads where indices are known, argued symbolically elsewhere."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from torch_tile.intrinsics.memory import atomic, atomic_load
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Load, Var, binary, const, select
from torch_tile.ir.stmt import Block, For, LoopKind
from torch_tile.lowering.sync.accesses import Access, Collector, Hazards, Numbers

TX, K, B = Var("tx", role="thread"), Var("k", role="loop"), Var("b", role="block")
TILE = Buffer("tile", tuple(const(n, dt.int32) for n in (4, 64, 64)), dt.float16, "shared")


def access(kind, *indices, **fields):
    full = tuple(i if not isinstance(i, int) else const(i, dt.int32) for i in indices)
    return Access(TILE, full, kind, Block(()), **fields)


def meet(a, b, threads=64):
    found = Hazards(threads).between(a, b)
    assert found == Hazards(threads).between(b, a)
    return found


def turns(count, name="r"):
    var = Var(name, role="loop")
    stop = const(count, dt.int32) if isinstance(count, int) else count
    return var, For(LoopKind.UNROLLED, (var,), (const(0, dt.int32),), (stop,), Block(()))


def test_runs_of_elements():
    row, column = TX // 8, TX % 8 * 8
    wide = access("w", 0, row, column, count=8)
    assert not meet(wide, access("r", 0, row, column + 7))
    assert meet(wide, access("r", 0, row, column + 8)), "the first element of the neighbour"
    assert not meet(wide, access("r", 0, row + 8, column, count=8))


def test_versions():
    now, later = access("r", K % 3, TX, 0), access("w", (K + 2) % 3, TX + 1, 0)
    assert not meet(now, later)
    assert meet(now, access("w", (K + 3) % 3, TX + 1, 0))
    assert meet(now, access("w", B % 3, TX + 1, 0)), "nothing is known of the other version"
    assert not meet(access("r", K, TX, 0), access("w", K + 1, TX + 1, 0))


def test_warps_act_together():
    mine = access("w", 0, TX, 0)
    assert not meet(mine, access("r", 0, TX, 0))
    assert meet(mine, access("r", 0, TX, 0, collective=True))


UPDATES = ["add", "max", "or", "exchange", "load"]


@pytest.mark.parametrize("first", UPDATES)
@pytest.mark.parametrize("second", UPDATES)
def test_atomic_updates_of_one_kind_do_not_meet_each_other(first, second):
    """Those of two kinds do, and two stores, unless a thread polls."""
    place = Address(TILE, (const(0, dt.int32),) * 3)
    calls = [atomic_load(place, "relaxed") if op == "load" else atomic(place, TX, op) for op in (first, second)]
    (a,), (b,) = (Collector({}, {TILE}).of(call) for call in calls)
    assert meet(a, b) == (first != second or first == "exchange")
    assert not meet(a, a) and not Hazards(64, polls=True).between(a, b)
    assert [meet(a, access(kind, 0, 0, 0)) for kind in ("r", "w")] == [first != "load", True]


def test_reads_do_not_meet_each_other():
    assert not meet(access("r", 0, 0, 0), access("r", 0, 0, 0))


def test_a_value_that_is_not_taken_is_not_read():
    """But loads of global memory may be made before it is known."""
    seen = Buffer("seen", (const(64, dt.int32),), dt.float16, "global")
    value = select(binary("==", TX, const(10, dt.int32)), Load(TILE, (const(0, dt.int32), TX, TX)), Load(seen, (TX,)))
    taken, other = Collector({}, {TILE, seen}).of(value)
    assert taken.buffer is TILE and len(taken.conditions) == 1 and other.conditions == ()
    write = access("w", 0, 10, 10, conditions=(binary("==", TX, const(10, dt.int32)),))
    assert not meet(write, taken) and meet(write, replace(taken, conditions=(), indices=write.indices))


def test_conditions_name_the_thread():
    first = access("w", 0, 0, 0, conditions=(TX < 1,))
    assert not meet(first, access("r", 0, 0, 0, conditions=(TX < 1,)))
    assert meet(first, access("r", 0, 0, 0, conditions=(TX < 2,)))


def test_rows_of_a_loop_of_unknown_length_are_any_rows():
    j, loop = turns(K)
    mine = access("w", K, TX, 0)
    assert not meet(mine, access("r", j, TX, 0, loops=(loop,)))
    assert meet(mine, access("r", j, TX + 1, 0, loops=(loop,)))
    assert meet(mine, access("r", 0, j, 0, loops=(loop,)))
    unless = access("r", j, TX, 0, loops=(loop,), conditions=(j < TX,))
    assert not meet(mine, unless) and meet(access("w", K, TX + 1, 0), unless)


def test_random_multiples_of_unknown_numbers(seed):
    """Tiles of unknown number meet where what is left of their indices, divided by their common period, agrees."""
    rng = random.Random(seed)
    answers = set()
    for _ in range(60):
        threads, last = rng.choice([4, 32, 64]), rng.random() < 0.5
        sides = []
        for number in (Var("n", role="block"), Var("m", role="block")):
            period, step, start = rng.choice([6, 8, 16, 24, 64]), rng.choice([1, 1, 2, 4]), rng.choice([0, 0, 1, 4])
            within = rng.choice([4, 16, 64])
            moved = rng.choice([0, 0, 3, 8, 64, -8])  # a number beside the unknown one
            own = lambda t, step=step, start=start + moved, within=within: t % within * step + start  # noqa: E731
            count = rng.choice([1, 2, 4]) if last else 1
            place = number * period + moved + (TX % within * step + start)
            indices = (0, 0, place) if last else (0, place, 0)
            sides.append((access("w", *indices, count=count), period, own, count))
        (a, p, mine, runs), (b, q, theirs, others) = sides
        places = [
            {(t, (own(t) + e) % math.gcd(p, q)) for t in range(threads) for e in range(count)}
            for own, count in ((mine, runs), (theirs, others))
        ]
        want = any(t != u and x == y for t, x in places[0] for u, y in places[1])
        assert meet(a, b, threads) == want, (a.indices, b.indices, runs, others, threads)
        if not want:  # each warp has accesses of its own only
            assert not meet(a.with_(in_warp=True), b, threads)
        answers.add(want)
    assert answers == {True, False}


def test_random_patterns_against_sets(seed):
    """A loop of unknown length takes any plane of the tile; rows and columns tell threads apart as ever."""
    rng = random.Random(seed)
    answers = set()
    for _ in range(60):
        threads = rng.choice([8, 32])
        sides = []
        for _ in range(2):
            r, loop = turns(rng.choice([1, 2, 4]))
            row = (TX * rng.choice([1, 2]) + r * rng.choice([0, 8, 16]) + rng.choice([0, 1, 7])) % 64
            column = rng.choice([TX % 4 * 8, (TX ^ 1) % 8 * 8, r * 8, const(0, dt.int32)])
            u, any_plane = turns(K, "u")
            plane, loops = rng.choice(
                [(0, (loop,)), (0, (any_plane, loop)), (u, (any_plane, loop)), (u, (loop, any_plane))]
            )
            sides.append((access(rng.choice("rw"), plane, row, column, count=rng.choice([1, 8]), loops=loops), r, loop))
        places = []
        for a, r, loop in sides:
            seen = {}
            for turn in range(int(loop.stops[0].value)):
                numbers = Numbers({r: np.full(threads, turn)}, np.arange(threads))
                rows, columns = (np.broadcast_to(numbers(i), threads) for i in a.indices[1:])
                for t in range(threads):
                    for n in range(a.count):
                        seen.setdefault((int(rows[t]), int(columns[t]) + n), set()).add(t)
            places.append(seen)
        both = places[0].keys() & places[1].keys()
        wanted = any(len(places[0][p] | places[1][p]) > 1 for p in both)
        wanted = wanted and (sides[0][0].writes or sides[1][0].writes)
        assert meet(sides[0][0], sides[1][0], threads) == wanted
        answers.add(wanted)
    assert answers == {True, False}
