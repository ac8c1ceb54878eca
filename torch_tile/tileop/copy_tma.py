# SPDX-License-Identifier: Apache-2.0
"""T.tma_copy: the tensor memory accelerator moves a tile between global and shared memory, box by box.

One thread starts the copies. A load counts its bytes for an mbarrier; a store is waited for until it has read its
source. Boxes are as wide as the panels that the tile lies in, so that the swizzle is the hardware's; what lies outside
the tensor is read as 0 and not written, as T.copy has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..diagnostics import Diagnostic, diagnose, error
from ..intrinsics import bulk
from ..ir import dtype as dt
from ..ir.bounds import interval
from ..ir.buffer import Region
from ..ir.divisor import divides
from ..ir.expr import Address, Const, Expr, Load, binary, const
from ..ir.layout import row_major, shared_tile
from ..ir.simplify import simplify
from ..ir.stmt import Block, If, Stmt
from ..ir.tensor_map import TensorMap
from .alignment import strides_of
from .base import is_one, region_of, same_extents, spread, squeezed, tile_op
from .copy import Copy
from .gemm_wgmma import panel_span
from .nest import Inline
from .threads import Demand, Layouts, ThreadContext

ZERO = const(0, dt.int32)
MOST_DIMENSIONS, LARGEST_BOX = 5, 256
TYPES = {
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
    "uint64", "float8_e4m3fn", "float8_e5m2",
}  # fmt: skip


@tile_op("tma_copy")
@dataclass(frozen=True, eq=False, repr=False)
class TmaCopy(Copy):
    """As T.copy, by one thread of those that run it. A load has a `barrier`, for which its bytes are expected; whoever
    waits for the barrier sees the tile, once somebody arrives. A store has none. `by` is that thread's number.
    """

    barrier: Load | None = None
    by: int = 0

    @classmethod
    def build(cls, src: Any, dst: Any, barrier: Any = None, by: int = 0, **hints: Any) -> TmaCopy:
        """Regions as for T.copy; `barrier` is one element of a T.alloc_barrier."""
        where = None if barrier is None else region_of(barrier)
        if barrier is not None and not (where and where.buffer.scope == "barrier" and all(map(is_one, where.extents))):
            fix = "give one mbarrier, as in barrier=ready[stage]"
            raise error("bad_argument", None, op="T.tma_copy", name="barrier", why=f"is {barrier!r}"[:80], fix=fix)
        signal = None if where is None else Load(where.buffer, where.starts)
        made = Copy.build(src, dst, **{k: v for k, v in hints.items() if k == "eviction_policy"})
        return cls(made.src, made.dst, eviction_policy=made.eviction_policy, barrier=signal, by=by)

    def check(self) -> list[Diagnostic]:
        """Extents agree, and the copy goes between global and shared memory."""
        found = super().check()
        scopes = self.src.buffer.scope, self.dst.buffer.scope
        if scopes not in (("global", "shared"), ("shared", "global")):
            why = f"goes from {scopes[0]} to {scopes[1]} memory"
            fix = "copy between global and shared memory"
            found.append(diagnose("bad_argument", self.span, op="T.tma_copy", name="src", why=why, fix=fix))
        elif (self.barrier is None) == (scopes[0] == "global"):
            why, fix = "belongs to copies from global memory, and to each of them", "give barrier=... to loads only"
            found.append(diagnose("bad_argument", self.span, op="T.tma_copy", name="barrier", why=why, fix=fix))
        return found

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Panels, or rows where one row is copied, unless something else asks for the tile."""
        region = self.dst if self.barrier is not None else self.src
        tile, sizes = region.buffer, region.buffer.static_shape
        if sizes is None:
            return []
        if all(map(is_one, region.extents[:-1])):
            return [Demand(tile, row_major(sizes), False, "rows of bulk copies", self.span)]
        return [Demand(tile, shared_tile(sizes, tile.dtype.bits), False, "panels of bulk copies", self.span)]

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """The boxes, by one thread. A store that cannot be made so is an ordinary one."""
        why = refuses(self, ctx)
        if why is None:
            return lower(self, ctx)
        if self.barrier is not None:
            raise error("bulk_copy", self.span, why=why)
        ctx.build.note(self.span, "T.copy", "an ordinary copy", why)
        return super().lower_cuda(ctx)


