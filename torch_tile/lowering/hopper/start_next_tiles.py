# SPDX-License-Identifier: Apache-2.0
"""Start the first product of a block's next tile beside the last product of a tile.

A persistent block runs a shifted loop (async_wgmma.py) for each of its tiles. Its warpgroups then multiply nothing
while one tile ends and the next one starts. Operands of the next tile may come ahead. This pass then starts that
tile's first product behind the last one of the tile before, in the same turn. Turns go on from tile to tile, so that
one warpgroup stores its rows while another one multiplies. In such loops the assembler may move the wait for second
products in front of all arithmetic beside them. A mark keeps some of that arithmetic before the wait.

Behind a block's last tile the product runs for nothing, on the tiles of that tile's last step. A branch around it would
make the assembler wait for each product at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch_tile.compiler.context import Build
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.traits import Sync
from torch_tile.intrinsics.wgmma import wait_of, wgmma_wait
from torch_tile.ir import stmt as st
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import float32, int32
from torch_tile.ir.expr import Address, Const, Expr, Load, Var, binary, const, select
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Rewriter, contains, find
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, Do, If, Let, LoopKind, Program, Stmt, Store, calls
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.lowering.hopper.warp_specialize import LoopsOfRoles
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.gemm.wgmma import WgmmaResults
from torch_tile.tileop.uses import writes_of

TURNS = 4  # calls that order turns: the first and the last turn, and the start and end of each
ZERO = const(0, int32)


def start_next_tiles(program: Program, build: Build) -> Program:
    """Start products of next tiles early in the loops of roles; values do not change."""
    return _Start(build)(program) if build.target.has_wgmma else program


class _Start(LoopsOfRoles):
    """Rewrite the loops over tiles in roles that the compiler made."""

    def __init__(self, build: Build):
        self.build = build

    def visit_For(self, loop: st.For) -> Stmt:
        """Rewrite a loop over tiles whose products have the form of a shifted loop with turns."""
        new: st.For = self.children(loop)
        counts = new.kind is LoopKind.SERIAL and new.step == 1 and len(new.vars) == 1
        tile = _tile_of(new) if self.inside and counts else None
        if tile is None:
            return new
        self.build.remark(tile.first.span, "T.gemm", "of the next tile beside the last product of a tile")
        return _rotated(new, tile)


@dataclass(frozen=True)
class _Tile:
    """The statements of one tile: its first product with all waits before it, its last one, and a product's turn."""

    stmts: tuple[Stmt, ...]
    waits: tuple[Stmt, ...]
    first: Gemm
    last: Gemm
    ordering: tuple[Do, ...]  # calls that open turns, take one, pass one, and close turns
    sums: Alloc  # of the first product
    later: IdMap[Buffer, Expr]  # counts of steps, and what they are behind the tile


def _tile_of(loop: st.For) -> _Tile | None:
    """Return the parts of a loop's body; None if it has another form, or if operands do not come ahead."""
    stmts = tuple(_flat(loop.body.stmts))
    products = [s for s in stmts if isinstance(s, Gemm)]
    steps = [s for s in stmts if isinstance(s, st.For) and contains(s, Gemm)]
    ordering = _ping_pong_calls(loop)
    if len(products) != 2 or not steps or not all(s.ping_pong for s in steps) or len(ordering) != TURNS:
        return None
    first, last = products
    begin, end = stmts.index(first), stmts.index(last)
    if not all(begin < stmts.index(s) < end for s in steps) or first.wg_wait or last.wg_wait:
        return None
    if any(contains(s, Gemm) for s in stmts if s not in products and s not in steps):
        return None
    waits = tuple(s for s in stmts[:begin] if calls(s, "mbarrier_wait"))
    sums = next((s for s in stmts[:begin] if isinstance(s, Alloc) and s.buffer is first.C.buffer), None)
    if sums is None or not _is_free(first, sums, (*stmts[:begin], *stmts[end:])) or not _come_ahead(first, waits, loop):
        return None
    later = IdMap((s.buffer, s.value) for s in stmts if isinstance(s, Store) and s.buffer.scope == "var")
    stored = [s for s in find(loop.body, Store) if s.buffer.scope == "var"]
    names = IdSet(s.var for s in stmts if isinstance(s, Let))
    if any(names.any_in(s) for s in (*waits, first)) or len(stored) != len(later):
        return None
    return _Tile(stmts, waits, first, last, ordering, sums, later)


