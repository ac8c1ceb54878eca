# SPDX-License-Identifier: Apache-2.0
"""Find stores of own values to one place, by all blocks of a grid or all iterations of a T.Parallel.

Only certain ones count. The value depends on the block or iteration. The place and the conditions around the store do
not, nor do they read memory. Kernels with atomic operations, calls or `break` order their blocks by themselves: left
alone. So are stores in loops that read the place, as sums do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Call, Const, Expr, Load, Var
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Node, Rewriter, contains, find
from torch_tile.ir.stmt import Alloc, Break, Continue, Do, For, If, Kernel, Let, LoopKind, Program, Stmt, Store, While
from torch_tile.tileop import RegisteredOp


def block_races(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each store by all blocks of a grid to one place, with values of their own."""
    found: list[Diagnostic] = []
    for kernel in program.kernels:
        several = [v for v, n in zip(kernel.blocks, kernel.grid, strict=True) if isinstance(n, Const) and n.value > 1]
        if not several or kernel.cluster != (1, 1, 1) or _is_ordered(kernel):
            continue
        flow = _OfBlocks([*kernel.blocks])
        while flow.pass_over(kernel):
            pass
        found += flow.races
    return found


def iteration_races(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each store by all iterations of a T.Parallel to one place, with values of their own."""
    found: list[Diagnostic] = []
    for loop in find(program, For):
        if loop.kind is not LoopKind.PARALLEL or _is_ordered(loop):
            continue
        for var, stop in zip(loop.vars, loop.stops, strict=True):
            if isinstance(stop, Const) and stop.value < 2:
                continue
            flow = _OfIterations([var])
            while flow.pass_over(loop):
                pass
            found += flow.races
    return found


def _is_ordered(node: Kernel | For) -> bool:
    """Return whether a kernel or loop holds what may order its blocks or iterations, or skip some of them."""
    if contains(node.body, Do, Break, Continue):
        return True
    named = [op.op_name for op in find(node.body, RegisteredOp)] + [call.name for call in find(node.body, Call)]
    return any("atomic" in name or "arrive" in name for name in named)


class _OfBlocks(Rewriter):
    """Follow values that depend on the block through names, tiles and loops; collect the stores that race."""

    def __init__(self, blocks: Iterable[Var]) -> None:
        self.names: IdSet[Any] = IdSet(blocks)  # names and on-chip buffers whose values depend on the block
        self.races: list[Diagnostic] = []
        self.around: list[Node] = []  # conditions and bounds around the statement

    def pass_over(self, node: Kernel | For) -> bool:
        """Visit the statements once; return whether more names than before depend on the block."""
        before, self.races = len(self.names), []
        self(node.body)
        return len(self.names) > before

    def depends(self, *nodes: Node) -> bool:
        """Return whether any of the nodes reads a name, or a tile, that depends on the block."""
        read = (n for node in nodes for n in find(node, Var, Load, Region))
        return any((n if isinstance(n, Var) else n.buffer.base or n.buffer) in self.names for n in read)

    def visit_Let(self, node: Let) -> Stmt:
        """Follow a name."""
        if self.depends(node.value):
            self.names.add(node.var)
        return node

    def visit_Alloc(self, node: Alloc) -> Stmt:
        """Follow a variable's first value."""
        if node.init is not None and self.depends(node.init):
            self.names.add(node.buffer)
        return node

    def visit_For(self, node: For) -> Stmt:
        """Follow a loop's variables; its bounds stand around the body."""
        bounds = (*node.starts, *node.stops)
        if self.depends(*bounds):
            for var in node.vars:
                self.names.add(var)
        return self._within(bounds, node, node.body)

    def visit_While(self, node: While) -> Stmt:
        """Visit the body under its condition."""
        return self._within((node.condition,), node, node.body)

    def visit_If(self, node: If) -> Stmt:
        """Visit both branches under the condition."""
        return self._within((node.condition,), node, node.then, node.otherwise)

    def visit_Store(self, node: Store) -> Stmt:
        """Look at the write of an element."""
        self._write(node, node.buffer, node.indices, [node.value])
        return node

    def visit_RegisteredOp(self, node: RegisteredOp) -> Stmt:
        """Look at the writes of a tile op."""
        reads, writes = node.accesses()
        values = [*reads, *(e for e in vars(node).values() if isinstance(e, Expr))]
        for region in writes:
            self._write(node, region.buffer, region.starts, values)
        return node

    def _within(self, outer: Iterable[Node], node: Stmt, *bodies: Stmt) -> Stmt:
        """Visit bodies with what stands around them."""
        depth = len(self.around)
        self.around += outer
        for body in bodies:
            self(body)
        del self.around[depth:]
        return node

    def _write(self, node: Stmt, buffer: Buffer, place: Sequence[Expr], values: Sequence[Node]) -> None:
        """Follow a value into a tile, or report its store to memory of all blocks."""
        own, apart = self.depends(*values), self.depends(*self.around, *place)
        if buffer.scope != "global":
            if own or apart:
                self.names.add(buffer.base or buffer)
        elif own and not apart and not any(contains(each, Load, Call) for each in (*self.around, *place)):
            self.races.append(diagnose("block_race", node.span, buffer=buffer.name))


class _OfIterations(_OfBlocks):
    """Follow values that depend on one index of a T.Parallel, and collect the stores that race."""

    def _write(self, node: Stmt, buffer: Buffer, place: Sequence[Expr], values: Sequence[Node]) -> None:
        """Follow a value into a variable of the iteration, or report its store to memory of all."""
        own, apart = self.depends(*values), self.depends(*self.around, *place)
        if buffer.scope in ("var", "local"):
            if own or apart:
                self.names.add(buffer.base or buffer)
        elif own and not apart and not any(contains(each, Load, Call) for each in (*self.around, *place)):
            read = (n.buffer.base or n.buffer for each in values for n in find(each, Load, Region))
            if not any(one is (buffer.base or buffer) for one in read):
                self.races.append(diagnose("iteration_race", node.span, buffer=buffer.name))
