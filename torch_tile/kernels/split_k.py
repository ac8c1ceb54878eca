# SPDX-License-Identifier: Apache-2.0
"""Combination of the partial results of blocks that each took a split of the keys, or of a sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, compute_dtype, power_of_two, strided
from torch_tile.kernels.library_jit import library_jit

LAST = 2**31 - 1
LEAST_SHARE = 4  # steps of a block in tiles that blocks share
JOINED_ROWS, JOINED_AHEAD = 4, 4  # rows of a block that adds up shares, and parts that it reads together
MOST_AHEAD = 8  # parts of a row that are read together, since memory's latency is the cost


@T.macro
def read_ahead(parts: Any, iteration: Any, count: int, place: tuple[Any, ...], first: Any, width: int) -> Any:
    """Read `parts[s, *place, first : first + width]` of the `count` splits of an iteration, with 0 for splits that do
    not exist.
    """
    values = [T.alloc_fragment((width,), parts.dtype) for _ in range(count)]
    for n, value in zip(range(count), values, strict=True):
        split = iteration * count + n
        for j in T.Parallel(width):
            value[j] = T.if_then_else(split < parts.shape[0], parts[(split, *place, first + j)], 0.0)
    return values


@T.macro
def sum_of_parts(parts: Any, place: tuple[Any, ...], first: Any, width: int) -> Any:
    """Compute `sum_s parts[s, *place, first : first + width]` over the splits that all blocks wrote."""
    total = T.alloc_fragment((width,), parts.dtype)
    T.clear(total)
    for iteration in T.serial(T.ceildiv(parts.shape[0], MOST_AHEAD)):
        for value in read_ahead(parts, iteration, MOST_AHEAD, place, first, width):
            for j in T.Parallel(width):
                total[j] += value[j]
    return total


@dataclass(frozen=True)
class Shares:
    """How persistent blocks share the tiles that do not fill their last wave, in one line of steps along K.

    Tiles before `first` are whole. A second kernel adds up the parts of the others. Each block takes `share` steps, no
    more than a tile has: so it leaves parts of two tiles at most.
    """

    blocks: int
    steps: Any  # of a tile
    first: Any  # tile that is shared
    tiles: Any  # that are shared
    share: Any

    @staticmethod
    def of(tiles: Any, steps: Any, blocks: int) -> Shares:
        """Share out a product's tiles of `steps` steps."""
        left, steps = tiles % blocks, T.clamp(steps, 1, LAST // (blocks + 2))  # so that int32 holds the line
        least = T.min(LEAST_SHARE, steps)
        return Shares(blocks, steps, tiles // blocks * blocks, left, T.max(T.ceildiv(left * steps, blocks), least))

    def begin(self, block: Any) -> Any:
        """Return the first step of a block, or where the steps end."""
        return T.min(block * self.share, self.tiles * self.steps)

    def shared(self, block: Any) -> Any:
        """Return the shared tile in which a block begins."""
        return T.min(self.begin(block) // self.steps, self.blocks - 1)

    def pieces(self, block: Any) -> Any:
        """Count the tiles of which a block sums up a part."""
        begin, end = self.begin(block), self.begin(block + 1)
        behind = (self.shared(block) + 1) * self.steps
        return T.clamp(end - begin, 0, 1) + T.clamp(end - behind, 0, 1)

    def work(self, block: Any, iteration: Any) -> tuple[Any, Any, Any, Any]:
        """Return the tile of a block's iteration, whether it takes it whole, and the first step and the end."""
        waves = self.first // self.blocks
        whole, shared = iteration < waves, T.clamp(self.shared(block) + iteration - waves, 0, self.blocks - 1)
        start = shared * self.steps
        first, last = (T.clamp(self.begin(at) - start, 0, self.steps) for at in (block, block + 1))
        number = T.if_then_else(whole, block + iteration * self.blocks, self.first + shared)
        return number, whole, T.if_then_else(whole, 0, first), T.if_then_else(whole, self.steps, last)

    def owner(self, tile: Any) -> Any:
        """Return the block that sums up the first step of a shared tile."""
        return tile * self.steps // self.share

    def owners(self, tile: Any) -> Any:
        """Count the blocks that share a tile."""
        return (tile * self.steps + self.steps - 1) // self.share - self.owner(tile) + 1

    def slot(self, block: Any, tile: Any) -> Any:
        """Return where a block leaves its part of a shared tile. Along the line, each piece has the next block or tile,
        or both: so no other has this number.
        """
        return T.clamp(block + tile, 0, 2 * self.blocks - 1)


def joining_threads(columns: int) -> int:
    """Return the threads of a block that adds up `JOINED_ROWS` rows of parts: four columns of a row for each."""
    return -(-columns // 32) * 32


@T.macro
def sum_of_shares(parts: Any, place: tuple[Any, ...], shares: Shares, tile: Any, first: Any) -> Any:
    """Compute the sum of a shared tile's parts `parts[slot, *place]`, in the order of blocks, of `JOINED_ROWS` rows
    from `first` on.
    """
    shape, count = (JOINED_ROWS, parts.shape[-1]), shares.owners(tile)
    total = T.alloc_fragment(shape, parts.dtype)
    T.clear(total)
    for iteration in T.serial(T.ceildiv(count, JOINED_AHEAD)):
        values = [T.alloc_fragment(shape, parts.dtype) for _ in range(JOINED_AHEAD)]
        for n, value in zip(range(JOINED_AHEAD), values, strict=True):
            number = T.min(iteration * JOINED_AHEAD + n, count - 1)  # so that no load waits for a test
            slot = shares.slot(shares.owner(tile) + number, tile)
            for i, j in T.Parallel(*shape):
                value[i, j] = parts[(slot, *place, first + i, j)]
        for n, value in zip(range(JOINED_AHEAD), values, strict=True):
            for i, j in T.Parallel(*shape):
                total[i, j] += T.if_then_else(iteration * JOINED_AHEAD + n < count, value[i, j], 0.0)
    return total


@T.macro
def left_for_cluster(products: Sequence[Any], count: int = 2) -> list[Any]:
    """Copy each fragment to a shared tile. From here on the other blocks of a cluster of `count` may read it."""
    parts: list[Any] = []
    for product in products:
        part = T.alloc_shared(product.shape, product.dtype)
        T.copy(product, part)
        parts.append(part)
    if count > 1:
        T.cluster_sync()
    return parts


@T.macro
def sum_in_cluster(tile: Any, place: tuple[Any, ...], count: int) -> Any:
    """Sum an element of a shared tile over the `count` blocks of the cluster, which have all written the tile.

    One block has no cluster.
    """
    total: Any = T.alloc_var(tile.dtype, 0.0)
    for rank in range(count):
        total += T.at_rank(tile[place], rank) if count > 1 else tile[place]
    return total


@T.macro
def join_parts(
    part: Any, part_lse: Any, slot_of: Callable[[Any], Any], count: Any, row: Any, ahead: int
) -> tuple[Any, Any]:
    """Join the `count` parts `part[slot_of(n), row]` of a row by their weights `exp(part_lse[slot_of(n), row])`.

    Returns a fragment of the row's results, and its log-sum-exp. Without visible keys these are 0 and -inf. `ahead`
    parts are read together, since memory's latency is the cost. More take registers, so that fewer blocks run at once.
    """
    accum, latent = part.dtype, part.shape[2]
    infinity = T.infinity(accum)
    acc = T.alloc_fragment((latent,), accum)
    row_max = T.alloc_var(accum, -infinity)
    row_sum = T.alloc_var(accum, 0.0)
    T.clear(acc)
    for iteration in T.serial(T.ceildiv(count, ahead)):
        logs: list[Any] = [T.alloc_var(accum, -infinity) for _ in range(ahead)]
        values = [T.alloc_fragment((latent,), accum) for _ in range(ahead)]
        for n, log, value in zip(range(ahead), logs, values, strict=True):
            number = iteration * ahead + n
            log = T.if_then_else(number < count, part_lse[slot_of(number), row], -infinity)
            for c in T.Parallel(latent):
                value[c] = T.if_then_else(number < count, part[slot_of(number), row, c], 0.0)
        highest = functools.reduce(T.max, logs, row_max)
        level = T.if_then_else(highest == -infinity, 0.0, highest)
        rescale = T.exp(row_max - level)
        row_max = highest
        row_sum = row_sum * rescale
        for c in T.Parallel(latent):
            acc[c] *= rescale
        for value, log in zip(values, logs, strict=True):
            weight = T.exp(log - level)
            row_sum += weight
            for c in T.Parallel(latent):
                acc[c] += weight * value[c]
    for c in T.Parallel(latent):
        acc[c] /= T.max(row_sum, 1.0)
    return acc, row_max + T.log(T.max(row_sum, 1.0))


@library_jit
def combine(dtype: torch.dtype, latent: int, ahead: int) -> Any:
    """Build the kernel `out = sum_s exp(lse_s - lse) part_s` with `lse = log sum_s exp(lse_s)`. Rows without visible
    keys give 0 and -inf.

    The kernel that leaves the parts lets this one start early (`T.pdl_trigger`), so that its launch costs no time.
    `ahead` parts are read together. A row of `out` has three indices, since they may lie in memory in any order.
    """
    accum = compute_dtype(dtype)
    splits, rows, outer, middle, inner = T.dynamic("splits, rows, outer, middle, inner")

    @T.prim_func
    def combine(
        part: T.Tensor((splits, rows, latent), accum),
        part_lse: T.Tensor((splits, rows), accum),
        out: strided("out", (outer, middle, inner, latent), dtype, multiple=latent),
        lse: T.Tensor((rows,), accum),
    ):
        with T.Kernel(rows, threads=128) as row:
            T.pdl_sync()
            acc, log_sum = join_parts(part, part_lse, lambda n: n, splits, row, ahead)
            T.copy(acc, out[row // inner // middle, row // inner % middle, row % inner, 0])
            lse[row] = log_sum

    return combine


def combine_parts(
    part: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, machine: Machine
) -> None:
    """Combine parts `[splits, ..., width]` and `[splits, ...]` into `out` and `lse`.

    `out` has four dimensions and is dense in some order, the last one innermost; the others are contiguous.
    """
    splits, width = part.shape[0], part.shape[-1]
    ahead = min(power_of_two(splits), 2 * MOST_AHEAD)
    machine.kernel(combine)(out.dtype, width, ahead)(
        part.view(splits, -1, width), part_lse.view(splits, -1), out, lse.view(-1)
    )
