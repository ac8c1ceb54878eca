# SPDX-License-Identifier: Apache-2.0
"""Loops that gather a tile, in the thread interpreter: rows by a table, zeros by a condition, refusals."""

from __future__ import annotations

import linecache
import random

import pytest
import torch

import torch_tile.language as T
from torch_tile.intrinsics.memory import cp_async_commit, cp_async_wait
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Binary, Load, Select, Var, cast, const
from torch_tile.ir.layout import shared_tile
from torch_tile.ir.node import alike
from torch_tile.ir.stmt import Block, For, Let, LoopKind, Store
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.copy.async_loop import AsyncLoop, gather_of

ZERO = const(0, dt.int32)


def gather(on_threads, rows, width, count=None, change=None):
    """`tile[v, i, j] = x[table[i], j + 8] if i < count else 0`, and its buffers; `change` makes it something else."""
    x = on_threads.buffer("x", (const(50, dt.int32), const(width + 8, dt.int32)), dt.float16, "global")
    table = on_threads.buffer("table", (const(rows, dt.int32),), dt.int32, "global")
    tile = on_threads.buffer("tile", (2, rows, width), dt.float16, "shared", shared_tile((2, rows, width), 16))
    i, j, row = Var("i", role="loop"), Var("j", role="loop"), Var("row")
    column = j * 2 if change == "apart" else j + (3 if change == "odd" else 8)
    source = x if change != "types" else on_threads.buffer("y", x.shape, dt.float32, "global")
    value = cast(Load(source, (row, column)), dt.float16)
    if count is not None:
        value = Select(
            Binary("<", j if change == "columns" else i, const(count, dt.int32)), value, const(0.0, dt.float16)
        )
    stmts = (Let(row, Load(table, (i,))), Store(tile, (const(1, dt.int32), i, j), value))
    extents = const(rows, dt.int32), const(width, dt.int32)
    loop = For(LoopKind.PARALLEL, (i, j), (ZERO, ZERO), extents, Block(stmts))
    return loop, [x, table, tile]


@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("conditional", [False, True])
def test_rows_by_a_table(on_threads, rows, conditional, seed):
    rng = random.Random(seed)
    count = rng.randint(0, rows) if conditional else None
    width = rng.choice([8, 64, 72])
    loop, buffers = gather(on_threads, rows, width, count)
    run = on_threads(rng.choice([32, 128]))
    op = AsyncLoop(loop)
    assert not op.check()
    x = torch.randn(50, width + 8).half()
    places = torch.randint(0, 50, (rows,), dtype=torch.int32)
    tile = torch.full((2, rows, width), 7.0).half()
    body = Block((op.lower_cuda(run.ctx), cp_async_commit(), cp_async_wait(0)))
    (_, _, after), findings = run.run(body, buffers, [x, places, tile], {})
    assert not findings, findings.report()
    wanted = x[places.long(), 8:].clone()
    wanted[rows if count is None else count :] = 0
    assert torch.equal(after[1], wanted) and (after[0] == 7).all()
    assert run.ctx.build.notes[-1].became == "cp.async of 16 bytes"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("apart", "`j` does not count along the last dimension of `x`"),
        ("odd", "runs of 2 in `x` may not be aligned"),
        ("columns", "the condition depends on `j`"),
    ],
)
def test_what_cp_async_cannot_do(on_threads, change, why):
    loop, _ = gather(on_threads, 8, 16, 5, change)
    ctx = on_threads(32).ctx
    assert AsyncLoop(loop).lower_cuda(ctx) is loop
    assert ctx.build.notes[-1].why_not == why


def test_only_loops_that_fill_a_tile(on_threads):
    loop, _ = gather(on_threads, 8, 16, change="types")
    assert gather_of(loop) is None
    assert AsyncLoop(loop).check()[0].code == "bad_argument"
    loop, (_, _, tile) = gather(on_threads, 8, 16)
    reads, writes = AsyncLoop(loop).accesses()
    assert [r.buffer.name for r in reads] == ["table", "x"] or [r.buffer.name for r in reads] == ["x", "table"]
    assert [r.buffer for r in writes] == [tile]


def test_what_is_printed_traces_back():
    @T.prim_func
    def kernel(x: T.Tensor((32, 16)), out: T.Tensor((4, 16))):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((4, 16), "float32")
            for i, j in T.Parallel(4, 16, asynchronous=True):
                tile[i, j] = x[i * 2, j]
            T.copy(tile, out)

    text = repr(kernel.program)
    assert "for i, j in T.Parallel(4, 16, asynchronous=True):" in text
    linecache.cache["<async loop>"] = (len(text), None, text.splitlines(keepends=True), "<async loop>")
    scope = {"T": T}
    exec(compile(text, "<async loop>", "exec"), scope)
    assert alike(scope["kernel"].program, kernel.program)
    x, out = torch.randn(32, 16), torch.zeros(4, 16)
    evaluate(kernel.program, x, out)
    assert torch.equal(out, x[0:8:2])
