# SPDX-License-Identifier: Apache-2.0
"""T.Parallel nests become single loops, each with the order that it needs.

A loop whose iterations are independent may be a vector loop; one that carries a value (it accumulates into a place
that does not move with the loop variable, or reads what another iteration writes) runs in order.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.buffer import Buffer
from ..ir.expr import Binary, Cast, Const, Expr, Load, Unary, Var
from ..ir.node import Node, Rewriter, equal, walk
from ..ir.stmt import Alloc, Assert, Block, Break, Continue, Do, For, Let, LoopKind, Print, Program, Stmt, Store, While


def split_parallel(program: Program) -> Program:
    """Replace PARALLEL loops by SERIAL and VECTOR ones of one variable; only innermost loops become VECTOR."""
    return _Split()(program)  # type: ignore[no-any-return]


class _Split(Rewriter):
    def For(self, loop: For) -> Stmt:
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
    return not any(isinstance(n, For | While | Break | Continue | Do | Print | Assert) for n in walk(body))


def carried_vars(loop: For) -> list[Var]:
    """The variables of a nest whose iterations are not independent."""
    uses = _Uses(loop)
    stores = [n for n in walk(loop.body) if isinstance(n, Store) and not uses.is_private(n.buffer)]
    accesses = [n for n in walk(loop.body) if isinstance(n, Load | Store)]
    found = []
    for var in loop.vars:
        for store in stores:
            others = [x for x in accesses if x.buffer is store.buffer and x is not store]
            moves = _moves_with(store.indices, var, uses)
            if (others and (not moves or any(not _same_place(x, store) for x in others))) or (
                not moves and uses.depends(store.value, var)
            ):
                found.append(var)
                break
    return found


class _Uses:
    """Which loop variables a value depends on, through the names bound in the body."""

    def __init__(self, loop: For):
        self.lets: dict[int, Expr] = {}
        self.private: set[int] = set()
        for node in walk(loop.body):
            if isinstance(node, Let):
                self.lets[id(node.var)] = node.value
            elif isinstance(node, Alloc):
                self.private.add(id(node.buffer))
                if node.init is not None:
                    self.lets[id(node.buffer)] = node.init

    def is_private(self, buffer: Buffer) -> bool:
        """Whether each iteration has its own."""
        return id(buffer) in self.private

    def depends(self, expr: Expr, var: Var) -> bool:
        """Whether the value may change with `var`."""
        return any(n is var or (isinstance(n, Load) and self.is_private(n.buffer)) for n in self._reach(expr))

    def _reach(self, expr: Node) -> Iterator[Node]:
        for node in walk(expr):
            yield node
            if isinstance(node, Var) and id(node) in self.lets:
                yield from self._reach(self.lets[id(node)])

    def resolve(self, expr: Expr) -> Expr:
        """The definition of a bound name, or the expression itself."""
        while isinstance(expr, Var) and id(expr) in self.lets:
            expr = self.lets[id(expr)]
        return expr


def _moves_with(indices: tuple[Expr, ...], var: Var, uses: _Uses) -> bool:
    """Whether different values of `var` certainly give different places: some index is affine in it."""
    return any(_is_affine(index, var, uses) for index in indices)


def _is_affine(expr: Expr, var: Var, uses: _Uses) -> bool:
    """`var` times a non-zero constant plus something free of `var`."""
    expr = uses.resolve(expr)
    if expr is var:
        return True
    if isinstance(expr, Cast | Unary) and getattr(expr, "op", "-") == "-":
        return _is_affine(expr.a, var, uses)
    if isinstance(expr, Binary) and expr.op in ("+", "-"):
        for a, b in ((expr.a, expr.b), (expr.b, expr.a)):
            if _is_affine(a, var, uses) and not uses.depends(b, var):
                return True
    if isinstance(expr, Binary) and expr.op == "*":
        for a, b in ((expr.a, expr.b), (expr.b, expr.a)):
            if _is_affine(a, var, uses) and isinstance(b, Const) and b.value:
                return True
    return False


def _same_place(a: Load | Store, b: Store) -> bool:
    return equal(a.indices, b.indices)
