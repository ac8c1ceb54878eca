# SPDX-License-Identifier: Apache-2.0
"""Find reads of tiles that no earlier statement can have written, and results of T.empty that are never used.

The check reports certain faults only: a write on any path counts, for the box that holds all of its elements. A read of
an element outside of these boxes is a fault where its value reaches a tensor or condition. So it is where it reaches a
sum along the element's row. Values that are dropped beyond a tensor may be garbage. The simulator finds reads that
depend on a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Expr, Load, Select, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, children, contains, equal, find
from torch_tile.ir.stmt import (
    Alloc,
    Block,
    Break,
    Continue,
    For,
    Kernel,
    Let,
    LoopKind,
    Print,
    Program,
    Role,
    Stmt,
    Store,
    While,
)
from torch_tile.lowering.common.written_boxes import ONE, Box, InOrder, uncovered
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.base import need_region
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.reduce.op import Reduce
from torch_tile.tileop.results import needed


def unwritten_reads(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for the first read of each unwritten tile, and for each lost result."""
    found = _lost_results(program)
    for kernel in program.kernels:
        found += _Order(kernel).found
    return found


def cleared(program: Program) -> Program:
    """Return the program with each tile cleared that is read unwritten: it compiles, and must not run."""
    tiles: IdSet[Buffer] = IdSet()
    for kernel in program.kernels:
        tiles.update(_Order(kernel).tiles)
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


