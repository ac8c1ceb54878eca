# SPDX-License-Identifier: Apache-2.0
"""Blocks that arrive at counters: what the last of them may touch of what others wrote and read, with both clocks."""

import numpy as np
import pytest
import torch

from torch_tile.intrinsics import bulk, memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import const
from torch_tile.simulator.simt.races import Heard

BLOCKS, THREADS = 4, 64


@pytest.fixture(params=["barriers", "vector clocks"])
def made(build, request):
    """A builder with tensors x and counters and a flag; and a statement that makes the interpreter use other clocks."""
    b = build(THREADS, (BLOCKS,))
    b.x, b.out = b.tensor("x", torch.zeros(BLOCKS * THREADS)), b.tensor("out", torch.zeros(THREADS))
    b.counters, b.flag = b.tensor("counters", torch.zeros(4, dtype=torch.int32)), b.shared("flag", 1, "int32")
    b.first = () if request.param == "barriers" else (bulk.fence_proxy_async(),)
    b.bx = b.blocks[0]
    return b


def arrive(b, count=BLOCKS, at=0, line=0):
    last = memory.arrive_last(b.address(b.counters, at), count)
    return b.when(b.thread == 0, b.store(b.flag, 0, last, line))


def write(b, line=1):
    """Each thread its element of this block's part."""
    return b.store(b.x, b.bx * THREADS + b.thread, 1.0, line)


def read(b, line=9, blocks=BLOCKS):
    """Each thread adds up an element of all parts, of another thread's."""
    there = THREADS - 1 - b.thread
    total = b.load(b.x, there)
    for n in range(1, blocks):
        total = total + b.load(b.x, there + n * THREADS)
    return b.store(b.out, b.thread, total, line)


def if_last(b, *then, otherwise=()):
    return b.when(b.load(b.flag, 0) == 1, *then, otherwise=otherwise)


def outcome(b, *stmts):
    found = b.run(*b.first, *stmts)
    return b.lines(found), b.tensors[1].tolist(), b.tensors[2].tolist()


def test_the_last_block_sees_all(made):
    b = made
    stmts = write(b), memory.barrier(), arrive(b), memory.barrier(), if_last(b, read(b))
    assert outcome(b, *stmts) == ([], [float(BLOCKS)] * THREADS, [0] * 4)


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("order", ["acquire", "relaxed"])
def test_an_update_behind_a_fence_releases_what_a_load_acquires(made, fenced, order):
    """Each without the other orders nothing, and neither do writes behind the fence."""
    b = made
    counter = b.address(b.counters, 0)
    update = b.store(b.flag, 0, memory.atomic(counter, const(1, dt.int32), "add"))
    release = b.when(b.thread == 0, *([memory.memory_fence()] if fenced else []), update)
    acquire = b.when(b.thread == 0, b.store(b.flag, 0, memory.atomic_load(counter, order)))
    look = b.when(b.bx == BLOCKS - 1, acquire, memory.barrier(), read(b))
    found, out, _ = outcome(b, write(b), memory.barrier(), release, memory.barrier(), look)
    assert out == [float(BLOCKS)] * THREADS
    assert (found == []) == (fenced and order == "acquire")
    late = b.when(b.thread == 0, memory.memory_fence()), memory.barrier(), write(b), memory.barrier()
    assert ("race", 9) in outcome(b, *late, b.when(b.thread == 0, update), memory.barrier(), look)[0]


def test_a_barrier_before_and_one_after(made):
    b = made
    found, _, _ = outcome(b, write(b), arrive(b), memory.barrier(), if_last(b, read(b)))
    assert found and all(kind == "race" for kind, _ in found)
    found, _, _ = outcome(b, write(b), memory.barrier(), arrive(b), if_last(b, read(b)))
    assert ("race", 0) in found


def test_what_is_written_after_the_arrival_is_not_seen(made):
    b = made
    body = memory.barrier(), arrive(b), memory.barrier(), write(b), memory.barrier(), if_last(b, read(b))
    found, _, _ = outcome(b, *body)
    assert found == [("race", 9)]


def test_blocks_that_are_not_the_last(made):
    b = made
    body = write(b), memory.barrier(), arrive(b), memory.barrier()
    found, _, _ = outcome(b, *body, if_last(b, otherwise=(read(b),)))
    assert ("race", 9) in found


