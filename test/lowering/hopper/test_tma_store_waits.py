# SPDX-License-Identifier: Apache-2.0
"""Waits of bulk stores move as far as the next use of their tiles: checked by running groups, tile by tile."""

import random

import pytest

from torch_tile.intrinsics import bulk
from torch_tile.intrinsics.memory import arrive_last, memory_fence
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, Call, Const, Load, Var, const
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Block, Break, Do, For, If, Kernel, LoopKind, Program, Store
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering.hopper.tma_store_waits import sink_store_waits

TX, ZERO, N = Var("tx", role="thread"), const(0, dt.int32), Var("n", role="size")
OUT = Buffer("out", (const(64, dt.int32), const(32, dt.int32)), dt.float32, "global")
A, B, C, D = (Buffer(name, (const(8, dt.int32), const(32, dt.int32)), dt.float32, "shared") for name in "abcd")
COUNTER = Buffer("counter", (const(4, dt.int32),), dt.int32, "global")
MAP = TensorMap(OUT, OUT.shape, (const(32, dt.int32), const(1, dt.int32)), (8, 32), 0)


def write(tile):
    return Store(tile, (ZERO, TX), const(1.0, dt.float32))


def start(*tiles, thread=0):
    moves = [bulk.tma_store(MAP, Address(tile, (ZERO, ZERO)), (ZERO, ZERO)) for tile in tiles]
    return If(const(thread, dt.int32) == TX, Block((*moves, bulk.bulk_commit(), bulk.bulk_wait(0))), Block(()))


def loop(*body, trips=3):
    stop = const(trips, dt.int32) if isinstance(trips, int) else trips
    return For(LoopKind.SERIAL, (Var("k", role="loop"),), (ZERO,), (stop,), Block(body))


def program(*stmts):
    body = Block((*map(Alloc, (A, B, C)), *stmts))
    kernel = Kernel((const(1, dt.int32),), (Var("b", role="block"),), (4,), body, thread=TX)
    return Program("made", (OUT,), (kernel,), (), ())


def waits(made):
    """How many groups each wait leaves in flight, and of which tiles it says so, in the order of the text."""
    found = (n for n in walk(made) if isinstance(n, Call) and n.name == "bulk_wait")
    return [(n.options[0], "".join(a.buffer.name for a in n.args)) for n in found]


def complete(made):
    """Which waits are until results are there, in the order of the text."""
    found = (n for n in walk(made) if isinstance(n, Call) and n.name == "bulk_wait")
    return [not n.options[1] for n in found]


def check(made):
    """Run what thread 0 does: a tile is written only when all stores that read it are waited for; so at the end."""
    groups, opened, done, seen = [], [], 0, []

    def run(node):
        nonlocal opened, done
        if isinstance(node, Block):
            for one in node.stmts:
                run(one)
        elif isinstance(node, For):
            for _ in range(node.stops[0].value if isinstance(node.stops[0], Const) else 2):
                run(node.body)
        elif isinstance(node, If):
            run(node.then)
        elif isinstance(node, Store):
            assert not any(node.buffer in group for group in groups[done:]), node
            seen.append(("write", node.buffer.name))
        elif isinstance(node, Do) and node.call.name == "tma_store":
            opened.append(node.call.args[1].buffer)
            seen.append(("store", opened[-1].name))
        elif isinstance(node, Do) and node.call.name == "bulk_commit":
            groups.append(opened)
            opened = []
        elif isinstance(node, Do):
            done = max(done, len(groups) - node.call.options[0])

    run(made.kernels[0].body)
    assert done == len(groups)
    return seen


def test_a_tile_of_one_turn_is_waited_for_in_it():
    """Its name is gone after the loop, and its place may be another's."""
    made = sink_store_waits(program(loop(Alloc(D), write(D), start(D))))
    assert waits(made) == [(0, "")]
    verify(made, Stage.THREAD)
    made = sink_store_waits(program(loop(Alloc(D), write(D), start(D), write(A), write(D), start(D))))
    assert waits(made) == [(0, "d"), (0, "")]


def test_two_tiles_in_turn():
    made = sink_store_waits(
        program(loop(write(A), start(A), write(B), start(B), write(A), start(A), write(B), start(B)))
    )
    assert waits(made) == [(1, "a"), (1, "b"), (1, "a"), (1, "b"), (0, "ab")]
    check(made)
    assert sink_store_waits(made) is made


