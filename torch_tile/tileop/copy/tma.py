# SPDX-License-Identifier: Apache-2.0
"""T.tma_copy: the tensor memory accelerator moves a tile between global and shared memory, box by box.

One thread starts the copies. A load counts its bytes for an mbarrier; a store is waited for until it has read its
source. Boxes are as wide as the panels that the tile lies in, so that the swizzle is the hardware's; what lies outside
the tensor is read as 0 and not written, as T.copy has it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose, error
from torch_tile.hardware import BULK_BYTES, LARGEST_BOX, MOST_RANK, WARP
from torch_tile.intrinsics import bulk
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import Expand, divides
from torch_tile.ir.buffer import Region, TensorMap
from torch_tile.ir.expr import Address, Const, Expr, Load, binary, const, to_expr
from torch_tile.ir.layout import row_major, shared_tile
from torch_tile.ir.node import equal, node_class
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Block, If, Stmt
from torch_tile.tileop.atomic import folded
from torch_tile.tileop.base import (
    Scalar,
    Tile,
    is_one,
    need_choice,
    number_of,
    region_of,
    same_extents,
    spread,
    squeezed,
    strides_of,
    tile_op,
)
from torch_tile.tileop.copy.op import Copy, policy_of, remark_on_policy
from torch_tile.tileop.gemm.wgmma import panel_span
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env

ZERO = const(0, dt.int32)
TYPES = {
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
    "uint64", "float8_e4m3fn", "float8_e5m2",
}  # fmt: skip
_WORDS = {"int32", "uint32"}
# Types that a bulk store combines, by the way (PTX: cp.reduce.async.bulk.tensor).
COMBINED = {"add": {*_WORDS, "float32", "float16", "bfloat16"}, "min": _WORDS, "max": _WORDS}
COMBINES = (None, *COMBINED)


@tile_op("tma_copy")
@node_class
class TmaCopy(Copy):
    """Copy as T.copy, by one thread of those that run the op; `by` is that thread's number.

    A load has a `barrier`, which expects the load's bytes, unless `counts` is False: then the author's
    T.mbarrier_expect_tx counts them. A thread that waits for the barrier sees the tile, once a
    thread has arrived. A store has no barrier.

    With `blocks`, all blocks of the cluster whose bits are set run this copy of the same source: of `shares` equal
    parts of the tile each starts its own, number `share`, which comes to all of them.

    A store with `combine` adds the tile to the tensor, or keeps the larger or smaller elements. Blocks combine elements
    one by one, in any order.

    With `by_warps` the first thread of each warp stores an equal part of the rows, in the order of warps.
    """

    barrier: Load | None = None
    blocks: Expr | None = None
    share: Expr | None = None
    shares: int = 1
    by: int = 0
    combine: str = ""
    counts: bool = True
    by_warps: bool = False

    @classmethod
    def build(  # type: ignore[override]
        cls,
        src: Tile,
        dst: Tile,
        barrier: Any = None,
        blocks: Scalar = None,
        share: Scalar = None,
        *,
        shares: int = 1,
        by: int = 0,
        counts: bool = True,
        combine: str | None = None,
        eviction_policy: str | None = None,
        by_warps: bool = False,
    ) -> TmaCopy:
        """Build the copy that T.tma_copy (language/cluster.py) describes."""
        need_choice("tma_copy", "combine", combine, COMBINES)
        where = None if barrier is None else region_of(barrier)
        if barrier is not None and not (where and where.buffer.scope == "barrier" and all(map(is_one, where.extents))):
            fix = "give one mbarrier, as in barrier=ready[stage]"
            raise error("bad_argument", None, op="T.tma_copy", name="barrier", why=f"is {barrier!r}"[:80], fix=fix)
        signal = None if where is None else Load(where.buffer, where.starts)
        a, b = cls.regions(src, dst)
        to, number = (None if e is None else to_expr(e) for e in (blocks, share))
        policy = policy_of("tma_copy", eviction_policy)
        return cls(
            a, b, eviction_policy=policy, barrier=signal, blocks=to, share=number, shares=shares, by=by, counts=counts,
            combine=combine or "", by_warps=bool(by_warps),
        )  # fmt: skip

    def check(self) -> list[Diagnostic]:
        """Check extents, and that the copy goes between global and shared memory."""
        found = super().check()
        scopes = self.src.buffer.scope, self.dst.buffer.scope
        if scopes not in (("global", "shared"), ("shared", "global")):
            why = f"goes from {scopes[0]} to {scopes[1]} memory"
            fix = "copy between global and shared memory"
            found.append(diagnose("bad_argument", self.span, op="T.tma_copy", name="src", why=why, fix=fix))
        elif (self.barrier is None) == (scopes[0] == "global"):
            if self.barrier is None:
                why, fix = ("is missing", "give the mbarrier that waits for the bytes: barrier=full[i]")
            else:
                why, fix = "is given to a copy to global memory", "leave it out: only loads complete an mbarrier"
            found.append(diagnose("bad_argument", self.span, op="T.tma_copy", name="barrier", why=why, fix=fix))
        elif self.by_warps and self.barrier is not None:
            why, fix = "is given to a load", "leave it out: one thread starts a load"
            found.append(diagnose("bad_argument", self.span, op="T.tma_copy", name="by_warps", why=why, fix=fix))
        elif self.combine and (why := self._no_combine()):
            fix = f"give a store of {', '.join(sorted(COMBINED[self.combine]))}"
            found.append(diagnose("bad_argument", self.span, op="T.tma_copy", name="combine", why=why, fix=fix))
        return found

    def _no_combine(self) -> str:
        """Return why a copy cannot combine elements with the stored ones; empty if it can."""
        if self.barrier is not None:
            return "belongs to copies to global memory"
        dtype = self.dst.buffer.dtype
        return "" if dtype.name in COMBINED[self.combine] else f"is {self.combine!r} of {dtype}"

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return what the copy reads and writes; a store that combines reads its destination."""
        return [self.src, self.dst] if self.combine else [self.src], [self.dst]

    def evaluate(self, env: Env) -> None:
        """Copy the box, or combine it with the stored elements."""
        if not self.combine:
            super().evaluate(env)
            return
        old, dtype = env.read(self.dst), self.dst.buffer.dtype
        new, wide = env.read(self.src).reshape(old.shape), env.wide(dtype)
        env.write(self.dst, folded(self.combine, old.to(wide), new.to(wide), dtype).to(old.dtype))

    def lower_cpu(self) -> Stmt:
        """Emit element moves. Raises an author error for a store that combines."""
        if self.combine:
            raise error(
                "bulk_copy", self.span, why="only Hopper's bulk copies combine elements; T.atomic_add does here"
            )
        return super().lower_cpu()

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Prefer panels for the tile, or rows where one row is copied, unless another op demands a layout."""
        region = self.dst if self.barrier is not None else self.src
        tile, sizes = region.buffer, region.buffer.static_shape
        if sizes is None:
            return []
        if all(map(is_one, region.extents[:-1])):
            return [Demand(tile, row_major(sizes), False, "rows of bulk copies", self.span)]
        return [Demand(tile, shared_tile(sizes, tile.dtype.bits), False, "panels of bulk copies", self.span)]

    def leader(self, ctx: ThreadContext) -> int:
        """Return the number of the thread that starts the copy: `by`, or without it the first of those that come by."""
        if not ctx.parted or self.by in ctx.comers:
            return self.by
        if ctx.comers and not self.by:
            return ctx.comers[0]
        why = f"thread {self.by} does not come by" if ctx.comers else "which threads come by depends on data"
        raise error("bulk_copy", self.span, why=f"one thread starts it, and {why}")

    def _part_of_warp(self, ctx: ThreadContext) -> TmaCopy | None:
        """Return the copy of the running warp's rows; None if the warps have no equal parts of whole boxes.

        All threads have to come by, so that each warp has a first thread.
        """
        if ctx.parted or ctx.count % WARP:
            return None
        sides, warps = Sides.of(self), ctx.count // WARP
        part = rows_of(sides, warps, ctx.thread // WARP)
        return None if part is None else replace(self, src=part.tile, dst=part.tensor)

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Emit the box copies of one thread, or an ordinary copy for a store that bulk copies cannot do."""
        why = refuses(self, ctx)
        if why is None and self.by_warps and (part := self._part_of_warp(ctx)) is not None:
            return lower(part, ctx)
        if why is None:
            return lower(replace(self, by=self.leader(ctx), by_warps=False), ctx)
        if self.barrier is not None or self.combine or ctx.parted:
            raise error("bulk_copy", self.span, why=why)
        ctx.build.remark(self.span, "T.copy", "an ordinary copy", why)
        return super().lower_cuda(ctx)


