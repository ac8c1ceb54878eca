# SPDX-License-Identifier: Apache-2.0
"""Find reads of tiles of which a part has no write before it on some path. They may be right: nobody knows the path.

A write counts for the box that holds its elements, as in unwritten.py, but only where each path to the read passes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import LOGICAL, Address, Binary, Const, Expr, Load, Select, unary
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Node, Rewriter, contains, contents
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, For, If, Kernel, Let, Program, Role, Stmt, Store, While
from torch_tile.lowering.common.unwritten import SCOPES, ranges_of
from torch_tile.lowering.common.written_boxes import MOST, ONE, Box, Scopes, missing
from torch_tile.tileop import RegisteredOp

Written = IdMap[Buffer, list[Box]]


def perhaps_unwritten(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for the first such read of each tile. Kernels of roles are left out: roles share tiles."""
    found = []
    for kernel in program.kernels:
        if not contains(kernel.body, Role):
            paths = _Paths(kernel)
            paths(kernel.body)
            found += paths.found
    return found


class _Paths(Rewriter):
    """Visit a kernel in the order of its statements, and keep what each path so far has written."""

    def __init__(self, kernel: Kernel):
        self.found: list[Diagnostic] = []
        self.written: Written = IdMap()  # of the tiles that are not wholly written yet
        self.outer = Scopes(ranges_of(kernel))

    def __call__(self, node: Any) -> Any:
        """Skip values that read no memory."""
        plain = isinstance(node, Expr) and not contents(node) & (Load.bit | Address.bit)
        return node if plain else super().__call__(node)

    def visit_Alloc(self, node: Alloc) -> Stmt:
        if node.buffer.scope in SCOPES and node.init is None:
            self.written[node.buffer] = []
        return node

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Check the reads of a tile op, then count its writes."""
        reads, writes = op.accesses()
        self.children(op)
        for region in reads:
            self._read(region.buffer, region.starts, region.extents, op)
        for region in writes:
            self._write(region.buffer, region.starts, region.extents)
        return op

    def visit_Store(self, store: Store) -> Stmt:
        self.children(store)
        self._write(store.buffer, store.indices, [ONE] * len(store.indices))
        return store

    def visit_Load(self, load: Load) -> Any:
        self._read(load.buffer, load.indices, [ONE] * len(load.indices), load)
        return self.children(load)

    def visit_Address(self, node: Address) -> Any:
        """Count the tile as written: the call may write there."""
        self.written.pop(node.buffer, None)
        return self.children(node)

    def visit_Block(self, block: Block) -> Block:
        """Visit statements in order, each with the names before it."""
        depth = len(self.outer)
        for one in block.stmts:
            self(one)
            if isinstance(one, Let):
                self.outer.name(one)
        self.outer.leave(depth)
        return block

    def visit_For(self, loop: For) -> Stmt:
        """Visit the body once; what it writes counts behind the loop if all of its iterations certainly run."""
        for value in (*loop.starts, *loop.stops):
            self(value)
        before, depth = self._copy(), len(self.outer)
        self.outer.enter_loop(loop)
        self(loop.body)
        self.outer.leave(depth)
        known = self.outer.ranges
        runs = all(known.prove(a < b) for a, b in zip(loop.starts, loop.stops, strict=True))
        if not runs or contains(loop.body, Break, Continue):
            self.written = before
        return loop

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
        self._under(node.condition, node.then)
        then, self.written = self.written, before
        self._under(unary("not", node.condition), node.otherwise)
        for buffer, boxes in then.items():
            if (others := self.written.get(buffer)) is None:  # wholly written in the other branch
                self.written[buffer] = boxes
            else:
                both = [x for x in boxes if not missing(x, others)] + [x for x in others if not missing(x, boxes)]
                self.written[buffer] = both
        return node

    def visit_Select(self, node: Select) -> Any:
        self(node.condition)
        self._under(node.condition, node.a)
        self._under(unary("not", node.condition), node.b)
        return node

    def visit_Binary(self, node: Binary) -> Any:
        """Visit both operands, the second one of `and` and `or` under the first."""
        self(node.a)
        if node.op in LOGICAL:
            self._under(node.a if node.op == "and" else unary("not", node.a), node.b)
        else:
            self(node.b)
        return node

    def _under(self, condition: Expr, node: Node) -> None:
        """Visit a node that runs where a condition holds."""
        if isinstance(condition, Const) and not condition.value:
            return
        depth = len(self.outer)
        self.outer.enter(lambda known: known.assume(condition))
        self(node)
        self.outer.leave(depth)

    def _copy(self) -> Written:
        """Copy what is written so far."""
        return IdMap((buffer, list(boxes)) for buffer, boxes in self.written.items())

    def _write(self, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr]) -> None:
        """Count a write."""
        boxes, shape = self.written.get(buffer), buffer.static_shape
        if boxes is None:
            return
        if shape is not None and len(boxes) < MOST:
            boxes.append(self.outer.may_touch(starts, extents, shape))
            if missing(tuple((0, n) for n in shape), boxes):
                return
        del self.written[buffer]

    def _read(self, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr], node: Node) -> None:
        """Report a read of elements that some path has not written."""
        boxes, shape = self.written.get(buffer), buffer.static_shape
        if boxes is None or shape is None or not missing(self.outer.may_touch(starts, extents, shape), boxes):
            return
        del self.written[buffer]
        self.found.append(diagnose("perhaps_unwritten", node.span, buffer=buffer.name))
