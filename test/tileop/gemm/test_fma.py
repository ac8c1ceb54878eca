# SPDX-License-Identifier: Apache-2.0
"""Products by multiply-adds: the loops compute what T.gemm means, and the layouts keep operands with their results."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

import torch_tile.language as T
from torch_tile.ir import dtype as dt
from torch_tile.ir.layout import Layout
from torch_tile.ir.node import Rewriter
from torch_tile.ir.stmt import Program
from torch_tile.ir.verify import Stage, verify
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.gemm import fma
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.threads import Layouts


class Lowered(Rewriter):
    """Every product as its loops."""

    def __init__(self, ctx):
        self.ctx = ctx

    def visit_Gemm(self, op):
        return fma.lower(op, self.ctx)


@pytest.mark.parametrize("turned", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize(
    ("a_type", "b_type", "c_type"),
    [
        ("float32", "float32", "float32"), ("float16", "bfloat16", "float32"), ("bfloat16", "bfloat16", "bfloat16"),
        ("int8", "int32", "int32"), ("float64", "float32", "float64"),
    ],
)  # fmt: skip
def test_loops_compute_the_product(on_threads, turned, a_type, b_type, c_type, seed: int) -> None:
    rng = random.Random(seed)
    m, n, k = (rng.randrange(1, 12) for _ in range(3))
    clear = rng.random() < 0.5
    a_shape, b_shape = (k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n)
    print(m, n, k, clear)

    @T.prim_func
    def kernel(A: T.Tensor(a_shape, a_type), B: T.Tensor(b_shape, b_type), C: T.Tensor((m, n), c_type)):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((2, *a_shape), a_type), T.alloc_shared(b_shape, b_type)
            c = T.alloc_fragment((m, n), c_type)
            T.copy(A, a[1, :, :])
            T.copy(B, b)
            T.copy(C, c)
            T.gemm(a[1, :, :], b, c, *turned, clear_accum=clear)
            T.copy(c, C)

    lowered: Program = Lowered(on_threads(64).ctx)(kernel.program)
    verify(lowered, Stage.TILE)
    assert not any(isinstance(node, Gemm) for node in lowered.kernels[0].body.stmts)
    x, y, z = (
        torch.randint(-4, 5, s).to(getattr(torch, t))
        for s, t in zip((a_shape, b_shape, (m, n)), (a_type, b_type, c_type), strict=True)
    )
    want = (x.T if turned[0] else x).double() @ (y.T if turned[1] else y).double() + (0 if clear else z.double())
    evaluate(lowered, x, y, z)
    torch.testing.assert_close(z.double(), want.to(z.dtype).double(), rtol=0, atol=0)


def held(layout: Layout, threads: int) -> list[set[tuple[int, int]]]:
    """The elements in each thread."""
    registers = layout.extent("r")
    found = []
    for thread in range(threads):
        points = set()
        for register in range(registers):
            index = []
            for digits in layout.dims:
                i = 0
                for d in digits:
                    i = i * d.size + (thread if d.axis == "t" else register) // d.stride % d.size
                index.append(i)
            points.add((index[0], index[1]))
        found.append(points)
    return found


@pytest.mark.parametrize("turn", range(12))
def test_operands_lie_with_their_results(on_threads, turn: int, seed: int) -> None:
    rng = random.Random(seed)
    m, n, k, threads = rng.randrange(1, 24), rng.randrange(1, 24), rng.randrange(1, 9), 32 * rng.choice([1, 2, 4])
    turned = rng.random() < 0.5, rng.random() < 0.5
    print(m, n, k, threads, turned)
    shapes = [(k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n), (m, n)]
    buffers = [
        on_threads.buffer(name, shape, dt.float32, "fragment") for name, shape in zip("ABC", shapes, strict=True)
    ]
    op = Gemm(*(on_threads.box(b) for b in buffers), *turned)
    run = on_threads(threads)
    known = Layouts()
    for demand in fma.infer_layout(op, known, run.ctx):
        known.decide(demand)
    a, b, c = (held(known.get(x), threads) for x in buffers)
    everything = np.zeros((m, n), int)
    for thread in range(threads):
        for i, j in c[thread]:
            everything[i, j] += 1
            for s in range(k):
                assert ((s, i) if turned[0] else (i, s)) in a[thread]
                assert ((j, s) if turned[1] else (s, j)) in b[thread]
    assert everything.min() >= 1
    layout = known.get(buffers[2])
    assert everything.max() == np.prod([d.size for d in layout.replicas])


def test_the_grid_uses_the_threads(on_threads) -> None:
    op_c = on_threads.buffer("C", (128, 128), dt.float32, "fragment")
    a, b = (on_threads.buffer(name, (128, 32), dt.float32, "shared") for name in "AB")
    op = Gemm(*(on_threads.box(x) for x in (a, b, op_c)), False, True)
    (demand,) = fma.infer_layout(op, Layouts(), on_threads(256).ctx)
    assert demand.layout == Layout.parse("[8:8r 16:16t | 8:1r 16:1t]") and not demand.required


def test_the_report_tells_why(on_threads) -> None:
    for types, shape, why_not in (
        ((dt.float16, dt.float32), (8, 16), "M = 8 is not a multiple of 16"), ((dt.float32, dt.float32), (16, 16), ""),
    ):  # fmt: skip
        a, b = (on_threads.buffer(name, shape, types[0], "shared") for name in "AB")
        c = on_threads.buffer("C", (shape[0], shape[0]), types[1], "fragment")
        run = on_threads(32)
        Gemm(*(on_threads.box(x) for x in (a, b, c)), False, True).lower_cuda(run.ctx)
        note = run.ctx.build.remarks[-1]
        assert note.became.startswith("multiply-adds of single elements") and note.why_not == why_not


def test_threads_that_are_no_whole_warps_are_told_of(on_threads, seed) -> None:
    threads = random.Random(seed).choice([n for n in range(1, 256) if n % 32])
    a, b = (on_threads.buffer(name, (64, 64), dt.float16, "shared") for name in "AB")
    op = Gemm(
        *(on_threads.box(x) for x in (a, b, on_threads.buffer("C", (64, 64), dt.float32, "fragment"))), False, True
    )
    with pytest.warns(UserWarning, match=f"as {threads} threads are not whole warps") as told:
        op.lower_cuda(on_threads(threads).ctx)
    nearest = min((32, 64, 128, 256), key=lambda n: abs(n - threads))
    assert f"threads={nearest}" in str(told[0].message)
