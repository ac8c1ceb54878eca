# SPDX-License-Identifier: Apache-2.0
"""Tile helpers of MLA decoding kernels: load tiles, hide scores, store sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.mla.spec import Spec

GROUP = 128  # columns of a packed latent that share a scale

SLACK = 8.0  # weights may be as large as 2 ** 8 before sums are scaled anew: far from the end of float16


@dataclass(frozen=True, eq=False)
class Positions:
    """Which position of the cache each column of a tile of scores is, and where that position lies.

    Of listed positions, `indices` has a list for each of the sequences of a launch. They share the cache of `owner`,
    which has `length` positions.
    """

    spec: Spec
    indices: Any
    table: Sequence[Any]
    sequence: Any
    owner: Any
    length: Any

    def number(self, column: Any) -> Any:
        """Return the position that a column stands for, some negative number for none."""
        if not self.spec.listed:
            return column
        inside = T.min(column, self.indices.shape[1] - 1)
        return T.if_then_else(column < self.indices.shape[1], self.indices[self.sequence, inside], -1)

    def exists(self, position: Any) -> Any:
        """Return whether a position is one of the sequence."""
        return T.logical_and(position >= 0, position < self.length)

    def place(self, cache: Any, position: Any) -> tuple[Any, Any]:
        """Return the cache indices of a position; valid ones for a position outside."""
        if not self.spec.paged:
            return self.owner, T.clamp(position, 0, cache.shape[1] - 1)
        table, page = self.table[0], self.spec.page
        column = T.clamp(position // page, 0, table.shape[1] - 1)
        return T.clamp(table[self.owner, column], 0, cache.shape[0] - 1), T.max(position, 0) % page


@T.macro
def load_cache(spec: Spec, caches: Sequence[Any], positions: Positions, tile: Any, stored: Any, number: Any) -> None:
    """Load tile `number` of a sequence's positions into a tile, latent and rotary part side by side.

    Memory past the sequence's end may hold NaN. It is made 0 here only where positions are read one by one. Packed
    latents (`caches` are then values, rotary parts and scales) pass through the tile `stored`.
    """
    keys, latent = tile.shape[0], spec.latent
    if spec.one_by_one:
        for j, c in T.Parallel(keys, spec.rotary):
            position = positions.number(number * keys + j)
            value = caches[1][(*positions.place(caches[1], position), c)]
            value = T.cast(value, spec.dtype)
            tile[j, latent + c] = T.if_then_else(positions.exists(position), value, T.cast(0, spec.dtype))
        for j, c in T.Parallel(keys, latent):
            position = positions.number(number * keys + j)
            place = positions.place(caches[0], position)
            value = caches[0][(*place, c)]
            if spec.packed:
                value = widened(value, caches[2][(*place, c // GROUP)], spec.dtype)
            tile[j, c] = T.if_then_else(positions.exists(position), value, T.cast(0, spec.dtype))
    else:
        place = spec.place(caches[0], positions.table, positions.owner, number, keys)
        T.copy(caches[0][(*place, 0)], stored if spec.packed else tile[:, :latent])
        T.copy(caches[1][(*place, 0)], tile[:, latent:])
        if spec.packed:
            for j, c in T.Parallel(keys, latent):
                where = positions.place(caches[0], number * keys + j)
                tile[j, c] = widened(stored[j, c], caches[2][(*where, c // GROUP)], spec.dtype)


def widened(value: Any, scale: Any, dtype: Any) -> Any:
    """Return a float8 number times its scale, in float32 and rounded once."""
    return T.cast(T.cast(value, T.float32) * scale, dtype)


@T.macro
def hide(
    spec: Spec,
    scores: Any,
    first: Any,
    length: Any,
    reach: Any,
    heads: Any,
    row: Any,
    scale: Any,
    positions: Any = None,
) -> None:
    """Set scores to -inf for hidden positions from `first` on. Row r sees the positions up to `reach + r // heads`, or
    the listed `positions`.

    The scale is applied where it is not folded.
    """
    for i, j in T.Parallel(*scores.shape):
        if spec.listed:
            seen = positions.exists(positions.number(first + j))
        else:
            seen = first + j <= reach + (row + i) // heads
            seen = T.logical_and(seen, first + j < length)
        score = scores[i, j] if spec.folded else scores[i, j] * scale
        scores[i, j] = T.if_then_else(seen, score, -T.infinity(scores.dtype))


@T.macro
def store_weighted(
    tile: Any, acc: Any, weight: Any, out: Any, place: tuple[Any, ...], first: Any, column: int = 0, bulk: bool = False
) -> None:
    """Store rows of `acc` times their weights to `out` at `place`, from row `first` and column `column` on. They
    go through a shared `tile` if there is one, by 16-byte accesses or by `bulk` copies. These are few instructions.
    """
    if tile is None:
        for i, c in T.Parallel(*acc.shape):
            out[(*place, first + i, column + c)] = T.cast(acc[i, c] * weight[i], out.dtype)
    else:
        result = T.alloc_fragment(acc.shape, out.dtype)
        for i, c in T.Parallel(*acc.shape):
            result[i, c] = T.cast(acc[i, c] * weight[i], out.dtype)
        part = tile[:, column : column + acc.shape[1]]
        T.copy(result, part)
        if bulk:
            T.fence_proxy_async()
            T.sync_threads()
            T.tma_copy(part, out[(*place, first, column)])
        else:
            T.copy(part, out[(*place, first, column)])


# Two tiles of positions in halves, which come and go one by one, for MLA decoding by turns (hopper.py).

PANEL = 64  # columns that come as one copy
ORDER = (0, 1), (3, 2)  # in which halves of either tile become free


@dataclass(frozen=True, eq=False)
class Steps:
    """The pairs of tiles that a block takes: the first one begins with tile `begin`, each next one `stride` tiles
    later, before tile `end`. There are `pairs`, at least one.
    """

    begin: Any
    stride: Any
    end: Any
    pairs: Any


@dataclass(frozen=True, eq=False)
class Halves:
    """Two tiles of positions in halves by columns, 0 to 3: left and right of the first, left and right of the second.

    Right halves have the rotary part at their end. Each panel of a half has an mbarrier in `full`, which those wait for
    who make scores: who has their weights need not. Each half has one in `free`. Pair `iteration` of tiles is the one
    that they hold next, or now.
    """

    spec: Spec
    tiles: Sequence[Any]
    full: Sequence[Any]
    free: Any

    @property
    def keys(self) -> int:
        """Return the positions of a tile."""
        return int(self.tiles[0].shape[0])

    def panels(self, half: int) -> list[int]:
        """Return the numbers of the panels of a half."""
        return list(range(self.tiles[half].shape[1] // PANEL))

    def panel(self, half: int, n: int) -> Any:
        """Return the columns of a half that come as copy `n`."""
        return self.tiles[half][:, n * PANEL : (n + 1) * PANEL]

    def values(self, half: int) -> Any:
        """Return the columns of a half that are values."""
        return self.tiles[half][:, : self.spec.latent // 2]

    @T.macro
    def load(self, caches: Sequence[Any], place: tuple[Any, Any], half: int, iteration: Any) -> None:
        """Load a half from a place in the caches once the half is free. Loops keep the code small, since code that no
        multiprocessor holds yet costs time.
        """
        T.mbarrier_wait_parity(self.free[half], (iteration + 1) % 2)
        each, tile, full = self.spec.latent // 2, self.tiles[half], self.full[half]
        for n in T.unroll(each // PANEL, unroll_factor=1):
            panel = tile[:, n * PANEL : (n + 1) * PANEL]
            T.tma_copy(caches[0][(*place, half % 2 * each + n * PANEL)], panel, barrier=full[n])
            if T.shuffle_elect(128):
                T.mbarrier_arrive(full[n])
        for column in range(each, self.tiles[half].shape[1], PANEL):
            n = column // PANEL
            T.tma_copy(caches[1][(*place, column - each)], self.panel(half, n), barrier=full[n])
            if T.shuffle_elect(128):
                T.mbarrier_arrive(full[n])

    @T.macro
    def load_pairs(self, caches: Sequence[Any], table: Sequence[Any], at: Any, steps: Steps, done: Any) -> None:
        """Load the pairs of tiles of sequence `at`. The block has loaded `done` pairs before. The first pair is loaded
        whatever the sequence's length.

        Look up entries of the table behind the copies of the pair before. The assembler waits for them at once.
        """
        tile, number = T.alloc_var("int32", steps.begin), T.alloc_var("int32", done)
        pages = [T.alloc_var("int32", self.spec.entry(table, at, tile + n, self.keys)) for n in range(len(ORDER))]
        more = T.alloc_var("int32", 1)
        while more != 0:
            for n, (order, page) in enumerate(zip(ORDER, pages, strict=True)):
                slab = T.alloc_var("int32", self.spec.slab(caches[0], page))
                row = T.alloc_var("int32", self.spec.row(tile + n, self.keys))
                for half in order:
                    self.load(caches, (slab, row), half, number)
            tile += steps.stride
            for n, page in enumerate(pages):
                page = self.spec.entry(table, at, tile + n, self.keys)
            number += 1
            more = T.if_then_else(tile < steps.end, 1, 0)

    @T.macro
    def multiply(self, half: int, iteration: Any, queries: Sequence[Any], scores: Any, is_first: bool) -> None:
        """Add the products of a half's columns to the scores, panel by panel as they arrive. The products stay in
        flight. The `is_first` half begins the scores.

        `queries` are the tile of their latent part, and the panels of their rotary part in registers.
        """
        if is_first:
            T.clear(scores)
        each, factor = self.spec.latent // 2, None if self.spec.paged else 1  # unrolled is faster for pages alone
        tile, full = self.tiles[half], self.full[half]
        for n in T.unroll(each // PANEL, unroll_factor=factor):
            T.mbarrier_wait_parity(full[n], iteration % 2)
            left = queries[0][:, half % 2 * each + n * PANEL : half % 2 * each + (n + 1) * PANEL]
            T.wgmma_gemm(left, tile[:, n * PANEL : (n + 1) * PANEL], scores, transpose_B=True)
        for n, held in enumerate(queries[1:] if half % 2 else []):
            last = each // PANEL + n
            T.mbarrier_wait_parity(full[last], iteration % 2)
            T.wgmma_gemm(held, self.panel(half, last), scores, transpose_B=True)

    @T.macro
    def clear(self, tile: int, first: Any, limit: Any) -> None:
        """Clear the values of positions from `limit` on: NaN may be there, which weights of 0 would not cancel."""
        if first + self.tiles[0].shape[0] > limit:
            T.sync_threads()  # all warps have their scores
            for half in [2 * tile, 2 * tile + 1]:
                for j, c in T.Parallel(self.tiles[half].shape[0], self.spec.latent // 2):
                    if first + j >= limit:
                        self.tiles[half][j, c] = 0
            T.fence_proxy_async()

    @T.macro
    def release(self, half: int) -> None:
        """Release a half, which this warpgroup is the last to read."""
        if T.get_lane_idx() == 0:
            T.mbarrier_arrive(self.free[half])
