# SPDX-License-Identifier: Apache-2.0
"""Decide which elements of a tile earlier statements may have written, and which elements a read certainly takes.

Both are boxes of indices. A write counts for the smallest box that holds all of its elements. A read counts only where
the box is exact: its indices are numbers, or variables of the loops around.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import LOGICAL, Address, Binary, Cast, Const, Expr, Load, Select, Var, const, unary
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Node, Rewriter, contents
from torch_tile.ir.stmt import Alloc, Block, For, If, Kernel, Let, LoopKind, Stmt

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

    def enter_let(self, let: Let) -> None:
        """Enter the statements after a Let, where its variable has that value."""
        self.enter(functools.partial(Ranges.define, var=let.var, value=let.value))

    def leave(self, depth: int) -> None:
        """Leave scopes until `depth` of them are left."""
        del self._steps[depth:], self._ranges[depth + 1 :]

    @property
    def ranges(self) -> Ranges:
        """Return the ranges of values at this place; computed when asked for."""
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
        """Return the elements that an access takes, None unless exact; with `first`, in first turns of serial loops."""
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
        var, offset = shifted(start)
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


def shifted(index: Expr) -> tuple[Var | None, int]:
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


def uncovered(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """Return the parts of a box that lie in none of `boxes`."""
    rest = [box]
    for other in boxes:
        rest = [part for one in rest for part in _parts_outside(one, other)]
    return rest


def _parts_outside(box: Box, other: Box) -> list[Box]:
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


class InOrder(Rewriter):
    """Visit a kernel's statements in order, a loop's body once, and keep what they may have written of each tile.

    A subclass says what a read and a write mean. `written` may hold buffers from outside the kernel; those that are
    wholly written leave it.
    """

    def __init__(self, kernel: Kernel, written: IdMap[Buffer, list[Box]] | None = None):
        self.found: list[Diagnostic] = []
        self.values: dict[Var, Expr] = {}  # of names
        self.written: IdMap[Buffer, list[Box]] = IdMap() if written is None else written
        known = Ranges().kernel(kernel)
        thread = kernel.thread
        self.outer = Scopes(known if thread is None else known.loop(thread, 0, math.prod(kernel.threads)))
        self(kernel.body)

    def visit_where(self, condition: Expr | None, node: Node) -> None:
        """Visit a node that may not run, or only where a condition holds."""
        depth = len(self.outer)
        if condition is not None:
            self.outer.enter(lambda known: known.assume(condition))
        self(node)
        self.outer.leave(depth)

    def __call__(self, node: Any) -> Any:
        """Skip values that read no memory."""
        plain = isinstance(node, Expr) and not contents(node) & (Load.bit | Address.bit)
        return node if plain else super().__call__(node)

    def visit_Alloc(self, node: Alloc) -> Stmt:
        """Count a tile without first values as unwritten."""
        if node.buffer.scope in ("fragment", "shared", "local") and node.init is None:
            self.written[node.buffer] = []
        return node

    def visit_Address(self, node: Address) -> Any:
        """Count the tile as written: the call may write there."""
        self.written.pop(node.buffer, None)
        return self.children(node)

    def visit_Block(self, block: Block) -> Block:
        """Visit statements in order, each with the names before it."""
        depth = len(self.outer)
        for one in block.stmts:
            self(one)
            if isinstance(one, Let):
                self.outer.enter_let(one)
                self.values[one.var] = one.value
        self.outer.leave(depth)
        return block

    def visit_For(self, loop: For) -> Stmt:
        """Visit the bounds, then the body by `loop_body`."""
        for value in (*loop.starts, *loop.stops):
            self(value)
        self.loop_body(loop)
        return loop

    def loop_body(self, loop: For) -> None:
        """Visit a loop's body once."""
        depth = len(self.outer)
        self.outer.enter_loop(loop)
        self.outer.loops.append(loop)
        self(loop.body)
        self.outer.loops.pop()
        self.outer.leave(depth)

    def visit_If(self, node: If) -> Stmt:
        """Visit both branches, each where its condition holds."""
        self(node.condition)
        self.visit_where(node.condition, node.then)
        self.visit_where(unary("not", node.condition), node.otherwise)
        return node

    def visit_Select(self, node: Select) -> Any:
        """Visit both values under the condition that chooses them."""
        self(node.condition)
        self.visit_where(node.condition, node.a)
        self.visit_where(unary("not", node.condition), node.b)
        return node

    def visit_Binary(self, node: Binary) -> Any:
        """Visit both operands, the second one of `and` and `or` under the first."""
        self(node.a)
        if node.op in LOGICAL:
            self.visit_where(node.a if node.op == "and" else unary("not", node.a), node.b)
        else:
            self(node.b)
        return node

    def write(
        self, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr], garbage: Sequence[Box] = ()
    ) -> None:
        """Count a write for the box that holds its elements, but for the elements in `garbage`."""
        boxes, shape = self.written.get(buffer), buffer.static_shape
        if boxes is None:
            return
        if shape is not None and len(boxes) < MOST:
            boxes += uncovered(self.outer.may_touch(starts, extents, shape), garbage)
            if uncovered(tuple((0, n) for n in shape), boxes):
                return
        del self.written[buffer]

    def is_exact(self, index: Expr) -> bool:
        """Return whether an index certainly reaches the end of its interval: a sum of blocks, and of counted loops."""
        if isinstance(index, Var) and index in self.values:
            return self.is_exact(self.values[index])
        if isinstance(index, Var):
            loop = next((loop for loop in self.outer.loops if any(var is index for var in loop.vars)), None)
            bounds = () if loop is None else (*loop.starts, *loop.stops)
            return index.role == "block" or (loop is not None and all(isinstance(e, Const) for e in bounds))
        if isinstance(index, Cast):
            return index.a.dtype.is_integer and self.is_exact(index.a)
        if isinstance(index, Binary) and index.op in ("//", "%"):
            return isinstance(index.a, Var) and index.a.role == "block" and isinstance(index.b, Const)
        if isinstance(index, Binary) and index.op in ("+", "-", "*"):
            return self.is_exact(index.a) and self.is_exact(index.b)
        return isinstance(index, Const)
