# SPDX-License-Identifier: Apache-2.0
"""The shared memory that a block of a tiling takes, told from its tiles before anything is compiled.

It is never less than what the compiler allocates, and never `SPARE` bytes more: test/kernels/test_footprint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from torch_tile.hardware import Target

SPARE = 1024  # bytes for mbarriers, and for what threads hand each other in reductions
BOX_BYTES, BOX_ROWS = 128, 8  # of a row that bulk copies swizzle, and of rows after which a swizzle repeats


class Part(IntEnum):
    """A part of a kernel: what comes before its loop, the loop, a last step after it, and how results leave."""

    BEFORE, LOOP, LAST, LEAVING = range(4)


EVERYWHERE = tuple(Part)


@dataclass(frozen=True)
class Tile:
    """A tile of `rows` by `columns` elements of so many `bits`, in use in some `parts` of the kernel.

    A loop keeps several `versions` of it.
    """

    rows: int
    columns: int
    bits: int
    versions: int = 1
    parts: tuple[Part, ...] = EVERYWHERE

    @property
    def bytes(self) -> int:
        """Side by side."""
        return self.versions * self.rows * self.columns * self.bits // 8

    @property
    def boxed(self) -> int:
        """In columns of 128 bytes, whose swizzles begin anew, as bulk copies fill it."""
        row = self.columns * self.bits // 8
        if self.rows == 1 or row % BOX_BYTES or self.rows % BOX_ROWS == 0:
            return self.bytes
        whole = -(-self.rows // BOX_ROWS) * BOX_ROWS
        return (self.versions * row // BOX_BYTES - 1) * whole * BOX_BYTES + self.rows * BOX_BYTES


@dataclass(frozen=True)
class Footprint:
    """The tiles of a block. Those that `bulk` copies fill or empty share their memory with no others; else tiles that
    are not in use in the same part of the kernel do.
    """

    tiles: tuple[Tile, ...]
    bulk: bool = False

    @property
    def tile_bytes(self) -> int:
        """Bytes of the tiles alone."""
        if self.bulk:
            return sum(tile.boxed for tile in self.tiles)
        return max(sum(tile.bytes for tile in self.tiles if part in tile.parts) for part in EVERYWHERE)

    @property
    def bytes(self) -> int:
        """What a block needs at most."""
        return self.tile_bytes + SPARE

    def fits(self, target: Target) -> bool:
        """Whether a block of the target may have so much."""
        return self.bytes <= target.shared_limit


def most_stages(footprint: Callable[[int], Footprint], stages: Iterable[int], target: Target) -> int:
    """The first of `stages` with which a block fits; 0 if it does with none."""
    return next((n for n in stages if n > 0 and footprint(n).fits(target)), 0)
