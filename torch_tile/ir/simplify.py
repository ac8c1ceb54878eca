# SPDX-License-Identifier: Apache-2.0
"""Simplify expressions, keeping their values.

Arithmetic of int32 and int64 elements may wrap, that of indices does not (widths.py); a rule that holds for exact
numbers only is not used on what may wrap. Floating arithmetic is never reordered, and
rules for it hold for nan, infinities and -0.0. An expression that cannot be improved is returned as the same object.
Simplifying twice changes nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch_tile.ir import dtype as dt, stmt
from torch_tile.ir.bounds import NEGATED, Ranges
from torch_tile.ir.dtype import FORMATS, DType
from torch_tile.ir.expr import (
    COMPARISONS,
    LOGICAL,
    Binary,
    Cast,
    Const,
    Expr,
    Select,
    Unary,
    Var,
    binary,
    cast,
    const,
    fold,
    is_constant,
    unary,
)
from torch_tile.ir.node import Node, Rewriter, equal, map_children, with_fields
from torch_tile.ir.polynomial import EXACT, structure, widens
from torch_tile.ir.widths import SIGNED, is_compared_exactly

Sum = tuple[dict[Hashable, tuple[int, Expr]], int, int]
COMMUTATIVE = {"+", "*", "min", "max", "&", "|", "^"}


def simplify(expr: Expr, ranges: Ranges | None = None) -> Expr:
    """Simplify an expression, with the same value wherever `ranges` holds; return the same object if unchanged."""
    return Simplifier(ranges or Ranges())(expr)


def is_below(iteration: Expr, stop: Expr, natural: bool) -> Expr:
    """Compare an iteration, which is not negative if `natural`, with the end of its loop.

    If that is a quotient `x // size`, compare a product with x: a division by a size takes some 40 instructions.
    """
    if isinstance(stop, Binary) and stop.op == "min":
        return binary("and", is_below(iteration, stop.a, natural), is_below(iteration, stop.b, natural))
    if not isinstance(stop, Binary) or not divides_by_size(stop):
        return iteration < stop
    end = simplify(stop.a - (stop.b - 1))
    if natural and isinstance(end, Binary) and end.op == "max" and isinstance(end.b, Const) and end.b.value <= 0:
        end = end.a  # what is not negative is below `max(x, 0)` only where it is below `x`
    return simplify(iteration * stop.b) < end


def divides_by_size(expr: Expr) -> bool:
    """Return whether an index is a quotient by something that is known at run time only, and never negative."""
    divides = isinstance(expr, Binary) and expr.op == "//" and expr.dtype in SIGNED and not isinstance(expr.b, Const)
    return divides and Ranges().interval(expr.b).low >= 0  # type: ignore[attr-defined]


class Simplifier:
    """Apply `simplify` to many expressions at one point: children first, then rules at the node until none applies."""

    def __init__(self, ranges: Ranges):
        self.ranges = ranges
        self.done: dict[Expr, Expr] = {}

    def define(self, var: Var, value: Expr) -> Simplifier:
        """Add the fact `var = value`, which changes nothing for expressions without `var`."""
        after = Simplifier(self.ranges.define(var, value))
        after.done = dict(self.done)
        return after

    def __call__(self, e: Expr) -> Expr:
        """Return the simplified expression."""
        if isinstance(e, Const):
            return e
        known = self.done.get(e)
        if known is not None:
            return known
        new = self._children(e)
        while (better := self._step(new)) is not None:
            new = self(better)
        self.done[e] = self.done[new] = new
        return new

    def _children(self, e: Expr) -> Expr:
        """Simplify operands; an operand evaluated only under a condition is simplified given the condition."""
        if isinstance(e, Binary):
            a = self(e.a)
            b = self._simplify_where(a, e.op == "and", e.b) if e.op in LOGICAL else self(e.b)
            return e if a is e.a and b is e.b else Binary(e.op, a, b, span=e.span)
        if isinstance(e, Select):
            c = self(e.condition)
            x, y = self._simplify_where(c, True, e.a), self._simplify_where(c, False, e.b)
            same = c is e.condition and x is e.a and y is e.b
            return e if same else Select(c, x, y, span=e.span)
        return map_children(e, self._child)

    def _child(self, e: Any) -> Any:
        """Simplify a child if it is an expression."""
        return self(e) if isinstance(e, Expr) else e

    def _simplify_where(self, condition: Expr, holds: bool, e: Expr) -> Expr:
        """Simplify an expression where a condition holds, or does not hold."""
        if isinstance(e, Const):
            return e
        known = self.ranges.assume(condition if holds else unary("not", condition))
        return self(e) if known is self.ranges else Simplifier(known)(e)

    def _step(self, e: Expr) -> Expr | None:
        """Return a better expression than `e`, whose children are simple; None if no rule applies."""
        rule = _RULES.get(type(e))
        return None if rule is None or (new := rule(e, self.ranges)) is e else new


# Rules: each takes a node with simple children and returns a better one, or None.


def _var(e: Var, ranges: Ranges) -> Expr | None:
    """Replace a variable by its value if its range is a single number."""
    return ranges.value_of(e)


def _unary(e: Unary, ranges: Ranges) -> Expr | None:
    """Simplify a negation or inversion."""
    a = e.a
    if isinstance(a, Const):
        return unary(e.op, a)
    if isinstance(a, Unary) and a.op == e.op:
        return a.a
    if e.op == "not" and isinstance(a, Binary) and a.op in NEGATED:
        exact = a.op in ("==", "!=") or not a.a.dtype.is_float  # not (x < nan) is not x >= nan
        return Binary(NEGATED[a.op], a.a, a.b) if exact else None
    return _linear(e) if e.op == "-" else None


def _binary(e: Binary, ranges: Ranges) -> Expr | None:
    """Fold literals, and simplify logical operators and comparisons; hand other operators to their rules."""
    a, b = e.a, e.b
    if isinstance(a, Const) and isinstance(b, Const) and (folded := fold(e.op, a, b)) is not None:
        return folded
    if e.op in LOGICAL:
        return a if equal(a, b) else b if is_literal(a, e.op == "and") else a if is_literal(a, e.op == "or") else (
            a if is_literal(b, e.op == "and") else b if is_literal(b, e.op == "or") else None
        )  # fmt: skip
    if e.op in COMPARISONS:
        if not is_compared_exactly(e):
            return None
        return TRUE if ranges.prove(e) else FALSE if ranges.refute(e) else None
    if e.dtype.is_float:
        return _float(e)
    if isinstance(a, Const) and e.op in COMMUTATIVE:
        return Binary(e.op, b, a)
    if e.op in ("+", "-", "*"):
        return _linear(e)
    if e.op in ("//", "%"):
        return _division(e, ranges)
    return _extremum(e, ranges) if e.op in ("min", "max") else _bitwise(e)


def _float(e: Binary) -> Expr | None:
    """Simplify x * 1, 1 * x, x / 1, x - 0.0, x + -0.0, min(x, x) of floats. Not x + 0.0, which turns -0.0 into 0.0."""
    a, b = e.a, e.b
    if e.op in ("*", "/") and is_constant(b, 1.0):
        return a
    if e.op == "*" and is_constant(a, 1.0):
        return b
    if isinstance(b, Const) and b.value == 0 and e.op in ("+", "-"):
        return a if (math.copysign(1, b.value) < 0) == (e.op == "+") else None
    return a if e.op in ("min", "max") and equal(a, b) else None


def _linear(e: Expr) -> Expr | None:
    """Write an integer combination with fewer leaves: (x + 1) + 2, x * 2 + x * 3, x - x, x + 0, x * 1, x * 0."""
    if e.dtype.is_float:
        return None
    terms, constant, leaves = _terms(e)
    small = _fits(constant, e.dtype) and all(_fits(c, e.dtype) for c, _ in terms)
    after = sum(1 + (abs(c) != 1) for c, _ in terms) + (constant != 0 or not terms)
    return _combine(terms, constant, e.dtype) if small and after < leaves else None


def _division(e: Binary, ranges: Ranges) -> Expr | None:
    """Simplify a floor division or modulo."""
    a, b, quotient = e.a, e.b, e.op == "//"
    if is_constant(b, 1):
        return a if quotient else const(0, e.dtype)
    if not ranges.is_exact(e):
        return None
    found = ranges.interval(e)
    if found.is_point:
        return const(int(found.low), e.dtype)
    if e.dtype not in EXACT:
        return a if not quotient and ranges.inside(a, b) else None
    if ranges.inside(a, b):
        return const(0, e.dtype) if quotient else a
    return _division_by_constant(e, int(b.value), ranges) if isinstance(b, Const) and b.value > 1 else None


def _division_by_constant(e: Binary, c: int, ranges: Ranges) -> Expr | None:
    """Simplify a floor division or modulo by a constant."""
    a, dtype, quotient = e.a, e.dtype, e.op == "//"
    if isinstance(a, Binary) and isinstance(a.b, Const) and a.b.value > 0:
        inner = int(a.b.value)
        if quotient and a.op == "//" and _fits(inner * c, dtype):  # (x // 2) // 3
            return Binary("//", a.a, const(inner * c, dtype))
        if not quotient and a.op == "%" and inner % c == 0:  # (x % 6) % 3
            return Binary("%", a.a, e.b)
    terms, constant, _ = _terms(a)
    whole = [(f // c, x) for f, x in terms if f % c == 0]
    rest = [(f, x) for f, x in terms if f % c]
    kept = 0 if constant % c == 0 else constant
    if whole or (not quotient and kept != constant):  # (x * 6 + y) // 3, (x * 6 + y) % 3
        remainder = Binary(e.op, _combine(rest, kept, dtype), e.b)
        return _combine(whole, (constant - kept) // c, dtype) + remainder if quotient else remainder
    if not quotient:
        return None
    for g in sorted({math.gcd(f, c) for f, _ in terms} - {1}, reverse=True):  # (x * 4 + y) // 8 with 0 <= y < 4
        low = _combine([(f, x) for f, x in terms if f % g], constant % g, dtype)
        if ranges.inside(low, const(g, dtype)):
            high = [(f // g, x) for f, x in terms if f % g == 0]
            return Binary("//", _combine(high, constant // g, dtype), const(c // g, dtype))
    return None


def _extremum(e: Binary, ranges: Ranges) -> Expr | None:
    """Simplify a minimum or maximum whose operands are ordered."""
    a, b = e.a, e.b
    if not ranges.is_exact(e):
        return None
    if ranges.prove(Binary("<=", a, b)):
        return a if e.op == "min" else b
    if ranges.prove(Binary("<=", b, a)):
        return b if e.op == "min" else a
    if isinstance(a, Binary) and a.op == e.op and isinstance(b, Const) and isinstance(a.b, Const):
        pick = min if e.op == "min" else max
        return Binary(e.op, a.a, pick(a.b, b, key=lambda x: x.value))
    return None


def _bitwise(e: Binary) -> Expr | None:
    """Simplify `x & x`, `x | x`, and bitwise operators and shifts with 0."""
    if e.op in ("&", "|") and equal(e.a, e.b):
        return e.a
    if not isinstance(e.b, Const) or e.b.value != 0:
        return None
    return e.b if e.op == "&" else e.a if e.op in ("|", "^", "<<", ">>") else None


def _cast(e: Cast, ranges: Ranges) -> Expr | None:
    """Drop casts that change nothing; fold casts of constants."""
    a = e.a
    if a.dtype == e.type or isinstance(a, Const):
        new = cast(a, e.type)
        return None if isinstance(new, Cast) else new
    if isinstance(a, Cast) and is_exact(a.a.dtype, a.type):
        if a.a.dtype == e.type == dt.float8_e5m2:
            return None  # there and back saturates infinities
        low_bits = e.type.kind in ("int", "uint") and e.type.bits <= 32
        if a.type == dt.int64 and not low_bits and isinstance(a.a, Binary | Unary | Select):
            return None  # int32 arithmetic is exact in a cast to int64, and wraps in others; its low bits are the same
        # float to int saturates where int to int wraps
        through_float = a.type.is_float and not a.a.dtype.is_float and e.type.is_integer
        return cast(a.a, e.type) if not through_float or widens(a.a.dtype, e.type) else None
    return None


def _select(e: Select, ranges: Ranges) -> Expr | None:
    """Simplify a select with a known condition or equal values."""
    if isinstance(e.condition, Const):
        return e.a if e.condition.value else e.b
    if equal(e.a, e.b):
        return e.a
    if isinstance(e.condition, Unary):
        return Select(e.condition.a, e.b, e.a)
    if is_literal(e.a, True) and is_literal(e.b, False):
        return e.condition
    return unary("not", e.condition) if is_literal(e.a, False) and is_literal(e.b, True) else None


_RULES: dict[type[Expr], Callable[[Any, Ranges], Expr | None]] = {
    Var: _var, Unary: _unary, Binary: _binary, Cast: _cast, Select: _select,
}  # fmt: skip
TRUE, FALSE = const(True, dt.bool_), const(False, dt.bool_)


def is_literal(e: Expr, value: bool) -> bool:
    """Return whether `e` is the literal `value` of type bool."""
    return isinstance(e, Const) and e.dtype.kind == "bool" and bool(e.value) is value


def _fits(value: int, dtype: DType) -> bool:
    """Return whether an integer fits a dtype."""
    return dtype not in EXACT or -(1 << (dtype.bits - 1)) <= value < 1 << (dtype.bits - 1)


def is_exact(source: DType, to: DType) -> bool:
    """Return whether a cast from `source` to `to` keeps every value."""
    if source == to or not to.is_float:
        return source == to or widens(source, to)
    digits, exponent = FORMATS[to.name]
    if source.is_float:
        return FORMATS[source.name][0] <= digits and FORMATS[source.name][1] <= exponent
    needed = 1 if source.kind == "bool" else source.bits - (source.kind == "int")
    return needed <= digits and needed < 1 << (exponent - 1)


def _terms(e: Expr) -> tuple[list[tuple[int, Expr]], int, int]:
    """Split `e` into (factor, atom) pairs in order of appearance plus a constant, and its number of leaves."""
    terms, constant, leaves = _sum(e)
    return [term for term in terms.values() if term[0]], constant, leaves


def _sum(e: Expr) -> Sum:
    """Collect the terms of a sum by atom. The result is kept with the node."""
    if isinstance(e, Const):
        return {}, int(e.value), 1
    if not isinstance(e, Unary | Binary) or e.op not in ("+", "-", "*"):
        return {structure(e): (1, e)}, 0, 1
    known: Sum | None = e.__dict__.get("_sum")
    if known is None:
        known = _collected(e)
        if not any(atom is e for _, atom in known[0].values()):  # which would keep itself alive
            e.__dict__["_sum"] = known
    return known


def _collected(e: Unary | Binary) -> Sum:
    """Write a sum as terms with factors, a constant, and the number of leaves."""
    if isinstance(e, Unary):
        return _scaled(_sum(e.a), -1, 0)
    if e.op in ("+", "-"):
        (terms, constant, leaves), (others, more, count) = _sum(e.a), _sum(e.b)
        sign = 1 if e.op == "+" else -1
        terms = dict(terms)
        for key, (factor, atom) in others.items():
            before = terms.get(key)
            terms[key] = (sign * factor, atom) if before is None else (before[0] + sign * factor, before[1])
        return terms, constant + sign * more, leaves + count
    if isinstance(e.b, Const):
        return _scaled(_sum(e.a), int(e.b.value), 1)
    if isinstance(e.a, Const):
        return _scaled(_sum(e.b), int(e.a.value), 1)
    return {structure(e): (1, e)}, 0, 1


def _scaled(whole: Sum, factor: int, leaves: int) -> Sum:
    """Multiply collected terms by a factor."""
    terms, constant, count = whole
    return {k: (factor * f, atom) for k, (f, atom) in terms.items()}, factor * constant, count + leaves


def _combine(terms: list[tuple[int, Expr]], constant: int, dtype: DType) -> Expr:
    """Build the sum of the terms, positive ones first."""
    total: Expr | None = None
    for factor, atom in sorted(terms, key=lambda t: t[0] < 0):
        size = abs(factor)
        product = atom if size == 1 else Binary("*", atom, const(size, dtype))
        if total is None:
            total = product if factor > 0 else Unary("-", product)
        else:
            total = Binary("+" if factor > 0 else "-", total, product)
    if total is None:
        return const(constant, dtype)
    return total if constant == 0 else Binary("+", total, const(constant, dtype))


# Simplify programs, kernels and statements; drop branches and loops that never run. Facts about variables are carried
# through kernels, loops, branches and names. Unchanged nodes stay the same objects.

N = TypeVar("N", bound=Node)
NOTHING = stmt.Block(())


def simplify_stmt(node: N, ranges: Ranges | None = None) -> N:
    """Simplify a program, kernel or statement; return the same object if nothing improved."""
    return _Statements(ranges or Ranges())(node)  # type: ignore[no-any-return]


class _Statements(Rewriter):
    """Carry facts through roles, loops and branches. A statement without effect becomes an empty block."""

    def __init__(self, ranges: Ranges):
        self.expr = Simplifier(ranges)
        self.thread: Var | None = None

    def _ranges_here(self) -> Ranges:
        """Return the ranges at the current statement."""
        return self.expr.ranges

    def _simplify_in(self, node: N, ranges: Ranges) -> N:
        """Simplify a node under other ranges."""
        outer, self.expr = self.expr, Simplifier(ranges)
        new = self(node)
        self.expr = outer
        return new  # type: ignore[no-any-return]

    def visit_Expr(self, e: Expr) -> Expr:
        """Simplify an expression, given what holds here."""
        return self.expr(e)

    def visit_Kernel(self, k: stmt.Kernel) -> stmt.Kernel:
        """Simplify a kernel, knowing that block indices are below the grid."""
        grid = tuple(self.expr(g) for g in k.grid)
        self.thread = k.thread
        return with_fields(k, grid=grid, body=self._simplify_in(k.body, self._ranges_here().kernel(k)))

    def visit_Role(self, r: stmt.Role) -> stmt.Role:
        """Simplify a role, knowing that the thread is one of the role's."""
        if self.thread is None:
            return self.children(r)
        ranges = self._ranges_here().within(self.thread, r.first, r.first + r.count - 1)
        return with_fields(r, body=self._simplify_in(r.body, ranges))

    def visit_Block(self, b: stmt.Block) -> stmt.Block:
        """Flatten a block, and drop what follows a break or continue."""
        outer = self.expr
        stmts: list[stmt.Stmt] = []
        for s in b.stmts:
            new = self(s)
            stmts.extend(new.stmts if isinstance(new, stmt.Block) else (new,))
            if stmts and isinstance(stmts[-1], stmt.Break | stmt.Continue):
                break
        self.expr = outer
        return with_fields(b, stmts=tuple(stmts))

    def visit_Let(self, s: stmt.Let) -> stmt.Stmt:
        """Replace a name for a literal or another name by its value."""
        value = self.expr(s.value)
        self.expr = self.expr.define(s.var, value)
        return NOTHING if isinstance(value, Const | Var) else with_fields(s, value=value)

    def visit_For(self, f: stmt.For) -> stmt.Stmt:
        """Remove a loop that never runs or does nothing."""
        starts, stops = tuple(self.expr(x) for x in f.starts), tuple(self.expr(x) for x in f.stops)
        ranges = self._ranges_here()
        if any(ranges.prove(Binary(">=", a, b)) for a, b in zip(starts, stops, strict=True)):
            return NOTHING
        for var, start, stop in zip(f.vars, starts, stops, strict=True):
            ranges = ranges.loop(var, start, stop, f.step)
        body = self._simplify_in(f.body, ranges)
        return with_fields(f, starts=starts, stops=stops, body=body) if body.stmts else NOTHING

    def visit_While(self, s: stmt.While) -> stmt.Stmt:
        """Remove a loop whose condition never holds."""
        condition = self.expr(s.condition)
        if is_literal(condition, False):
            return NOTHING
        body = self._simplify_in(s.body, self._ranges_here().assume(condition))
        return with_fields(s, condition=condition, body=body)

    def visit_If(self, s: stmt.If) -> stmt.Stmt:
        """Replace a branch by one side if the condition is known."""
        condition = self.expr(s.condition)
        if isinstance(condition, Const):
            return self(s.then if condition.value else s.otherwise)  # type: ignore[no-any-return]
        then = self._simplify_in(s.then, self._ranges_here().assume(condition))
        otherwise = s.otherwise
        if otherwise.stmts:
            otherwise = self._simplify_in(otherwise, self._ranges_here().assume(unary("not", condition)))
        if not then.stmts and not otherwise.stmts:
            return NOTHING
        if not then.stmts:
            return stmt.If(self.expr(unary("not", condition)), otherwise, then)
        return with_fields(s, condition=condition, then=then, otherwise=otherwise)

    def visit_Assert(self, s: stmt.Assert) -> stmt.Stmt:
        """Remove an assertion whose condition always holds."""
        condition = self.expr(s.condition)
        return NOTHING if is_literal(condition, True) else with_fields(s, condition=condition)