def refuses(op: Copy, ctx: ThreadContext) -> str | None:
    """Return why bulk copies cannot do the copy; None if they can."""
    if not ctx.target.has_tma:
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
    return None if box_of(sides) else f"`{sides.tile.buffer.name}` does not consist of equal boxes of at most 256 rows"


def _refuses_tensor(region: Region, ctx: ThreadContext) -> str | None:
    """Return which property of the tensor a tensor map cannot describe."""
    tensor, size = region.buffer, region.buffer.dtype.itemsize
    if tensor.dtype.name not in TYPES:
        return f"no bulk copy moves {tensor.dtype}"
    if tensor.rank > MOST_RANK:
        return f"`{tensor.name}` has {tensor.rank} dimensions, and tensor maps have at most {MOST_RANK}"
    if tensor.origin == "address":
        return f"the kernel itself computes the address of `{tensor.name}`, and launches make tensor maps"
    if not tensor.may_start_at(16):
        return f"`{tensor.name}` may not start at a multiple of 16 bytes"
    strides = strides_of(tensor)
    if not is_one(strides[-1]):
        return f"`{tensor.name}` is not dense along its last dimension"
    for dim, stride in enumerate(strides[:-1]):
        if not is_one(tensor.shape[dim]) and not divides(16 // math.gcd(16, size), stride, ctx.ranges):
            return f"the stride of dimension {dim} of `{tensor.name}` may not be a multiple of 16 bytes"
    column = Expand(ctx.values)(region.starts[-1])
    if not divides(16 // math.gcd(16, size), column, ctx.ranges):  # seen to stop an H200
        return f"the columns of `{tensor.name}` may not start at a multiple of 16 bytes"
    if not all(isinstance(e, Const) for e in region.extents):
        return "the extents are known only at run time"
    return None


def _refuses_store(region: Region, ctx: ThreadContext) -> str | None:
    """Return what a bulk store cannot do and a bulk load can, as observed on an H200.

    Across the end of a row they write the rest of the 16 bytes that the end lies in; in front of a tensor they stop the
    GPU.
    """
    tensor, inline = region.buffer, Expand(ctx.values)
    if not divides(16 // math.gcd(16, tensor.dtype.itemsize), inline(tensor.shape[-1]), ctx.ranges):
        return f"the rows of `{tensor.name}` may not end at a multiple of 16 bytes"
    ranges = ctx.ranges
    for size in tensor.shape:  # nothing is copied to an empty tensor
        ranges = ranges.assume(binary(">=", size, const(1, size.dtype)))
    if any(ranges.may_be_negative(inline(start)) for start in region.starts):
        return f"the slice of `{tensor.name}` may start in front of it"
    return None


def _refuses_tile(sides: Sides, ctx: ThreadContext) -> str | None:
    """Return why the tile does not consist of boxes."""
    tile, region = sides.tile.buffer, sides.tile
    shape, size = tile.static_shape, tile.dtype.itemsize
    if shape is None or is_one(sides.tensor.extents[-1]) or is_one(region.extents[-1]):
        return "the last dimension is not copied along"
    if not same_extents(squeezed(region), squeezed(sides.tensor)):
        return "the dimensions of both sides do not correspond"
    span = panel_span(tile)
    width = number_of(region.extents[-1])
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
    """Return why TMA boxes cannot copy rows of a tile that has no swizzled panels."""
    tile, shape, size = region.buffer, region.buffer.static_shape or (), region.buffer.dtype.itemsize
    if tile.layout is not None and tile.layout != row_major(shape):
        return f"`{tile.name}` lies neither in panels nor row by row"
    sides = [(n, number_of(e)) for n, e in zip(shape, region.extents, strict=True)]
    copied = itertools.dropwhile(lambda side: side[1] == 1, sides)
    if any(n != e for n, e in itertools.islice(copied, 1, None)):  # a single index of several leaves gaps, too
        return f"the slice of `{tile.name}` is not dense"
    row = sides[-1][1]
    if row * size % BULK_BYTES or _width(row, size) == 0:
        return f"rows of {row} elements are no boxes of whole 16 bytes"
    start: Expr = ZERO
    for index, count in zip(region.starts, shape, strict=True):
        start = binary("+", binary("*", start, const(count, dt.int32)), index)
    if not divides(128 // math.gcd(128, size), simplify(start), ctx.ranges):
        return f"the slice of `{tile.name}` may not start at a multiple of 128 bytes"
    return None


def lower(op: Copy, ctx: ThreadContext) -> Stmt:
    """Emit the code of the one thread that starts a copy for each box, or for its share of boxes."""
    sides = Sides.of(op)
    tile, tensor = sides.tile.buffer, sides.tensor.buffer
    span, size = panel_span(tile) or 0, tile.dtype.itemsize
    load = op if isinstance(op, TmaCopy) and op.barrier is not None else None
    policy = op.eviction_policy if op.eviction_policy in bulk.POLICIES else ""  # no bulk copy takes room in L1
    bytes_ = math.prod(number_of(e) for e in sides.tensor.extents) * size
    if load is not None and load.share is not None:
        part = part_of(sides, load.shares, load.share)
        if part is None:
            raise error("bulk_copy", op.span, why=refuses_shares(op, load.shares))
        sides = part
    extents = [number_of(e) for e in sides.tensor.extents]
    box = box_of(sides)
    assert box is not None
    map_ = TensorMap(tensor, tensor.shape, strides_of(tensor), box, span)
    moves: list[Stmt] = []
    for point in corners(extents, box):
        place = [simplify(s + const(p, dt.int32)) for s, p in zip(sides.tensor.starts, point, strict=True)]
        inside = [const(p, dt.int32) for p, e in zip(point, extents, strict=True) if e != 1]
        there = Address(tile, spread(sides.tile, tuple(inside)))
        if load is None:
            moves.append(bulk.tma_store(map_, there, place, op.combine if isinstance(op, TmaCopy) else ""))
        else:
            assert load.barrier is not None
            signal = Address(load.barrier.buffer, load.barrier.indices)
            moves.append(bulk.tma_load(there, map_, place, signal, policy, load.blocks))
    if load is not None and load.counts:
        assert load.barrier is not None
        moves = [bulk.mbarrier_expect(Address(load.barrier.buffer, load.barrier.indices), bytes_), *moves]
    elif load is None:
        moves += [bulk.bulk_commit(), bulk.bulk_wait(0)]
    _remark(op, box, span, len(list(corners(extents, box))), ctx)
    remark_on_policy(op, ctx)
    by = op.by if isinstance(op, TmaCopy) else 0
    by_warps = isinstance(op, TmaCopy) and op.by_warps
    first = binary("==", ctx.thread % WARP if by_warps else ctx.thread, const(by, dt.int32))
    return If(first, Block(tuple(moves)), Block(()))


def _remark(op: Copy, box: tuple[int, ...], span: int, count: int, ctx: ThreadContext) -> None:
    """Report a bulk copy and its box to the author."""
    shape = " x ".join(str(n) for n in box if n != 1)
    swizzled = f", swizzled over {span} bytes" if span else ""
    ctx.build.remark(op.span, "T.copy", f"{count} bulk {'copies' if count > 1 else 'copy'} of {shape}{swizzled}")


# Boxes that a bulk copy moves: those of the whole tile, or an equal part of them for one of several blocks. Boxes are
# as wide as the panels of the tile, so that the swizzle is the hardware's. They are as high as 256 rows allow. copy_tma
# refuses tiles of neither panels nor dense rows before.


@dataclass(frozen=True)
class Sides:
    """The tile and the part of the tensor that the copy reads or writes."""

    tile: Region
    tensor: Region

    @staticmethod
    def of(op: Copy) -> Sides:
        """Return the sides of a copy between shared and global memory."""
        return Sides(op.dst, op.src) if op.src.buffer.scope == "global" else Sides(op.src, op.dst)


def box_of(sides: Sides) -> tuple[int, ...] | None:
    """Return the box that a copy repeats; None if there is none."""
    tile, span = sides.tile.buffer, panel_span(sides.tile.buffer) or 0
    extents, size = [number_of(e) for e in sides.tensor.extents], tile.dtype.itemsize
    return _box(extents, span // size if span else _width(extents[-1], size), size, 8 * span or 128)


def _width(row: int, size: int) -> int:
    """Compute the width of the boxes for dense rows: the whole row up to 256 elements, else an equal part of it.

    Parts begin at multiples of 128 bytes; 0 if there are no such parts.
    """
    if row <= LARGEST_BOX:
        return row
    return next((n for n in range(LARGEST_BOX, 0, -1) if row % n == 0 and n * size % 128 == 0), 0)


def _box(extents: list[int], width: int, size: int, unit: int) -> tuple[int, ...] | None:
    """Compute the largest box of rows, at most 256 of them and dense in the tile, that divides the tile.

    It has one dimension beside its rows. Boxes begin at multiples of `unit` bytes of the tile, elements having `size`;
    None if there is no such box.
    """
    # Parts of a dense row are boxes of one row: panels lie one after the other, rows are not cut.
    box, whole = [width], width == extents[-1] or unit > 128
    for extent in reversed(extents[:-1]):
        row = math.prod(box) * size
        sides = [n for n in range(min(extent, LARGEST_BOX), 0, -1) if extent % n == 0] if whole else [1]
        side = next((n for n in sides if n == extent or n * row % unit == 0), None)
        if side is None:
            return None
        whole = whole and side == extent == 1
        box.insert(0, side)
    return tuple(box)


def corners(extents: list[int], box: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Return the first point of each box."""
    counts = [e // b for e, b in zip(extents, box, strict=True)]
    for number in range(math.prod(counts)):
        point = []
        for count, size in zip(reversed(counts), reversed(box), strict=True):
            number, step = divmod(number, count)
            point.append(step * size)
        yield tuple(reversed(point))


def refuses_shares(op: Copy, count: int) -> str | None:
    """Return why `count` blocks cannot each do a part of a bulk copy; None if they can."""
    sides = Sides.of(op)
    return (
        None if part_of(sides, count, ZERO) else f"`{sides.tile.buffer.name}` has no {count} equal parts of whole boxes"
    )


def part_of(sides: Sides, count: int, number: Expr) -> Sides | None:
    """Return part `number` of `count` equal parts, split so that a part has the fewest boxes; None if no split gives
    whole boxes.

    A part begins where boxes can: at whole patterns of the swizzle, or at whole 128 bytes of a dense tile.
    """
    return min(_parts_of(sides, count, number), key=_boxes, default=None)


def rows_of(sides: Sides, count: int, number: Expr) -> Sides | None:
    """Return part `number` of `count` equal parts of a tile's rows; None if these are no whole boxes."""
    lines = [n for n, e in enumerate(sides.tensor.extents) if not is_one(e)]
    if len(lines) != 2:
        return None
    whole = sides.tensor.extents[lines[1]]
    return next((p for p in _parts_of(sides, count, number) if equal(p.tensor.extents[lines[1]], whole)), None)


def _parts_of(sides: Sides, count: int, number: Expr) -> Iterator[Sides]:
    """Yield part `number` of `count` equal parts, for each dimension along which whole boxes can be cut."""
    tile, size = sides.tile.buffer, sides.tile.buffer.dtype.itemsize
    span = panel_span(tile) or 0
    dims = [n for n, e in enumerate(sides.tensor.extents) if not is_one(e)]
    for place, dim in enumerate(dims):
        extent = number_of(sides.tensor.extents[dim])
        least = (span // size if place == len(dims) - 1 else 8) if span else 1
        if extent % (count * least) or (not span and place):
            continue
        inside = [n for n, e in enumerate(sides.tile.extents) if not is_one(e)][place]
        part = Sides(_part_of(sides.tile, inside, count, number), _part_of(sides.tensor, dim, count, number))
        bytes_ = math.prod(number_of(e) for e in part.tensor.extents) * size
        if (span or bytes_ % 128 == 0) and box_of(part) is not None:
            yield part


def _part_of(region: Region, dim: int, count: int, number: Expr) -> Region:
    """Return part `number` of a region that is cut along a dimension."""
    whole = region.ranges[dim]
    extent = number_of(whole.extent) // count
    part = replace(whole, start=simplify(whole.start + number * extent), extent=const(extent, dt.int32))
    return replace(region, ranges=(*region.ranges[:dim], part, *region.ranges[dim + 1 :]))


def _boxes(sides: Sides) -> int:
    """Count the boxes of a copy."""
    box = box_of(sides)
    assert box is not None
    return math.prod(number_of(e) for e in sides.tensor.extents) // math.prod(box)
