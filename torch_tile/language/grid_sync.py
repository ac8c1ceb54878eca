# SPDX-License-Identifier: Apache-2.0
"""T.sync_grid: all blocks of a grid meet. The kernel is cut there into launches one after another.

So no block waits while it occupies a processor, and a grid may have any size on every target. Values named before the
cut are computed again behind it. A loop of a constant number of iterations is unrolled first. What tiles hold does not
survive the cut: a tile is either written anew behind it or refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch_tile.diagnostics.errors import error
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Const, Expr, Load, Var, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, children, contains, find, walk
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, For, If, Let, LoopKind, Role, Stmt, Store, While
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.roles import outermost
from torch_tile.tileop.base import RegisteredOp

MOST_TURNS = 256  # of the loops around one T.sync_grid


class GridSync(Stmt):
    """The statement of T.sync_grid. The end of T.Kernel splits the body into several kernels at it. Only recorded:
    T.Kernel's end cuts the body at it.
    """


def sync_grid() -> None:
    """Wait for all blocks of the grid; what they wrote to global memory before is visible to all after it.

    The kernel becomes launches one after another, so the grid may be larger than the GPU. Stands in the body of the
    kernel itself, or in loops of a constant number of iterations, 256 in all. In other loops and in branches it is a
    TileError. So is a tile whose content is used behind it.
    """
    at = in_kernel("T.sync_grid")
    if any(scope.what != "loop" for scope in at.scopes[1:]):
        outermost("T.sync_grid")
    at.emit(GridSync())


def cut_at_grid_syncs(body: Block, blocks: tuple[Var, ...], thread: Var) -> list[tuple[Block, tuple[Var, ...], Var]]:
    """Yield the parts of a kernel's body between T.sync_grid, each with its own block indices and thread index."""
    if contains(body, GridSync):
        body = Block(tuple(_unrolled(body, MOST_TURNS)))
    places = [n for n, stmt in enumerate(body.stmts) if isinstance(stmt, GridSync)]
    if not places:
        return [(body, blocks, thread)]
    parts: list[tuple[Block, tuple[Var, ...], Var]] = []
    for start, stop in zip([-1, *places], [*places, len(body.stmts)], strict=True):
        before, part = body.stmts[: max(start, 0)], body.stmts[start + 1 : stop]
        if not part:  # a meeting at the end, or two in a row
            continue
        again = IdMap[Node, Node]((var, replace(var)) for var in ((*blocks, thread) if parts else ()))
        opened = _opened_again(before, part)
        renamed = _Renamed(again)
        again.update((stmt.var, replace(stmt.var)) for stmt in opened if isinstance(stmt, Let))
        again.update((stmt.buffer, _made_again(stmt.buffer, renamed)) for stmt in opened if isinstance(stmt, Alloc))
        stmts = [_bound_again(renamed, stmt) for stmt in opened] + [renamed(stmt) for stmt in part]
        own = [again.get(var, var) for var in (*blocks, thread)]
        assert all(isinstance(var, Var) for var in own)
        parts.append((Block(tuple(stmts)), tuple(own[:-1]), own[-1]))  # type: ignore[arg-type]
    return parts


