# SPDX-License-Identifier: Apache-2.0
"""Registers that products have, and ordinary code that uses them too early or without a fence."""

import pytest
import torch

from torch_tile.intrinsics import bulk, memory as tm, wgmma
from torch_tile.intrinsics.wgmma import Descriptor
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var

TYPES = ("float16", "float16", "float32")
WALK = Descriptor(32, 16, 256)


def kernel(b, steps):
    """Statements of `steps`: products by numbers "1" (A of registers, to d), "2" (A shared, to d), "3" (to e)."""
    s, y = b.shared("s", 64 * 16, "float16"), b.tensor("y", torch.zeros(256))
    d, e, a = b.local("d", 4), b.local("e", 4), b.local("a", 8, "float16")
    i, j = Var("i", dt.int32, "loop"), Var("j", dt.int32, "loop")
    fill = b.loop(i, 0, 8, b.store(s, i * 128 + b.thread % 128, 1.0))
    start = b.loop(j, 0, 8, b.store(a, j, 1.0)), *(b.store(x, n, 0.0) for x in (d, e) for n in range(4))

    def product(line, to, in_registers):
        source = b.address(a if in_registers else s, 0)
        do = wgmma.wgmma(b.address(to, 0), source, b.address(s, 0), 8, TYPES, None if in_registers else WALK, WALK)
        return b.at(line, do)

    every = {
        "1": lambda: product(1, d, True), "2": lambda: product(2, d, False), "3": lambda: product(3, e, False),
        "fence": wgmma.wgmma_fence, "commit": wgmma.wgmma_commit, "barrier": tm.barrier,
        "results": lambda: b.at(12, wgmma.wgmma_results(b.address(d, 0), 4)),
        "results_e": lambda: wgmma.wgmma_results(b.address(e, 0), 4),
        "wait0": lambda: wgmma.wgmma_wait(0), "wait1": lambda: wgmma.wgmma_wait(1),
        "load": lambda: b.store(y, b.thread, b.load(d, 0), line=5), "store": lambda: b.store(d, 1, 0.0, line=6),
        "a": lambda: b.store(a, 3, 0.0, line=7), "e": lambda: b.store(y, b.thread, b.load(e, 1), line=8),
        "rows": lambda: b.at(9, tm.vector_copy(b.address(a, 0), b.address(s, 0), 16)),
        "s": lambda: b.store(s, b.thread, 1.5, line=10),
        "indexed": lambda: b.store(y, b.thread, b.load(d, b.thread % 4), line=11),
    }  # fmt: skip
    return [fill, *start, bulk.fence_proxy_async(), tm.barrier(), *(every[n]() for n in steps.split())]


@pytest.mark.parametrize(
    ("steps", "lines"),
    [
        ("fence 1 2 commit wait0 results load a", []),
        ("1 commit wait0", [("missing_fence", 1)] * 2),
        ("fence 2 commit wait0 results store 2 commit wait0", [("missing_fence", 2)]),
        ("fence 2 commit wait0 results load 2 commit wait0", [("missing_fence", 2)]),
        ("fence 2 commit wait0 results store fence 2 commit wait0", []),
        ("fence 2 commit wait0 2 commit wait0 results load", []),
        ("fence 2 commit wait1 load wait0", [("missing_wait", 5)]),
        ("fence 2 commit wait1 indexed wait0", [("missing_wait", 11)]),
        ("fence 2 commit store wait0", [("missing_wait", 6)]),
        ("fence 1 commit a wait0", [("missing_wait", 7)]),
        ("fence 1 commit rows wait0", [("missing_wait", 9)]),
        ("fence 2 commit a wait0", []),
        ("fence 3 commit 2 commit wait1 results_e e wait0 results load", []),
        ("fence 2 commit 3 commit wait1 e wait0", [("missing_wait", 8)]),
        ("fence 2 commit wait0 load", [("missing_fence", 5)]),
        ("fence 2 commit results wait0 load", [("missing_wait", 12)]),
        ("fence 2 commit wait1 results wait0", [("missing_wait", 12)]),
        ("fence 2 commit wait0 results 2 commit wait0 load", [("missing_fence", 5)]),
        ("fence 2 wait0 load commit wait0", [("missing_wait", 5)]),
        ("fence 2 commit", [("missing_wait", 2)]),
        ("fence 2 commit s wait0", [("race", 10)]),
        ("fence 2 commit wait0 barrier s", []),
        ("fence 2 commit barrier s wait0", [("race", 10)]),
        ("fence 2 commit wait0 s", [("race", 10)]),
    ],
)
def test_the_order_of_products_and_of_what_uses_their_operands(build, steps, lines):
    b = build(128)
    findings = b.run(*kernel(b, steps))
    assert b.lines(findings) == lines, findings.report()


def test_warpgroups_have_their_own(build):
    for first, lines in ((False, []), (True, [("missing_wait", 5)])):
        b = build(256)
        *before, fence, product, commit, load, wait = kernel(b, "fence 2 commit load wait0")
        mine = b.thread < 128
        used = b.when(mine if first else b.thread >= 128, load)
        assert b.lines(b.run(*before, b.when(mine, fence, product, commit), used, b.when(mine, wait))) == lines


def test_an_accumulator_becomes_no_factor_under_way(build):
    b = build(128)
    s, d = b.shared("s", 1024, "float16"), b.local("d", 16, "float16")
    types = ("float16", "float16", "float16")
    i = Var("i", dt.int32, "loop")
    fill = b.loop(i, 0, 8, b.store(s, i * 128 + b.thread, 1.0))
    into = b.at(1, wgmma.wgmma(b.address(d, 0), b.address(s, 0), b.address(s, 0), 16, types, WALK, WALK))
    out_of = b.at(2, wgmma.wgmma(b.address(d, 8), b.address(d, 0), b.address(s, 0), 16, types, None, WALK))
    cleared = (b.store(d, n, 0.0) for n in range(16))
    before = fill, *cleared, bulk.fence_proxy_async(), tm.barrier(), wgmma.wgmma_fence()
    after = wgmma.wgmma_commit(), wgmma.wgmma_wait(0)
    assert b.lines(b.run(*before, into, out_of, *after)) == [("missing_wait", 2)]
    assert b.lines(b.run(*before, into, *after, out_of, *after)) == []
