# SPDX-License-Identifier: Apache-2.0
"""A variable that each iteration of a T.Parallel nest sets before it uses it becomes a variable of the iteration.

Such variables come from names that a kernel binds again. It is done where no later statement could tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load
from torch_tile.ir.node import Node, Rewriter, children, find
from torch_tile.ir.stmt import Alloc, Block, For, If, Kernel, LoopKind, Stmt, Store, While


def private_vars(kernel: Kernel) -> Kernel:
    """Give nests variables of their own where that changes no value."""
    stored = {
        id(n.buffer): n.buffer
        for loop in find(kernel, For)
        if loop.kind is LoopKind.PARALLEL
        for n in find(loop.body, Store)
        if n.buffer.scope == "var"
    }
    private = {key: buffer for key, buffer in stored.items() if _Reads(buffer).are_covered(kernel.body)}
    return _Own(private)(kernel) if private else kernel


class _Reads:
    """Whether every read of a variable sees a value set outside nests, or by its own iteration."""

    def __init__(self, buffer: Buffer):
        self.buffer = buffer
        self.covered = True

    def are_covered(self, body: Block) -> bool:
        """The answer for the whole kernel."""
        self._block(body.stmts, False)
        return self.covered

    def _block(self, stmts: Iterable[Stmt], known: bool) -> bool:
        """Whether the value is known after the statements, given whether it is before."""
        for one in stmts:
            known = self._statement(one, known)
        return known

    def _statement(self, one: Stmt, known: bool) -> bool:
        if isinstance(one, Alloc) and one.buffer is self.buffer:
            return one.init is not None
        if isinstance(one, Block):
            return self._block(one.stmts, known)
        if isinstance(one, If):
            self._reads((one.condition,), known)
            ways = [self._block(branch.stmts, known) for branch in (one.then, one.otherwise)]
            return all(ways)
        if isinstance(one, For | While):
            self._reads([c for c in children(one) if not isinstance(c, Stmt)], known)
            sets = any(n.buffer is self.buffer for n in find(one.body, Store))
            nest = isinstance(one, For) and one.kind is LoopKind.PARALLEL
            after = self._block(one.body.stmts, known and not sets)
            return known if not sets else known and after and not nest
        self._reads((one,), known)
        return known or (isinstance(one, Store) and one.buffer is self.buffer)

    def _reads(self, nodes: Iterable[Node], known: bool) -> None:
        if not known:
            self.covered &= not any(n.buffer is self.buffer for node in nodes for n in find(node, Load))


class _Own(Rewriter):
    def __init__(self, private: dict[int, Buffer]):
        self.private = private
        self.here: dict[int, Buffer] = {}

    def visit_Buffer(self, buffer: Buffer) -> Buffer:
        return self.here.get(id(buffer), buffer)

    def visit_For(self, loop: For) -> For:
        if loop.kind is not LoopKind.PARALLEL or self.here:
            return self.children(loop)
        names = {id(n.buffer): n.buffer for n in find(loop.body, Store) if id(n.buffer) in self.private}
        made_here = {id(n.buffer) for n in find(loop.body, Alloc)}  # the iteration's own already
        self.here = {key: replace(buffer) for key, buffer in names.items() if key not in made_here}
        allocs = tuple(Alloc(b, span=loop.span) for b in self.here.values())
        new: For = self.children(loop)
        self.here = {}
        return replace(new, body=Block((*allocs, *new.body.stmts))) if allocs else new
