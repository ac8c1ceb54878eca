# SPDX-License-Identifier: Apache-2.0
"""In which iterations of a loop a branch is taken, as far as that can be computed before the loop: as masks are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from torch_tile.ir.expr import Binary, Const, Expr, Load, Var, binary, const
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import contains, find, symbols
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Block, For, If, Let
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.tileop.base import RegisteredOp


def taken_from(place: int, loop: For) -> Expr | None:
    """From which iteration on the statement at `place` of a loop's body, an `if`, is taken: in all that follow, too.

    None if that is not known before the loop, or if it is no `if` that computes something and has no other side.
    """
    return _iteration(place, loop, begins=True)


def taken_until(place: int, loop: For) -> Expr | None:
    """An iteration from which on the statement at `place` of a loop's body, such an `if`, is certainly not taken."""
    return _iteration(place, loop, begins=False)


def _iteration(place: int, loop: For, begins: bool) -> Expr | None:
    one, k = loop.body.stmts[place], loop.vars[0]
    if not isinstance(one, If) or one.otherwise.stmts or not _is_work(one.then):
        return None
    condition = one.condition
    for let in reversed([s for s in loop.body.stmts[:place] if isinstance(s, Let)]):
        condition = Instance(IdMap([(let.var, let.value)]), IdMap(), fresh=False)(condition)
    found = [_start(part, k) if begins else _until(part, k) for part in _parts(condition, "or")]
    known = [iteration for iteration in found if iteration is not None]
    if len(known) < len(found) or not _is_settled(known, loop):
        return None
    return reduce(lambda a, b: binary("min" if begins else "max", a, b), known)


def _is_work(branch: Block) -> bool:
    """Whether a branch computes something; a mere arrival at a barrier is not worth another loop."""
    return contains(branch, RegisteredOp, For)


def _parts(condition: Expr, op: str) -> Iterator[Expr]:
    if isinstance(condition, Binary) and condition.op == op:
        yield from (*_parts(condition.a, op), *_parts(condition.b, op))
    else:
        yield condition


def _until(condition: Expr, k: Var) -> Expr | None:
    """A k from which on one of the comparisons joined by `and` fails; a number, if there is one."""
    found = [iteration for part in _parts(condition, "and") if (iteration := _end(part, k)) is not None]
    return min(found, key=lambda iteration: not isinstance(iteration, Const), default=None)


def _start(comparison: Expr, k: Var) -> Expr | None:
    """The least k for which a comparison holds that holds for all larger ones, too."""
    if (line := _line(comparison, k)) is None or line[0] <= 0:
        return None
    step, rest, reaches = line
    return simplify(-(rest // step)) if reaches else simplify((-rest) // step + 1)


def _end(comparison: Expr, k: Var) -> Expr | None:
    """The least k for which a comparison fails that fails for all larger ones, too."""
    if isinstance(comparison, Binary) and comparison.op == "==" and comparison.a is k:
        return simplify(comparison.b + 1)
    if (line := _line(comparison, k)) is None or line[0] >= 0:
        return None
    step, rest, reaches = line
    return simplify(rest // -step + 1) if reaches else simplify(-((-rest) // -step))


def _line(comparison: Expr, k: Var) -> tuple[int, Expr, bool] | None:
    """A comparison as `step * k + rest` above 0, or not below it if the last of the three says so."""
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
    """Whether all threads know the values before the loop."""
    bound = {*loop.vars, *(n.var for n in find(loop, Let))}
    nodes = [n for value in values for n in find(value, Load, Var)]
    return not any(isinstance(n, Load) or n.role == "thread" or n in bound for n in nodes)