def _ping_pong_calls(loop: st.For) -> tuple[Do, ...]:
    """Return the first call of each intrinsic that orders turns of warpgroups, in their order."""
    found: dict[str, Do] = {}
    for one in find(loop.body, Do):
        traits = intrinsic_of(one)
        if traits is not None and traits.sync is Sync.TURN:
            found.setdefault(traits.name, one)
    return tuple(found.values())


def _flat(stmts: Sequence[Stmt]) -> Iterator[Stmt]:
    """Yield the statements of nested blocks in order, without the blocks."""
    for one in stmts:
        if isinstance(one, Block):
            yield from _flat(one.stmts)
        else:
            yield one


def _is_free(first: Gemm, sums: Alloc, around: Sequence[Stmt]) -> bool:
    """Return whether a tile's first product may start beside statements that are not between it and the last one."""
    touched = IdSet(b for s in around if s is not sums for b in find(s, Buffer))
    return bool(first.clear_accum) and first.C.buffer not in touched


def _come_ahead(first: Gemm, waits: Sequence[Stmt], loop: st.For) -> bool:
    """Return whether producers alone write the operands of a product, and the next tile's beside those of this one.

    Then barriers that the compiler made guard them, and counts of steps name their versions.
    """
    barriers = [n.buffer for s in waits for n in find(s, Address) if n.buffer.scope == "barrier"]
    stages = [b.shape[0] for b in barriers if b.guards is not None]
    several = all(isinstance(n, Const) and n.value > 1 for n in stages) and len(stages) == len(barriers) > 0
    counts, used = (IdSet(n.buffer for s in some for n in find(s, Load)) for some in (waits, (first,)))
    operands = IdSet([first.A.buffer, first.B.buffer])
    shared = all(b.scope == "shared" for b in operands) and not operands & writes_of(loop.body)
    return several and shared and used <= counts and all(b.scope == "var" for b in counts)


class _Held(Rewriter):
    """Keep the start of arithmetic on a result in front of waits for all products."""

    def __init__(self, result: Region):
        self.result = result

    def visit_Do(self, one: Do) -> Stmt:
        """Put the mark before a wait."""
        wait = wait_of(one)
        return one if wait is None or wait.pending else Block((WgmmaResults(self.result, held=True), one))


class _Later(Rewriter):
    """Replace loads of variables by what these hold later."""

    def __init__(self, later: IdMap[Buffer, Expr]):
        self.later = later

    def visit_Load(self, load: Load) -> Expr:
        """Return the later value."""
        found = self.later.get(load.buffer)
        return self.children(load) if found is None else found


def _rotated(loop: st.For, tile: _Tile) -> Block:
    """Build the loop that starts the next tile's first product behind a tile's last one, and the product before it."""
    wave, start, stop = loop.vars[0], loop.starts[0], loop.stops[0]
    open_, take, give, close = tile.ordering
    results = WgmmaResults(tile.first.C, span=tile.first.span)

    def at(iteration: Expr, stmts: Iterable[Stmt]) -> list[Stmt]:
        made = Instance(IdMap([(wave, iteration)]), IdMap(), fresh=True)
        return [made(one) for one in stmts]

    started = (*tile.waits, replace(tile.first, wg_wait=-1))
    *waits, product = at(start, started)
    before = If(binary("<", start, stop), Block((*waits, take, product, give)), Block(()))
    # Behind the last tile `more` is 0: the counts then name the last step of that tile.
    more = Var(f"{wave.name}_more", int32, "let")
    follow = simplify(wave + more)
    later = _Later(IdMap((count, simplify(after - 1 + more)) for count, after in tile.later.items()))
    *waits, product = (later(one) for one in at(follow, started))
    end = [
        Let(more, select(binary("<", wave + 1, stop), const(1, int32), ZERO), span=loop.span),
        *waits,
        take,
        replace(tile.last, wg_wait=-1),
        product,
        give,
        wgmma_wait(1),
        WgmmaResults(tile.last.C, span=tile.last.span),
    ]
    moved = IdSet([*tile.waits, tile.sums, open_, close])
    body: list[Stmt] = []
    for one in tile.stmts:
        if one is tile.first:
            body += [wgmma_wait(0), results]
        elif one is tile.last:
            body += end
        elif isinstance(one, st.For) and tile.first.C.buffer.dtype == float32:
            body.append(_Held(tile.first.C)(one))
        elif one not in moved:
            body.append(one)
    main = replace(loop, body=Block(tuple(body)))
    return Block((tile.sums, open_, before, main, wgmma_wait(0), results, close))
