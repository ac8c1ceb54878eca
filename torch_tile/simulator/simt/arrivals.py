# SPDX-License-Identifier: Apache-2.0
"""Blocks that arrive at counters in global memory (arrive_last), and what the last one then knows of the others.

Thread by thread; thread_order has the same for kernels of which barriers of the block tell all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torch_tile.hardware import WARP
from torch_tile.simulator.simt.race_epochs import Array


class Heard:
    """What some blocks released: of each, by its first time, the times that one of its threads knew."""

    def __init__(self, blocks: Mapping[int, Array], lanes: int):
        self.blocks = dict(sorted(blocks.items()))
        self.firsts = np.array(list(self.blocks), np.int64)
        width = max((len(known) for known in self.blocks.values()), default=0)
        self.table = np.zeros((len(self.blocks), width + 1), np.int64)  # the last column is of agents not known
        for row, known in zip(self.table, self.blocks.values(), strict=True):
            row[: len(known)] = known
            row[lanes : 2 * lanes] = np.repeat(known[:lanes].reshape(-1, WARP).min(axis=1), WARP)

    def has(self, when: Array, column: Array) -> Array:
        """Whether what stamps of other blocks say was done before (columns as of View.seen)."""
        block = np.searchsorted(self.firsts, when, side="right") - 1
        if not self.blocks:
            return np.zeros(when.shape, bool)
        known = self.table[np.maximum(block, 0), np.minimum(column, self.table.shape[1] - 1)]
        return (block >= 0) & (known >= when)
