# SPDX-License-Identifier: Apache-2.0
"""Loops of products whose last iterations do something more, as causal masks do, are cut in two.

An `if` whose condition holds from some iteration on, which can be computed before the loop, is gone from the iterations
before it: what stands around it is then one piece of code, whose instructions the assembler can interleave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from ..build import Build
from ..ir import stmt as st
from ..ir.dtype import int32
from ..ir.expr import Binary, Const, Expr, Load, Var, binary, const
from ..ir.node import Rewriter, walk
from ..ir.simplify import simplify
from ..ir.stmt import Block, If, Let, LoopKind, Program, Stmt
from ..tileop.base import RegisteredOp
from ..tileop.gemm import Gemm
from .instance import Instance


def peel_branches(program: Program, build: Build) -> Program:
    """Cut loops of roles where a branch begins; values do not change."""
    return _Peel()(program) if build.target.capability == 90 else program


class _Peel(Rewriter):
    inside = False  # of a role

    def Role(self, role: st.Role) -> st.Role:
        """Loops of a role that is the compiler's."""
        self.inside = not role.by_hand
        new = self.children(role)
        self.inside = False
        return new

    def For(self, loop: st.For) -> Stmt:
        """A loop around products."""
        new: st.For = self.children(loop)
        products = any(isinstance(s, Gemm) for s in new.body.stmts)
        if not self.inside or new.kind is not LoopKind.SERIAL or new.step != 1 or not products:
            return new
        found = next(((n, first) for n in range(len(new.body.stmts)) if (first := _first(n, new)) is not None), None)
        return new if found is None else _cut(new, *found)


def _cut(loop: st.For, place: int, first: Expr) -> Block:
    """The loop without its branch up to iteration `first`, and with it from there on."""
    start, stop = loop.starts[0], loop.stops[0]
    middle = Var(f"{loop.vars[0].name}_more", int32, "let")
    stmts = loop.body.stmts
    branch = stmts[place]
    assert isinstance(branch, If)
    before = replace(loop, stops=(middle,), body=Block((*stmts[:place], *stmts[place + 1 :])))
    whole = Block((*stmts[:place], *branch.then.stmts, *stmts[place + 1 :]))
    after: st.For = Instance({}, {}, fresh=True)(replace(loop, starts=(middle,), body=whole))
    bounded = simplify(binary("max", start, binary("min", first, stop)))
    return Block((Let(middle, bounded, span=loop.span), before, after))


def _first(place: int, loop: st.For) -> Expr | None:
    """From which iteration on the condition of an `if` holds, if it is one with nothing else in it; it holds on."""
    one = loop.body.stmts[place]
    if not isinstance(one, If) or one.otherwise.stmts or not _is_work(one.then):
        return None
    condition = one.condition
    for let in reversed([s for s in loop.body.stmts[:place] if isinstance(s, Let)]):
        condition = Instance({id(let.var): let.value}, {}, fresh=False)(condition)
    starts = [_start(part, loop.vars[0]) for part in _alternatives(condition)]
    known = [s for s in starts if s is not None]
    if len(known) < len(starts) or not _is_settled(known, loop):
        return None
    return reduce(lambda a, b: binary("min", a, b), known)


def _is_work(branch: Block) -> bool:
    """Whether a branch computes something; a mere arrival at a barrier is not worth another loop."""
    return any(isinstance(n, RegisteredOp | st.For) for n in walk(branch))


def _alternatives(condition: Expr) -> Iterator[Expr]:
    if isinstance(condition, Binary) and condition.op == "or":
        yield from (*_alternatives(condition.a), *_alternatives(condition.b))
    else:
        yield condition


def _start(comparison: Expr, k: Var) -> Expr | None:
    """The least k for which a comparison holds that holds for all larger ones, too."""
    if (
        not isinstance(comparison, Binary)
        or comparison.op not in ("<", "<=", ">", ">=")
        or not comparison.a.dtype.is_integer
    ):
        return None
    a, b = (comparison.a, comparison.b) if comparison.op[0] == ">" else (comparison.b, comparison.a)
    apart = a - b  # is above, or not below, 0

    def at(turn: Expr) -> Expr:
        found: Expr = simplify(Instance({id(k): turn}, {}, fresh=False)(apart))
        return found

    step = simplify(at(k + 1) - at(k))
    rest = at(const(0, k.type))
    if not isinstance(step, Const) or step.value <= 0 or any(n is k for n in walk(rest)):
        return None
    if comparison.op in (">=", "<="):
        return simplify(-(rest // step))
    return simplify((-rest) // step + 1)


def _is_settled(values: list[Expr], loop: st.For) -> bool:
    """Whether all threads know the values before the loop."""
    bound = {id(n.var) for n in walk(loop) if isinstance(n, Let)} | {id(v) for v in loop.vars}
    nodes = [n for value in values for n in walk(value)]
    return not any(
        isinstance(n, Load) or (isinstance(n, Var) and (n.role == "thread" or id(n) in bound)) for n in nodes
    )
