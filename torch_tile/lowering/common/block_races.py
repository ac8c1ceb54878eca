# SPDX-License-Identifier: Apache-2.0
"""Find stores of own values to one place, by all blocks of a grid or all iterations of a T.Parallel.

Only certain ones count. The value depends on the block or iteration. The place and the conditions around the store do
not, nor do they read memory. Kernels with atomic operations, calls or `break` order their blocks by themselves: left
alone. So are stores in loops that read the place, as sums do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Call, Const, Expr, Load, Var
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, contains, find
from torch_tile.ir.stmt import Alloc, Break, Continue, Do, For, If, Kernel, Let, LoopKind, Program, Stmt, Store, While
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.atomic import Atomic


def block_races(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each store by all blocks of a grid to one place, with values of their own."""
    found: list[Diagnostic] = []
    for kernel in program.kernels:
        steps = zip(kernel.blocks, kernel.grid, strict=True)
        several = [var for var, n in steps if isinstance(n, Const) and n.value > 1]
        if several and kernel.cluster == (1, 1, 1) and not _is_ordered(kernel):
            found += _OfBlocks(kernel.body, several).races
    return found


def iteration_races(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each store by all iterations of a T.Parallel to one place, with values of their own."""
    found: list[Diagnostic] = []
    for loop in find(program, For):
        if loop.kind is LoopKind.PARALLEL and not _is_ordered(loop):
            steps = zip(loop.vars, loop.stops, strict=True)
            several = [var for var, stop in steps if not isinstance(stop, Const) or stop.value > 1]
            found += _OfIterations(loop.body, several).races
    return found


def cleared_sums(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each tensor that all blocks of a grid set, and to which they add."""
    found: list[Diagnostic] = []
    for kernel in program.kernels:
        steps = zip(kernel.blocks, kernel.grid, strict=True)
        several = [var for var, n in steps if isinstance(n, Const) and n.value > 1]
        sums = IdSet(op.dst.buffer.base or op.dst.buffer for op in find(kernel.body, Atomic))
        if several and sums and kernel.cluster == (1, 1, 1) and not contains(kernel.body, Do, Break, Continue):
            found += _OfClears(kernel.body, several, sums).races
    return found


def _is_ordered(node: Kernel | For) -> bool:
    """Return whether a kernel or loop holds what may order its blocks or iterations, or skip some of them."""
    if contains(node.body, Do, Break, Continue):
        return True
    named = [op.op_name for op in find(node.body, RegisteredOp)] + [call.name for call in find(node.body, Call)]
    return any("atomic" in name or "arrive" in name for name in named)


class _OfBlocks(Rewriter):
    """Follow values that depend on block indices, a bit each, through names, tiles and loops; collect races."""

    def __init__(self, body: Stmt, several: Sequence[Var]) -> None:
        self.several = several
        # Names, on-chip buffers too, with the bits of the indices that their values depend on.
        self.names = IdMap[Any, int]((var, 1 << n) for n, var in enumerate(several))
        self.races: list[Diagnostic] = []
        self.around = 0  # bits of the conditions and bounds around the statement
        self.is_read_around = False  # whether these read memory
        self.grows = bool(several)
        while self.grows:
            self.grows, self.races = False, []
            self(body)

    def index_bits(self, *nodes: Node) -> int:
        """Return the bits of the block or iteration indices that any of the nodes depends on."""
        found = 0
        for node in nodes:
            for n in find(node, Var, Load, Region):
                found |= self.names.get(n if isinstance(n, Var) else n.buffer.base or n.buffer, 0)
        return found

    def follow(self, name: Var | Buffer, bits: int) -> None:
        """Let a name depend on more bits."""
        known = self.names.get(name, 0)
        if bits & ~known:
            self.names[name], self.grows = known | bits, True

    def visit_Let(self, node: Let) -> Stmt:
        """Follow a name."""
        self.follow(node.var, self.index_bits(node.value))
        return node

    def visit_Alloc(self, node: Alloc) -> Stmt:
        """Follow a variable's first value."""
        if node.init is not None:
            self.follow(node.buffer, self.index_bits(node.init))
        return node

    def visit_For(self, node: For) -> Stmt:
        """Follow a loop's variables; its bounds stand around the body."""
        bounds = (*node.starts, *node.stops)
        for var in node.vars:
            self.follow(var, self.index_bits(*bounds))
        return self._within(bounds, node, node.body)

    def visit_While(self, node: While) -> Stmt:
        """Visit the body under its condition."""
        return self._within((node.condition,), node, node.body)

    def visit_If(self, node: If) -> Stmt:
        """Visit both branches under the condition."""
        return self._within((node.condition,), node, node.then, node.otherwise)

    def visit_Store(self, node: Store) -> Stmt:
        """Look at the write of an element."""
        self._check_write(node, node.buffer, node.indices, [node.value])
        return node

    def visit_RegisteredOp(self, node: RegisteredOp) -> Stmt:
        """Look at the writes of a tile op."""
        reads, writes = node.accesses()
        values = [*reads, *(e for e in vars(node).values() if isinstance(e, Expr))]
        for region in writes:
            self._check_write(node, region.buffer, region.starts, values)
        return node

    def _within(self, outer: Sequence[Expr], node: Stmt, *bodies: Stmt) -> Stmt:
        """Visit bodies with what stands around them."""
        before = self.around, self.is_read_around
        self.around |= self.index_bits(*outer)
        self.is_read_around |= _reads_memory(outer)
        for body in bodies:
            self(body)
        self.around, self.is_read_around = before
        return node

    def _check_write(self, node: Stmt, buffer: Buffer, place: Sequence[Expr], values: Sequence[Node]) -> None:
        """Follow a value into a tile, or report its store to memory that all blocks or iterations share."""
        own, apart = self.index_bits(*values), self.around | self.index_bits(*place)
        if not self.is_of_all(buffer):
            self.follow(buffer.base or buffer, own | apart)
        elif own & ~apart and not self.is_read_around and not _reads_memory(place) and self.is_lost(buffer, values):
            index = next(var for n, var in enumerate(self.several) if own & ~apart & 1 << n)
            self.races.append(self.race(node, buffer.name, index.name))

    def race(self, node: Stmt, buffer: str, index: str) -> Diagnostic:
        """Return the diagnostic for a store."""
        return diagnose("block_race", node.span, buffer=buffer, index=index)

    def is_of_all(self, buffer: Buffer) -> bool:
        """Return whether all blocks write the same memory."""
        return buffer.scope == "global"

    def is_lost(self, buffer: Buffer, values: Sequence[Node]) -> bool:
        """Return whether a later store loses these values."""
        return True


class _OfClears(_OfBlocks):
    """Collect the stores of all blocks to tensors to which atomic operations add."""

    def __init__(self, body: Stmt, several: Sequence[Var], sums: IdSet[Buffer]) -> None:
        self.sums = sums
        super().__init__(body, several)

    def visit_RegisteredOp(self, node: RegisteredOp) -> Stmt:
        """Pass by the sums themselves."""
        return node if isinstance(node, Atomic) else super().visit_RegisteredOp(node)

    def _check_write(self, node: Stmt, buffer: Buffer, place: Sequence[Expr], values: Sequence[Node]) -> None:
        """Report a store to a sum by all blocks of an index."""
        if buffer.scope != "global":
            super()._check_write(node, buffer, place, values)
            return
        apart = self.around | self.index_bits(*place)
        idle = next((var for n, var in enumerate(self.several) if not apart & 1 << n), None)
        if (buffer.base or buffer) in self.sums and idle is not None and not self.is_read_around:
            self.races.append(diagnose("cleared_sum", node.span, buffer=buffer.name, index=idle.name))


class _OfIterations(_OfBlocks):
    """Follow values that depend on the indices of a T.Parallel, and collect the stores that race."""

    def race(self, node: Stmt, buffer: str, index: str) -> Diagnostic:
        """Return the diagnostic for a store."""
        return diagnose("iteration_race", node.span, buffer=buffer, index=index)

    def is_of_all(self, buffer: Buffer) -> bool:
        """Return whether all iterations write the same memory: it is no variable."""
        return buffer.scope not in ("var", "local")

    def is_lost(self, buffer: Buffer, values: Sequence[Node]) -> bool:
        """Return whether a later store loses these values: it reads no earlier ones, as sums do."""
        read = (n.buffer.base or n.buffer for each in values for n in find(each, Load, Region))
        return not any(one is (buffer.base or buffer) for one in read)


def _reads_memory(nodes: Sequence[Expr]) -> bool:
    """Return whether any of the nodes reads memory or calls a function."""
    return any(contains(each, Load, Call) for each in nodes)
