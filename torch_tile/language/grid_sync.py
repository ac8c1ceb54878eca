# SPDX-License-Identifier: Apache-2.0
"""T.sync_grid: all blocks of a grid meet. The kernel is cut there into launches one after another.

So no block waits while it occupies a processor, and a grid may have any size on every target. Values named before the
cut are computed again behind it. A loop of a constant number of iterations is unrolled first. What tiles, variables and
other values hold survives the cut in global memory: each block, or each thread, has a place of its own there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch_tile.diagnostics.errors import error
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.dtype import DType, int32
from torch_tile.ir.expr import Call, Const, Expr, Load, Var, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, children, contains, find, walk
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, For, If, Let, LoopKind, Role, Stmt, Store, While
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.roles import outermost
from torch_tile.tileop.base import RegisteredOp
from torch_tile.tileop.copy.op import Copy

TILES = ("shared", "fragment")  # scopes of what all threads of a block hold together
MOST_TURNS = 256  # of the loops around one T.sync_grid


class GridSync(Stmt):
    """The statement of T.sync_grid. The end of T.Kernel splits the body into several kernels at it. Only recorded:
    T.Kernel's end cuts the body at it.
    """


def sync_grid() -> None:
    """Wait for all blocks of the grid; what they wrote to global memory before is visible to all after it.

    The kernel becomes launches one after another, so the grid may be larger than the GPU. Stands in the body of the
    kernel itself, or in loops of a constant number of iterations, 256 in all. In other loops and in branches it is a
    TileError. So is an mbarrier that is used on both sides. Tiles and variables that are used behind it go through
    global memory.
    """
    at = in_kernel("T.sync_grid")
    if any(scope.what != "loop" for scope in at.scopes[1:]):
        outermost("T.sync_grid")
    at.emit(GridSync())


@dataclass(frozen=True)
class Launch:
    """The grid and the threads of a kernel that is cut, and what makes its workspaces."""

    grid: tuple[Expr, ...]
    blocks: tuple[Var, ...]
    thread: Var
    threads: int
    uses_thread: bool
    workspace: Callable[[tuple[Expr, ...], DType], Buffer]


def cut_at_grid_syncs(body: Block, launch: Launch) -> list[tuple[Block, tuple[Var, ...], Var]]:
    """Return the parts of a kernel's body between T.sync_grid, each with its own block indices and thread index."""
    blocks, thread = launch.blocks, launch.thread
    if contains(body, GridSync):
        body = Block(tuple(_unrolled(body, MOST_TURNS)))
    places = [n for n, stmt in enumerate(body.stmts) if isinstance(stmt, GridSync)]
    if not places:
        return [(body, blocks, thread)]
    bounds = list(zip([-1, *places], [*places, len(body.stmts)], strict=True))
    bounds = [(start, stop) for start, stop in bounds if stop - start > 1]  # not a meeting at the end, or two in a row
    texts = [body.stmts[start + 1 : stop] for start, stop in bounds]
    phases_before = [body.stmts[: max(start, 0)] for start, _ in bounds]
    opened = [_opened_again(before, text, texts) for before, text in zip(phases_before, texts, strict=True)]
    kept = _Kept(launch, texts, opened)
    parts: list[tuple[Block, tuple[Var, ...], Var]] = []
    for n, text in enumerate(texts):
        again = IdMap[Node, Node]((var, replace(var)) for var in ((*blocks, thread) if parts else ()))
        renamed = _Renamed(again)
        again.update((stmt.var, replace(stmt.var)) for stmt in opened[n] if isinstance(stmt, Let))
        again.update((stmt.buffer, _made_again(stmt.buffer, renamed)) for stmt in opened[n] if isinstance(stmt, Alloc))
        stmts = [_bound_again(renamed, kept.opened(stmt)) for stmt in opened[n]]
        stmts += [renamed(stmt) for stmt in (*kept.brought(n), *text, *kept.left(n))]
        own = [again.get(var, var) for var in (*blocks, thread)]
        assert all(isinstance(var, Var) for var in own)
        parts.append((Block(tuple(stmts)), tuple(own[:-1]), own[-1]))  # type: ignore[arg-type]
    return parts