def test_other_counters_tell_nothing(made):
    """Pairs of blocks have counters of their own."""
    b = made
    arrival = arrive(b, 2, b.bx // 2)
    body = write(b), memory.barrier(), arrival, memory.barrier()
    mine = b.load(b.x, b.bx // 2 * 2 * THREADS + THREADS - 1 - b.thread)
    theirs = b.load(b.x, (b.bx // 2 * 2 + 2) % BLOCKS * THREADS + b.thread)
    found, _, counters = outcome(b, *body, if_last(b, b.store(b.x, b.bx * THREADS + b.thread, mine, 5)))
    assert (found, counters) == ([], [0] * 4)
    found, _, _ = outcome(b, *body, if_last(b, b.store(b.x, b.bx * THREADS + b.thread, theirs, 5)))
    assert ("race", 5) in found


def test_what_the_last_block_of_some_knows_it_hands_on(made):
    """Blocks 0 and 1 have a counter, and the later one arrives with 2 and 3 at another."""
    b = made
    early = b.when(b.bx < 2, arrive(b, 2, 0), memory.barrier())
    goes_on = b.when((b.bx > 1) | (b.load(b.flag, 0) == 1), memory.barrier(), arrive(b, 3, 1), memory.barrier())
    start = b.when(b.thread == 0, b.store(b.flag, 0, 0)), write(b), memory.barrier()
    found, out, counters = outcome(b, *start, early, goes_on, b.when(b.bx == 3, if_last(b, read(b))))
    assert (found, out, counters) == ([], [float(BLOCKS)] * THREADS, [0] * 4)


def test_the_last_block_may_overwrite_what_others_read(made):
    b = made
    reads = b.store(b.x, b.bx * THREADS + b.thread, b.load(b.out, THREADS - 1 - b.thread), 3)
    writes = b.store(b.out, b.thread, 5.0, 4)
    assert outcome(b, reads, memory.barrier(), arrive(b), memory.barrier(), if_last(b, writes))[0] == []
    found, _, _ = outcome(b, reads, memory.barrier(), arrive(b, BLOCKS - 1), memory.barrier(), if_last(b, writes))
    assert found  # one more block comes after the last one


def test_a_counter_outside_its_tensor(made):
    b = made
    found, _, counters = outcome(b, memory.barrier(), arrive(b, 2, 7, line=3))
    assert (found, counters) == ([("out_of_bounds", 3)], [0] * 4)


def test_counters_go_round(made):
    b = made
    for _ in range(3):
        assert outcome(b, memory.barrier(), arrive(b, 2), memory.barrier())[2] == [0] * 4
    b.tensors[2].fill_(0)
    assert outcome(b, memory.barrier(), arrive(b, 3), memory.barrier())[2] == [1, 0, 0, 0]


def test_bulk_stores_are_there_only_after_a_complete_wait(build):
    for read_only, want in ((False, set()), (True, {("race", 9), ("missing_wait", 9)})):
        b = build(THREADS, (BLOCKS,))
        b.x, b.out = b.tensor("x", torch.zeros(BLOCKS * THREADS)), b.tensor("out", torch.zeros(THREADS))
        b.counters, b.flag = b.tensor("counters", torch.zeros(4, dtype=torch.int32)), b.shared("flag", 1, "int32")
        b.bx, tile = b.blocks[0], b.shared("tile", THREADS)
        map_ = b.map(b.x, (BLOCKS, THREADS), (1, THREADS))
        place = b.bx, const(0, dt.int32)
        store = bulk.tma_store(map_, b.address(tile, 0), place), bulk.bulk_commit(), bulk.bulk_wait(0, read_only)
        found = b.run(
            b.store(tile, b.thread, 1.0), bulk.fence_proxy_async(), memory.barrier(), b.when(b.thread == 0, *store),
            memory.barrier(), arrive(b), memory.barrier(), if_last(b, read(b)),
        )  # fmt: skip
        assert set(b.lines(found)) == want


def test_what_was_heard_is_what_each_block_knew(seed):
    """Against a look at the vector of the block that a time belongs to."""
    rng, lanes = np.random.default_rng(seed), 64
    for turn in range(20):
        firsts = np.cumsum(rng.integers(10, 30, 6)).tolist()
        vectors = {n: rng.integers(n, n + 9, 2 * lanes + int(rng.integers(0, 5))) for n in firsts[:5]}
        chosen = {n: v for n, v in vectors.items() if turn and rng.random() < 0.6}  # first of none
        heard = Heard(chosen, lanes)
        when, column = rng.integers(0, firsts[-1] + 9, (40, 3)), rng.integers(0, 2 * lanes + 6, (40, 3))

        def known(when, column, firsts=firsts, chosen=chosen):
            first = max((n for n in firsts if n <= when), default=0)
            vector = chosen.get(first)
            if vector is None or column >= len(vector):
                return False
            if lanes <= column < 2 * lanes:
                warp = (column - lanes) // 32 * 32
                return bool(vector[warp : warp + 32].min() >= when)
            return bool(vector[column] >= when)

        want = [[known(*pair) for pair in zip(*row, strict=True)] for row in zip(when, column, strict=True)]
        assert heard.knew(when, column).tolist() == want
