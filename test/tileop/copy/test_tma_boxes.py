# SPDX-License-Identifier: Apache-2.0
"""Parts of a tile that several blocks load for each other: together the whole; and why some tiles have none."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from torch_tile.diagnostics.errors import TileError
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var
from torch_tile.ir.layout import row_major
from torch_tile.tileop.copy.tma import refuses
from torch_tile.tileop.copy.tma_boxes import refuses_shares

for folder in (Path(__file__).parents[1], Path(__file__).parent):
    sys.path.insert(0, str(folder))

from hopper_model import calls  # noqa: E402
from test_tma import LOADS, SIZES, Case, ctx_of, moved, number, wanted  # noqa: E402


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("case", LOADS, ids=str)
def test_blocks_that_share_a_load(on_threads, case: Case, count: int) -> None:
    """Their parts are the whole, each of as many bytes; each expects the bytes of all."""
    ctx, whole = ctx_of(on_threads), case.copy(on_threads)
    if refuses_shares(whole, count) is not None:
        return
    rank = Var("rank", dt.int32, "block")
    op = dataclasses.replace(whole, blocks=number((1 << count) - 1), share=rank, shares=count)
    assert refuses(op, ctx) is None
    found: dict[int, tuple[int, ...]] = {}
    for n in range(count):
        SIZES[rank] = n
        part, size = moved(case, op, ctx, "tma_load")
        assert not set(part) & set(found)
        found |= part
        done = list(calls(op.lower_cuda(ctx), {ctx.thread: 0, **SIZES}))
        assert done[0][:2] == ("mbarrier_expect", ((op.barrier.buffer, (1,)), count * size))
        assert all(args[-1] == (1 << count) - 1 and call.options == ("", "multicast") for _, args, call in done[1:])
    assert found == wanted(case, op, op.dst.buffer)


PARTS = [  # how many can share, and the boxes of each
    (Case(), {2: 1, 4: 1, 8: 1}),
    (Case(tile=(64, 128), part=((0, 64), (0, 128))), {2: 1, 4: 2, 8: 2}),  # a panel each, then parts of both
    (Case(tile=(128, 192), part=((0, 128), (0, 192))), {2: 3, 3: 1, 4: 3, 8: 3}),
    (Case(tile=(60, 64), part=((0, 60), (0, 64))), {}),
    (Case(tile=(64, 32), part=((0, 64), (32, 32))), {2: 1, 4: 1, 8: 1}),
    (Case(tile=(24, 64), part=((0, 24), (0, 64))), {3: 1}),
    (Case(tile=(64, 64), layout=row_major((64, 64))), {2: 1, 4: 1, 8: 1}),
    (Case(tile=(2, 24), part=((0, 2), (0, 24)), layout=row_major((2, 24))), {}),
    (Case(tile=(4, 16, 24), part=((4, 4), (16, 16), (0, 24)), tensor=(8, 32, 24), layout=row_major((4, 16, 24))),
     {2: 2, 4: 1}),
    (Case(tile=(256,), part=((64, 256),), tensor=(512,)), {2: 1, 4: 1}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "boxes"), PARTS, ids=str)
def test_how_many_blocks_can_share_a_load(on_threads, case: Case, boxes: dict[int, int]) -> None:
    ctx, whole = ctx_of(on_threads), case.copy(on_threads)
    for count in (2, 3, 4, 8):
        why = refuses_shares(whole, count)
        assert (why is None) == (count in boxes), (count, why)
        if why is not None:
            assert why == f"`s` has no {count} equal parts of whole boxes"
            continue
        op = dataclasses.replace(whole, blocks=number(1), share=number(0), shares=count)
        assert len(list(calls(op.lower_cuda(ctx), {ctx.thread: 0, **SIZES}))) == 1 + boxes[count], count


def test_a_layout_that_cannot_be_cut_is_told(on_threads) -> None:
    ctx, whole = ctx_of(on_threads), Case(tile=(60, 64), part=((0, 60), (0, 64))).copy(on_threads)
    with pytest.raises(TileError, match="no 2 equal parts of whole boxes"):
        dataclasses.replace(whole, blocks=number(3), share=number(0), shares=2).lower_cuda(ctx)
