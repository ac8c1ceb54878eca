# SPDX-License-Identifier: Apache-2.0
"""What a statement becomes stands in the author's file where that statement stands."""

from __future__ import annotations

from torch_tile.diagnostics.errors import Span
from torch_tile.ir.node import Rewriter, rebuilt
from torch_tile.ir.stmt import Stmt


def place_at(op: Stmt, new: Stmt) -> Stmt:
    """`new`, with the span of `op` on every statement that has none."""
    placed: Stmt = _PlaceAt(op.span)(new)
    return placed


class _PlaceAt(Rewriter):
    def __init__(self, span: Span | None):
        self.span = span

    def visit_Stmt(self, node: Stmt) -> Stmt:
        node = self.children(node)
        return node if node.span is not None else rebuilt(node, span=self.span)
