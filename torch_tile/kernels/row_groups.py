# SPDX-License-Identifier: Apache-2.0
"""Tiles of rows that are sorted by their group: experts' tokens, or sequences one after the other.

Where groups end is known to the device only. So a kernel of one block cuts the rows of each group into tiles. It writes
down for each tile which group it belongs to. No tile has rows of two groups.
"""

from __future__ import annotations

from typing import Any

import torch

import torch_tile.language as T

# A row of the plan: a tile's group, its first row, the end of its group; in the first row, how many tiles have rows.
FIELDS = 4
GROUP, FIRST, END, COUNT = range(FIELDS)
PLANNERS = 256  # groups that are planned at a time


@T.macro
def bounds_of(group: Any, offsets: Any, rows: Any) -> Any:
    """Return a group's first row and end, within the rows; rows behind the last group are a group."""
    first = T.clamp(T.if_then_else(group > 0, offsets[group - 1], 0), 0, rows)
    return first, T.clamp(T.if_then_else(group < offsets.shape[0], offsets[group], rows), first, rows)


@T.macro
def plan(offsets: Any, table: Any, rows: Any, height: int) -> None:
    """Add the kernel that cuts groups into tiles of `height` rows. Unneeded tiles have no rows."""
    groups, tiles = offsets.shape[0], table.shape[0]
    with T.Kernel(1, threads=PLANNERS):
        until = T.alloc_shared((PLANNERS,), "int32")
        first, end, count = (T.alloc_fragment((PLANNERS,), "int32") for _ in range(3))
        for iteration in T.serial(T.ceildiv(tiles, PLANNERS)):
            for i in T.Parallel(PLANNERS):
                tile = iteration * PLANNERS + i
                table[tile, GROUP] = groups
                table[tile, FIRST] = rows
                table[tile, END] = rows
        base: Any = T.alloc_var("int32", 0)
        for iteration in T.serial(T.ceildiv(groups + 1, PLANNERS)):
            for i in T.Parallel(PLANNERS):
                group = iteration * PLANNERS + i
                first[i], end[i] = bounds_of(group, offsets, rows)
                # Rounded up in one sum, since rows are far below the top of int32.
                count[i] = T.if_then_else(group <= groups, (end[i] - first[i] + (height - 1)) // height, 0)
            T.copy(count, until)
            T.cumsum(until)
            for i in T.Parallel(PLANNERS, independent=True):
                for n in T.serial(count[i]):
                    tile = base + until[i] - count[i] + n
                    table[tile, GROUP] = iteration * PLANNERS + i
                    table[tile, FIRST] = first[i] + n * height
                    table[tile, END] = end[i]
            base = T.min(base + until[PLANNERS - 1], tiles)
        for i in T.Parallel(1):
            table[i, COUNT] = base


def most_tiles(rows: Any, groups: Any, height: int) -> Any:
    """Return an upper bound of the tiles of `height` rows that cover all groups and what is behind them."""
    return torch.sym_min(-(-rows // height) + groups + 1, rows)
