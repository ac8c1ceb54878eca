# SPDX-License-Identifier: Apache-2.0
"""T.async_copy in the thread interpreter: widths from what is provable, ragged edges read as 0."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from torch_tile.intrinsics.memory import cp_async_commit, cp_async_wait
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var
from torch_tile.ir.layout import row_major, shared_tile
from torch_tile.ir.stmt import Block
from torch_tile.tileop.copy.cp_async import WIDTHS, AsyncCopy, refuses


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
    note = run.ctx.build.notes[-1]
    assert note.became == f"cp.async of {width} bytes" and bool(note.why_not) == (width < 16)
    assert all(banks.ways == 1 for (_, what), banks in findings.banks.items() if "cp_async" in what), findings.report()


@pytest.mark.parametrize(
    ("tile", "start", "dtype", "multiples", "layout", "why"),
    [
        ((64, 64), (0, 0), dt.float16, (1, 1), shared_tile, "the stride of dimension 0 of `source`"),
        ((64, 64), (0, 1), dt.float16, (1, 8), shared_tile, "the columns of `source` may not start"),
        ((64, 63), (0, 0), dt.float16, (1, 8), shared_tile, "rows of 63 are not whole runs of 2"),
        ((64, 63), (0, 0), dt.float16, (1, 8), lambda s, b: row_major(s), "rows of 63 are not whole runs of 2"),
        ((64, 1), (0, 0), dt.float32, (1, 8), shared_tile, "the last dimension is not copied along"),
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
