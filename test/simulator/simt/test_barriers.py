# SPDX-License-Identifier: Apache-2.0
"""mbarriers between two roles, and what is found when they are not used as they were set up."""

import pytest
import torch
from mutation import removals

from torch_tile.intrinsics import bulk, memory as tm
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, cast
from torch_tile.ir.stmt import Let
from torch_tile.simulator.simt.interpreter import run_threads


def exchange(b, steps=5, stages=2):
    """Warp 1 writes rows of x into `stages` places, warp 0 adds them up; by threads' own stores and loads."""
    x, y = b.tensor("x", torch.randn(steps * 32)), b.tensor("y", torch.zeros(32))
    s, total = b.shared("s", stages * 32), b.var("total", "float32", 0.0)
    full, empty = b.barrier("full", stages, 32), b.barrier("empty", stages, 1)
    n, m, lane = Var("n", dt.int32, "loop"), Var("m", dt.int32, "loop"), Var("lane")
    reads = b.loop(
        n, 0, steps,
        b.at(1, bulk.mbarrier_wait(b.address(full, n % stages), n // stages % 2)),
        b.store(total, None, b.load(total) + b.load(s, n % stages * 32 + 31 - b.thread)),
        b.at(3, bulk.warp_arrive(b.address(empty, n % stages))),
    )  # fmt: skip
    writes = b.loop(
        m, 0, steps,
        b.at(4, bulk.mbarrier_wait(b.address(empty, m % stages), (m // stages + 1) % 2)),
        b.store(s, m % stages * 32 + lane, b.load(x, m * 32 + lane), line=5),
        b.at(6, bulk.mbarrier_arrive(b.address(full, m % stages))),
    )  # fmt: skip
    b.threads = 64
    return (
        *b.ready(full, empty), b.role(0, 32, reads, b.store(y, b.thread, b.load(total))),
        b.role(32, 32, Let(lane, b.thread - 32), writes),
    )  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_two_roles_exchange(build, stages):
    b = build(64)
    findings = b.run(*exchange(b, stages=stages))
    assert not findings, findings.report()
    torch.testing.assert_close(b.tensors[1], b.tensors[0].view(5, 32).sum(0).flip(0))


def test_each_removal_is_reported(build):
    b = build(64)
    program = b.program(*exchange(b))
    tensors = dict(zip(b.params, b.tensors, strict=True))
    found = {}
    for removal in removals(program):
        found[removal.name, removal.span and removal.span.line] = run_threads(removal.program, tensors, {}).kinds
    assert found.pop(("mbarrier_wait", 1)) & {"race", "unwritten"}
    assert found.pop(("mbarrier_wait", 4)) & {"race"}
    assert found == {
        ("fence_barrier_init", None): {"missing_fence"}, ("barrier", None): {"race"},
        ("warp_arrive", 3): {"deadlock"}, ("mbarrier_arrive", 6): {"deadlock"},
    }  # fmt: skip


def test_who_waits_for_ever_is_told_for_what(build):
    b = build(64)
    *before, reader, writer = exchange(b)
    loop = writer.body.stmts[1]
    late = b.loop(loop.vars[0], 0, 1, *loop.body.stmts)
    findings = b.run(*before, reader, b.role(32, 32, writer.body.stmts[0], late))
    assert b.lines(findings) == [("deadlock", 1)]
    text = findings.report()
    assert "phase 0 of `full[1]` lacks 32 arrivals" in text and "arrivals at kernel.py:6" in text


def simple(build, *stmts, arrivals=1, made=True, threads=32):
    """Findings of statements (functions of builder and barrier) with one mbarrier."""
    b = build(threads)
    bar = b.barrier("bar", 1, arrivals)
    return b.lines(b.run(*(b.ready(bar) if made else ()), *(s(b, b.address(bar, 0)) for s in stmts)))


def arrive(line, of=32):
    return lambda b, bar: b.when(b.thread < of, b.at(line, bulk.mbarrier_arrive(bar)))


def wait(line, parity):
    return lambda b, bar: b.at(line, bulk.mbarrier_wait(bar, parity))


def expect(line, size):
    return lambda b, bar: b.when(b.thread == 0, b.at(line, bulk.mbarrier_expect(bar, size)))


def test_parities(build):
    assert simple(build, wait(1, 1)) == []
    assert simple(build, wait(1, 0)) == [("deadlock", 1)]
    assert simple(build, arrive(1), wait(2, 0), arrivals=32) == []
    assert simple(build, arrive(1), wait(2, 1), arrivals=32) == [("deadlock", 2)]
    assert simple(build, arrive(1), wait(2, 0), arrive(3), wait(4, 1), wait(5, 0), arrivals=32) == [("deadlock", 5)]
    assert simple(build, arrive(1, of=31), wait(2, 0), arrivals=32) == [("deadlock", 2)]
    assert simple(build, wait(2, 0), arrive(1), arrivals=32) == [("deadlock", 2)]


def test_bytes_that_never_come(build):
    assert simple(build, expect(1, 16), arrive(2), wait(3, 0), arrivals=32) == [("deadlock", 3)]
    assert simple(build, expect(1, 1 << 20)) == [("barrier", 1)]


def test_too_many_arrivals(build):
    assert simple(build, expect(1, 16), arrive(2), arrivals=31) == [("barrier", 2)]


def test_making_barriers(build):
    assert simple(build, wait(1, 1), made=False) == [("barrier", 1)]
    again = simple(build, lambda b, bar: b.when(b.thread == 0, b.at(1, bulk.mbarrier_init(bar, 1))))
    assert again == [("barrier", 1)]


def test_a_barrier_orders_only_who_waits(build):
    def kernel(*who):
        b = build(64)
        s, y, bar = b.shared("s", 64), b.tensor("y", torch.zeros(64)), b.barrier("bar", 1, 64)
        waits = (b.when(b.thread < n, bulk.mbarrier_wait(b.address(bar, 0), 0)) for n in who)
        return b, b.run(
            *b.ready(bar), b.store(s, b.thread, 1.0), bulk.mbarrier_arrive(b.address(bar, 0)), *waits,
            b.store(y, b.thread, b.load(s, 63 - b.thread), line=7),
        )  # fmt: skip

    b, findings = kernel(64)
    assert not findings and b.tensors[0].sum() == 64
    b, findings = kernel(40)
    assert b.lines(findings) == [("race", 7)] and next(iter(findings)).count == 24


def test_one_thread_arrives_for_itself_only(build):
    for sync in ((), (tm.warp_barrier(),)):
        b = build(64)
        s, y, bar = b.shared("s", 32), b.tensor("y", torch.zeros(32)), b.barrier("bar", 1, 1)
        first = b.role(
            0, 32, b.store(s, b.thread, 1.0), *sync, b.when(b.thread == 0, bulk.mbarrier_arrive(b.address(bar, 0)))
        )
        second = b.role(
            32, 32, bulk.mbarrier_wait(b.address(bar, 0), 0), b.store(y, b.thread - 32, b.load(s, b.thread - 32), 9)
        )
        findings = b.run(*b.ready(bar), first, second)
        assert b.lines(findings) == ([] if sync else [("race", 9)])


def test_each_thread_may_have_its_own_barrier(build):
    b = build(64)
    bar = b.barrier("bar", 2, 32)
    at = b.address(bar, b.thread // 32)
    assert not b.run(*b.ready(bar), bulk.mbarrier_arrive(at), bulk.mbarrier_wait(at, 0))
    b = build(32)
    bar = b.barrier("bar", 2, 32)
    assert ("out_of_bounds", 3) in b.lines(b.run(*b.ready(bar), b.at(3, bulk.mbarrier_arrive(b.address(bar, 2)))))


def test_a_block_begins_with_no_barriers(build):
    b = build(32, grid=(3,))
    bar = b.barrier("bar", 1, 32)
    at = b.address(bar, 0)
    assert not b.run(*b.ready(bar), bulk.mbarrier_arrive(at), bulk.mbarrier_wait(at, 0))


def test_warps_of_a_role_wait_apart(build):
    """Warp 2 gives to warp 1 and takes what it makes of it; both are of one role, and branches say who does what."""
    b = build(96)
    full, back = b.barrier("full", 2, 1), b.barrier("back", 2, 1)
    n, m, k, s, y = *(Var(x, dt.int32, "loop") for x in "nmk"), b.shared("s", 64), b.tensor("y", torch.zeros(128))
    lane, turns = b.thread % 32, b.var("turns")
    takes = b.loop(
        n, 0, 4, bulk.mbarrier_wait(b.address(full, n % 2), n // 2),
        b.store(s, n % 2 * 32 + lane, b.load(s, n % 2 * 32 + lane) * 2.0), bulk.warp_arrive(b.address(back, n % 2)),
    )  # fmt: skip
    gives = b.loop(
        m, 0, 4, b.store(turns, None, b.load(turns) + 1),
        b.store(s, m % 2 * 32 + lane, cast(m * 32 + lane, dt.float32)), bulk.warp_arrive(b.address(full, m % 2)),
        bulk.mbarrier_wait(b.address(back, m % 2), m // 2), b.store(y, m * 32 + lane, b.load(s, m % 2 * 32 + lane)),
    )  # fmt: skip
    role = b.role(32, 64, b.when(b.thread // 32 == 1, takes), b.when(b.thread // 32 == 2, gives), b.loop(k, 0, 2))
    z = b.tensor("z", torch.zeros(96, dtype=torch.int32))
    findings = b.run(*b.ready(full, back), role, b.store(z, b.thread, b.load(turns)))
    assert not findings, findings.report()
    assert b.tensors[0].tolist() == [2.0 * n for n in range(128)]
    assert b.tensors[1].view(3, 32).tolist() == [[0] * 32, [0] * 32, [4] * 32]


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
        tensors = dict(zip(b.params, b.tensors, strict=True))
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
