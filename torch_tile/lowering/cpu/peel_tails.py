# SPDX-License-Identifier: Apache-2.0
"""Split elementwise loops with a guard `a * i + r < n` at its limit, so that the main part has no guard.

Both parts are plain code that vectorises: a loop up to the limit with the guard known true, and one from there with the
guard known false.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch_tile.ir import dtype as dt, stmt
from torch_tile.ir.arith_util import Expand, terms_of
from torch_tile.ir.expr import Binary, Const, Expr, Load, Select, Var, binary, const, maximum, minimum, select
from torch_tile.ir.node import Rewriter, equal, rebuilt, symbols, walk, with_fields
from torch_tile.ir.scope_facts import values_for_names
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, Do, For, If, Let, LoopKind, Program, Stmt, While
from torch_tile.ir.widths import is_compared_exactly

CONDITIONS_PER_LOOP = 2  # most guards of a loop to split at; each doubles its code
LARGEST_BODY = 120  # most nodes in the body of a loop to split


def peel_tails(program: Program) -> Program:
    """Split elementwise loops at their upper guards."""
    return _Peel()(program)  # type: ignore[no-any-return]


class _Peel(Rewriter):
    """Split the elementwise loops of a program."""

    def visit_For(self, loop: For) -> Stmt:
        return self._peel(loop, CONDITIONS_PER_LOOP)

    def _peel(self, loop: stmt.For, budget: int) -> Stmt:
        """Split a loop at its first guard, and its parts again while `budget` is left."""
        found = next(_guards(loop), None) if budget and _is_elementwise(loop) else None
        if found is None:
            return self.children(loop)
        guard, limit = found
        limit = simplify(maximum(minimum(limit, loop.stops[0]), loop.starts[0]))
        head = _with_body(loop, loop.starts[0], limit, _Decide(guard, True)(loop.body))
        tail = _with_body(loop, limit, loop.stops[0], _Decide(guard, False)(loop.body))
        parts = [self._peel(part, budget - 1) for part in (head, tail) if not _is_idle(part)]
        return parts[0] if len(parts) == 1 else Block(tuple(parts), span=loop.span)


def _is_idle(one: Stmt) -> bool:
    """Return whether a statement is a loop that only names values."""
    return isinstance(one, For) and all(isinstance(s, Let) or _is_idle(s) for s in one.body.stmts)


def _with_body(loop: For, start: Expr, stop: Expr, body: Block) -> For:
    """Build a part of the loop, with its own variable and its own local names."""
    var = Var(loop.vars[0].name, loop.vars[0].type, "loop")
    fresh = _Rename({loop.vars[0]: var})
    return For(loop.kind, (var,), (start,), (stop,), fresh(body), span=loop.span)


class _Rename(Rewriter):
    """Copy a body with fresh symbols, so that every symbol is bound once in the program."""

    def __init__(self, names: dict[Var, Var]):
        self.names = names

    def visit_Var(self, var: Var) -> Var:
        return self.names.get(var, var)

    def visit_For(self, loop: For) -> For:
        """Copy a loop with new variables."""
        fresh = tuple(Var(v.name, v.type, v.role) for v in loop.vars)
        self.names |= zip(loop.vars, fresh, strict=True)
        starts, stops = tuple(map(self, loop.starts)), tuple(map(self, loop.stops))
        return For(
            loop.kind, fresh, starts, stops, self(loop.body), loop.step, loop.stages, loop.order, loop.stage,
            ping_pong=loop.ping_pong, span=loop.span,
        )  # fmt: skip

    def visit_Let(self, let: Let) -> Let:
        value = self(let.value)
        fresh = self.names[let.var] = Var(let.var.name, let.var.type, let.var.role)
        return Let(fresh, value, span=let.span)


class _Decide(Rewriter):
    """Replace a condition by its known truth, and drop code that then never runs."""

    def __init__(self, guard: Expr, truth: bool):
        self.guard, self.truth = guard, truth

    def visit_Binary(self, node: Binary) -> Expr:
        """Replace the guard by its truth; fold operators of the result."""
        if equal(node, self.guard):
            return Const(self.truth, dt.bool_)
        a, b = self(node.a), self(node.b)
        return node if a is node.a and b is node.b else binary(node.op, a, b)

    def visit_Select(self, node: Select) -> Expr:
        condition, a, b = self(node.condition), self(node.a), self(node.b)
        unchanged = condition is node.condition and a is node.a and b is node.b
        return node if unchanged else select(condition, a, b)

    def visit_If(self, node: If) -> Stmt:
        """Keep the branch that a decided condition takes."""
        condition = self(node.condition)
        if isinstance(condition, Const):
            return self(node.then if condition.value else node.otherwise)  # type: ignore[no-any-return]
        return with_fields(node, condition=condition, then=self(node.then), otherwise=self(node.otherwise))

    def visit_Block(self, block: Block) -> Block:
        """Rewrite a block, with inner blocks merged into it and idle loops dropped."""
        new = self.children(block)
        return block if new is block else rebuilt(new, stmts=tuple(s for s in new.stmts if not _is_idle(s)))


def _is_elementwise(loop: For) -> bool:
    """Return whether a loop is small and has only stores, alone or in further such loops."""
    if loop.kind not in (LoopKind.VECTOR, LoopKind.SERIAL) or len(loop.vars) != 1 or loop.step != 1:
        return False
    for size, node in enumerate(walk(loop.body)):
        if isinstance(node, Do | While | Break | Continue | Alloc) or size > LARGEST_BODY:
            return False
    return True


def _guards(loop: For) -> Iterator[tuple[Expr, Expr]]:
    """Yield conditions of the body that hold exactly below a limit of the loop variable, with the limit."""
    bound = {v for n in walk(loop.body) for v in _binds(n)}
    in_full = values_for_names(loop.body)
    for node in walk(loop.body):
        if isinstance(node, If | Select):
            for part in terms_of("and", node.condition):
                limit = _limit(part, in_full, loop.vars[0], bound)
                if limit is not None:
                    yield part, limit


def _binds(node: object) -> tuple[Var, ...]:
    """Return the variables that a node binds."""
    return node.vars if isinstance(node, For) else (node.var,) if isinstance(node, Let) else ()


def _limit(condition: Expr, in_full: Expand, var: Var, bound: set[Var]) -> Expr | None:
    """Return `n` if the condition is `var < n` with terms that do not change within the loop; else None."""
    if not (isinstance(condition, Binary) and condition.op == "<"):
        return None
    value = in_full(condition.a)
    split = affine(value, var)
    if split is None or split[0] <= 0 or not is_compared_exactly(Binary("<", value, condition.b)):
        return None
    scale, rest = split
    for part in (rest, condition.b):
        if any(isinstance(n, Load) or n is var or n in bound for n in walk(part)):
            return None
    room = binary("-", condition.b, rest)
    return room if scale == 1 else binary("//", binary("+", room, scale - 1), scale)


def affine(expr: Expr, var: Var) -> tuple[int, Expr] | None:
    """Write `expr` as `scale * var + rest` with `rest` free of `var`; return None if it is not of that form."""
    if expr is var:
        return 1, const(0, var.type)
    if var not in symbols(expr):
        return 0, expr
    if isinstance(expr, Binary) and expr.op in ("+", "-"):
        a, b = affine(expr.a, var), affine(expr.b, var)
        if a is None or b is None:
            return None
        sign = 1 if expr.op == "+" else -1
        return a[0] + sign * b[0], binary(expr.op, a[1], b[1])
    if isinstance(expr, Binary) and expr.op == "*":
        for x, y in ((expr.a, expr.b), (expr.b, expr.a)):
            if isinstance(y, Const) and isinstance(y.value, int):
                split = affine(x, var)
                return None if split is None else (split[0] * y.value, binary("*", split[1], y))
    return None
