# SPDX-License-Identifier: Apache-2.0
"""Find reads of tiles that some path leaves partly unwritten. They may be right, if no call takes that path.

A write counts for the box that holds its elements, as in unwritten.py. It does so only where each path to the read
passes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr, Load, unary
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Node, contains
from torch_tile.ir.stmt import Break, Continue, For, If, Program, Role, Stmt, Store, While
from torch_tile.lowering.common.written_boxes import ONE, Box, InOrder, uncovered
from torch_tile.tileop import RegisteredOp


def perhaps_unwritten(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for the first such read of each tile. Kernels of roles are left out: roles share tiles."""
    found = []
    for kernel in program.kernels:
        if not contains(kernel.body, Role):
            found += _Paths(kernel).found
    return found


class _Paths(InOrder):
    """Visit a kernel in the order of its statements, and keep what each path so far has written."""

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Check the reads of a tile op, then count its writes."""
        reads, writes = op.accesses()
        self.children(op)
        for region in reads:
            self._read(region.buffer, region.starts, region.extents, op)
        for region in writes:
            self.write(region.buffer, region.starts, region.extents)
        return op

    def visit_Store(self, store: Store) -> Stmt:
        self.children(store)
        self.write(store.buffer, store.indices, [ONE] * len(store.indices))
        return store

    def visit_Load(self, load: Load) -> Any:
        self._read(load.buffer, load.indices, [ONE] * len(load.indices), load)
        return self.children(load)

    def loop_body(self, loop: For) -> None:
        """Visit the body once; what it writes counts behind the loop if all of its iterations certainly run."""
        before = self._copy()
        super().loop_body(loop)
        known = self.outer.ranges
        runs = all(known.prove(a < b) for a, b in zip(loop.starts, loop.stops, strict=True))
        if not runs or contains(loop.body, Break, Continue):
            self.written = before

    def visit_While(self, node: While) -> Stmt:
        self(node.condition)
        before = self._copy()
        self(node.body)
        self.written = before
        return node

    def visit_If(self, node: If) -> Stmt:
        """Visit both branches; what both write counts behind them."""
        self(node.condition)
        before = self._copy()
        self.visit_where(node.condition, node.then)
        then, self.written = self.written, before
        self.visit_where(unary("not", node.condition), node.otherwise)
        for buffer, boxes in then.items():
            if (others := self.written.get(buffer)) is None:  # wholly written in the other branch
                self.written[buffer] = boxes
            else:
                both = [x for x in boxes if not uncovered(x, others)] + [x for x in others if not uncovered(x, boxes)]
                self.written[buffer] = both
        return node

    def visit_where(self, condition: Expr | None, node: Node) -> None:
        """Visit a node that runs where a condition holds, unless it never does."""
        if not isinstance(condition, Const) or condition.value:
            super().visit_where(condition, node)

    def _copy(self) -> IdMap[Buffer, list[Box]]:
        """Copy what is written so far."""
        return IdMap((buffer, list(boxes)) for buffer, boxes in self.written.items())

    def _read(self, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr], node: Node) -> None:
        """Report a read of elements that some path has not written."""
        boxes, shape = self.written.get(buffer), buffer.static_shape
        if boxes is None or shape is None or not uncovered(self.outer.may_touch(starts, extents, shape), boxes):
            return
        del self.written[buffer]
        self.found.append(diagnose("perhaps_unwritten", node.span, buffer=buffer.name))
