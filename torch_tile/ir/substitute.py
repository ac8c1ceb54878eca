# SPDX-License-Identifier: Apache-2.0
"""Variables replaced by expressions. What mentions none of them stays the same object, and is not walked over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_tile.ir.expr import Expr, Var
from torch_tile.ir.node import Rewriter, symbols


class Substitute(Rewriter):
    """Replaces variables by what is `known` of them, by identity."""

    def __init__(self, known: Mapping[int, Expr]):
        self.known = known

    def __call__(self, node: Any) -> Any:
        """The same object without such a variable."""
        return node if self.known.keys().isdisjoint(symbols(node)) else super().__call__(node)

    def visit_Var(self, var: Var) -> Expr:
        """What stands for it."""
        return self.known[id(var)]


class Expand(Substitute):
    """The same, and variables in what stands for one are replaced, too."""

    def __init__(self, known: Mapping[int, Expr]):
        super().__init__(known)
        self.expanded: dict[int, Expr] = {}

    def visit_Var(self, var: Var) -> Expr:
        """What stands for it."""
        if id(var) not in self.expanded:
            self.expanded[id(var)] = self(self.known[id(var)])
        return self.expanded[id(var)]
