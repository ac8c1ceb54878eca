# SPDX-License-Identifier: Apache-2.0
"""Blocks of a cluster that load for each other, and what is found when they do not wait for each other."""

import math

import pytest
import torch
from mutation import removals

from torch_tile.diagnostics.errors import LaunchError
from torch_tile.intrinsics import bulk
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, const
from torch_tile.simulator.simt.interpreter import run_threads

TURNS, STAGES, ROWS, COLUMNS = 5, 2, 4, 16
PART = ROWS * COLUMNS  # elements that a block loads


def number(n):
    return const(n, dt.int32)


def sums(b, arrivals=None, to=None, at=None, bytes_=None):
    """Each block of a cluster adds up the same rows of x, of which each loads a part for all.

    `arrivals` is how many release a stage, `to` and `at` the blocks (bits) that loads come to and that they arrive at.
    """
    (nx, ny, _), count = b.cluster, b.cluster[0] * b.cluster[1]
    bx, by = (*b.blocks, number(0))[:2]
    everyone = number((1 << count) - 1)
    to, at = everyone if to is None else to, everyone if at is None else at
    x, y = b.tensor("x", torch.randn(TURNS * count * PART)), b.tensor("y", torch.zeros(math.prod(b.grid) * 32))
    s, total = b.shared("s", STAGES * count * PART), b.var("total", "float32", 0.0)
    full, empty = b.barrier("full", STAGES, 1), b.barrier("empty", STAGES, arrivals or count)
    rank = bx % nx + by % ny * nx
    n, m, i = (Var(name, dt.int32, "loop") for name in "nmi")
    first = n % STAGES * count * PART
    reads = b.loop(
        n, 0, TURNS,
        b.at(1, bulk.mbarrier_wait(b.address(full, n % STAGES), n // STAGES % 2)),
        b.loop(i, 0, count * PART // 32, b.store(total, None, b.load(total) + b.load(s, first + i * 32 + b.thread))),
        b.at(3, bulk.warp_arrive(b.address(empty, n % STAGES), at)),
    )  # fmt: skip
    signal, place = b.address(full, m % STAGES), [(m * count + rank) * ROWS, number(0)]
    map_ = b.map(x, (TURNS * count * ROWS, COLUMNS), (ROWS, COLUMNS))
    there = b.address(s, m % STAGES * count * PART + rank * PART)
    loads = b.loop(
        m, 0, TURNS,
        b.at(4, bulk.mbarrier_wait(b.address(empty, m % STAGES), (m // STAGES + 1) % 2)),
        b.when(
            b.thread == 32,
            bulk.mbarrier_expect(signal, count * PART * 4 if bytes_ is None else bytes_),
            b.at(5, bulk.tma_load(there, map_, place, signal, "", to)),
            b.at(6, bulk.mbarrier_arrive(signal)),
        ),
    )  # fmt: skip
    block = bx + by * b.grid[0] if len(b.blocks) > 1 else bx
    return (
        b.ready(full, empty)[0], b.at(7, bulk.cluster_arrive_relaxed()), b.at(8, bulk.cluster_wait()),
        b.role(0, 32, reads, b.store(y, block * 32 + b.thread, b.load(total))), b.role(32, 32, loads),
        b.at(9, bulk.cluster_arrive()), b.at(10, bulk.cluster_wait()),
    )  # fmt: skip


def wanted(b):
    """What each block stores."""
    return b.tensors[0].view(-1, 32).sum(0).repeat(b.tensors[1].numel() // 32)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("grid", "cluster"), [((4,), (2, 1, 1)), ((2, 2), (2, 2, 1)), ((4, 2), (4, 2, 1)), ((3, 2), (3, 1, 1))]
)
def test_each_loads_a_part_for_all(build, grid, cluster):
    b = build(64, grid, cluster)
    findings = b.run(*sums(b))
    assert not findings, findings.report()
    close(b.tensors[1], wanted(b))


def test_chosen_blocks_bring_those_of_their_cluster(build):
    b = build(64, (6,), (2, 1, 1))
    assert not b.run(*sums(b), blocks=[(3,), (2,)])
    want = wanted(b)
    want[:64] = want[128:] = 0
    close(b.tensors[1], want)


def test_each_removal_is_reported(build):
    b = build(64, (2,), (2, 1, 1))
    program = b.program(*sums(b))
    tensors = dict(zip(b.params, b.tensors, strict=True))
    found = {}
    for removal in removals(program):
        found[removal.name, removal.span and removal.span.line] = run_threads(removal.program, tensors, {}).kinds
    assert found.pop(("mbarrier_wait", 1)) & {"race", "unwritten", "missing_wait"}
    assert found.pop(("mbarrier_wait", 4)) & {"race", "missing_wait"}
    assert found == {
        ("fence_barrier_init", None): {"missing_fence", "race"}, ("warp_arrive", 3): {"deadlock"},
        ("mbarrier_arrive", 6): {"deadlock"}, ("cluster_arrive_relaxed", 7): {"race", "barrier"},
        ("cluster_wait", 8): {"race", "barrier"}, ("cluster_arrive", 9): {"missing_wait", "barrier"},
        ("cluster_wait", 10): {"missing_wait"},
    }  # fmt: skip


def test_a_block_ends_before_it_is_reached(build):
    """The loop ends with an arrival for nobody, which still must find the barrier."""
    b = build(64, (2,), (2, 1, 1))
    *stmts, _, _ = sums(b)
    findings = b.run(*stmts)
    assert findings.kinds == {"missing_wait"} and {f.span.line for f in findings} == {3}
    assert "may end before thread" in findings.report() or "has ended" in findings.report()


def own(b):
    """The bit of the running block."""
    return number(1) << b.blocks[0] % 2


WRONG = {
    "stages release by one block's readers": (lambda b: {"arrivals": 1}, "missing_wait"),
    "a block that arrives at itself only": (lambda b: {"at": own(b)}, "deadlock"),
    "a load to itself only": (lambda b: {"to": own(b)}, "deadlock"),
    "bytes of the own part only": (lambda b: {"bytes_": PART * 4}, "unwritten"),
    "a block that there is not": (lambda b: {"to": number(7)}, "out_of_bounds"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(build, what):
    b, (change, kind) = build(64, (2,), (2, 1, 1)), WRONG[what]
    findings = b.run(*sums(b, **change(b)))
    assert kind in findings.kinds, findings.report()


def test_who_waits_for_ever_is_told_for_what(build):
    b = build(64, (2,), (2, 1, 1))
    text = b.run(*sums(b, at=own(b))).report()
    assert "phase 0 of `empty[0]` lacks 1 arrivals; there is arrivals at kernel.py:3" in text
    assert "kernel.py:4" in text


def meeting(b, *between, first=(), second=()):
    """Block 0 writes y, all of the cluster meet, and block 1 reads it."""
    y, z = b.tensor("y", torch.zeros(32)), b.tensor("z", torch.zeros(32))
    bx = b.blocks[0]
    return b.run(
        b.when(bx == 0, b.store(y, b.thread, 7.0, line=1), *first), *between,
        b.when(bx == 1, b.store(z, b.thread, b.load(y, b.thread), line=2), *second),
    )  # fmt: skip


MET = (bulk.cluster_arrive, bulk.cluster_wait)


def test_blocks_that_meet_see_what_each_wrote(build):
    b = build(32, (2,), (2, 1, 1))
    findings = meeting(b, *(f() for f in MET))
    assert not findings, findings.report()
    assert b.tensors[1].eq(7).all()


def test_a_relaxed_arrival_shows_nothing_that_was_written(build):
    b = build(32, (2,), (2, 1, 1))
    findings = meeting(b, bulk.cluster_arrive_relaxed(), bulk.cluster_wait())
    assert b.lines(findings) == [("race", 2)]


def test_blocks_that_arrive_late_race(build):
    b = build(32, (2,), (2, 1, 1))
    findings = meeting(b, second=[f() for f in MET], first=[f() for f in MET][::-1])
    assert "race" in findings.kinds


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (["cluster_arrive", "cluster_arrive", "cluster_wait"], "arrive at the cluster's barrier again"),
        (["cluster_wait"], "without having arrived"),
    ],
)
def test_the_barrier_of_a_cluster_is_met_in_turns(build, calls, text):
    b = build(32, (2,), (2, 1, 1))
    findings = meeting(b, *(getattr(bulk, name)() for name in calls))
    assert "barrier" in findings.kinds and text in findings.report()


def test_who_ends_needs_not_be_waited_for(build):
    b = build(32, (2,), (2, 1, 1))
    findings = b.run(b.when(b.blocks[0] == 0, *(f() for f in MET)))
    assert not findings, findings.report()


def test_shared_memory_is_each_block_s_own(build):
    b = build(32, (2,), (2, 1, 1))
    s, y = b.shared("s", 32), b.tensor("y", torch.zeros(64))
    mine = b.store(s, b.thread, b.thread + b.blocks[0] * 100)
    findings = b.run(mine, *(f() for f in MET), b.store(y, b.blocks[0] * 32 + b.thread, b.load(s, b.thread)))
    assert not findings, findings.report()
    assert b.tensors[0].tolist() == [float(t + 100 * n) for n in range(2) for t in range(32)]


def test_a_grid_that_is_no_clusters(build):
    b = build(32, (3,), (2, 1, 1))
    with pytest.raises(LaunchError, match="3 blocks in x are no clusters of 2"):
        meeting(b, *(f() for f in MET))


def test_blocks_that_have_nothing_to_do_with_each_other_run_one_by_one(build):
    b = build(32, (3,), (2, 1, 1))
    y = b.tensor("y", torch.zeros(96))
    assert not b.run(b.store(y, b.blocks[0] * 32 + b.thread, b.blocks[0]))
    assert b.tensors[0].tolist() == [float(n) for n in range(3) for _ in range(32)]
