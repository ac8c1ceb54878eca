# SPDX-License-Identifier: Apache-2.0
"""Compute the iterations of a loop that take a branch, if they are known before the loop, as for masks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from torch_tile.ir.expr import Binary, Const, Expr, Load, Var, binary, const
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import contains, find, symbols
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import For, If, Let
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.tileop.base import RegisteredOp


def taken_from(place: int, loop: For) -> Expr | None:
    """Return the first iteration from which the `if` at `place` of a loop's body is always taken.

    Return None if that is not known before the loop. Also return None if the statement is no `if`, if it computes
    nothing, or if it has an else-branch.
    """
    return _iteration(place, loop, begins=True)


def taken_until(place: int, loop: For) -> Expr | None:
    """Return an iteration from which the `if` at `place` is certainly never taken, or None as `taken_from`."""
    return _iteration(place, loop, begins=False)


def _iteration(place: int, loop: For, begins: bool) -> Expr | None:
    """Compute the iteration where a branch begins (`begins`) or ends, from the parts of its condition."""
    one, k = loop.body.stmts[place], loop.vars[0]
    if not isinstance(one, If) or one.otherwise.stmts or not contains(one.then, RegisteredOp, For):
        return None
    condition = one.condition
    for let in reversed([s for s in loop.body.stmts[:place] if isinstance(s, Let)]):
        condition = Instance(IdMap([(let.var, let.value)]), IdMap(), fresh=False)(condition)
    found = [_start(part, k) if begins else _until(part, k) for part in _parts(condition, "or")]
    known = [iteration for iteration in found if iteration is not None]
    if len(known) < len(found) or not _is_settled(known, loop):
        return None
    return reduce(lambda a, b: binary("min" if begins else "max", a, b), known)


def _parts(condition: Expr, op: str) -> Iterator[Expr]:
    """Yield the operands that `op` joins in a condition."""
    if isinstance(condition, Binary) and condition.op == op:
        yield from (*_parts(condition.a, op), *_parts(condition.b, op))
    else:
        yield condition


def _until(condition: Expr, k: Var) -> Expr | None:
    """Return a `k` from which on one of the comparisons joined by `and` fails; a constant, if there is one."""
    found = [iteration for part in _parts(condition, "and") if (iteration := _first_failing(part, k)) is not None]
    return min(found, key=lambda iteration: not isinstance(iteration, Const), default=None)


def _start(comparison: Expr, k: Var) -> Expr | None:
    """Return the least `k` from which on a comparison holds; None if it is not known."""
    if (line := _line(comparison, k)) is None or line[0] <= 0:
        return None
    step, rest, reaches = line
    return simplify(-(rest // step)) if reaches else simplify((-rest) // step + 1)


def _first_failing(comparison: Expr, k: Var) -> Expr | None:
    """Return the least `k` from which on a comparison fails; None if it is not known."""
    if isinstance(comparison, Binary) and comparison.op == "==" and comparison.a is k:
        return simplify(comparison.b + 1)
    if (line := _line(comparison, k)) is None or line[0] >= 0:
        return None
    step, rest, reaches = line
    return simplify(rest // -step + 1) if reaches else simplify(-((-rest) // -step))


def _line(comparison: Expr, k: Var) -> tuple[int, Expr, bool] | None:
    """Write a comparison as `step * k + rest > 0`; the third value says that it is `>= 0` instead."""
    if (
        not isinstance(comparison, Binary)
        or comparison.op not in ("<", "<=", ">", ">=")
        or not comparison.a.dtype.is_integer
    ):
        return None
    a, b = (comparison.a, comparison.b) if comparison.op[0] == ">" else (comparison.b, comparison.a)
    difference = a - b

    def at(iteration: Expr) -> Expr:
        found: Expr = simplify(Instance(IdMap([(k, iteration)]), IdMap(), fresh=False)(difference))
        return found

    step, rest = simplify(at(k + 1) - at(k)), at(const(0, k.type))
    if not isinstance(step, Const) or k in symbols(rest):
        return None
    return int(step.value), rest, comparison.op in (">=", "<=")


def _is_settled(values: list[Expr], loop: For) -> bool:
    """Return whether all threads know the values before the loop."""
    bound = {*loop.vars, *(n.var for n in find(loop, Let))}
    nodes = [n for value in values for n in find(value, Load, Var)]
    return not any(isinstance(n, Load) or n.role == "thread" or n in bound for n in nodes)
