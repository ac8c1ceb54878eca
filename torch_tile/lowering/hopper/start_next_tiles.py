# SPDX-License-Identifier: Apache-2.0
"""Start the first product of a block's next tile beside the last product of a tile.

A persistent block runs a shifted loop (async_wgmma.py) for each of its output tiles: S0; then S1 beside P0, S2 beside
P1, and so on; last P. S and P are the products of one step, as those of attention. The tensor cores idle where one tile
ends and the next one starts. If the producers copy the next tile's operands ahead, this pass rewrites the loop:

    for tile in ...:                     start S0 of the first tile
        S0; the shifted loop; last P     for tile in ...:
        store the rows of the tile           wait for S0; the shifted loop
                                             last P; S0 of the next tile, in the same turn
                                             wait for P; store the rows of the tile

Warpgroups keep their turns from tile to tile, so that one stores its rows while another one multiplies. The assembler
may move the wait for P in front of all arithmetic beside it. A mark keeps some of that arithmetic before the wait.

Behind a block's last tile S0 runs for nothing, on operands of that tile's last step. A branch around it would make the
assembler wait for each product at once.
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
    """Start the first product of each next tile early, in loops over tiles of consumers. Values do not change."""
    return _StartEarly(build)(program) if build.target.has_wgmma else program


class _StartEarly(LoopsOfRoles):
    """Rewrite the loops over tiles in roles that the compiler made."""

    def __init__(self, build: Build):
        self.build = build

    def visit_For(self, loop: st.For) -> Stmt:
        """Rewrite a loop over tiles that holds a shifted loop with turns."""
        new: st.For = self.children(loop)
        is_counted = new.kind is LoopKind.SERIAL and new.step == 1 and len(new.vars) == 1
        tile = _tile_of(new) if self.inside and is_counted else None
        if tile is None:
            return new
        self.build.remark(tile.first.span, "T.gemm", "of the next tile beside the last product of a tile")
        return _build(new, tile)


@dataclass(frozen=True)
class _Tile:
    """The statements of one tile, with the parts that move."""

    stmts: tuple[Stmt, ...]
    waits: tuple[Stmt, ...]  # for operands, before the first product
    first: Gemm
    last: Gemm
    order_calls: tuple[Do, ...]  # calls that open turns, take one, pass one, and close turns
    sums: Alloc  # of the first product
    behind: IdMap[Buffer, Expr]  # the values of counts of steps behind the tile


def _tile_of(loop: st.For) -> _Tile | None:
    """Return the parts of a loop's body; None if it has another form, or if operands do not come ahead."""
    stmts = tuple(_flat(loop.body.stmts))
    products = [s for s in stmts if isinstance(s, Gemm)]
    steps = [s for s in stmts if isinstance(s, st.For) and contains(s, Gemm)]
    order_calls = _ping_pong_calls(loop)
    if len(products) != 2 or not steps or not all(s.ping_pong for s in steps) or len(order_calls) != TURNS:
        return None
    first, last = products
    begin, end = stmts.index(first), stmts.index(last)
    if not all(begin < stmts.index(s) < end for s in steps) or first.wg_wait or last.wg_wait:
        return None
    if any(contains(s, Gemm) for s in stmts if s not in products and s not in steps):
        return None
    waits = tuple(s for s in stmts[:begin] if calls(s, "mbarrier_wait"))
    sums = next((s for s in stmts[:begin] if isinstance(s, Alloc) and s.buffer is first.C.buffer), None)
    if (
        sums is None
        or not _are_untouched(first, sums, (*stmts[:begin], *stmts[end:]))
        or not _are_copied_ahead(first, waits, loop)
    ):
        return None
    behind = IdMap((s.buffer, s.value) for s in stmts if isinstance(s, Store) and s.buffer.scope == "var")
    # In the next tile, names of this one and counts that are also stored elsewhere have no known value.
    stored = [s for s in find(loop.body, Store) if s.buffer.scope == "var"]
    names = IdSet(s.var for s in stmts if isinstance(s, Let))
    if any(names.any_in(s) for s in (*waits, first)) or len(stored) != len(behind):
        return None
    return _Tile(stmts, waits, first, last, order_calls, sums, behind)


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


