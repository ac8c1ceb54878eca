# SPDX-License-Identifier: Apache-2.0
"""Which names differ between the threads of a block, and so which branches and loops only some of them take."""

from __future__ import annotations

from torch_tile.ir.expr import Expr, Var
from torch_tile.ir.node import Node, children, find, symbols
from torch_tile.ir.stmt import Block, Break, Continue, For, If, Kernel, Let, Stmt, Store, While


class Divergence:
    """The names and variables of a kernel whose value differs between threads, by identity: `mixed`.

    With `arrays`, also the arrays of threads in which such a value, or one at such a place, is stored.
    """

    def __init__(self, kernel: Kernel, arrays: bool = False):
        self.scopes = ("var", "local") if arrays else ("var",)
        self.mixed = {id(n) for n in find(kernel, Var) if n.role == "thread"}
        size = -1
        while size != len(self.mixed):
            size = len(self.mixed)
            self._spread(kernel.body, False)

    def _spread(self, node: Node, divergent: bool) -> None:
        if isinstance(node, Let) and self.is_divergent(node.value):
            self.mixed.add(id(node.var))
        elif isinstance(node, Store) and node.buffer.scope in self.scopes:
            if divergent or any(map(self.is_divergent, (*node.indices, node.value))):
                self.mixed.add(id(node.buffer))
        elif isinstance(node, If):
            divergent = divergent or self.is_divergent(node.condition)
        elif isinstance(node, For | While):
            divergent = divergent or self.parts(node)
        for child in children(node):
            if isinstance(child, Stmt):
                self._spread(child, divergent)

    def is_divergent(self, e: Expr) -> bool:
        """Whether threads of the block may see different values; registers are read alike where they decide."""
        return not self.mixed.isdisjoint(symbols(e))

    def parts(self, loop: For | While) -> bool:
        """Whether threads may be in different iterations of a loop, or leave it at different times."""
        bounds = (loop.condition,) if isinstance(loop, While) else (*loop.starts, *loop.stops)
        return any(map(self.is_divergent, bounds)) or self._leaves(loop.body, False)

    def _leaves(self, one: Stmt, divergent: bool) -> bool:
        """Whether only some threads may leave the iteration in `one`."""
        if isinstance(one, Break | Continue):
            return divergent
        if isinstance(one, If):
            divergent = divergent or self.is_divergent(one.condition)
        inside = children(one) if isinstance(one, Block | If) else ()
        return any(self._leaves(child, divergent) for child in inside if isinstance(child, Stmt))
