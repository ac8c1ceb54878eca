# SPDX-License-Identifier: Apache-2.0
"""How a scan is divided over lanes. That its numbers are right is for test_scan.py."""

import random

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Var, const
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc
from torch_tile.tileop.reduce.scan import CumSum
from torch_tile.tileop.threads import ThreadContext


def scan(name, shape, dim, reverse, dtype, in_place):
    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), B: T.Tensor(shape, dtype)):
        with T.Kernel(1) as _:
            a = T.alloc_shared(shape, dtype)
            b = T.alloc_fragment(shape, dtype)
            T.copy(A, a)
            if in_place:
                getattr(T, name)(a, dim=dim, reverse=reverse)
                T.copy(a, B)
            else:
                getattr(T, name)(a, b, dim=dim, reverse=reverse)
                T.copy(b, B)

    return kernel


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("name", ["cumsum", "cummax"])
def test_scans(name, case, launch, seed):
    draw = random.Random(seed)
    shape = [draw.randint(1, 40) for _ in range(1 + case % 2)]
    dim, reverse, in_place = draw.randrange(len(shape)), draw.random() < 0.5, draw.random() < 0.5
    dtype = draw.choice(["float32", "float64", "int32"])
    a = (
        torch.randn(shape).to(getattr(torch, dtype))
        if "f" in dtype
        else torch.randint(-50, 50, shape, dtype=torch.int32)
    )
    b = torch.zeros_like(a)
    launch(scan(name, shape, dim, reverse, dtype, in_place), a, b)
    wide = a.double().flip(dim) if reverse else a.double()
    expected = wide.cumsum(dim) if name == "cumsum" else wide.cummax(dim).values
    expected = expected.flip(dim) if reverse else expected
    torch.testing.assert_close(b.double(), expected, rtol=1e-5, atol=1e-5)


def test_slices(launch):
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32"), B: T.Tensor((8, 8), "float32")):
        with T.Kernel(1) as _:
            T.cumsum(A[1:3, :], B[4:6, 1:7], dim=1)
            T.cumsum(A[:, 2], B[0:4, 0])

    a, b = torch.randn(4, 6), torch.zeros(8, 8)
    launch(kernel, a, b)
    expected = torch.zeros(8, 8)
    expected[4:6, 1:7], expected[0:4, 0] = a[1:3].cumsum(1), a[:, 2].cumsum(0)
    torch.testing.assert_close(b, expected, rtol=1e-5, atol=1e-5)


def test_shapes_must_agree(complaint):
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32"), B: T.Tensor((6, 4), "float32")):
        with T.Kernel(1) as _:
            T.cumsum(A, B, dim=1)  # here

    assert "`A` (4, 6) and `B` (6, 4) differ" in complaint(kernel, "scan_shape")


def test_dim_must_exist():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4, 6), "float32")):
            with T.Kernel(1) as _:
                T.cummax(A, dim=2)

    assert caught.value.code == "reduce_dim"


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
