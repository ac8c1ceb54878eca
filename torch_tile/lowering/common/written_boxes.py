# SPDX-License-Identifier: Apache-2.0
"""Decide which elements of a tile earlier statements may have written, and which elements a read certainly takes.

Both are boxes of indices. A write counts for the smallest box that holds all of its elements. A read counts only where
the box is exact: its indices are numbers, or variables of the loops around.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Binary, Const, Expr, Var, const
from torch_tile.ir.stmt import For, Let, LoopKind

Box = tuple[tuple[int, int], ...]  # of each dimension the first index, and the first one behind
MOST = 16  # boxes of one tile; a tile of more counts as written
ONE = const(1, dt.int32)


class Scopes:
    """The loops, names and conditions around a place, outermost first, and what they say of values."""

    def __init__(self, ranges: Ranges):
        self._steps: list[Callable[[Ranges], Ranges]] = []
        self._ranges = [ranges]  # of as many steps as were asked for
        self.loops: list[For] = []

    def __len__(self) -> int:
        return len(self._steps)

    def enter(self, step: Callable[[Ranges], Ranges]) -> None:
        """Enter a scope, in which `step` adds facts to the ranges."""
        self._steps.append(step)

    def enter_loop(self, loop: For) -> None:
        """Enter the body of a loop."""
        for var, start, stop in zip(loop.vars, loop.starts, loop.stops, strict=True):
            self.enter(functools.partial(Ranges.loop, var=var, start=start, stop=stop, step=loop.step))

    def name(self, let: Let) -> None:
        """Enter the statements behind a name."""
        self.enter(functools.partial(Ranges.define, var=let.var, value=let.value))

    def leave(self, depth: int) -> None:
        """Leave scopes until `depth` of them are left."""
        del self._steps[depth:], self._ranges[depth + 1 :]

    @property
    def ranges(self) -> Ranges:
        """The ranges of values at this place; computed when asked for."""
        while len(self._ranges) <= len(self._steps):
            self._ranges.append(self._steps[len(self._ranges) - 1](self._ranges[-1]))
        return self._ranges[-1]

    def may_touch(self, starts: Sequence[Expr], extents: Sequence[Expr], shape: Sequence[int]) -> Box:
        """Return a box that holds every element of an access, inside the tile."""
        return tuple(self._hull(a, n, size) for a, n, size in zip(starts, extents, shape, strict=True))

    def _hull(self, start: Expr, extent: Expr, size: int) -> tuple[int, int]:
        """Return the indices that an access may have in one dimension of `size`."""
        if isinstance(start, Const) and isinstance(extent, Const):
            first, behind = int(start.value), int(start.value) + int(extent.value)
            return max(first, 0), min(behind, size)
        known = self.ranges
        low, high = known.interval(start).low, known.interval(start).high + known.interval(extent).high
        return (max(int(low), 0) if low > 0 else 0), (min(int(high), size) if high < size else size)

    def certainly_reads(self, starts: Sequence[Expr], extents: Sequence[Expr], first: bool) -> Box | None:
        """Return the elements that an access takes, None where its box is not exact.

        With `first`, only those of the first turn of each serial loop around.
        """
        used: set[Var] = set()
        found = []
        for start, extent in zip(starts, extents, strict=True):
            one = self._exact(start, extent, first, used)
            if one is None:
                return None
            found.append(one)
        return tuple(found)

    def _exact(self, start: Expr, extent: Expr, first: bool, used: set[Var]) -> tuple[int, int] | None:
        """Return the indices of one dimension; each variable may decide one dimension only."""
        if not isinstance(extent, Const):
            return None
        width = int(extent.value)
        if isinstance(start, Const):
            return int(start.value), int(start.value) + width
        var, offset = _shifted(start)
        loop = next((loop for loop in self.loops if any(v is var for v in loop.vars)), None)
        if var is None or loop is None or var in used or loop.step != 1:
            return None
        used.add(var)
        at = next(n for n, v in enumerate(loop.vars) if v is var)
        low, high = loop.starts[at], loop.stops[at]
        if not isinstance(low, Const) or not isinstance(high, Const) or high.value <= low.value:
            return None
        last = int(low.value) if first and loop.kind is not LoopKind.PARALLEL else int(high.value) - 1
        return int(low.value) + offset, last + offset + width

    def stays_inside(self, region: Region) -> bool:
        """Return whether a region certainly lies inside its tensor, so that no write of it is dropped."""
        known = self.ranges
        return all(
            known.prove(r.start >= 0) and known.prove(r.start + r.extent <= size)
            for r, size in zip(region.ranges, region.buffer.shape, strict=True)
        )


def _shifted(index: Expr) -> tuple[Var | None, int]:
    """Return the variable and the number of `variable + number`."""
    if isinstance(index, Var):
        return index, 0
    if isinstance(index, Binary) and index.op in ("+", "-"):
        a, b = index.a, index.b
        if isinstance(a, Var) and isinstance(b, Const):
            return a, int(b.value) if index.op == "+" else -int(b.value)
        if index.op == "+" and isinstance(b, Var) and isinstance(a, Const):
            return b, int(a.value)
    return None, 0


def missing(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """Return the parts of a box that lie in none of `boxes`."""
    rest = [box]
    for other in boxes:
        rest = [part for one in rest for part in _cut(one, other)]
    return rest


def _cut(box: Box, other: Box) -> list[Box]:
    """Return the parts of `box` outside of `other`."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    if any(a >= b for a, b in common):
        return [box]
    found, done = [], list(box)
    for dim, ((a, b), (c, d)) in enumerate(zip(box, common, strict=True)):
        for low, high in ((a, c), (d, b)):
            if low < high:
                found.append((*done[:dim], (low, high), *box[dim + 1 :]))
        done[dim] = (c, d)
    return found