def test_reads_need_no_wait():
    """A product, or a thread, may read a tile that a bulk store reads."""
    read = Store(B, (ZERO, TX), Load(A, (ZERO, TX)))
    made = sink_store_waits(program(loop(write(A), start(A), read, write(B))))
    assert waits(made) == [(0, "a"), (0, "a")]
    (body,) = (n.body for n in walk(made) if isinstance(n, For))
    assert [type(s).__name__ for s in body.stmts] == ["If", "Store", "If", "Store", "Store"]
    check(made)


def test_one_tile_waits_before_it_is_written():
    made = sink_store_waits(program(loop(write(A), start(A), trips=N)))
    assert waits(made) == [(0, "a"), (0, "a")]
    (body,) = (n.body for n in walk(made) if isinstance(n, For))
    assert [type(s).__name__ for s in body.stmts] == ["If", "Store", "If"]


@pytest.mark.parametrize(
    "stmts",
    [
        (write(A), start(A)),  # nobody writes it again
        (loop(start(A)),),
        (loop(write(A), start(A), If(N == ZERO, Block((Break(),)), Block(()))),),
        (write(A), If(TX == ZERO, Block((*start(A).then.stmts, bulk.bulk_commit())), Block(())), write(A)),
    ],
)
def test_other_waits_stay(stmts):
    before = program(*stmts)
    assert sink_store_waits(before) is before


def test_other_threads_count_for_themselves():
    made = sink_store_waits(program(write(A), start(A), write(B), start(B, thread=32), write(A)))
    assert waits(made) == [(0, ""), (0, "a")]  # that of b stays where it is


def test_random_programs_store_the_same():
    for number in range(300):
        pick = random.Random(number)

        def body(size, depth, pick=pick):
            stmts = []
            for _ in range(size):
                kind = pick.randrange(7)
                tiles = pick.sample((A, B, C), pick.randint(1, 2))
                if kind == 0 and depth:
                    stmts.append(loop(*body(pick.randint(1, 5), depth - 1), trips=pick.choice((1, 2, 3))))
                elif kind == 1 and depth:
                    stmts.append(If(N == ZERO, Block(tuple(body(pick.randint(1, 3), depth - 1))), Block(())))
                else:
                    stmts += [*map(write, tiles), start(*tiles)] if kind < 5 else [write(tiles[0])]
            return stmts

        before = program(*body(pick.randint(1, 7), 2))
        after = sink_store_waits(before)
        assert check(before) == check(after)


ARRIVE = If(
    TX == ZERO,
    Block((Store(C, (ZERO, ZERO), arrive_last(Address(COUNTER, (ZERO,)), 4)),)),
    Block(()),
)
READ = Store(C, (ZERO, TX), Load(OUT, (ZERO, TX)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_what_other_blocks_may_read_is_there_before_they_are_told(order):
    """Also under conditions, and where the wait could be deferred to the next use of the tile."""
    parts = (Block((write(A), start(A), write(A))), ARRIVE, If(N == ZERO, Block((READ,)), Block(())))
    made = sink_store_waits(program(*(parts[n] for n in order)))
    assert complete(made) == [True] and waits(made) == [(0, "")]
    merged = If(TX == ZERO, Block((write(B), *start(A).then.stmts, write(B))), Block(()))
    assert complete(sink_store_waits(program(merged, ARRIVE, READ))) == [True]


def test_sums_are_there_before_a_fence_tells_of_them():
    """Other blocks add to the same tensor by the same statement. A store that only this one makes is no concern."""
    for combine in ("add", ""):
        sums = [bulk.tma_store(MAP, Address(A, (ZERO, ZERO)), (ZERO, ZERO), combine), bulk.bulk_commit()]
        one = If(TX == ZERO, Block((*sums, bulk.bulk_wait(0))), Block(()))
        assert complete(sink_store_waits(program(write(A), one, write(A), memory_fence()))) == [combine == "add"]
        assert complete(sink_store_waits(program(write(A), one, write(A)))) == [False]


def test_what_nobody_else_touches_is_deferred_as_ever():
    made = sink_store_waits(program(write(A), start(A), write(A), ARRIVE))
    assert complete(made) == [False] and waits(made) == [(0, "a")]
    assert complete(sink_store_waits(program(write(A), start(A), write(A), READ))) == [False]  # no arrival


def test_stores_of_two_places_may_follow_each_other():
    """The last block overwrites what another one has stored."""
    made = sink_store_waits(program(write(A), start(A), ARRIVE, write(A), start(A)))
    assert complete(made) == [True, True]
