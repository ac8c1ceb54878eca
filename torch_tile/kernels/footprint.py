# SPDX-License-Identifier: Apache-2.0
"""The shared memory that a block of a tiling takes, computed from its tiles before compilation.

It is never less than what the compiler allocates, and never `SPARE` bytes more: test/kernels/test_footprint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from torch_tile.hardware import Target

SPARE = 1024  # bytes for mbarriers, and for what threads hand each other in reductions
BOX_BYTES, BOX_ROWS = (128, 64, 32), 8  # bytes of a row that bulk copies swizzle, and rows after which one repeats
SWIZZLED_ALIGNMENT = BOX_BYTES[0] * BOX_ROWS


class Part(IntEnum):
    """A part of a kernel: what comes before its loop, the loop, a last step after it, and how results leave."""

    BEFORE, LOOP, LAST, LEAVING = range(4)


EVERYWHERE = tuple(Part)


@dataclass(frozen=True)
class Tile:
    """A tile of `rows` by `columns` elements of so many `bits`, in use in some `parts` of the kernel.

    A loop keeps several `versions` of it. `bulk`: bulk copies fill or empty it, if the kernel has any.
    """

    rows: int
    columns: int
    bits: int
    versions: int = 1
    parts: tuple[Part, ...] = EVERYWHERE
    bulk: bool = True

    @property
    def bytes(self) -> int:
        """Return the size of all versions of the tile in bytes."""
        return self.versions * self.rows * self.columns * self.bits // 8

    @property
    def boxed(self) -> int:
        """Return the bytes of the tile as bulk copies fill it: in columns of up to 128 bytes, each with its swizzle."""
        row = self.columns * self.bits // 8
        box = next((size for size in BOX_BYTES if row % size == 0), 0)
        if self.rows == 1 or not box or self.rows % BOX_ROWS == 0:
            return self.bytes
        whole = -(-self.rows // BOX_ROWS) * BOX_ROWS
        return (self.versions * row // box - 1) * whole * box + self.rows * box


@dataclass(frozen=True)
class Footprint:
    """The tiles of a block. Tiles that `bulk` copies fill or empty share their memory with no other tiles. Other tiles
    share memory unless the same part of the kernel uses them.
    """

    tiles: tuple[Tile, ...]
    bulk: bool = False

    @property
    def tile_bytes(self) -> int:
        """Return the size of the tiles alone in bytes."""
        alone = [tile for tile in self.tiles if self.bulk and tile.bulk]
        sharing = [tile for tile in self.tiles if not (self.bulk and tile.bulk)]
        most = max(_aligned_bytes([tile.bytes for tile in sharing if part in tile.parts]) for part in EVERYWHERE)
        return sum(tile.boxed for tile in alone) + most

    @property
    def bytes(self) -> int:
        """Return an upper bound of the shared memory of a block in bytes."""
        return self.tile_bytes + SPARE

    def fits(self, target: Target) -> bool:
        """Return whether the target allows a block this much shared memory."""
        return self.bytes <= target.shared_limit


def _aligned_bytes(sizes: list[int]) -> int:
    """Return the bytes of tiles of these sizes. Each tile begins where swizzles do, but small ones lie in gaps."""
    gaps = [-size % SWIZZLED_ALIGNMENT if size > SWIZZLED_ALIGNMENT else 0 for size in sizes]
    return sum(sizes) + sum(gaps) - max(gaps, default=0)


def most_stages(footprint: Callable[[int], Footprint], stages: Iterable[int], target: Target) -> int:
    """Return the first of `stages` with which a block fits, or 0 if none fits."""
    return next((n for n in stages if n > 0 and footprint(n).fits(target)), 0)