@dataclass(frozen=True)
class Sides:
    """The tile and the part of the tensor that it is copied from or to."""

    tile: Region
    tensor: Region

    @staticmethod
    def of(op: Copy) -> Sides:
        """Of a copy between shared and global memory."""
        return Sides(op.dst, op.src) if op.src.buffer.scope == "global" else Sides(op.src, op.dst)


def refuses(op: Copy, ctx: ThreadContext) -> str | None:
    """Why bulk copies cannot do it; None if they can."""
    if ctx.target.capability < 90:
        return f"{ctx.target} has no bulk copies of tiles"
    if {op.src.buffer.scope, op.dst.buffer.scope} != {"global", "shared"}:
        return "bulk copies go between global and shared memory"
    if op.src.buffer.dtype != op.dst.buffer.dtype:
        return f"{op.src.buffer.dtype} is converted to {op.dst.buffer.dtype} on the way"
    sides = Sides.of(op)
    if why := _refuses_tensor(sides.tensor, ctx) or _refuses_tile(sides, ctx):
        return why
    if op.dst is sides.tensor and (why := _refuses_store(sides.tensor, ctx)):
        return why
    return None if _box_of(sides) else f"`{sides.tile.buffer.name}` does not consist of equal boxes of at most 256 rows"


def _refuses_tensor(region: Region, ctx: ThreadContext) -> str | None:
    """What of the tensor a map cannot describe."""
    tensor, size = region.buffer, region.buffer.dtype.itemsize
    if tensor.dtype.name not in TYPES:
        return f"no bulk copy moves {tensor.dtype}"
    if tensor.rank > MOST_DIMENSIONS:
        return f"`{tensor.name}` has {tensor.rank} dimensions, and tensor maps have at most {MOST_DIMENSIONS}"
    if not tensor.may_start_at(16):
        return f"`{tensor.name}` may not start at a multiple of 16 bytes"
    strides = strides_of(tensor)
    if not is_one(strides[-1]):
        return f"`{tensor.name}` is not dense along its last dimension"
    for dim, stride in enumerate(strides[:-1]):
        if not is_one(tensor.shape[dim]) and not divides(16 // math.gcd(16, size), stride, ctx.ranges):
            return f"the stride of dimension {dim} of `{tensor.name}` may not be a multiple of 16 bytes"
    column = Inline(ctx.values)(region.starts[-1])
    if not divides(16 // math.gcd(16, size), column, ctx.ranges):  # seen to stop an H200
        return f"the columns of `{tensor.name}` may not start at a multiple of 16 bytes"
    if not all(isinstance(e, Const) for e in region.extents):
        return "the extents are known only at run time"
    return None


def _refuses_store(region: Region, ctx: ThreadContext) -> str | None:
    """What stores cannot do and loads can, as seen on an H200.

    Across the end of a row they write the rest of the 16 bytes that the end lies in; in front of a tensor they stop the
    GPU.
    """
    tensor, inline = region.buffer, Inline(ctx.values)
    if not divides(16 // math.gcd(16, tensor.dtype.itemsize), inline(tensor.shape[-1]), ctx.ranges):
        return f"the rows of `{tensor.name}` may not end at a multiple of 16 bytes"
    # No interval at all have quotients by sizes that may be zero; then there is nothing to be copied.
    if any(-math.inf < interval(inline(start), ctx.ranges).low < 0 for start in region.starts):
        return f"the slice of `{tensor.name}` may start in front of it"
    return None


def _refuses_tile(sides: Sides, ctx: ThreadContext) -> str | None:
    """What of the tile is not made of boxes."""
    tile, region = sides.tile.buffer, sides.tile
    shape, size = tile.static_shape, tile.dtype.itemsize
    if shape is None or is_one(sides.tensor.extents[-1]) or is_one(region.extents[-1]):
        return "the last dimension is not copied along"
    if not same_extents(squeezed(region), squeezed(sides.tensor)):
        return "the dimensions of both sides do not correspond"
    span = panel_span(tile)
    width = _number(region.extents[-1])
    if span is None:
        return _refuses_rows(region, ctx)
    panel = span // size
    if width % panel or not divides(panel, region.starts[-1], ctx.ranges):
        return f"the slice of `{tile.name}` does not consist of whole panels of {panel}"
    if not divides(8, region.starts[-2], ctx.ranges):
        return f"the slice of `{tile.name}` may not start at a multiple of 8 rows"
    if any(not is_one(e) for e in region.extents[:-2]):
        return f"`{tile.name}` is copied in more than two dimensions"
    return None


def _refuses_rows(region: Region, ctx: ThreadContext) -> str | None:
    """The same for a tile that does not lie in panels."""
    tile, shape, size = region.buffer, region.buffer.static_shape or (), region.buffer.dtype.itemsize
    if tile.layout is not None and tile.layout != row_major(shape):
        return f"`{tile.name}` lies neither in panels nor row by row"
    copied = [(n, _number(e)) for n, e in zip(shape, region.extents, strict=True) if not is_one(e)]
    if any(n != e for n, e in copied[1:]):
        return f"the slice of `{tile.name}` is not dense"
    if copied[-1][1] * size % 16 or copied[-1][1] > LARGEST_BOX:
        return f"rows of {copied[-1][1]} elements are no boxes of whole 16 bytes"
    start: Expr = ZERO
    for index, count in zip(region.starts, shape, strict=True):
        start = binary("+", binary("*", start, const(count, dt.int32)), index)
    if not divides(128 // math.gcd(128, size), simplify(start), ctx.ranges):
        return f"the slice of `{tile.name}` may not start at a multiple of 128 bytes"
    return None


def _box_of(sides: Sides) -> tuple[int, ...] | None:
    """The box that a copy is made of; None if there is none."""
    tile, span = sides.tile.buffer, panel_span(sides.tile.buffer) or 0
    extents, size = [_number(e) for e in sides.tensor.extents], tile.dtype.itemsize
    return _box(extents, span // size if span else extents[-1], size, 8 * span or 128)


def lower(op: Copy, ctx: ThreadContext) -> Stmt:
    """One thread starts one copy for each box."""
    sides = Sides.of(op)
    tile, tensor = sides.tile.buffer, sides.tensor.buffer
    span, size = panel_span(tile) or 0, tile.dtype.itemsize
    barrier, by = (op.barrier, op.by) if isinstance(op, TmaCopy) else (None, 0)
    extents = [_number(e) for e in sides.tensor.extents]
    box = _box_of(sides)
    assert box is not None
    map_ = TensorMap(tensor, tensor.shape, strides_of(tensor), box, span)
    moves: list[Stmt] = []
    for point in _corners(extents, box):
        place = [simplify(s + const(p, dt.int32)) for s, p in zip(sides.tensor.starts, point, strict=True)]
        inside = [const(p, dt.int32) for p, e in zip(point, extents, strict=True) if e != 1]
        there = Address(tile, spread(sides.tile, tuple(inside)))
        if barrier is not None:
            signal = Address(barrier.buffer, barrier.indices)
            moves.append(bulk.tma_load(there, map_, place, signal, op.eviction_policy or ""))
        else:
            moves.append(bulk.tma_store(map_, there, place))
    if barrier is not None:
        expected = bulk.mbarrier_expect(Address(barrier.buffer, barrier.indices), math.prod(extents) * size)
        moves = [expected, *moves]
    else:
        moves += [bulk.bulk_commit(), bulk.bulk_wait(0)]
    _note(op, box, span, len(list(_corners(extents, box))), ctx)
    return If(binary("==", ctx.thread, const(by, dt.int32)), Block(tuple(moves)), Block(()))


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


def _corners(extents: list[int], box: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The first point of each box."""
    counts = [e // b for e, b in zip(extents, box, strict=True)]
    for number in range(math.prod(counts)):
        point = []
        for count, size in zip(reversed(counts), reversed(box), strict=True):
            number, turn = divmod(number, count)
            point.append(turn * size)
        yield tuple(reversed(point))


def _number(extent: Expr) -> int:
    assert isinstance(extent, Const)
    return int(extent.value)


def _note(op: Copy, box: tuple[int, ...], span: int, count: int, ctx: ThreadContext) -> None:
    shape = " x ".join(str(n) for n in box if n != 1)
    swizzled = f", swizzled over {span} bytes" if span else ""
    ctx.build.note(op.span, "T.copy", f"{count} bulk {'copies' if count > 1 else 'copy'} of {shape}{swizzled}")
