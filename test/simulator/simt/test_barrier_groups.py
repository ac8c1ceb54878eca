# SPDX-License-Identifier: Apache-2.0
"""Named barriers: whom they order and whom they do not."""

import torch

from torch_tile.intrinsics import bulk, memory as tm
from torch_tile.simulator.mutation import removals
from torch_tile.simulator.simt.interpreter import run_threads


def swap(b, first, second, line=3):
    """Each role writes its half of s and reads the other's."""
    s, y = b.shared("s", 128), b.tensor("y", torch.zeros(128))
    store, load = b.store(s, b.thread, 1.0), b.store(y, b.thread, b.load(s, 127 - b.thread), line=line)
    again = b.store(y, b.thread, b.load(s, 127 - b.thread), line=line + 1)
    return b.role(0, 64, store, *first, load), b.role(64, 64, b.store(s, b.thread, 1.0), *second, again)


def test_two_roles_meet(build):
    b = build(128)
    assert not b.run(*swap(b, [bulk.named_barrier(1, 128)], [bulk.named_barrier(1, 128)]))
    assert b.tensors[0].sum() == 128
    b = build(128)
    roles = swap(b, [bulk.named_barrier(1, 128)], [bulk.named_barrier(1, 128)])
    for removal in removals(b.program(*roles)):
        tensors = {id(p): t for p, t in zip(b.params, b.tensors, strict=True)}
        assert run_threads(removal.program, tensors, {}).kinds & {"deadlock", "race"}


def test_a_block_barrier_is_met_by_roles_together(build):
    b = build(128)
    assert not b.run(*swap(b, [tm.barrier()], [tm.barrier()]))


def test_barriers_of_each_role_hide_nothing(build):
    b = build(128)
    kinds = {k for k, _ in b.lines(b.run(*swap(b, [bulk.named_barrier(1, 64)], [bulk.named_barrier(2, 64)])))}
    assert kinds <= {"race", "unwritten"} and "race" in kinds


def test_who_arrives_need_not_wait(build):
    b = build(64)
    s, y = b.shared("s", 32), b.tensor("y", torch.zeros(32))
    gives = [b.store(s, b.thread, 1.0), bulk.named_barrier_arrive(3, 64), b.store(s, b.thread, 2.0, line=8)]
    takes = [bulk.named_barrier(3, 64), b.store(y, b.thread - 32, b.load(s, 63 - b.thread), line=9)]
    assert not b.run(b.role(0, 32, *gives[:2]), b.role(32, 32, *takes))
    findings = b.run(b.role(0, 32, *gives), b.role(32, 32, *takes))
    assert [kind for kind, _ in b.lines(findings)] == ["race"]


def test_who_does_not_come(build):
    b = build(64)
    alone = b.role(0, 32, b.at(4, bulk.named_barrier(1, 64)))
    findings = b.run(alone, b.role(32, 32))
    assert b.lines(findings) == [("deadlock", 4)] and "64 threads; 32 come" in findings.report()


def test_counts(build):
    b = build(128)
    assert b.lines(b.run(b.at(2, bulk.named_barrier(1, 64)))) == [("barrier", 2)]
    b = build(128)
    roles = b.role(0, 64, b.at(2, bulk.named_barrier(1, 64))), b.role(64, 64, b.at(3, bulk.named_barrier(1, 128)))
    assert "barrier" in {kind for kind, _ in b.lines(b.run(*roles))}


def test_whole_warps_meet(build):
    b = build(64)
    torn = b.when(b.thread < 40, b.at(5, bulk.named_barrier(1, 40)))
    assert b.lines(b.run(torn)) == [("deadlock", 5)]


def test_variables_are_each_roles_own(build):
    b = build(96)
    n, y = b.var("n", init=7), b.tensor("y", torch.zeros(96, dtype=torch.int32))
    meet = bulk.named_barrier(1, 64)
    roles = [
        b.role(first, 32, b.store(n, None, b.load(n) + first), meet, b.store(n, None, b.load(n) + 1))
        for first in (0, 32)
    ]
    assert not b.run(*roles, b.store(y, b.thread, b.load(n)))
    assert b.tensors[0].view(3, 32).tolist() == [[8] * 32, [40] * 32, [7] * 32]
