# SPDX-License-Identifier: Apache-2.0
"""How a scan is divided over lanes. That its numbers are right is for test_scan.py."""

import pytest

from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Var, const
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc
from torch_tile.tileop.reduce.scan import CumSum
from torch_tile.tileop.threads import ThreadContext


def lowered(shape, dim, threads, reverse=False):
    buffer = Buffer("a", tuple(n if isinstance(n, Var) else const(n, dt.int32) for n in shape), dt.float32, "shared")
    context = ThreadContext(Build(Target("cuda", 90)), Var("thread", dt.int32, "thread"), threads, Ranges())
    return CumSum.build(buffer, None, dim, reverse).lower_cuda(context)


@pytest.mark.parametrize("length, steps", [(1, 0), (5, 3), (32, 5), (1000, 5), (Var("n", dt.int32, "dim"), 5)])
def test_lanes_follow_the_length(length, steps):
    found = [n for n in walk(lowered((length,), 0, 128)) if isinstance(n, Call) and n.name == "shuffle_up"]
    assert [c.args[1].value for c in found] == [1 << s for s in range(steps)]


def test_memory_needs_no_copy():
    assert all(a.buffer.scope == "local" for a in walk(lowered((8, 40), 1, 64)) if isinstance(a, Alloc))
