# SPDX-License-Identifier: Apache-2.0
"""Helpers on integer expressions: terms of a sum, substitution, evaluation, known divisors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.expr import (
    COMPARISONS,
    LOGICAL,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Scalar,
    Select,
    Unary,
    Var,
    const,
    extremum,
)
from torch_tile.ir.node import Rewriter, symbols
from torch_tile.ir.polynomial import EXACT


def terms_of(op: str, expr: Expr) -> Iterator[Expr]:
    """Split a chain of `op` into its operands, from left to right: `a and b and c` into those three."""
    if isinstance(expr, Binary) and expr.op == op:
        yield from terms_of(op, expr.a)
        yield from terms_of(op, expr.b)
    else:
        yield expr


# Variables replaced by expressions. A node without any of them stays the same object, and is not walked.


class Substitute(Rewriter):
    """Replace variables by their `known` expressions, by identity."""

    def __init__(self, known: Mapping[Var, Expr]):
        self.known = known

    def __call__(self, node: Any) -> Any:
        """Replace in one node. Return the same object if no such variable occurs."""
        return node if self.known.keys().isdisjoint(symbols(node)) else super().__call__(node)

    def visit_Var(self, var: Var) -> Expr:
        """Return the variable's replacement."""
        return self.known[var]


class Expand(Substitute):
    """Replace variables as Substitute does, and also variables in the replacements."""

    def __init__(self, known: Mapping[Var, Expr]):
        super().__init__(known)
        self.expanded: dict[Var, Expr] = {}

    def visit_Var(self, var: Var) -> Expr:
        """Return the variable's replacement."""
        if var not in self.expanded:
            self.expanded[var] = self(self.known[var])
        return self.expanded[var]


# The value of a scalar expression for given values of its variables: launch grids, run-time sizes, tests of rewrites.
#
# Follows the semantics at the top of expr.py: int32 and int64 do not wrap, other integers do, floats round to their
# type. Values of variables may also be symbols that compute with Python's operators, such as torch.SymInt.

Values = Mapping[Var, Scalar]
_OPERATORS: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "min": min, "max": max,
}  # fmt: skip


def evaluate(expr: Expr, values: Values) -> Scalar:
    """Compute the value of `expr`.

    Raises KeyError for a variable without a value and ZeroDivisionError for integers divided by zero. Raises
    ValueError for elements of buffers and for calls other than abs.
    """
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Var):
        return values[expr]
    if isinstance(expr, Binary):
        return _binary(expr, values)
    if isinstance(expr, Select):
        return evaluate(expr.a if evaluate(expr.condition, values) else expr.b, values)
    if isinstance(expr, Cast):
        a = evaluate(expr.a, values)
        if not isinstance(a, int | float) and expr.type in EXACT:
            return a
        if isinstance(a, float) and expr.type.is_integer:
            return dt.truncated(a, expr.type)
        return const(a, expr.type).value
    if isinstance(expr, Unary):
        a = evaluate(expr.a, values)
        return _typed(not a if expr.op == "not" else -a if expr.op == "-" else ~int(a), expr)
    if isinstance(expr, Call) and expr.name == "abs":
        return _typed(abs(evaluate(expr.args[0], values)), expr)
    raise ValueError(f"{expr!r} has no value outside a kernel")


def _binary(expr: Binary, values: Values) -> Scalar:
    """Evaluate a binary expression; `and` and `or` evaluate the second operand only if needed."""
    a = evaluate(expr.a, values)
    if expr.op in LOGICAL:
        return a if bool(a) is (expr.op == "or") else evaluate(expr.b, values)
    b = evaluate(expr.b, values)
    if expr.op == "/":
        return _typed(_quotient(float(a), float(b)), expr)
    if expr.op in ("min", "max") and expr.dtype.is_float:
        return _typed(extremum(expr.op, float(a), float(b)), expr)
    if expr.op in ("//", "%") and expr.dtype.is_float:
        return _typed(_floored(expr.op, float(a), float(b)), expr)
    return _typed(_OPERATORS[expr.op](a, b), expr)


def _quotient(a: float, b: float) -> float:
    """Divide floats as IEEE does: no exception for zero."""
    if b != 0:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


def _floored(op: str, a: float, b: float) -> float:
    """Compute `a // b` or `a % b` of floats, as torch.floor_divide and torch.remainder."""
    rest = math.nan if b == 0 or not math.isfinite(a) else math.fmod(a, b)
    short = rest != 0 and (rest < 0) != (b < 0)
    if op == "%":
        return rest + b if short else rest
    quotient = _quotient(a - rest, b) - short
    if b == 0 or quotient == 0:
        return _quotient(a, b) if b == 0 else math.copysign(0.0, _quotient(a, b))
    if not math.isfinite(quotient):
        return quotient
    return math.floor(quotient) + (quotient % 1 > 0.5)


def _typed(value: Scalar, expr: Expr) -> Scalar:
    """Convert a result to the type of `expr`."""
    if (isinstance(expr, Binary) and expr.op in COMPARISONS) or expr.dtype.kind == "bool":
        return bool(value)
    if expr.dtype in EXACT:
        return int(value) if isinstance(value, int | float) else value
    return const(value, expr.dtype).value


# A number that certainly divides an integer expression: what alignment and whole vectors are proved from.


def divisor_of(expr: Expr, ranges: Ranges | None = None) -> int:
    """Return the largest known divisor of every value of `expr`; 0 if `expr` is always 0."""
    if isinstance(expr, Const):
        return abs(int(expr.value))
    if expr.dtype not in EXACT:
        return 1  # it may wrap
    if isinstance(expr, Var):
        known = ranges.value_of(expr) if ranges is not None else None
        return expr.multiple if known is None else divisor_of(known)
    if isinstance(expr, Cast) and expr.a.dtype in EXACT:
        return divisor_of(expr.a, ranges)
    if isinstance(expr, Unary) and expr.op == "-":
        return divisor_of(expr.a, ranges)
    if isinstance(expr, Select):
        return math.gcd(divisor_of(expr.a, ranges), divisor_of(expr.b, ranges))
    if isinstance(expr, Binary):
        return _of_binary(expr.op, divisor_of(expr.a, ranges), expr.b, divisor_of(expr.b, ranges))
    return 1


def divides(by: int, expr: Expr, ranges: Ranges | None = None) -> bool:
    """Return whether `by` certainly divides `expr`."""
    return divisor_of(expr, ranges) % by == 0


def _of_binary(op: str, a: int, right: Expr, b: int) -> int:
    """Return a known divisor of a binary expression."""
    if op in ("+", "-", "min", "max", "%"):  # x % y is x minus a multiple of y
        return math.gcd(a, b)
    if op == "*":
        return a * b
    if op == "//" and isinstance(right, Const) and b and a % b == 0:
        return a // b
    if op == "<<" and isinstance(right, Const):
        return a << b
    return 1