class _Kept:
    """The tiles and values that outlive the parts of a kernel in global memory, and the copies there and back."""

    def __init__(self, launch: Launch, texts: list[tuple[Stmt, ...]], opened: list[list[Let | Alloc]]):
        self.launch, self.texts, self.names = launch, texts, opened
        self.places: IdMap[Node, Buffer] = IdMap()

    def opened(self, stmt: Let | Alloc) -> Let | Alloc:
        """Return the statement that opens a name or a tile again, whose value may have been kept."""
        if isinstance(stmt, Let) and not _is_repeatable(stmt, self.texts):
            return replace(stmt, value=Load(self.place(stmt.var), self.indices()))
        return stmt

    def brought(self, n: int) -> Iterator[Stmt]:
        """Yield the statements that bring the tiles back whose old content part `n` needs."""
        for stmt in self.names[n]:
            if isinstance(stmt, Alloc) and _is_on_chip(stmt.buffer) and self.is_needed(stmt.buffer, n):
                yield from self.copied(stmt.buffer, back=True)

    def left(self, n: int) -> Iterator[Stmt]:
        """Yield the statements that put away what a part behind part `n` needs."""
        mine = [s for s in self.texts[n] if isinstance(s, Let | Alloc)]
        for stmt in (*self.names[n], *mine):
            if isinstance(stmt, Alloc) and _is_on_chip(stmt.buffer) and self.is_needed(stmt.buffer, n + 1):
                yield from self.copied(stmt.buffer, back=False)
        for stmt in mine:
            later = any(one is stmt for names in self.names[n + 1 :] for one in names)
            if isinstance(stmt, Let) and later and not _is_repeatable(stmt, self.texts):
                yield Store(self.place(stmt.var), self.indices(), stmt.var)

    def is_needed(self, buffer: Buffer, n: int) -> bool:
        """Return whether part `n` or a later one reads a tile's contents from before part `n`."""
        return next((found for text in self.texts[n:] if (found := _is_kept(buffer, text)) is not None), False)

    def place(self, symbol: Var | Buffer) -> Buffer:
        """Return the global memory in which a tile or value outlives a part."""
        if symbol not in self.places:
            threads = const(self.launch.threads, int32)
            shared = isinstance(symbol, Buffer) and symbol.scope in TILES
            around = self.launch.grid if shared or not self.launch.uses_thread else (*self.launch.grid, threads)
            shape = symbol.shape if isinstance(symbol, Buffer) else ()
            self.places[symbol] = self.launch.workspace((*around, *shape), symbol.dtype)
        return self.places[symbol]

    def indices(self, own: tuple[Expr, ...] = ()) -> tuple[Expr, ...]:
        """Return the place of a thread's own element."""
        blocks: tuple[Expr, ...] = self.launch.blocks
        return (*blocks, self.launch.thread, *own) if self.launch.uses_thread else (*blocks, *own)

    def copied(self, buffer: Buffer, back: bool) -> Iterator[Stmt]:
        """Yield the copy of a tile, or of a thread's elements, to its place or `back`."""
        place, zero, one = self.place(buffer), const(0, int32), const(1, int32)
        if buffer.scope in TILES:
            whole = tuple(Range(zero, size) for size in buffer.shape)
            tile = Region(buffer, whole)
            away = Region(place, (*(Range(block, one) for block in self.launch.blocks), *whole))
            yield Copy(away, tile) if back else Copy(tile, away)
            return
        names = tuple(Var("i", int32, "loop") for _ in buffer.shape)
        elements = Load(place, self.indices(names)), Load(buffer, names)
        source, target = elements if back else elements[::-1]
        stmt: Stmt = Store(target.buffer, target.indices, source)
        for name, size in zip(reversed(names), reversed(buffer.shape), strict=True):
            stmt = For(LoopKind.SERIAL, (name,), (zero,), (size,), Block((stmt,)))
        yield stmt


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
            if isinstance(stmt, For | While):
                raise error("not_outermost", meeting.span, what="T.sync_grid", region="loop")
            fix = "write what is skipped under an `if` in place of T.thread_return(), and end it before T.sync_grid()"
            note = (stmt.span, "behind this only those go on that have not returned")
            raise error("not_outermost", meeting.span, [note], what="T.sync_grid", region="branch", fix=fix)
        assert isinstance(stmt, For)
        start, stop = (int(n.value) for n in bounds if isinstance(n, Const))
        numbers = range(start, stop, stmt.step)
        if len(numbers) > most:
            why, fix = f"has {len(numbers)} iterations", f"each is a launch: make more than {most} by calls"
            raise error("bad_argument", stmt.span, op="T.sync_grid", name="the loop", why=why, fix=fix)
        for number in numbers:
            fresh = _Fresh(IdMap([(stmt.vars[0], const(number, stmt.vars[0].dtype))]))
            yield from _unrolled(Block(tuple(map(fresh, stmt.body.stmts))), most // max(1, len(numbers)))


def _opened_again(
    before: tuple[Stmt, ...], part: tuple[Stmt, ...], texts: Sequence[tuple[Stmt, ...]]
) -> list[Let | Alloc]:
    """Return the names and tiles that a part after the cut needs again. Raises `lost_at_grid_sync` for mbarriers."""
    wanted = IdSet[Node](node for stmt in part for node in walk(stmt) if node.is_symbol)
    found: list[Let | Alloc] = []
    for place in range(len(before) - 1, -1, -1):
        stmt = before[place]
        if not isinstance(stmt, Let | Alloc) or _symbol_of(stmt) not in wanted:
            continue
        if isinstance(stmt, Let):
            if _is_repeatable(stmt, texts):
                wanted.update(node for node in walk(stmt.value) if node.is_symbol)
        elif stmt.buffer.scope == "global":  # a tensor at an address
            used = (stmt.init, *stmt.buffer.shape, *(stmt.buffer.strides or ()))
            wanted.update(node for value in used if value is not None for node in walk(value) if node.is_symbol)
        elif stmt.buffer.scope == "barrier":
            raise error("lost_at_grid_sync", stmt.span, name=stmt.buffer.name)
        else:
            stmt = replace(stmt, init=None)
        found.insert(0, stmt)
    return found


def _is_on_chip(buffer: Buffer) -> bool:
    """Return whether a buffer lies in shared memory or registers."""
    return buffer.scope not in ("global", "barrier")


def _is_repeatable(let: Let, texts: Sequence[tuple[Stmt, ...]]) -> bool:
    """Return whether a value may be computed again: statements of `texts` change nothing that it reads."""
    reads = [load.buffer for load in find(let.value, Load)]
    if contains(let.value, Call) or any(b.scope != "global" for b in reads):
        return False
    return not reads or not any(b in _written(text) for text in texts for b in reads)


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
