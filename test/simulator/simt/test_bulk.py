# SPDX-License-Identifier: Apache-2.0
"""Bulk copies: what they move, and what is found when nobody waits for them."""

import numpy as np
import pytest
import torch
from mutation import removals

from torch_tile.diagnostics.errors import InternalError
from torch_tile.intrinsics import bulk, memory as tm
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, cast, const
from torch_tile.simulator.simt.bulk import swizzled
from torch_tile.simulator.simt.interpreter import run_threads


def number(n):
    return const(n, dt.int32)


def loaded(b, box, at, swizzle=0, size=(20, 64), dtype=torch.float16, wait=True, where=0, expected=None):
    """Statements that load a box of x to s, and the tile."""
    count = box[0] * box[1]
    x = b.tensor("x", torch.arange(size[0] * size[1]).to(dtype))
    s, bar = b.shared("s", count + where, str(dtype)[6:]), b.barrier("bar", 1, 1)
    signal, bytes_ = b.address(bar, 0), count * dtype.itemsize
    start = b.when(
        b.thread == 0,
        bulk.mbarrier_expect(signal, bytes_ if expected is None else expected),
        b.at(2, bulk.tma_load(b.address(s, where), b.map(x, size, box, swizzle), [number(n) for n in at], signal)),
        bulk.mbarrier_arrive(signal),
    )
    return s, [*b.ready(bar), start, *([b.at(3, bulk.mbarrier_wait(signal, 0))] if wait else [])]


