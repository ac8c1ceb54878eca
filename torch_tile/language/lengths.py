# SPDX-License-Identifier: Apache-2.0
"""T.copy between a tile and a slice whose length is known only at run time, such as A[lo : T.min(lo + 64, n)].

What the slice does not have reads as 0 and is not written. A slice that ends where its tensor does is an ordinary one
of the tile's size. Its copies keep all instructions for copies; others are nests of guarded moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_tile.ir.buffer import Range, Region
from torch_tile.ir.expr import Binary, Const, Expr, Load, Var, binary, cast, const, select
from torch_tile.ir.node import equal
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Block, If, Stmt, Store
from torch_tile.language.trace import expand_names
from torch_tile.tileop.base import conjunction, is_one, may_overlap, parallel, spread, squeezed
from torch_tile.tileop.copy.op import Copy


def settled(copy: Copy) -> Stmt:
    """Return a copy unchanged if the sizes of its sides agree; else restrict it to what both sides have."""
    src, dst = squeezed(copy.src), squeezed(copy.dst)
    if len(src) != len(dst) or not any(map(_is_open, src, dst)):
        return copy
    whole = replace(copy, src=_whole(copy.src, dst), dst=_whole(copy.dst, src))
    if not any(map(_is_open, squeezed(whole.src), squeezed(whole.dst))):
        return whole
    return _guarded(whole) or copy


def _is_open(a: Expr, b: Expr) -> bool:
    """Return whether one of two sizes is known at compile time and the other is not."""
    return isinstance(a, Const) is not isinstance(b, Const)


def _whole(region: Region, others: Sequence[Expr]) -> Region:
    """Return `region` with the other side's sizes, where it is as long or ends where its tensor does."""
    rest = iter(others)
    ranges = []
    for one, size in zip(region.ranges, region.buffer.shape, strict=True):
        other = None if is_one(one.extent) else next(rest)
        if isinstance(other, Const) and region.buffer.scope == "global" and _ends_at(one, size, other):
            one = replace(one, extent=other)
        ranges.append(one)
    return replace(region, ranges=tuple(ranges))


def _ends_at(one: Range, size: Expr, length: Const) -> bool:
    """Return whether a range has `length` indices, or ends at `size` if that comes first."""
    start, extent = simplify(expand_names(one.start)), simplify(expand_names(one.extent))
    left = simplify(size - start)
    for found, base in ((extent, const(0, extent.dtype)), (simplify(extent + start), start)):
        if isinstance(found, Binary) and found.op == "min":
            for x, y in ((found.a, found.b), (found.b, found.a)):
                if _is_zero(x - base - length) and _is_zero(y - base - left):
                    return True
    return False


def _is_zero(difference: Expr) -> bool:
    """Return whether a difference simplifies to 0."""
    known = simplify(difference)
    return isinstance(known, Const) and known.value == 0


def _guarded(copy: Copy) -> Stmt | None:
    """Build a nest of guarded element moves over the compile-time sizes; None where the sides may overlap."""
    src, dst = squeezed(copy.src), squeezed(copy.dst)
    extents = [a if isinstance(a, Const) else b for a, b in zip(src, dst, strict=True)]
    same = [isinstance(n, Const) or equal(a, b) for n, a, b in zip(extents, src, dst, strict=True)]
    if may_overlap(copy.src, copy.dst) or not all(same):
        return None

    def inside(sizes: Sequence[Expr], point: Sequence[Var]) -> list[Expr]:
        both = zip(sizes, extents, point, strict=True)
        return [binary("<", at, size) for size, extent, at in both if size is not extent and _is_open(size, extent)]

    def move(point: tuple[Var, ...]) -> Stmt:
        value = cast(Load(copy.src.buffer, spread(copy.src, point)), copy.dst.buffer.dtype)
        if reads := inside(src, point):
            value = select(conjunction(reads), value, const(0, value.dtype))
        put = Store(copy.dst.buffer, spread(copy.dst, point), value)
        writes = inside(dst, point)
        return If(conjunction(writes), Block((put,)), Block(())) if writes else put

    return parallel(extents, move)


__all__ = ["settled"]
