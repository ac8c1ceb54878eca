# SPDX-License-Identifier: Apache-2.0
"""Conditions inside vectorised loops: which are the same in all steps, and when they hold in all of them."""

from __future__ import annotations

from torch_tile.ir.expr import Binary, Const, Expr, Load, Var, binary, const
from torch_tile.ir.node import contains, symbols
from torch_tile.ir.simplify import simplify
from torch_tile.ir.substitute import Substitute
from torch_tile.ir.terms import terms_of
from torch_tile.lowering.analysis.scope_facts import Known

ORDER = ("<", "<=", ">", ">=")


def in_all_steps(condition: Expr, var: Var, count: int, known: Known) -> tuple[Expr, bool] | None:
    """When `condition` holds for all `var` in [0, count), and whether it holds for none otherwise.

    None if that is not known: only conjunctions of comparisons that change evenly with `var` are understood.
    """
    whole: Expr | None = None
    same = True
    for term in terms_of("and", condition):
        found = _term(term, var, count, known)
        if found is None:
            return None
        whole = found[0] if whole is None else binary("and", whole, found[0])
        same = same and found[1]
    return None if whole is None else (whole, same)


def _term(term: Expr, var: Var, count: int, known: Known) -> tuple[Expr, bool] | None:
    if id(var) not in symbols(term):
        return term, True
    if not isinstance(term, Binary) or term.op not in ORDER or contains(term, Load):
        return None
    if not term.a.dtype.is_integer:
        return None
    first, last = (_at(term, var, n, known) for n in (0, count - 1))
    gap = binary("-", term.b, term.a) if term.op in ("<", "<=") else binary("-", term.a, term.b)
    step = simplify(binary("-", _at(gap, var, 1, known), _at(gap, var, 0, known)), known.ranges)
    even = simplify(binary("-", gap, binary("+", _at(gap, var, 0, known), binary("*", step, var))), known.ranges)
    if not isinstance(step, Const) or not isinstance(even, Const) or even.value != 0:
        return None
    if step.value == -1 and term.op in ("<", ">") and known.divides(count, _at(gap, var, 0, known)):
        return first, True  # the gap closes by less than the multiple that it is
    return (last if step.value < 0 else first), False


def _at(expr: Expr, var: Var, value: int, known: Known) -> Expr:
    return simplify(Substitute({id(var): const(value, var.type)})(expr), known.ranges)