def read_out(b, s, count):
    """Copy the first elements of s to a new tensor."""
    y, i = b.tensor("y", torch.full((count,), -1.0).to(b.tensors[0].dtype)), Var("i", dt.int32, "loop")
    at = i * b.threads + b.thread
    return b.loop(i, 0, count // b.threads, b.store(y, at, b.load(s, at), line=5))


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("at", [(0, 0), (8, 16), (-3, 40), (17, -8), (30, 0)])
def test_boxes(build, swizzle, at):
    b, columns = build(32), (swizzle or 32) // 2
    s, stmts = loaded(b, (8, columns), at, swizzle)
    findings = b.run(*stmts, read_out(b, s, 8 * columns))
    assert not findings, findings.report()
    x = torch.nn.functional.pad(b.tensors[0].view(20, 64), (64, 64, 64, 64))
    want = x[64 + at[0] : 72 + at[0], 64 + at[1] : 64 + at[1] + columns].reshape(-1).numpy()
    place = np.arange(8 * columns)
    got = b.tensors[1].numpy()[swizzled(place * 2, swizzle) // 2]
    assert np.array_equal(got, want)


def test_swizzles_are_those_of_the_hardware():
    address = np.arange(0, 2048, 16)
    for span, mask in ((32, 0x10), (64, 0x30), (128, 0x70)):
        assert np.array_equal(swizzled(address, span), address ^ ((address >> 3) & mask))
    assert swizzled(np.array([128 * 3 + 16 * 2]), 128) == 128 * 3 + 16 * (2 ^ 3)


@pytest.mark.parametrize(("wait", "line"), [(True, None), (False, 5)])
def test_a_load_is_waited_for(build, wait, line):
    b = build(32)
    s, stmts = loaded(b, (8, 16), (0, 0), wait=wait)
    lines = b.lines(b.run(*stmts, read_out(b, s, 128)))
    assert lines == ([("missing_wait", 5), ("missing_wait", 2)] if line else [])


def test_a_load_over_what_is_being_read(build):
    """What ordinary loads have read, or may still read, copies overwrite only after a fence of the readers."""
    for sync, kinds in (
        ([], {"race", "missing_fence"}),
        ([tm.barrier()], {"missing_fence"}),
        ([tm.barrier(), bulk.fence_proxy_async()], {"missing_fence"}),
        ([bulk.fence_proxy_async(), tm.barrier()], set()),
    ):
        b = build(64)
        s, stmts = loaded(b, (8, 16), (0, 0))
        y, other = b.tensor("y", torch.zeros(64).half()), b.store(s, b.thread, 1.0)
        stmts = [other, tm.barrier(), b.store(y, b.thread, b.load(s, 63 - b.thread)), *sync, *stmts[2:]]
        made = b.ready(next(a.buffer for a in b.allocs if a.buffer.scope == "barrier"))
        assert b.run(*made, *stmts).kinds == kinds


def test_bytes_are_counted(build):
    for expected in (128, 512):
        b = build(32)
        _, stmts = loaded(b, (8, 16), (0, 0), expected=expected)
        assert ("deadlock", 3) in b.lines(b.run(*stmts))


def test_alignment(build):
    b = build(32)
    _, stmts = loaded(b, (8, 16), (0, 0), where=8)
    assert b.lines(b.run(*stmts)) == [("misaligned", 2)]
    b = build(32)
    _, stmts = loaded(b, (8, 64), (0, 0), swizzle=128, where=64)
    assert b.lines(b.run(*stmts)) == [("misaligned", 2)]
    b = build(32)
    _, stmts = loaded(b, (8, 16), (0, 0), size=(20, 20))
    assert b.lines(b.run(*stmts)) == [("misaligned", 2)]
    b = build(32)
    with pytest.raises(InternalError, match="swizzled box"):
        b.run(*loaded(b, (8, 16), (0, 0), swizzle=64)[1])


def stored(b, at=(0, 0), combine="", swizzle=0, steps=("fence", "meet", "store", "commit", "wait"), size=(20, 64)):
    """Write a tile of 8 x 32 by all threads and store it to y; then overwrite the tile."""
    s, y = b.shared("s", 256, "float32"), b.tensor("y", torch.full((size[0] * size[1],), 2.0))
    i = Var("i", dt.int32, "loop")
    target = b.map(y, size, (8, 32), swizzle)
    place = i * b.threads + b.thread
    every = {
        "fence": bulk.fence_proxy_async(), "meet": tm.barrier(),
        "store": b.at(2, bulk.tma_store(target, b.address(s, 0), [number(n) for n in at], combine)),
        "commit": bulk.bulk_commit(), "wait": bulk.bulk_wait(0),
    }  # fmt: skip
    one = [every[n] for n in ("store", "commit", "wait") if n in steps]
    fill = b.loop(i, 0, 256 // b.threads, b.store(s, place, cast(place, dt.float32), line=1))
    return [fill, *(every[n] for n in ("fence", "meet") if n in steps), b.when(b.thread == 0, *one)], s


@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize("at", [(0, 0), (16, 48), (-4, 0)])
@pytest.mark.parametrize("combine", ["", "add", "min", "max"])
def test_stores(build, at, combine, swizzle):
    b = build(64)
    findings = b.run(*stored(b, at, combine, swizzle)[0])
    assert not findings, findings.report()
    tile = torch.from_numpy(np.arange(256, dtype=np.float32)[swizzled(np.arange(256) * 4, swizzle) // 4]).view(8, 32)
    want = torch.full((20 + 16, 64 + 64), 2.0)
    part = want[8 + at[0] : 16 + at[0], 32 + at[1] : 64 + at[1]]
    part[...] = {"": tile, "add": part + tile, "min": part.minimum(tile), "max": part.maximum(tile)}[combine]
    assert torch.equal(b.tensors[0].view(20, 64), want[8:28, 32:96])


def test_each_removal_is_reported(build):
    b = build(64)
    stmts, s = stored(b)
    program = b.program(*stmts, tm.barrier(), b.store(s, b.thread, 0.0, line=4))
    tensors = dict(zip(b.params, b.tensors, strict=True))
    assert not run_threads(program, tensors, {})
    found = [(r.name, run_threads(r.program, tensors, {}).kinds) for r in removals(program)]
    wait = {"race", "missing_wait"}  # of the tile overwritten, and of the end of the block
    assert found == [
        ("fence_proxy_async", {"missing_fence"}), ("barrier", {"race"}), ("bulk_wait", wait),
        ("bulk_wait, one laxer", wait), ("barrier", {"race"}),
    ]  # fmt: skip


def test_a_store_that_no_group_has(build):
    b = build(64)
    assert b.lines(b.run(*stored(b, steps=("fence", "meet", "store", "wait"))[0])) == [("missing_wait", 2)]


def test_results_are_there_after_a_wait_for_them(build):
    for read in (True, False):
        b = build(64)
        stmts, _ = stored(b, steps=("fence", "meet", "store", "commit"))
        z = b.tensor("z", torch.zeros(1))
        after = b.store(z, 0, b.load(b.params[0], 5), line=8)
        findings = b.run(*stmts, b.when(b.thread == 0, bulk.bulk_wait(0, read), after))
        assert b.lines(findings) == ([("missing_wait", 8)] if read else [])
        assert b.tensors[1].item() == 5


def test_copies_of_tensors_that_the_kernel_writes(build):
    """A fence and a barrier come before the load of what was stored, a wait before the next store."""
    for sync, wait, lines in (
        ([tm.barrier()], True, [("missing_fence", 2)]), ([bulk.fence_proxy_async(), tm.barrier()], True, []),
        ([bulk.fence_proxy_async()], True, [("race", 2)]),
        ([bulk.fence_proxy_async(), tm.barrier()], False, [("race", 7), ("missing_wait", 2)]),
    ):  # fmt: skip
        b = build(64)
        _, (made, met, start, *waits) = loaded(b, (8, 16), (0, 0), wait=wait)
        x = b.params[0]
        first, last = b.store(x, b.thread, 5.0, line=6), b.when(b.thread < 16, b.store(x, b.thread, 6.0, line=7))
        assert b.lines(b.run(made, met, first, *sync, start, *waits, last)) == lines
