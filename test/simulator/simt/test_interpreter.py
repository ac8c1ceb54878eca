# SPDX-License-Identifier: Apache-2.0
"""Statements of threads, their order, and what is found when the order is wrong."""

import itertools

import pytest
import torch

from torch_tile.diagnostics.errors import InternalError
from torch_tile.intrinsics import memory as tm
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var, cast, const, maximum
from torch_tile.ir.stmt import Break, Continue, Let, While


def one(findings, kind, line):
    """The only finding."""
    found = list(findings)
    assert [(f.kind, f.span.line) for f in found] == [(kind, line)], findings.report()
    assert kind in findings.report()
    return found[0]


def test_every_block_and_thread_runs(build):
    b = build(40, grid=(3, 2))
    x, y = b.tensor("x", torch.randn(240)), b.tensor("y", torch.zeros(240))
    at = (b.blocks[1] * 3 + b.blocks[0]) * 40 + b.thread
    assert not b.run(b.store(y, at, b.load(x, at) * 2.0 + 1.0))
    torch.testing.assert_close(b.tensors[1], b.tensors[0] * 2 + 1)


def test_chosen_blocks_run(build):
    b = build(32, grid=(4,))
    y = b.tensor("y", torch.zeros(4))
    b.run(b.store(y, b.blocks[0], 1.0), blocks=[(2,)])
    assert b.tensors[0].tolist() == [0, 0, 1, 0]


def test_guards_protect(build):
    b = build(64)
    x, y = b.tensor("x", torch.randn(50)), b.tensor("y", torch.zeros(50))
    n = Var("n")
    stmts = [Let(n, const(50, dt.int32)), b.when(b.thread < n, b.store(y, b.thread, b.load(x, b.thread)))]
    assert not b.run(*stmts)
    torch.testing.assert_close(b.tensors[1], b.tensors[0])


@pytest.mark.parametrize("write", [False, True])
def test_out_of_bounds(build, write):
    b = build(64)
    x, y = b.tensor("x", torch.randn(50 if not write else 64)), b.tensor("y", torch.zeros(50 if write else 64))
    found = one(b.run(b.store(y, b.thread, b.load(x, b.thread), line=7)), "out_of_bounds", 7)
    assert found.count == 14 and "element 50" in found.message
    torch.testing.assert_close(b.tensors[1][:50], b.tensors[0][:50])


def test_out_of_bounds_of_shared_and_local(build):
    for make in ("shared", "local"):
        b = build(32)
        one(b.run(b.store(getattr(b, make)("s", 16), b.thread, 1.0, line=3)), "out_of_bounds", 3)


def reversed_by_shared(b, between=(), last=()):
    s = b.shared("s", b.threads)
    x, y = b.tensor("x", torch.randn(b.threads)), b.tensor("y", torch.zeros(b.threads))
    return (
        b.store(s, b.thread, b.load(x, b.thread), line=1), *between,
        b.store(y, b.thread, b.load(s, b.threads - 1 - b.thread), line=2), *last, b.store(s, b.thread, 0.0, line=3),
    )  # fmt: skip


def test_barriers_order(build):
    b = build(96)
    assert not b.run(*reversed_by_shared(b, [tm.barrier()], [tm.barrier()]))
    torch.testing.assert_close(b.tensors[1], b.tensors[0].flip(0))


def test_read_with_no_barrier_after_the_write(build):
    b = build(96)
    found = one(b.run(*reversed_by_shared(b, [], [tm.barrier()])), "race", 2)
    assert "read" in found.message and found.count == 96


def test_write_with_no_barrier_after_the_read(build):
    b = build(96)
    assert "overwritten" in one(b.run(*reversed_by_shared(b, [tm.barrier()])), "race", 3).message


