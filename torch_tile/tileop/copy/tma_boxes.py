# SPDX-License-Identifier: Apache-2.0
"""Which boxes a bulk copy moves: those that a tile consists of, or an equal part that one of several blocks loads.

Boxes are as wide as the panels of the tile, so that the swizzle is the hardware's, and as high as 256 rows allow. What
lies in neither panels nor dense rows, copy_tma refuses before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch_tile.hardware import LARGEST_BOX
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Const, Expr, const
from torch_tile.ir.simplify import simplify
from torch_tile.tileop.base import is_one
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.gemm.wgmma import panel_span

ZERO = const(0, dt.int32)


@dataclass(frozen=True)
class Sides:
    """The tile and the part of the tensor that it is copied from or to."""

    tile: Region
    tensor: Region

    @staticmethod
    def of(op: Copy) -> Sides:
        """Of a copy between shared and global memory."""
        return Sides(op.dst, op.src) if op.src.buffer.scope == "global" else Sides(op.src, op.dst)


def box_of(sides: Sides) -> tuple[int, ...] | None:
    """The box that a copy is made of; None if there is none."""
    tile, span = sides.tile.buffer, panel_span(sides.tile.buffer) or 0
    extents, size = [number_of(e) for e in sides.tensor.extents], tile.dtype.itemsize
    return _box(extents, span // size if span else extents[-1], size, 8 * span or 128)


def _box(extents: list[int], width: int, size: int, unit: int) -> tuple[int, ...] | None:
    """The largest box of rows, at most 256 of them and dense in the tile, of which whole ones make it.

    It has one dimension beside its rows. Boxes begin at multiples of `unit` bytes of the tile, elements having `size`;
    None if there is no such box.
    """
    box, whole = [width], True
    for extent in reversed(extents[:-1]):
        row = math.prod(box) * size
        sides = [n for n in range(min(extent, LARGEST_BOX), 0, -1) if extent % n == 0] if whole else [1]
        side = next((n for n in sides if n == extent or n * row % unit == 0), None)
        if side is None:
            return None
        whole = side == extent == 1
        box.insert(0, side)
    return tuple(box)


def corners(extents: list[int], box: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The first point of each box."""
    counts = [e // b for e, b in zip(extents, box, strict=True)]
    for number in range(math.prod(counts)):
        point = []
        for count, size in zip(reversed(counts), reversed(box), strict=True):
            number, turn = divmod(number, count)
            point.append(turn * size)
        yield tuple(reversed(point))


def number_of(extent: Expr) -> int:
    """The value of a literal."""
    assert isinstance(extent, Const)
    return int(extent.value)


def refuses_shares(op: Copy, count: int) -> str | None:
    """Why a copy that bulk copies can do cannot be done by `count` blocks, a part by each; None if it can."""
    sides = Sides.of(op)
    return (
        None if part_of(sides, count, ZERO) else f"`{sides.tile.buffer.name}` has no {count} equal parts of whole boxes"
    )


def part_of(sides: Sides, count: int, number: Expr) -> Sides | None:
    """Part `number` of `count` equal ones, the one of the fewest boxes; None if there are none of whole boxes.

    A part begins where boxes can: at whole patterns of the swizzle, or at whole 128 bytes of a dense tile.
    """
    tile, size = sides.tile.buffer, sides.tile.buffer.dtype.itemsize
    span, found = panel_span(tile) or 0, list[Sides]()
    dims = [n for n, e in enumerate(sides.tensor.extents) if not is_one(e)]
    for place, dim in enumerate(dims):
        extent = number_of(sides.tensor.extents[dim])
        least = (span // size if place == len(dims) - 1 else 8) if span else 1
        if extent % (count * least) or (not span and place):
            continue
        inside = [n for n, e in enumerate(sides.tile.extents) if not is_one(e)][place]
        part = Sides(_cut(sides.tile, inside, count, number), _cut(sides.tensor, dim, count, number))
        bytes_ = math.prod(number_of(e) for e in part.tensor.extents) * size
        if (span or bytes_ % 128 == 0) and box_of(part) is not None:
            found.append(part)
    return min(found, key=_boxes, default=None)


def _cut(region: Region, dim: int, count: int, number: Expr) -> Region:
    whole = region.ranges[dim]
    extent = number_of(whole.extent) // count
    part = replace(whole, start=simplify(whole.start + number * extent), extent=const(extent, dt.int32))
    return replace(region, ranges=(*region.ranges[:dim], part, *region.ranges[dim + 1 :]))


def _boxes(sides: Sides) -> int:
    """How many boxes a copy takes."""
    box = box_of(sides)
    assert box is not None
    return math.prod(number_of(e) for e in sides.tensor.extents) // math.prod(box)