def _unrolled(block: Block, most: int) -> Iterator[Stmt]:
    """Yield the statements of a block, loops with a T.sync_grid turn by turn, of which there are `most` at most."""
    for stmt in block.stmts:
        if isinstance(stmt, GridSync) or not contains(stmt, GridSync):
            yield stmt
            continue
        bounds = (*stmt.starts, *stmt.stops) if isinstance(stmt, For) else ()
        is_plain = isinstance(stmt, For) and stmt.kind in (LoopKind.SERIAL, LoopKind.UNROLLED)
        if not is_plain or not all(isinstance(n, Const) for n in bounds) or contains(stmt, Break, Continue):
            meeting = next(find(stmt, GridSync))
            raise error("not_outermost", meeting.span, what="T.sync_grid", region="loop")
        assert isinstance(stmt, For)
        start, stop = (int(n.value) for n in bounds if isinstance(n, Const))
        numbers = range(start, stop, stmt.step)
        if len(numbers) > most:
            why, fix = f"has {len(numbers)} iterations", f"each is a launch: make more than {most} by calls"
            raise error("bad_argument", stmt.span, op="T.sync_grid", name="the loop", why=why, fix=fix)
        for number in numbers:
            fresh = _Fresh(IdMap([(stmt.vars[0], const(number, stmt.vars[0].dtype))]))
            yield from _unrolled(Block(tuple(map(fresh, stmt.body.stmts))), most // max(1, len(numbers)))


def _opened_again(before: tuple[Stmt, ...], part: tuple[Stmt, ...]) -> list[Let | Alloc]:
    """Return the names and tiles from before the cut that a later part needs again. Raises `lost_at_grid_sync` if it
    cannot have them.
    """
    wanted = IdSet[Node](node for stmt in part for node in walk(stmt) if node.is_symbol)
    found: list[Let | Alloc] = []
    for place in range(len(before) - 1, -1, -1):
        stmt = before[place]
        if not isinstance(stmt, Let | Alloc) or _symbol_of(stmt) not in wanted:
            continue
        if isinstance(stmt, Let):
            changed = _written(before[place:])
            reads = [load.buffer for load in find(stmt.value, Load)]
            if contains(stmt.value, Call) or any(b in changed or b.scope != "global" for b in reads):
                raise error("lost_at_grid_sync", stmt.span, name=stmt.var.name)
            wanted.update(node for node in walk(stmt.value) if node.is_symbol)
        elif stmt.buffer.scope == "global":  # a tensor at an address
            used = (stmt.init, *stmt.buffer.shape, *(stmt.buffer.strides or ()))
            wanted.update(node for value in used if value is not None for node in walk(value) if node.is_symbol)
        elif stmt.buffer.scope == "barrier" or _is_kept(stmt.buffer, part):
            raise error("lost_at_grid_sync", stmt.span, name=stmt.buffer.name)
        if isinstance(stmt, Alloc) and stmt.buffer.scope != "global":
            stmt = replace(stmt, init=None)
        found.insert(0, stmt)
    return found


def _is_kept(buffer: Buffer, stmts: tuple[Stmt, ...]) -> bool | None:
    """Return whether statements may use the old values of a tile. None if they do not, but may leave it unset."""
    for stmt in stmts:
        if not _mentions(stmt, buffer):
            continue
        if _sets_all(stmt, buffer):
            return False
        if not isinstance(stmt, If | For | While | Role):
            return True
        blocks = [getattr(stmt, name) for name in ("body", "then", "otherwise") if hasattr(stmt, name)]
        if any(_mentions(child, buffer) for child in children(stmt) if not isinstance(child, Block)):
            return True
        found = [_is_kept(buffer, block.stmts) for block in blocks]
        if any(found):
            return True
        if isinstance(stmt, If) and found == [False, False]:
            return False
    return None


def _mentions(node: Node, buffer: Buffer) -> bool:
    """Return whether a node uses a buffer."""
    return any(one is buffer for one in walk(node))


def _sets_all(stmt: Stmt, buffer: Buffer) -> bool:
    """Return whether a statement sets all of a tile, and reads nothing of it."""
    if any(load.buffer is buffer for load in find(stmt, Load)):
        return False
    if isinstance(stmt, RegisteredOp):
        reads, writes = stmt.accesses()
        return not any(r.buffer is buffer for r in reads) and any(
            w.buffer is buffer and all(_is_all(r.extent, size) for r, size in zip(w.ranges, buffer.shape, strict=True))
            for w in writes
        )
    if isinstance(stmt, Store):
        return _product(buffer.shape) == 1
    if not isinstance(stmt, For) or stmt.kind is not LoopKind.PARALLEL:
        return False
    stores = [s for s in stmt.body.stmts if isinstance(s, Store) and s.buffer is buffer]
    trips, sizes = (_product(bounds) for bounds in (stmt.stops, buffer.shape))
    return trips is not None and trips == sizes and any(_names_each(stmt, s) for s in stores)


def _names_each(loop: For, store: Store) -> bool:
    """Return whether a store's indices are the variables of the loop: each iteration has its own element."""
    return len(store.indices) == len(loop.vars) and all(any(i is v for v in loop.vars) for i in store.indices)


def _product(sizes: tuple[Expr, ...]) -> int | None:
    """Return the product of constant sizes, else None."""
    known = [int(n.value) for n in sizes if isinstance(n, Const)]
    return math.prod(known) if len(known) == len(sizes) else None


def _is_all(extent: Expr, size: Expr) -> bool:
    """Return whether an extent covers a constant size."""
    return isinstance(extent, Const) and isinstance(size, Const) and extent.value == size.value


def _written(stmts: tuple[Stmt, ...]) -> IdSet[Buffer]:
    """Return the buffers that statements may change."""
    found = IdSet[Buffer]()
    for stmt in stmts:
        for node in find(stmt, Store, RegisteredOp, Call):
            if isinstance(node, Store):
                found.add(node.buffer)
            elif isinstance(node, RegisteredOp):
                found.update(region.buffer for region in node.accesses()[1])
            else:
                found.update(n for n in walk(node) if isinstance(n, Buffer))
    return found


def _symbol_of(stmt: Let | Alloc) -> Var | Buffer:
    """Return the variable or buffer that a statement defines."""
    return stmt.var if isinstance(stmt, Let) else stmt.buffer


def _bound_again(renamed: _Renamed, stmt: Let | Alloc) -> Stmt:
    """Rewrite a statement to bind the new symbol in place of its own."""
    new = renamed.known[_symbol_of(stmt)]
    if isinstance(stmt, Let):
        assert isinstance(new, Var)
        return replace(stmt, var=new, value=renamed(stmt.value))
    assert isinstance(new, Buffer)
    return replace(stmt, buffer=new, init=None if stmt.init is None else renamed(stmt.init))


def _made_again(buffer: Buffer, renamed: _Renamed) -> Buffer:
    """Return a new buffer like another, whose sizes have their new names."""
    strides = None if buffer.strides is None else tuple(map(renamed, buffer.strides))
    return replace(buffer, shape=tuple(map(renamed, buffer.shape)), strides=strides)


class _Renamed(Rewriter):
    """Replace symbols by those that are `known` for them."""

    def __init__(self, known: IdMap[Node, Node]):
        self.known = known

    def visit_Var(self, var: Var) -> Node:
        """Return the new symbol."""
        return self.known.get(var, var)

    def visit_Buffer(self, buffer: Buffer) -> Node:
        """Return the new tile."""
        return self.known.get(buffer, buffer)


class _Fresh(_Renamed):
    """Copy statements with symbols of their own."""

    def visit_Let(self, let: Let) -> Let:
        """Name a value anew."""
        value = self(let.value)
        new = self.known[let.var] = replace(let.var)
        return Let(new, value, span=let.span)

    def visit_For(self, loop: For) -> For:
        """Copy a loop with new variables."""
        fresh = [replace(var) for var in loop.vars]
        self.known.update(zip(loop.vars, fresh, strict=True))
        new: For = self.children(loop)
        return replace(new, vars=tuple(fresh))

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """Allocate a buffer anew."""
        init = None if node.init is None else self(node.init)
        new = self.known[node.buffer] = _made_again(node.buffer, self)
        return Alloc(new, init, span=node.span)


__all__ = ["cut_at_grid_syncs", "sync_grid"]
