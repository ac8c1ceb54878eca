# SPDX-License-Identifier: Apache-2.0
"""Programs, kernels and statements with simpler expressions, without branches and loops that never run.

What is known about variables is carried through kernels, loops, branches and names. Unchanged nodes stay the same
objects.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch_tile.ir import stmt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.expr import Binary, Const, Expr, Var, unary
from torch_tile.ir.node import Node, Rewriter, rebuilt
from torch_tile.ir.simplify import Simplifier, is_literal

N = TypeVar("N", bound=Node)
NOTHING = stmt.Block(())


def simplify_stmt(node: N, ranges: Ranges | None = None) -> N:
    """A program, kernel or statement that does the same; the same object if nothing could be improved."""
    return _Statements(ranges or Ranges())(node)  # type: ignore[no-any-return]


class _Statements(Rewriter):
    """Carries what is known through roles, loops and branches. A statement that does nothing becomes an empty block."""

    def __init__(self, ranges: Ranges):
        self.expr = Simplifier(ranges)
        self.thread: Var | None = None

    def _known(self) -> Ranges:
        return self.expr.ranges

    def _inside(self, node: N, ranges: Ranges) -> N:
        outer, self.expr = self.expr, Simplifier(ranges)
        new = self(node)
        self.expr = outer
        return new  # type: ignore[no-any-return]

    def visit_Expr(self, e: Expr) -> Expr:
        """Any expression, under what holds here."""
        return self.expr(e)

    def visit_Kernel(self, k: stmt.Kernel) -> stmt.Kernel:
        """Block indices are below the grid."""
        grid = tuple(self.expr(g) for g in k.grid)
        self.thread = k.thread
        return _rebuilt(k, grid=grid, body=self._inside(k.body, self._known().kernel(k)))

    def visit_Role(self, r: stmt.Role) -> stmt.Role:
        """The thread is one of the role's."""
        if self.thread is None:
            return self.children(r)
        ranges = self._known().within(self.thread, r.first, r.first + r.count - 1)
        return _rebuilt(r, body=self._inside(r.body, ranges))

    def visit_Block(self, b: stmt.Block) -> stmt.Block:
        """Flat, and without what follows a break or continue."""
        outer = self.expr
        stmts: list[stmt.Stmt] = []
        for s in b.stmts:
            new = self(s)
            stmts.extend(new.stmts if isinstance(new, stmt.Block) else (new,))
            if stmts and isinstance(stmts[-1], stmt.Break | stmt.Continue):
                break
        self.expr = outer
        return _rebuilt(b, stmts=tuple(stmts))

    def visit_Let(self, s: stmt.Let) -> stmt.Stmt:
        """A name for a literal or another name is replaced by what it stands for."""
        value = self.expr(s.value)
        self.expr = self.expr.define(s.var, value)
        return NOTHING if isinstance(value, Const | Var) else _rebuilt(s, value=value)

    def visit_For(self, f: stmt.For) -> stmt.Stmt:
        """Gone if it never runs or does nothing."""
        starts, stops = tuple(self.expr(x) for x in f.starts), tuple(self.expr(x) for x in f.stops)
        ranges = self._known()
        if any(ranges.prove(Binary(">=", a, b)) for a, b in zip(starts, stops, strict=True)):
            return NOTHING
        for var, start, stop in zip(f.vars, starts, stops, strict=True):
            ranges = ranges.loop(var, start, stop, f.step)
        body = self._inside(f.body, ranges)
        return _rebuilt(f, starts=starts, stops=stops, body=body) if body.stmts else NOTHING

    def visit_While(self, s: stmt.While) -> stmt.Stmt:
        """Gone if the condition never holds."""
        condition = self.expr(s.condition)
        if is_literal(condition, False):
            return NOTHING
        body = self._inside(s.body, self._known().assume(condition))
        return _rebuilt(s, condition=condition, body=body)

    def visit_If(self, s: stmt.If) -> stmt.Stmt:
        """One branch if the condition is known."""
        condition = self.expr(s.condition)
        if isinstance(condition, Const):
            return self(s.then if condition.value else s.otherwise)  # type: ignore[no-any-return]
        then = self._inside(s.then, self._known().assume(condition))
        otherwise = s.otherwise
        if otherwise.stmts:
            otherwise = self._inside(otherwise, self._known().assume(unary("not", condition)))
        if not then.stmts and not otherwise.stmts:
            return NOTHING
        if not then.stmts:
            return stmt.If(self.expr(unary("not", condition)), otherwise, then)
        return _rebuilt(s, condition=condition, then=then, otherwise=otherwise)

    def visit_Assert(self, s: stmt.Assert) -> stmt.Stmt:
        """Gone if the condition always holds."""
        condition = self.expr(s.condition)
        return NOTHING if is_literal(condition, True) else _rebuilt(s, condition=condition)


def _rebuilt(node: N, **changed: Any) -> N:
    """`node` with fields replaced; the same object if all are the same."""
    same = all(_same(getattr(node, name), value) for name, value in changed.items())
    return node if same else rebuilt(node, **changed)


def _same(old: object, new: object) -> bool:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
    return old is new
