# SPDX-License-Identifier: Apache-2.0
"""Regions of buffers."""

from __future__ import annotations

import pytest

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Var, binary, const

N = Var("n", dt.int32, "dim")


@pytest.mark.parametrize(
    "starts, extents, whole",
    [
        ((0, 0), (4, N), True),
        ((0, 0), (4, 6), False),
        ((0, 1), (4, N), False),
        ((0, 0), (2, N), False),
        ((N, 0), (4, N), False),
        ((0, 0), (4, binary("-", N, const(1, dt.int32))), False),
        ((0, 0), (const(4, dt.int64), N), True),
    ],
)
def test_whole_regions(starts, extents, whole):
    """A region is whole if it begins at 0 and is as long as its buffer in each dimension, whatever the index's type."""
    made = [const(x, dt.int32) if isinstance(x, int) else x for x in (*starts, *extents)]
    buffer = Buffer("a", (const(4, dt.int32), N), dt.float32, "global")
    assert Region(buffer, tuple(map(Range, made[:2], made[2:]))).is_whole == whole