def test_warp_barriers_order_one_warp(build):
    b = build(32)
    assert not b.run(*reversed_by_shared(b, [tm.warp_barrier()], [tm.warp_barrier()]))
    b = build(64)
    found = b.run(*reversed_by_shared(b, [tm.warp_barrier()], [tm.warp_barrier()]))
    assert [(f.kind, f.span.line) for f in found] == [("race", 2), ("race", 3)]


def test_two_writers(build):
    b = build(64)
    s = b.shared("s", 64)
    assert not b.run(b.store(s, b.thread // 2, 1.0))  # the same value
    b = build(64)
    s = b.shared("s", 64)
    one(b.run(b.store(s, b.thread // 2, cast(b.thread, dt.float32), line=4)), "race", 4)
    b = build(64)
    y = b.tensor("y", torch.zeros(4))
    one(b.run(b.store(y, 1, cast(b.thread, dt.float32), line=5)), "race", 5)


def test_global_memory_has_an_order_too(build):
    for between, kinds in (([tm.barrier()], set()), ([], {"race"})):
        b = build(64)
        y, z = b.tensor("y", torch.zeros(64)), b.tensor("z", torch.zeros(64))
        first, last = b.store(y, b.thread, 1.0), b.store(z, b.thread, b.load(y, 63 - b.thread), line=3)
        assert b.run(first, *between, last).kinds == kinds


def test_blocks_are_not_ordered(build):
    for at, wrong in ((0, True), (64, False)):
        b = build(64, grid=(2,))
        y = b.tensor("y", torch.zeros(128))
        value = cast(b.thread + b.blocks[0] * 64, dt.float32)
        findings = b.run(b.store(y, b.thread + b.blocks[0] * at, value, line=3))
        if wrong:
            assert "another block" in one(findings, "race", 3).message
        else:
            assert not findings


def test_unwritten_shared_memory(build):
    b = build(32)
    s, y = b.shared("s", 64), b.tensor("y", torch.zeros(32))
    found = b.run(b.store(s, b.thread, 1.0), tm.barrier(), b.store(y, b.thread, b.load(s, b.thread * 2), line=6))
    assert one(found, "unwritten", 6).count == 16
    assert b.tensors[0][16:].isnan().all()


def test_buffers_may_share_a_place(build):
    def run(*between):
        b = build(32)
        p, q = b.shared("p", 32, "float32", 0), b.shared("q", 64, "float16", 0)
        y = b.tensor("y", torch.zeros(32))
        last = b.store(q, b.thread * 2, cast(b.thread, dt.float16), line=3)
        return b.run(b.store(p, b.thread, 1.0), tm.barrier(), b.store(y, b.thread, b.load(p, 31 - b.thread)),
                     *between, last), b  # fmt: skip

    assert not run(tm.barrier())[0]
    one(run()[0], "race", 3)


def test_what_another_buffer_left(build):
    b = build(32)
    p, q, y = b.shared("p", 32, "float32", 0), b.shared("q", 32, "float32", 0), b.tensor("y", torch.zeros(32))
    findings = b.run(b.store(p, b.thread, 1.0), tm.barrier(), b.store(y, b.thread, b.load(q, b.thread), line=2))
    assert "left there" in one(findings, "unwritten", 2).message


def async_copy(b, steps):
    """Statements of `steps` of: fill with NaN, copy, commit, wait, barrier, read."""
    s = b.shared("s", b.threads * 4, "float16")
    x = b.tensor("x", torch.randn(b.threads * 4).half())
    y = b.tensor("y", torch.zeros(b.threads * 4, dtype=torch.float16))
    at, r = b.thread * 4, b.local("r", 4, "float16")
    filled = [b.store(r, n, float("nan")) for n in range(4)] if "fill" in steps else []
    every = {
        "fill": b.at(1, tm.vector_copy(b.address(s, at), b.address(r, 0), 8)),
        "copy": b.at(2, tm.cp_async(b.address(s, at), b.address(x, at), 8, 8)),
        "commit": tm.cp_async_commit(), "wait": tm.cp_async_wait(0), "wait1": tm.cp_async_wait(1),
        "barrier": tm.barrier(),
        "read": b.store(y, b.thread, b.load(s, b.threads * 4 - 1 - b.thread), line=5),
        "own": b.store(y, b.thread, b.load(s, b.thread * 4), line=6),
    }  # fmt: skip
    return filled + [every[step] for step in steps.split()]


def test_asynchronous_copies_land_at_their_wait(build):
    b = build(64)
    assert not b.run(*async_copy(b, "copy commit wait barrier read"))
    assert torch.equal(b.tensors[1][:64], b.tensors[0].flip(0)[:64])
    b = build(64)
    assert not b.run(*async_copy(b, "copy commit wait own"))
    assert torch.equal(b.tensors[1][:64], b.tensors[0][::4])


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ("copy commit barrier read", "missing_wait"),
        ("copy wait barrier read", "missing_wait"),
        ("copy commit wait1 barrier read", "missing_wait"),
        ("copy commit wait read", "race"),
        ("copy commit barrier wait read", "race"),
    ],
)
def test_a_copy_that_may_be_under_way(build, steps, kind):
    b = build(64)
    findings = b.run(*async_copy(b, "fill barrier " + steps))
    one(findings, kind, 5)
    if kind == "missing_wait":  # the old bytes are seen
        assert b.tensors[1][:64].isnan().all()


def test_a_copy_over_what_others_read(build):
    b = build(64)
    one(b.run(*async_copy(b, "fill barrier read copy commit wait")), "race", 2)
    b = build(64)
    assert not b.run(*async_copy(b, "fill barrier read barrier copy commit wait"))


def test_a_part_of_a_copy_becomes_zero(build):
    b = build(32)
    s, x, y = b.shared("s", 128, "int16"), b.tensor("x", torch.arange(1, 65)), b.tensor("y", torch.zeros(128).short())
    x = b.tensor("z", torch.arange(1, 65).short())
    valid = maximum(0, 128 - b.thread * 8)
    copy = tm.cp_async(b.address(s, b.thread * 4), b.address(x, b.thread * 4), valid, 8)
    r = b.local("r", 4, "int16")
    assert not b.run(
        copy, tm.cp_async_commit(), tm.cp_async_wait(0), tm.vector_copy(b.address(r, 0), b.address(s, b.thread * 4), 8),
        tm.vector_copy(b.address(y, b.thread * 4), b.address(r, 0), 8),
    )  # fmt: skip
    assert b.tensors[1].tolist() == [*range(1, 65)] + [0] * 64


def test_threads_leave_loops_at_different_times(build):
    b = build(32)
    y, n, i = b.tensor("y", torch.zeros(32, dtype=torch.int32)), b.var("n"), Var("i", dt.int32, "loop")
    body = (
        b.when(i % 2 == 1, Continue()),
        b.when(i > 20, Break()),
        b.store(n, None, b.load(n) + i),
    )
    assert not b.run(b.loop(i, 0, b.thread, *body), b.store(y, b.thread, b.load(n)))
    assert b.tensors[0].tolist() == [sum(k for k in range(t) if k % 2 == 0 and k <= 20) for t in range(32)]


def test_while_and_break_of_all(build):
    b = build(32)
    y, n, m = b.tensor("y", torch.zeros(32, dtype=torch.int32)), b.var("n"), b.var("m")
    first = While(b.load(n) < b.thread, b.when(True, b.store(n, None, b.load(n) + 3)).then)
    i = Var("i", dt.int32, "loop")
    second = b.loop(i, 0, 100, b.store(m, None, b.load(m) + 1), b.when(b.load(m) == 5, Break()))
    assert not b.run(first, second, b.store(y, b.thread, b.load(n) * 100 + b.load(m)))
    assert b.tensors[0].tolist() == [-(-t // 3) * 300 + 5 for t in range(32)]


def test_deadlock(build):
    b = build(64)
    found = one(b.run(b.when(b.thread < 40, b.at(9, tm.barrier()))), "deadlock", 9)
    assert "40 of 64" in found.message
    b = build(64)
    i = Var("i", dt.int32, "loop")
    one(b.run(b.loop(i, 0, b.thread // 32 + 1, b.at(2, tm.barrier()))), "deadlock", 2)
    b = build(64)
    value = tm.shuffle_xor(cast(b.thread, dt.float32), 1)
    y = b.tensor("y", torch.zeros(64))
    assert not b.run(b.when(b.thread < 32, b.store(y, b.thread, value)))
    one(b.run(b.when(b.thread < 33, b.store(y, b.thread, value, line=8))), "deadlock", 8)


def test_uniform_branches_keep_barriers(build):
    b = build(64)
    i = Var("i", dt.int32, "loop")
    assert not b.run(b.loop(i, 0, 3, b.when(i > 0, tm.barrier())), b.when(b.thread >= 0, tm.barrier()))


def test_local_memory_is_per_thread(build):
    b = build(32)
    r, y, i = b.local("r", 4), b.tensor("y", torch.zeros(32)), Var("i", dt.int32, "loop")
    assert not b.run(
        b.loop(i, 0, 4, b.store(r, i, cast(b.thread * 10 + i, dt.float32))),
        b.store(y, b.thread, b.load(r, b.thread % 4)),
    )
    assert b.tensors[0].tolist() == [10 * t + t % 4 for t in range(32)]


def test_misaligned_vectors(build):
    b = build(32)
    x, r = b.tensor("x", torch.zeros(200)), b.local("r", 4)
    one(b.run(b.at(3, tm.vector_copy(b.address(r, 0), b.address(x, b.thread * 4 + 2), 16))), "misaligned", 3)


def test_bank_conflicts_are_counted(build):
    ways = {}
    for stride in (1, 2, 32, 33):
        b = build(32)
        s = b.shared("s", 33 * 32)
        findings = b.run(b.store(s, b.thread * stride, 1.0, line=1))
        (ways[stride],) = [banks.ways for banks in findings.banks.values()]
        assert not findings
    assert ways == {1: 1, 2: 2, 32: 32, 33: 1}
    b = build(32)
    s, r = b.shared("s", 32 * 36), b.local("r", 4)
    findings = b.run(*(tm.vector_copy(b.address(s, b.thread * k), b.address(r, 0), 16) for k in (4, 32, 36)))
    (banks,) = findings.banks.values()
    assert (banks.phases, banks.ideal, banks.worst) == (4 + 32 + 4, 12, 8)
    assert "ways of bank conflict" in findings.report()


def test_asserts_and_endless_loops(build, monkeypatch):
    from torch_tile.ir.expr import truth
    from torch_tile.ir.stmt import Assert, Block
    from torch_tile.simulator.simt import interpreter as threads

    monkeypatch.setattr(threads, "MOST_ITERATIONS", 50)
    b = build(32)
    findings = b.run(Assert(b.thread < 30, "few"), While(truth(True), Block(())))
    assert [(f.kind, f.count) for f in findings] == [("assertion", 2), ("endless", 1)]


def test_shared_memory_needs_its_place(build):
    b = build(32)
    s = b._alloc(Buffer("s", (const(4, dt.int32),), dt.float32, "shared", offset=0))
    b.allocs[0] = type(b.allocs[0])(type(s)("s", s.shape, s.dtype, "shared"))
    with pytest.raises(InternalError, match="no place"):
        b.run()


def test_findings_are_counted_once_per_line(build):
    b = build(32, grid=(2,))
    y = b.tensor("y", torch.zeros(8))
    findings = b.run(*itertools.repeat(b.store(y, b.thread, 1.0, line=2), 3))
    assert (
        one(findings, "out_of_bounds", 2).count == 24 * 6 and len(findings) == 1 and findings.kinds == {"out_of_bounds"}
    )
