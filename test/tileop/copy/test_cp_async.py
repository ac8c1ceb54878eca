# SPDX-License-Identifier: Apache-2.0
"""T.async_copy in the thread interpreter: widths from what is provable, ragged edges read as 0."""

from __future__ import annotations

import linecache
import random
from collections.abc import Sequence

import pytest
import torch

import torch_tile.language as T
from torch_tile.intrinsics.memory import cp_async_commit, cp_async_wait
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Binary, Load, Select, Var, cast, const
from torch_tile.ir.layout import row_major, shared_tile
from torch_tile.ir.node import alike
from torch_tile.ir.stmt import Block, For, Let, LoopKind, Store
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.copy.cp_async import WIDTHS, AsyncCopy, AsyncLoop, gather_of, refuses


def copy_of(on_threads, threads, tile, start, dtype, multiples=None, strided=False, versions=0, layout=shared_tile):
    """A copy of a tile from a tensor of sizes known only at run time, multiples of `multiples`."""
    run = on_threads(threads)
    sizes = [Var(f"n{d}", dt.int32, "dim", m) for d, m in enumerate(multiples or [1] * len(tile))]
    source = on_threads.buffer("source", sizes, dtype, "global")
    lead = (versions,) if versions else ()
    kept = on_threads.buffer("kept", lead + tuple(tile), dtype, "shared", layout(lead + tuple(tile), dtype.bits))
    dst = on_threads.box(kept, *([(versions - 1, 1)] if versions else []))
    return AsyncCopy(on_threads.box(source, *zip(start, tile, strict=True)), dst), run, [source, kept], sizes


def window(x: torch.Tensor, start: Sequence[int], tile: Sequence[int]) -> torch.Tensor:
    """The tile at `start`, 0 outside."""
    padded = torch.zeros([s + n + t for s, n, t in zip(start, x.shape, tile, strict=True)], dtype=x.dtype)
    padded[tuple(slice(0, n) for n in x.shape)] = x
    return padded[tuple(slice(s, s + t) for s, t in zip(start, tile, strict=True))]


CASES = [  # tile, start, dtype, known multiples, width
    ((64, 64), (64, 64), dt.float16, (1, 8), 16),
    ((64, 64), (64, 64), dt.bfloat16, (1, 4), 8),
    ((64, 64), (8, 4), dt.float16, (1, 8), 8),
    ((64, 64), (3, 2), dt.float16, (1, 2), 4),
    ((64, 64), (3, 5), dt.float32, (1, 1), 4),
    ((2, 32, 64), (1, 16, 32), dt.float16, (1, 1, 8), 16),
    ((16, 128), (0, 0), dt.int8, (1, 16), 16),
    ((16, 24), (16, 24), dt.float64, (1, 2), 16),
    ((1000,), (0,), dt.float16, (1,), 16),
    ((40, 72), (0, 0), dt.float16, (1, 8), 16),
]


@pytest.mark.parametrize(("tile", "start", "dtype", "multiples", "width"), CASES, ids=str)
def test_ragged_edges(on_threads, tile, start, dtype, multiples, width: int, seed: int) -> None:
    rng = random.Random(seed)
    op, run, buffers, sizes = copy_of(
        on_threads, rng.choice([32, 96, 128, 256]), tile, start, dtype, multiples, versions=rng.choice([0, 3])
    )
    assert next(w for w in WIDTHS if refuses(op, w, run.ctx.ranges) is None) == width
    shape = [
        s + rng.choice([t, t - m, max(0, t // 2 // m * m)]) for s, t, m in zip(start, tile, multiples, strict=True)
    ]
    shape = [-(-n // m) * m for n, m in zip(shape, multiples, strict=True)]
    print(shape)
    x = torch.randint(1, 99, shape).to(dtype.as_torch())
    kept = torch.zeros(buffers[1].static_shape, dtype=x.dtype)
    body = Block((op.lower_cuda(run.ctx), cp_async_commit(), cp_async_wait(0)))
    (_, after), findings = run.run(body, buffers, [x, kept], dict(zip(sizes, shape, strict=True)))
    assert not findings, findings.report()
    after = after[-1] if after.dim() > len(tile) else after
    torch.testing.assert_close(after, window(x, start, tile), rtol=0, atol=0)
    note = run.ctx.build.remarks[-1]
    assert note.became == f"cp.async of {width} bytes" and bool(note.why_not) == (width < 16)
    assert all(banks.ways == 1 for (_, what), banks in findings.banks.items() if "cp_async" in what), findings.report()


@pytest.mark.parametrize(
    ("tile", "start", "dtype", "multiples", "layout", "why"),
    [
        ((64, 64), (0, 0), dt.float16, (1, 1), shared_tile, "the stride of dimension 0 of `source`"),
        ((64, 64), (0, 1), dt.float16, (1, 8), shared_tile, "the columns of `source` may not start"),
        ((64, 63), (0, 0), dt.float16, (1, 8), shared_tile, "rows of 63 are not whole runs of 2"),
        ((64, 63), (0, 0), dt.float16, (1, 8), lambda s, b: row_major(s), "rows of 63 are not whole runs of 2"),
        ((64, 1), (0, 0), dt.float16, (1, 8), shared_tile, "the last dimension is not copied along"),
    ],
)
def test_what_is_not_provable_is_copied_plainly(on_threads, tile, start, dtype, multiples, layout, why: str) -> None:
    op, run, _, _ = copy_of(on_threads, 128, tile, start, dtype, multiples, layout=layout)
    assert (refuses(op, 4, run.ctx.ranges) or "").startswith(why)


def test_conversions_are_refused(on_threads) -> None:
    op, run, _, _ = copy_of(on_threads, 128, (64, 64), (0, 0), dt.float16, (1, 8))
    other = on_threads.buffer("other", (64, 64), dt.float32, "shared", row_major((64, 64)))
    converted = AsyncCopy(op.src, on_threads.box(other))
    assert refuses(converted, 16, run.ctx.ranges) == "float16 is converted to float32 on the way"
    held = on_threads.buffer("held", (64, 64), dt.float16, "fragment")
    assert "not from global to fragment" in (refuses(AsyncCopy(op.src, on_threads.box(held)), 16, run.ctx.ranges) or "")


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
    assert run.ctx.build.remarks[-1].became == "cp.async of 16 bytes"


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
    assert ctx.build.remarks[-1].why_not == why


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
