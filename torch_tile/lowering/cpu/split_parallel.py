# SPDX-License-Identifier: Apache-2.0
"""T.Parallel nests become single loops, each with the order that it needs.

A loop whose iterations are independent may be a vector loop; one that carries a value (it accumulates into a place
that does not move with the loop variable, or reads what another iteration writes) runs in order.
"""

from __future__ import annotations

from torch_tile.ir.expr import Call
from torch_tile.ir.node import Rewriter, contains, find
from torch_tile.ir.stmt import (
    Assert,
    Block,
    Break,
    Continue,
    Do,
    For,
    LoopKind,
    Print,
    Program,
    Stmt,
    While,
)
from torch_tile.tileop.parallel.carried import carried_vars


def split_parallel(program: Program) -> Program:
    """Replace PARALLEL loops by SERIAL and VECTOR ones of one variable; only innermost loops become VECTOR."""
    return _Split()(program)  # type: ignore[no-any-return]


class _Split(Rewriter):
    def visit_For(self, loop: For) -> Stmt:
        if loop.kind not in (LoopKind.PARALLEL, LoopKind.VECTOR):
            return self.children(loop)
        carried = carried_vars(loop)
        new = self.children(loop)
        body: Block = new.body
        for depth in reversed(range(len(new.vars))):
            var = new.vars[depth]
            innermost = depth == len(new.vars) - 1
            independent = not any(var is c for c in carried)
            kind = LoopKind.VECTOR if innermost and independent and is_straight(body) else LoopKind.SERIAL
            if new.kind is kind:
                return new
            made = For(kind, (var,), (new.starts[depth],), (new.stops[depth],), body, span=loop.span)
            body = Block((made,))
        return body.stmts[0]


def is_straight(body: Block) -> bool:
    """Whether a loop body has no inner loop and nothing that a vector loop cannot hold."""
    updates = any(call.name == "atomic" for call in find(body, Call))
    return not updates and not contains(body, For, While, Break, Continue, Do, Print, Assert)
