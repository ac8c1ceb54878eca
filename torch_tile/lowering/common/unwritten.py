# SPDX-License-Identifier: Apache-2.0
"""Find reads of tiles that no earlier statement can have written, and results of T.empty that are never used.

The check reports certain faults only: a write of any part of a tile, on any path, counts for the whole tile. The
simulator finds reads that depend on a path or on an element.
"""

from __future__ import annotations

from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import LOGICAL, Address, Binary, Load, Select, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, children, find
from torch_tile.ir.stmt import Alloc, Block, If, Kernel, Print, Program, Role, Stmt, Store, While
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.base import need_region
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm.op import Gemm

SCOPES = ("fragment", "shared", "local")


def unwritten_reads(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for the first read of each unwritten tile, and for each lost result."""
    found = [*_lost_results(program), *_unwritten_results(program)]
    for kernel in program.kernels:
        order = _Order(kernel)
        order(kernel.body)
        found += order.found
    return found


def cleared(program: Program) -> Program:
    """Return the program with each tile cleared that is read unwritten: it compiles, and must not run."""
    tiles: IdSet[Buffer] = IdSet()
    for kernel in program.kernels:
        order = _Order(kernel)
        order(kernel.body)
        tiles.update(order.tiles)
    return _Clear(tiles)(program)  # type: ignore[no-any-return]


class _Clear(Rewriter):
    """Fill tiles with 0 where they are made."""

    def __init__(self, tiles: IdSet[Buffer]):
        self.tiles = tiles

    def visit_Block(self, block: Block) -> Block:
        new: list[Stmt] = []
        for one in block.stmts:
            new.append(self(one))
            if isinstance(one, Alloc) and one.buffer in self.tiles:
                new.append(Fill(need_region(one.buffer, "fill", "buffer"), const(0, one.buffer.dtype), span=one.span))
        return Block(tuple(new), span=block.span) if len(new) != len(block.stmts) else self.children(block)


class _Order(Rewriter):
    """Visit a kernel in the order of its statements, a loop's body once.

    A read under a condition is a fault only if no statement of the kernel writes the tile at all.
    """

    def __init__(self, kernel: Kernel):
        self.found: list[Diagnostic] = []
        self.tiles: IdSet[Buffer] = IdSet()  # that `found` is about
        self.waiting: IdSet[Buffer] = IdSet()  # tiles that exist and have no write so far
        self.ever = _written_somewhere(kernel)
        self.conditional = 0

    def visit_Alloc(self, node: Alloc) -> Stmt:
        if node.buffer.scope in SCOPES and node.init is None:
            self.waiting.add(node.buffer)
        return node

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Check the reads of a tile op, then count its writes."""
        reads, writes = op.accesses()
        self.children(op)
        for region in reads:
            self._read(region.buffer, op)
        for region in writes:
            self.waiting.discard(region.buffer)
        return op

    def visit_Store(self, store: Store) -> Stmt:
        self.children(store)
        self.waiting.discard(store.buffer)
        return store

    def visit_Load(self, load: Load) -> Any:
        self._read(load.buffer, load)
        return self.children(load)

    def visit_Address(self, node: Address) -> Any:
        """Count the tile as written: the call may write there."""
        self.waiting.discard(node.buffer)
        return self.children(node)

    def visit_Print(self, node: Print) -> Stmt:
        if not hasattr(node.value, "dtype"):
            self._read(node.value.buffer, node)
        return self.children(node)

    def visit_If(self, node: If) -> Stmt:
        self(node.condition)
        self._perhaps(node.then, node.otherwise)
        return node

    def visit_While(self, node: While) -> Stmt:
        self(node.condition)
        self._perhaps(node.body)
        return node

    def visit_Role(self, node: Role) -> Stmt:
        """Visit a role as conditional: roles run at the same time, whatever their order."""
        self._perhaps(node.body)
        return node

    def visit_Select(self, node: Select) -> Any:
        self(node.condition)
        self._perhaps(node.a, node.b)
        return node

    def visit_Binary(self, node: Binary) -> Any:
        """Visit both operands, the second one of `and` and `or` as conditional."""
        self(node.a)
        if node.op in LOGICAL:
            self._perhaps(node.b)
        else:
            self(node.b)
        return node

    def _perhaps(self, *nodes: Any) -> None:
        """Visit nodes that may not run."""
        self.conditional += 1
        for node in nodes:
            self(node)
        self.conditional -= 1

    def _read(self, buffer: Buffer, node: Node) -> None:
        """Report a read of a tile that has no write before it."""
        if buffer not in self.waiting or (self.conditional and buffer in self.ever):
            return
        self.waiting.discard(buffer)
        self.tiles.add(buffer)
        adds = isinstance(node, Gemm) and node.C.buffer is buffer
        clear = f"T.clear({buffer.name})"
        fix = f"clear it first, `{clear}`, or pass clear_accum=True" if adds else f"write to it first, as by `{clear}`"
        self.found.append(diagnose("unwritten", node.span, buffer=buffer.name, fix=fix))


def _written_somewhere(kernel: Kernel) -> IdSet[Buffer]:
    """Return the tiles that some statement writes without reading them."""
    found: IdSet[Buffer] = IdSet()
    for node in find(kernel.body, RegisteredOp, Store, Address):
        if isinstance(node, RegisteredOp):
            reads, writes = node.accesses()
            read = IdSet(r.buffer for r in reads)
            found.update(r.buffer for r in writes if r.buffer not in read)
        elif isinstance(node, Address) or not _needs(node.value, node.buffer):
            found.add(node.buffer)
    return found


def _needs(value: Node, buffer: Buffer) -> bool:
    """Return whether a value is computed from a tile whatever its conditions choose."""
    if isinstance(value, Load) and value.buffer is buffer:
        return True
    if isinstance(value, Select):
        both = _needs(value.a, buffer) and _needs(value.b, buffer)
        return both or _needs(value.condition, buffer)
    return any(_needs(child, buffer) for child in children(value))


def _lost_results(program: Program) -> list[Diagnostic]:
    """Report tensors of T.empty that are written, but neither returned nor read."""
    lost = IdMap((b, b.span) for b in program.workspaces if b.origin == "empty")
    for node in (n for k in program.kernels for n in find(k.body, RegisteredOp, Store, Load, Address, Print)):
        if isinstance(node, RegisteredOp):
            reads, writes = (([r.buffer for r in side]) for side in node.accesses())
        elif isinstance(node, Store):
            reads, writes = [], [node.buffer]
        else:
            reads, writes = [n.buffer for n in find(node, Load, Address, Region)], []
        for buffer in reads:
            lost.pop(buffer.base or buffer, None)
        for buffer in (b.base or b for b in writes):
            if buffer in lost and lost[buffer] is None:
                lost[buffer] = node.span
    return [diagnose("lost_result", span, buffer=buffer.name) for buffer, span in lost.items()]


def _unwritten_results(program: Program) -> list[Diagnostic]:
    """Report tensors that are returned and that no kernel can write. A pointer to one may be written by."""
    written: IdSet[Buffer] = IdSet()
    for node in (n for k in program.kernels for n in find(k.body, RegisteredOp, Store, Address)):
        if isinstance(node, RegisteredOp):
            written.update(r.buffer.base or r.buffer for r in node.accesses()[1])
        else:
            written.add(node.buffer.base or node.buffer)
    return [diagnose("unwritten_result", b.span, buffer=b.name) for b in program.outputs if b not in written]