def _are_untouched(first: Gemm, sums: Alloc, around: Sequence[Stmt]) -> bool:
    """Return whether statements `around` a tile's products leave the sums of its first one alone."""
    touched = IdSet(b for s in around if s is not sums for b in find(s, Buffer))
    return bool(first.clear_accum) and first.C.buffer not in touched


def _are_copied_ahead(first: Gemm, waits: Sequence[Stmt], loop: st.For) -> bool:
    """Return whether producers copy a product's operands ahead, the next tile's beside those of this one.

    The operands then have several versions, by counts of steps, and mbarriers that the compiler made guard these.
    """
    barriers = [n.buffer for s in waits for n in find(s, Address) if n.buffer.scope == "barrier"]
    stages = [b.shape[0] for b in barriers if b.guards is not None]
    several = all(isinstance(n, Const) and n.value > 1 for n in stages) and len(stages) == len(barriers) > 0
    counts, used = (IdSet(n.buffer for s in some for n in find(s, Load)) for some in (waits, (first,)))
    operands = IdSet([first.A.buffer, first.B.buffer])
    shared = all(b.scope == "shared" for b in operands) and not operands & writes_of(loop.body)
    return several and shared and used <= counts and all(b.scope == "var" for b in counts)


class _KeepBeforeWaits(Rewriter):
    """Keep the start of arithmetic on a result in front of waits for all products."""

    def __init__(self, result: Region):
        self.result = result

    def visit_Do(self, one: Do) -> Stmt:
        """Put the mark before a wait."""
        wait = wait_of(one)
        return one if wait is None or wait.pending else Block((WgmmaResults(self.result, held=True), one))


class _Replace(Rewriter):
    """Replace loads of variables by their values at another place."""

    def __init__(self, values: IdMap[Buffer, Expr]):
        self.values = values

    def visit_Load(self, load: Load) -> Expr:
        """Return the value at that place."""
        found = self.values.get(load.buffer)
        return self.children(load) if found is None else found


def _build(loop: st.For, tile: _Tile) -> Block:
    """Build the loop that starts the next tile's first product behind a tile's last one, and the product before it."""
    var, start, stop = loop.vars[0], loop.starts[0], loop.stops[0]
    open_, take, give, close = tile.order_calls
    results = WgmmaResults(tile.first.C, span=tile.first.span)

    def at(iteration: Expr, stmts: Iterable[Stmt]) -> list[Stmt]:
        """Return copies of statements for another iteration."""
        made = Instance(IdMap([(var, iteration)]), IdMap(), fresh=True)
        return [made(one) for one in stmts]

    started = (*tile.waits, tile.first.started())
    *waits, product = at(start, started)
    before = If(binary("<", start, stop), Block((*waits, take, product, give)), Block(()))
    # Behind the last tile `more` is 0: the counts then name the last step of that tile.
    more = Var(f"{var.name}_more", int32, "let")
    follow = simplify(var + more)
    behind = ((count, after - 1 + count.below) for count, after in tile.behind.items())
    of_next = _Replace(IdMap((count, simplify(last + more)) for count, last in behind))
    *waits, product = (of_next(one) for one in at(follow, started))
    end = [
        Let(more, select(binary("<", var + 1, stop), const(1, int32), ZERO), span=loop.span),
        *waits,
        take,
        replace(tile.last, wg_wait=-1),  # of one group or two, both older than the one that stays in flight
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
            body.append(_KeepBeforeWaits(tile.first.C)(one))
        elif one not in moved:
            body.append(one)
    main = replace(loop, body=Block(tuple(body)))
    return Block((tile.sums, open_, before, main, wgmma_wait(0), results, close))
