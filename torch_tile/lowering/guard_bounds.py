# SPDX-License-Identifier: Apache-2.0
"""Global memory is touched only inside its bounds: reads outside give 0, writes outside are dropped.

A guard is added only where the bounds cannot be proved from the ranges of the loop variables and the conditions around
the access.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from ..ir import dtype as dt
from ..ir.bounds import Ranges
from ..ir.buffer import Buffer
from ..ir.expr import Address, Expr, Load, Select, binary, const, unary
from ..ir.node import N, Rewriter, walk
from ..ir.stmt import Block, Do, For, If, Kernel, Let, Program, Stmt, Store


def guard_bounds(program: Program) -> Program:
    """Guard every access of a global buffer that may lie outside it."""
    return _Guard()(program)  # type: ignore[no-any-return]


class _Guard(Rewriter):
    def __init__(self) -> None:
        self.ranges = Ranges()

    def Kernel(self, kernel: Kernel) -> Kernel:
        return self._within(self.ranges.kernel(kernel), kernel)

    def For(self, loop: For) -> Stmt:
        ranges = self.ranges
        for var, start, stop in zip(loop.vars, loop.starts, loop.stops, strict=True):
            ranges = ranges.loop(var, start, stop, loop.step)
        return self._within(ranges, loop)

    def If(self, node: If) -> Stmt:
        condition = self(node.condition)
        outer = self.ranges
        self.ranges = outer.assume(node.condition)
        then = self(node.then)
        self.ranges = outer.assume(unary("not", node.condition))
        otherwise = self(node.otherwise)
        self.ranges = outer
        if condition is node.condition and then is node.then and otherwise is node.otherwise:
            return node
        return If(condition, then, otherwise, span=node.span)

    def Block(self, block: Block) -> Block:
        outer = self.ranges
        new = []
        for stmt in block.stmts:
            new.append(self(stmt))
            if isinstance(stmt, Let):
                self.ranges = self.ranges.define(stmt.var, stmt.value)
        self.ranges = outer
        unchanged = all(a is b for a, b in zip(new, block.stmts, strict=True))
        return block if unchanged else Block(tuple(new), span=block.span)

    def Select(self, node: Select) -> Expr:
        condition = self(node.condition)
        a = self._within_expr(self.ranges.assume(node.condition), node.a)
        b = self._within_expr(self.ranges.assume(unary("not", node.condition)), node.b)
        if condition is node.condition and a is node.a and b is node.b:
            return node
        return Select(condition, a, b, span=node.span)

    def Load(self, load: Load) -> Expr:
        new = self.children(load)
        outside = self.missing(load.buffer, load.indices)
        return Select(conjunction(outside), new, const(0, load.dtype), span=load.span) if outside else new

    def Store(self, store: Store) -> Stmt:
        new = self.children(store)
        return self._only_if(self.missing(store.buffer, store.indices), new)

    def Do(self, node: Do) -> Stmt:
        conditions = [
            c for used in walk(node.call) if isinstance(used, Address) for c in self.missing(used.buffer, used.indices)
        ]
        return self._only_if(conditions, self.children(node))

    def _only_if(self, conditions: Sequence[Expr], stmt: Stmt) -> Stmt:
        if not conditions:
            return stmt
        return If(conjunction(conditions), Block((stmt,)), Block(()), span=stmt.span)

    def missing(self, buffer: Buffer, indices: Sequence[Expr]) -> list[Expr]:
        """Conditions that keep the access inside a global buffer and cannot be proved."""
        if buffer.scope != "global":
            return []
        wanted = []
        for index, size in zip(indices, buffer.shape, strict=True):
            wanted += [binary(">=", index, const(0, dt.int32)), binary("<", index, size)]
        return [c for c in wanted if not self.ranges.prove(c)]

    def _within(self, ranges: Ranges, node: N) -> N:
        outer, self.ranges = self.ranges, ranges
        new = self.children(node)
        self.ranges = outer
        return new

    def _within_expr(self, ranges: Ranges, expr: Expr) -> Expr:
        outer, self.ranges = self.ranges, ranges
        new = self(expr)
        self.ranges = outer
        return new  # type: ignore[no-any-return]


def conjunction(conditions: Sequence[Expr]) -> Expr:
    """All of them."""
    return reduce(lambda a, b: binary("and", a, b), conditions)
