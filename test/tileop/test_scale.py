# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Call
from torch_tile.ir.layout import Digit, Layout
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import If
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.simt.interpreter import run_threads
from torch_tile.tileop.scale import FEW, ScaleRows


def accumulators(warps, rows=16):
    """`rows` x 16 of each warp as mma.sync leaves them, and the layout of its rows."""
    row = (Digit(warps, 32, "t"), Digit(rows // 8, 2, "r"), Digit(8, 4, "t"))
    column = (Digit(2, rows // 4, "r"), Digit(4, 1, "t"), Digit(2, 1, "r"))
    held = (Digit(warps, 32, "t"), Digit(rows // 8, 1, "r"), Digit(8, 4, "t"))
    return Layout((row, column)), Layout((held,), (Digit(4, 1, "t"),))


@pytest.mark.parametrize("name", ["float32", "float16", "float64"])
def test_rows_times_factors(name, launch):
    dtype = getattr(torch, name)

    @T.prim_func
    def kernel(x: T.Tensor((5, 3, 2), name), f: T.Tensor((4,), "float32"), out: T.Tensor((5, 3, 2), name)):
        with T.Kernel(1) as _:
            tile, factors = T.alloc_fragment((5, 3, 2), name), T.alloc_fragment((4,), "float32")
            T.copy(x, tile)
            T.copy(f, factors)
            T.scale_rows(tile[1:5, :, 1:2], factors)
            T.scale_rows(tile[0:1, :, :], factors[2:3])
            T.copy(tile, out)

    x, f = torch.randn(5, 3, 2).to(dtype), torch.tensor([1.0, 0.0, -2.5, torch.inf])
    out, want = torch.empty_like(x), x.clone()
    want[1:, :, 1] *= f[:, None].to(dtype)
    want[0] *= f[2].to(dtype)
    launch(kernel, x, f, out)
    torch.testing.assert_close(out, want, equal_nan=True)


def test_one_factor_a_row(complaint):
    @T.prim_func
    def kernel(out: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            tile, factors = T.alloc_fragment((4, 8), "float32"), T.alloc_fragment((8,), "float32")
            T.scale_rows(tile, factors)  # here

    assert "has shape (8), the tile has (4, 8)" in complaint(kernel, "bad_argument")


def lowered(on_threads, count, layouts, shape=(32, 16)):
    """The op on fragments of `shape`, and the fragments."""
    threads = on_threads(count)
    tile = threads.buffer("tile", shape, dt.float32, "fragment", layouts[0])
    factors = threads.buffer("factors", shape[:1], dt.float32, "fragment", layouts[1])
    op = ScaleRows(threads.box(tile), threads.box(factors))
    return op.lower_cuda(threads.ctx)


def votes(stmt):
    return [n for n in walk(stmt) if isinstance(n, Call) and n.name == "vote_any"]


def test_a_warp_whose_factors_are_all_one_skips(on_threads):
    made = lowered(on_threads, 64, accumulators(2))
    assert isinstance(made, If) and made.condition is votes(made)[0]
    assert repr(made.condition) == 'T.call("vote_any", factors[0] != 1.0 or factors[1] != 1.0, dtype=T.bool)'


def test_no_vote_without_whole_warps_or_the_rows_own_factors(on_threads):
    tile, rows = accumulators(2)
    other = Layout(((Digit(32, 1, "t"),),), (Digit(2, 32, "t"),))
    assert not votes(lowered(on_threads, 64, (tile, other)))  # factors go through shared memory, with a barrier
    many = accumulators(1, 16 * FEW)
    assert not votes(lowered(on_threads, 32, many, (16 * FEW, 16)))
    padded = Layout(((Digit(2, 32, "t"), Digit(2, 1, "r"), Digit(8, 4, "t")),), (Digit(4, 1, "t"),))
    assert not votes(lowered(on_threads, 64, (tile, padded), (30, 16)))  # nobody writes the last factors
    assert rows == padded


@pytest.mark.parametrize("changed", [(), (3,), (0, 40), range(64)], ids=str)
def test_threads_multiply_what_has_to_be(changed):
    """Products of the tensor cores, scaled by factors that are 1 in some warps, then added to."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 16), "float16"), F: T.Tensor((64,), "float32"), C: T.Tensor((64, 16), "float32")):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((64, 16), "float16"), T.alloc_shared((16, 16), "float16")
            c, f = T.alloc_fragment((64, 16), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(A, a)
            T.copy(A[0:16, :], b)
            T.copy(F, f)
            T.clear(c)
            T.gemm(a, b, c)
            T.scale_rows(c, f)
            T.gemm(a, b, c)
            T.copy(c, C)

    program = lower(kernel.program, cuda_passes(Build(Target.of("cuda:sm_80"))))
    assert "vote_any" in repr(program)
    a, f, c = torch.randint(-4, 5, (64, 16)).half(), torch.ones(64), torch.full((64, 16), torch.nan)
    f[list(changed)] = 0.5
    findings = run_threads(program, dict(zip(program.params, (a, f, c), strict=True)), {})
    assert not findings
    product = a.float() @ a[:16].float()
    torch.testing.assert_close(c, product * f[:, None] + product)
