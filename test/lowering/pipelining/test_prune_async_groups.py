# SPDX-License-Identifier: Apache-2.0
"""Groups of no copies: what is left waits for the same copies at the same places, and counts no other group."""

import random

import pytest

from torch_tile.intrinsics.memory import cp_async, cp_async_commit, cp_async_wait
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Var, const
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Kernel, LoopKind, Program, Role
from torch_tile.lowering.pipelining.prune_async_groups import prune_async_groups

N = Var("n", role="size")
TX = Var("tx", role="thread")
TILE = Buffer("s", (const(99, dt.int32), const(4, dt.int32)), dt.float32, "shared")
GLOBAL = Buffer("g", (const(4, dt.int32),), dt.float32, "global")


def fly(number):
    return cp_async(Address(TILE, (const(number, dt.int32), TX)), Address(GLOBAL, (TX,)), 4, 4)


def loop(trips, body, name="k"):
    var = Var(name, role="loop")
    stop = const(trips, dt.int32) if isinstance(trips, int) else trips
    return For(LoopKind.SERIAL, (var,), (const(0, dt.int32),), (stop,), Block(tuple(body(var))))


def when(condition, *then):
    return If(condition, Block(then), Block(()))


def program(*stmts):
    body = Block((Alloc(TILE), *stmts))
    kernel = Kernel((const(1, dt.int32),), (Var("b", role="block"),), (4,), body, thread=TX)
    return Program("made", (GLOBAL,), (kernel,), (), ())


def counted(made):
    return [
        (n.name, *n.options) if n.name == "cp_async_wait" else n.name
        for n in walk(made)
        if isinstance(n, Call) and n.name in ("cp_async_commit", "cp_async_wait")
    ]


def landings(made, n):
    """What the copies are waited for by: per copy in the order of their starts, the number of copies started before."""
    run = {"flights": [], "groups": [[]], "landed": {}, "count": 0}

    def block(body, env):
        for s in body.stmts:
            statement(s, env)

    def statement(s, env):
        if isinstance(s, For):
            for turn in range(int(evaluate(s.stops[0], env))):
                block(s.body, {**env, s.vars[0]: turn})
        elif isinstance(s, If):
            block(s.then if evaluate(s.condition, env) else s.otherwise, env)
        elif isinstance(s, Block):
            block(s, env)
        elif isinstance(s, Do) and s.call.name == "cp_async":
            run["groups"][-1].append(run["count"])
            run["count"] += 1
        elif isinstance(s, Do) and s.call.name == "cp_async_commit":
            run["groups"].append([])
        elif isinstance(s, Do) and s.call.name == "cp_async_wait":
            closed = run["groups"][:-1]
            for group in closed[: max(0, len(closed) - s.call.options[0])]:
                for copy in group:
                    run["landed"].setdefault(copy, run["count"])

    block(made.kernels[0].body, {N: n})
    return run["landed"]


def dropped(made):
    """What the pass makes, checked to wait for the same."""
    done = prune_async_groups(made)
    for n in (0, 1, 2, 5):
        assert landings(done, n) == landings(made, n), done
    return done


def test_nothing_is_left_where_no_copy_is():
    made = program(cp_async_commit(), loop(N, lambda k: [cp_async_wait(0), cp_async_commit()]))
    assert counted(dropped(made)) == []


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_pipeline_stays_as_it_is(stages):
    before = loop(stages - 1, lambda k: [fly(1), cp_async_commit()])
    step = loop(N, lambda k: [cp_async_wait(stages - 2), when(k + stages - 1 < N, fly(2)), cp_async_commit()])
    made = program(before, step)
    assert dropped(made) is made


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("empty", [0, 1])
def test_one_of_two_groups(stages, empty):
    def copies(k):
        found = [[when(k < 9, fly(g))] if g != empty else [] for g in range(2)]
        return [*found[0], cp_async_commit(), *found[1], cp_async_commit()]

    def step(k):
        first, second = cp_async_wait(2 * (stages - 1) - 1), cp_async_wait(2 * (stages - 1))
        return [first, *copies(k + stages - 1), second]

    done = dropped(program(loop(stages - 1, copies), loop(N, step)))
    kept = ("cp_async_wait", stages - 1 if empty == 0 else stages - 2)
    assert counted(done) == (
        ["cp_async_commit", "cp_async_commit", kept] if empty == 0 else ["cp_async_commit", kept, "cp_async_commit"]
    )


def test_a_second_wait_for_the_same():
    done = dropped(program(fly(0), cp_async_commit(), cp_async_wait(0), cp_async_wait(0)))
    assert counted(done) == ["cp_async_commit", ("cp_async_wait", 0)]


def test_ways_that_count_differently_keep_their_groups():
    made = program(fly(0), cp_async_commit(), when(N > 1, cp_async_commit()), fly(1), cp_async_commit(),
                   cp_async_wait(2), cp_async_wait(0))  # fmt: skip
    assert counted(dropped(made)) == counted(made)


def test_random_programs(seed):
    source = random.Random(seed)

    def block(depth):
        made = []
        for _ in range(source.randint(1, 5)):
            kind = source.randrange(9 if depth < 2 else 7)
            if kind < 2:
                made.append(fly(source.randrange(9)))
            elif kind < 5:
                made.append(cp_async_commit())
            elif kind < 7:
                made.append(cp_async_wait(source.randrange(4)))
            elif kind == 7:
                made.append(loop(source.choice([2, 3, N]), lambda k: block(depth + 1), f"k{depth}"))
            else:
                made.append(when(source.randrange(3) < N, *block(depth + 1)))
        return made

    for _ in range(100):
        dropped(program(*block(0)))


def test_roles_go_different_ways():
    """What one role waits for, and groups that it does not fill, are none of the other's."""
    mine = fly(0), cp_async_commit(), cp_async_commit(), cp_async_wait(1)
    others = fly(1), cp_async_commit(), cp_async_wait(0), cp_async_wait(0)
    made = prune_async_groups(program(Role(0, 32, Block(mine)), Role(32, 32, Block(others))))
    first, second = (n for n in walk(made) if isinstance(n, Role))
    assert counted(first) == counted(second) == ["cp_async_commit", ("cp_async_wait", 0)]


def test_what_comes_after_roles_has_gone_either_way():
    role = Role(0, 32, Block((fly(0), cp_async_commit())))
    made = prune_async_groups(program(role, cp_async_commit(), cp_async_wait(0)))
    assert counted(made) == ["cp_async_commit", ("cp_async_wait", 0)]
