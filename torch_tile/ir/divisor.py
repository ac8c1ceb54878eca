# SPDX-License-Identifier: Apache-2.0
"""A number that certainly divides an integer expression: what alignment and whole vectors are proved from."""

from __future__ import annotations

import math

from torch_tile.ir.bounds import Ranges
from torch_tile.ir.expr import Binary, Cast, Const, Expr, Select, Unary, Var
from torch_tile.ir.polynomial import EXACT


def divisor_of(expr: Expr, ranges: Ranges | None = None) -> int:
    """The largest known divisor of every value of `expr`; 0 if it is always 0, which everything divides."""
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
    """Whether `by` certainly divides `expr`."""
    return divisor_of(expr, ranges) % by == 0


def _of_binary(op: str, a: int, right: Expr, b: int) -> int:
    if op in ("+", "-", "min", "max", "%"):  # x % y is x minus a multiple of y
        return math.gcd(a, b)
    if op == "*":
        return a * b
    if op == "//" and isinstance(right, Const) and b and a % b == 0:
        return a // b
    if op == "<<" and isinstance(right, Const):
        return a << b
    return 1
