# SPDX-License-Identifier: Apache-2.0
"""Lists of the blocks of keys that each block of queries sees. The kernels of attention walk them instead of a range.

A list has a number of blocks and their indices, `[B or 1, H or 1, blocks of queries]` and one dimension more. For
gradients of keys the same is listed the other way around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import strided


@dataclass(frozen=True)
class BlockLists:
    """Facts about lists that a kernel is compiled for: each has an entry for `own` rows, and names blocks of `other`
    rows. Sequences and heads have their own lists, or share them.
    """

    own: int
    other: int
    by_sequence: bool
    by_head: bool

    def types(self, batch: Any, heads: Any) -> list[Any]:
        """Return the types of the numbers of blocks and of their indices, for so many sequences and heads."""
        lead = (batch if self.by_sequence else 1, heads if self.by_head else 1, T.dynamic("listed_rows"))
        return [
            strided("block_counts", lead, torch.int32, unit=False, align=4),
            strided("block_indices", (*lead, T.dynamic("listed_most")), torch.int32, unit=False, align=4),
        ]

    def fits(self, own: int, other: int) -> bool:
        """Return whether tiles of so many rows divide the blocks."""
        return self.own % own == 0 and self.other % other == 0

    def place(self, sequence: Any, head: Any, row: Any, counts: Any) -> tuple[Any, ...]:
        """Return where the list of the tile of rows from `row` on is. Rows behind the last list use that one."""
        of = T.min(row // self.own, counts.shape[2] - 1)
        return sequence if self.by_sequence else 0, head if self.by_head else 0, of

    def steps(self, counts: Any, place: tuple[Any, ...], tile: int) -> Any:
        """Return the number of tiles of `tile` rows in a list."""
        return T.max(counts[place], 0) * (self.other // tile)

    def step(self, indices: Any, place: tuple[Any, ...], number: Any, tile: int, rows: Any) -> Any:
        """Return which tile of `rows` rows is one of a list. Whatever the list says, it is one of those that exist."""
        each = self.other // tile
        inside = T.min(number // each, indices.shape[3] - 1)
        last = T.max((rows - 1) // self.other, 0)
        return T.clamp(indices[(*place, inside)], 0, last) * each + number % each


@dataclass(frozen=True, eq=False)
class Listed:
    """The tensors of lists before a launch: of the blocks of keys that queries see, and the size of the blocks."""

    counts: torch.Tensor
    indices: torch.Tensor
    queries: int
    keys: int

    @property
    def spec(self) -> BlockLists:
        """Return what kernels over blocks of queries are compiled for."""
        return BlockLists(self.queries, self.keys, self.counts.shape[0] > 1, self.counts.shape[1] > 1)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the order of `BlockLists.types`."""
        return [self.counts, self.indices]

    def by_keys(self, blocks: Any) -> Listed:
        """Return the lists of the blocks of queries that see each of so many blocks of keys, in rising order."""
        # A copy, since torch's sorting keeps strides of dimensions of 1 where its fake form makes new ones.
        seen = as_blocks(self.counts, self.indices, blocks).mT.clone(memory_format=torch.contiguous_format)
        counts = seen.sum(-1, dtype=torch.int32)
        indices = torch.argsort(seen.int(), dim=-1, descending=True, stable=True).int()
        return Listed(counts, indices, self.keys, self.queries)


def concatenated_lists(
    lists: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate lists of blocks. Each is a pair of counts and indices; pairs of None are left out."""
    given = [(counts, indices) for counts, indices in lists if counts is not None and indices is not None]
    (counts, indices), *others = given
    for more, more_indices in others:
        width = indices.shape[-1] + more_indices.shape[-1]
        place = torch.arange(width, device=counts.device)
        first = place < counts[..., None]
        # Behind the first list's numbers come those of the second one.
        at = torch.where(first, place, place - counts[..., None])
        both = [torch.nn.functional.pad(x, (0, width - x.shape[-1])).expand(at.shape) for x in (indices, more_indices)]
        at = at.clamp(0)
        indices = torch.where(first, both[0].gather(-1, at), both[1].gather(-1, at))
        counts = counts + more
    return counts, indices


def as_blocks(counts: torch.Tensor, indices: torch.Tensor, blocks: Any) -> torch.Tensor:
    """Return bool `[B or 1, H or 1, rows, blocks]`: whether a list names a block. Indices of no block count as none."""
    named = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    named = named & (indices >= 0) & (indices < blocks)
    at = torch.where(named, indices, blocks).long()
    made = torch.zeros((*at.shape[:-1], blocks + 1), dtype=torch.bool, device=at.device)
    return made.scatter_(-1, at, True)[..., :blocks]