class _Order(InOrder):
    """Find certain reads of unwritten elements; conditional ones only where no statement writes the tile."""

    def __init__(self, kernel: Kernel):
        self.tiles: IdSet[Buffer] = IdSet()  # that `found` is about
        self.ever = _written_somewhere(kernel)
        self.conditional = 0
        self.partly = 0  # loops around whose iterations may end early
        self.dropped = False  # whether the values that are visited may change nothing
        super().__init__(kernel)

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Check the reads of a tile op, then count its writes."""
        reads, writes = op.accesses()
        self._may_be_dropped(op, True)
        for region in reads:
            self._report_read(region.buffer, op)
            if region.buffer in self.written and self._reaches(op, region):
                self._read_part(region.buffer, region.starts, region.extents, op)
        garbage: list[Box] = []
        if isinstance(op, Copy) and equal(op.src.ranges, op.dst.ranges):
            garbage = self._lost(op.src.buffer, op.src.starts, op.src.extents, op)
        for region in writes:
            self.write(region.buffer, region.starts, region.extents, garbage)
        return op

    def visit_Store(self, store: Store) -> Stmt:
        on_chip = store.buffer.scope != "global"
        self._may_be_dropped(store, on_chip or (bool(self.written) and not self._stays_inside(store)))
        if store.buffer in self.written:
            same = [load for load in needed(store.value) if equal(load.indices, store.indices)]
            one = [ONE] * len(store.indices)
            garbage = [box for load in same for box in self._lost(load.buffer, load.indices, one, load)]
            self.write(store.buffer, store.indices, one, garbage)
        return store

    def visit_Load(self, load: Load) -> Any:
        self._report_read(load.buffer, load)
        if load.buffer in self.written and not self.dropped:
            self._read_part(load.buffer, load.indices, [ONE] * len(load.indices), load)
        return self.children(load)

    def visit_Print(self, node: Print) -> Stmt:
        if isinstance(node.value, Region):
            self._report_read(node.value.buffer, node)
        return self.children(node)

    def visit_Let(self, let: Let) -> Stmt:
        """Visit a named value, whose uses are not looked for."""
        self._may_be_dropped(let, True)
        return let

    def loop_body(self, loop: For) -> None:
        """Visit the body once; where an iteration may end early, it is one that may not run."""
        early = contains(loop.body, Break, Continue)
        self.partly += early
        super().loop_body(loop)
        self.partly -= early

    def visit_While(self, node: While) -> Stmt:
        self(node.condition)
        self.visit_where(None, node.body)
        return node

    def visit_Role(self, node: Role) -> Stmt:
        """Visit a role as conditional: roles run at the same time, whatever their order."""
        self.visit_where(None, node.body)
        return node

    def visit_where(self, condition: Expr | None, node: Node) -> None:
        """Visit a node that may not run, or only where a condition holds."""
        self.conditional += 1
        super().visit_where(condition, node)
        self.conditional -= 1

    def _may_be_dropped(self, node: Node, dropped: bool) -> None:
        """Visit the values of a statement that perhaps has no effect outside of the tiles."""
        before, self.dropped = self.dropped, self.dropped or dropped
        self.children(node)
        self.dropped = before

    def _stays_inside(self, store: Store) -> bool:
        """Return whether the indices of a store certainly lie in the bounds of its tensor."""
        known = self.outer.ranges
        return all(known.inside(i, n) for i, n in zip(store.indices, store.buffer.shape, strict=True))

    def _reaches(self, op: RegisteredOp, region: Region) -> bool:
        """Return whether each element of a region that an operation reads certainly changes its result."""
        if isinstance(op, Copy):
            return op.dst.buffer.scope == "global" and self.outer.stays_inside(op.dst)
        return isinstance(op, Reduce) and region is op.src

    def _read_part(self, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr], node: Node) -> None:
        """Report a certain read of elements that have no write before it."""
        if self._lost(buffer, starts, extents, node):
            del self.written[buffer]
            self.tiles.add(buffer)
            self.found.append(diagnose("unwritten_element", node.span, buffer=buffer.name))

    def _lost(self, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr], node: Node) -> list[Box]:
        """Return elements that `node` certainly reads and that have no write before it."""
        boxes, loops = self.written.get(buffer), self.outer.loops
        if boxes is None or self.conditional or self.partly:
            return []
        # The first turns of the loops around see no later write of their bodies, but those of the same nest.
        nest = next((n for n in loops if n.kind is LoopKind.PARALLEL), None)
        for first, around in ((True, nest), (False, loops[0] if loops else None)):
            box = self.outer.certainly_reads(starts, extents, first)
            if box is None or (around is not None and _writes_elsewhere(around, buffer, node)):
                continue
            lost = [x for x in uncovered(box, boxes) if not isinstance(node, Reduce) or _is_mixed(x, box, node)]
            if lost:
                return lost
        return []

    def _report_read(self, buffer: Buffer, node: Node) -> None:
        """Report a read of a tile that has no write before it."""
        if self.written.get(buffer) != [] or (self.conditional and buffer in self.ever):
            return
        del self.written[buffer]
        self.tiles.add(buffer)
        adds = isinstance(node, Gemm) and node.C.buffer is buffer
        clear = f"T.clear({buffer.name})"
        fix = f"clear it first, `{clear}`, or pass clear_accum=True" if adds else f"write to it first, as by `{clear}`"
        if isinstance(node, Copy) and node.dst.buffer.scope == "global" and buffer not in self.ever:
            fix += (
                f"; if it is to be filled, turn the copy: the source comes first, T.copy({node.dst.buffer.name}[...], "
            )
            fix += f"{buffer.name})"
        self.found.append(diagnose("unwritten", node.span, buffer=buffer.name, fix=fix))


def _writes_elsewhere(loop: For, buffer: Buffer, node: Node) -> bool:
    """Return whether a loop's body writes to a tile at other indices than `node` reads."""
    at = node.indices if isinstance(node, Load) else None
    for one in find(loop.body, RegisteredOp, Store, Address):
        if isinstance(one, RegisteredOp):
            if any(region.buffer is buffer for region in one.accesses()[1]):
                return True
        elif one.buffer is buffer and not (isinstance(one, Store) and at is not None and equal(one.indices, at)):
            return True
    return False


def _is_mixed(part: Box, box: Box, op: Reduce) -> bool:
    """Return whether a part of the source shares sums with other elements. Other sums may be used by nobody."""
    return part[op.dim] != box[op.dim] or part == box or len(box) != len(op.src.tile_shape)


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
            if len(IdSet(writes)) == 1:  # what an update reads of its own result is no use of it
                reads = [b for b in reads if b is not writes[0]]
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
