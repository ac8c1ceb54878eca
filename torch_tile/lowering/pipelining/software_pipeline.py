# SPDX-License-Identifier: Apache-2.0
"""Make T.Pipelined explicit: copies run `num_stages - 1` iterations ahead, into versions of their tiles.

A loop over k with S stages keeps S versions of each loaded tile; iteration k uses version k % S. The copies for the
first S - 1 iterations start before the loop. Those for iteration k + S - 1 start in iteration k, right after the wait
for its own data. Iteration k - 1 was the last to read that version. So the barrier that makes the data visible also
frees the version. One stage keeps one version, filled again after its last reader. Every step commits every group, even
an empty one, so that waits count groups known here. Copies in front of the loop may begin with its first stage. No
PIPELINED loop is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby

from torch_tile.compiler.context import Build
from torch_tile.intrinsics.memory import cp_async_commit, cp_async_wait
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Call, Const, Expr, Load, Var, binary, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, contains, field_names, find, with_fields
from torch_tile.ir.simplify import is_below, is_literal, simplify, simplify_stmt
from torch_tile.ir.stmt import (
    Alloc,
    Block,
    Break,
    Continue,
    For,
    If,
    Kernel,
    Let,
    LoopKind,
    Program,
    Stmt,
    Store,
    While,
)
from torch_tile.lowering.analysis.clone import Instance, versions_of
from torch_tile.lowering.pipelining.copies_before import copies_before
from torch_tile.lowering.pipelining.copy_plan import Branch, Path, first_access, leaves, plan_copies
from torch_tile.lowering.pipelining.prefetch_addresses import AddressPrefetch
from torch_tile.lowering.pipelining.schedule import Item, Schedule, schedule_by_hand, single_schedule, usual_schedule
from torch_tile.tileop.copy.cp_async import AsyncCopy, AsyncLoop
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.uses import touched_by


def pipeline_loops(program: Program, build: Build) -> Program:
    """Replace every T.Pipelined loop; values do not change."""
    return _Pipeline(build)(program)  # type: ignore[no-any-return]


class _Pipeline(Rewriter):
    """Replace the pipelined loops of a program, inner ones first."""

    def __init__(self, build: Build):
        self.build = build
        self.later: list[tuple[Stmt, ...]] = []  # what runs after the current statement, innermost first
        self.earlier: list[Stmt] = []  # what stands before it in its block
        self.around = 0  # pipelined loops around it, whose own copies they stage
        self.replaced: IdSet[Buffer] = IdSet()

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Rewrite a kernel, and drop tiles that versions have replaced."""
        new = self.children(kernel)
        if new is kernel:
            return kernel
        used = IdSet(r.buffer for r in find(new, Region))
        used |= IdSet(n.buffer for n in find(new, Load, Store, Address))
        return _Drop(IdSet(self.replaced - used))(new)  # type: ignore[no-any-return]

    def visit_Block(self, block: Block) -> Block:
        """Rewrite the statements of a block, with the later ones at hand to find reads of tiles."""
        new: list[Stmt] = []
        outer = self.earlier
        for n, one in enumerate(block.stmts):
            self.later.insert(0, block.stmts[n + 1 :])
            self.earlier = new
            made = self(one)
            new.append(made)
            self.later.pop(0)
        self.earlier = outer
        return with_fields(block, stmts=tuple(new))

    def _pipelined(self, loop: For) -> Stmt:
        """Rewrite one T.Pipelined loop as prologue, main loop and last versions. Its inner loops are plain."""
        name = f"T.Pipelined(num_stages={loop.stages})"
        plain = replace(loop, kind=LoopKind.SERIAL, stages=0, order=(), stage=())
        if not loop.stages and max(loop.stage, default=0) < 1:
            self.build.remark(loop.span, name, "a plain loop")
            return plain
        if any(isinstance(leaf.node, Break | Continue) for leaf in leaves(loop.body)):
            self.build.remark(loop.span, name, "a plain loop", "`break` or `continue` decides which copies are needed")
            return plain
        schedule = self._schedule(loop, name)
        if schedule is None:
            return plain
        self.replaced |= IdSet(schedule.staged)
        made = _Stages(plain, schedule, self._joining(loop, schedule))
        own = IdSet(n.buffer for n in find(loop.body, Alloc))  # which end with the iteration
        escaping = [b for b in schedule.staged if b not in own and self._is_read_later(b)]
        return Block((*made.allocs(), made.prologue(), made.loop(), *made.last_versions(escaping)), span=loop.span)

    def _schedule(self, loop: For, name: str) -> Schedule | None:
        """Choose the schedule of a loop and report it; return None for a plain loop."""
        plan = plan_copies(loop)
        for copy, why in plan.refused:
            kind = "T.copy" if isinstance(copy, Copy) else "T.Parallel"
            self.build.remark(copy.span, kind, f"a copy within its iteration, no stage of {name}", why)
        why = ""
        if loop.stage:
            by_hand = schedule_by_hand(loop, plan)
            if isinstance(by_hand, Schedule):
                self.build.remark(loop.span, name, f"the schedule given, {_described(by_hand)}")
                return by_hand
            why = by_hand
        usual = None
        if plan.moves and loop.stages:
            single = loop.stages == 1
            usual = single_schedule(loop.body, plan) if single else usual_schedule(loop.body, plan, loop.stages)
        if usual is None:
            missing = "" if plan.moves or plan.refused else "no copy from global to shared memory"
            self.build.remark(loop.span, name, "a plain loop", why or missing)
            return None
        self.build.remark(loop.span, name, _described(usual), why)
        return usual

    def _joining(self, loop: For, schedule: Schedule) -> list[Copy]:
        """Remove the copies in front of a loop that begin with its first stage, and return them."""
        found = [] if self.around else copies_before(self.earlier, loop, schedule)
        found = [copy for copy in found if not self._is_read_later(copy.dst.buffer)]
        for copy in found:
            self.earlier.remove(copy)
            self.build.remark(copy.span, "T.copy", "starts with the first stage of the loop behind it")
        return found

    def _is_read_later(self, tile: Buffer) -> bool:
        """Return whether a statement after the loop may read the last content of a tile."""
        for stmts in self.later:
            found = first_access(stmts, tile)
            if found != "none":
                return found == "read"
        return False

    def visit_For(self, loop: For) -> Stmt:
        """Make a pipelined loop explicit, after the loops inside it."""
        self.later.insert(0, loop.body.stmts)  # the next iteration
        self.around += loop.kind is LoopKind.PIPELINED
        body = self(loop.body)
        self.around -= loop.kind is LoopKind.PIPELINED
        self.later.pop(0)
        inner = with_fields(loop, body=body)
        return self._pipelined(inner) if loop.kind is LoopKind.PIPELINED else inner

    def visit_While(self, loop: While) -> Stmt:
        """Make the loops inside explicit."""
        self.later.insert(0, loop.body.stmts)  # the next iteration
        body = self(loop.body)
        self.later.pop(0)
        return with_fields(loop, body=body)


class _Drop(Rewriter):
    """Remove allocations of unused buffers."""

    def __init__(self, dead: IdSet[Buffer]):
        self.dead = dead

    def visit_Alloc(self, node: Alloc) -> Stmt:
        return Block(()) if node.buffer in self.dead else node


def _described(schedule: Schedule) -> str:
    """Describe a schedule for the report."""
    groups = [item for item in schedule.items if item.is_group]
    parts = [f"{len(g.moves)} {'copy' if len(g.moves) == 1 else 'copies'} {g.ahead} ahead" for g in groups]
    versions = [f"{schedule.versions[b]} versions of {b.name}" for b in schedule.staged]
    later = [f"{item.ahead} ahead" for item in schedule.items if item.ahead and not item.is_group]
    return "; ".join([*parts, *(["statements " + ", ".join(later)] if later else []), ", ".join(versions)])


class _Stages:
    """Build one loop with parts of its body ahead of others.

    Groups of copies are numbered by their commits, relative to the first commit of a step. Take group g of iteration k
    + a, which runs `ahead`. In the step of iteration k it has the number `(a - ahead) * groups + g`.
    """

    def __init__(self, loop: For, schedule: Schedule, joining: Sequence[Copy]):
        self.source, self.items, self.versions = loop, schedule.items, schedule.versions
        self.joining = joining  # copies that belong to the first group of the prologue
        self.tiles = IdMap((b, versions_of(b, self.versions[b])) for b in schedule.staged)
        self.before = schedule.before
        self.depth = max(item.ahead for item in self.items)
        groups = [item for item in self.items if item.is_group]
        self.groups = [item.ahead for item in groups]
        self.group_of = IdMap((tile, g) for g, item in enumerate(groups) for tile in item.tiles)
        # Copies into the only version of a tile begin behind the step's work, which hides reads of addresses as well.
        even = all(g.ahead == self.depth and min(map(self.versions.__getitem__, g.tiles)) > 1 for g in groups)
        self.early = AddressPrefetch([m.path for g in groups for m in g.moves] if even else ())
        self.last_group = groups[-1] if groups else None

    def allocs(self) -> list[Stmt]:
        """Allocate all versions, and the buffers that the parts of a step pass to each other."""
        tiles = [Alloc(tile, span=self.source.span) for tile in self.tiles.values()]
        return [*tiles, *self.early.allocs(), *self.before]

    def prologue(self) -> Stmt:
        """Build the parts of the first iterations that must run before the loop."""
        start = self.source.starts[0]
        if not self.depth:
            return Block(())
        begins = _is_below(start, self.source)
        joining = _guarded([begins], Block(tuple(map(_started, self.joining))), self.source)
        if self.depth == 1:
            steps = self._prologue_step(start, const(0, int32))
            return Block((*joining, *steps, *self._read_early(simplify(start + 1))))
        iteration = Var(self.source.vars[0].name, int32, "loop")
        body = Block(tuple(self._prologue_step(start, iteration)))
        bounds = ((const(0, int32),), (const(self.depth, int32),))
        repeated = For(LoopKind.UNROLLED, (iteration,), *bounds, body, span=self.source.span)
        return Block((*joining, repeated, *self._read_early(simplify(start + self.depth))))

    def _read_early(self, iteration: Expr) -> list[Stmt]:
        """Build the reads that an iteration's copies need for their addresses, if the loop has that iteration."""
        reads = Block(tuple(self.early.reads(self.source.vars[0], iteration)))
        return _guarded([_is_below(iteration, self.source)], reads, self.source)

    def _prologue_step(self, start: Expr, iteration: Expr) -> Iterator[Stmt]:
        """Yield one step of the prologue: the parts whose stage has begun, and an empty commit for each later group."""
        arrivals = _Arrivals()
        for item in self.items:
            if item.ahead:
                late = self.depth - item.ahead
                begun = [iteration >= late] if late else []
                yield from self._part(item, simplify(start + iteration - late), begun, arrivals)
            elif item.is_group:
                yield cp_async_commit()  # so that waits count the same groups in each step

    def loop(self) -> For:
        """Build the loop's steady state."""
        return replace(self.source, body=Block(tuple(self._step())))

    def _step(self) -> Iterator[Stmt]:
        """Yield the parts of one step, with waits before readers and before copies into freed versions."""
        k, arrivals = self.source.vars[0], _Arrivals()
        for n, item in enumerate(self.items):
            if item.is_group and not (n and self.items[n - 1].is_group):
                # The next wait comes before the copies: the barrier after it also frees their versions.
                yield from arrivals.need(self._next_need(self.items[n:], arrivals))
            if item.is_group:
                yield from arrivals.need(self._overwritten(item))
            yield from self._part(item, simplify(k + item.ahead), [], arrivals, self.early)
            if item is self.last_group:
                yield from self._read_early(simplify(k + (item.ahead + 1)))
        # If the branch with a wait is not taken, versions must not be filled again before their copies land.
        yield from arrivals.need(max((need for item in self.items for need in self._needs(item)), default=None))

    def _next_need(self, items: Sequence[Item], arrivals: _Arrivals) -> int | None:
        """Return the group that is waited for next if it is older than this step: later waits cover older groups."""
        for needs in map(list, map(self._needs, items)):
            if any(need >= arrivals.committed for need in needs):
                return None
            if (found := next((need for need in needs if need >= arrivals.arrived), None)) is not None:
                return found
        return None

    def _overwritten(self, group: Item) -> int | None:
        """Return the number of this iteration's group whose versions `group` fills again; None without one."""
        if min(self.versions[tile] for tile in group.tiles) > group.ahead:
            return None
        return self.group_of[group.tiles[0]] - group.ahead * len(self.groups)

    def _part(
        self, item: Item, iteration: Expr, begun: list[Expr], arrivals: _Arrivals, early: AddressPrefetch | None = None
    ) -> Iterator[Stmt]:
        """Yield one part of a step for `iteration`, if the loop has that iteration. Copies take `early` reads."""
        if early is not None and item.is_group:
            item = replace(item, moves=tuple(replace(m, path=early.named(m.path)) for m in item.moves))
        guards = [*begun, _is_below(iteration, self.source)] if item.ahead else []
        named_again = any(m.path for m in item.moves)
        instance = self._instance(iteration, fresh=item.ahead > 0 or named_again)
        # Names of plain arithmetic are replaced by their values, so that an address shows its alignment.
        kept: IdSet[Var] = IdSet()
        for let in IdMap((let, let) for m in item.moves for let in m.path if isinstance(let, Let)).values():
            if contains(let.value, Load, Call) or kept.any_in(let.value):
                kept.add(let.var)
            else:
                instance.values[let.var] = simplify(instance(let.value))
        if item.is_group:
            parts = [(m.path, _started(m.stmt)) for m in item.moves]
        else:
            parts = [(m.path, self._awaited(m.stmt, item.ahead, arrivals)) for m in item.moves]
        named = [
            (tuple(x for x in path if isinstance(x, Branch) or x.var not in instance.values), s) for path, s in parts
        ]
        body = _nested(named)
        made: Block = instance(Block(tuple(body)))
        # Indices of an iteration known here are simplified, so that a reader sees numbers.
        yield from _guarded(guards, simplify_stmt(made) if isinstance(iteration, Const) else made, self.source)
        if item.is_group:
            yield cp_async_commit()
            arrivals.committed += 1

    def _needs(self, item: Item) -> Iterator[int]:
        """Yield the numbers of the groups that an item reads or changes, in order."""
        if not item.is_group:
            for move in item.moves:
                for leaf in leaves(Block((move.stmt,))):
                    yield from self._groups_touched(leaf.node, item.ahead)

    def _groups_touched(self, node: Node, ahead: int) -> list[int]:
        """Return the numbers of the groups whose tiles `node` reads or changes when it runs `ahead`."""
        groups = {self.group_of[t] for t in touched_by(node) if t in self.group_of}
        return sorted((ahead - self.groups[g]) * len(self.groups) + g for g in groups)

    def _awaited(self, stmt: Stmt, ahead: int, arrivals: _Arrivals) -> Stmt:
        """Return `stmt` with waits before statements that read or change groups still in flight."""
        if not isinstance(stmt, If):
            return Block((*arrivals.need(max(self._groups_touched(stmt, ahead), default=None)), stmt))
        before = arrivals.need(max(self._groups_touched(stmt.condition, ahead), default=None))
        ways = arrivals.copy(), arrivals.copy()
        then, otherwise = (
            Block(tuple(self._awaited(s, ahead, way) for s in branch.stmts))
            for branch, way in zip((stmt.then, stmt.otherwise), ways, strict=True)
        )
        arrivals.arrived = min(way.arrived for way in ways)
        return Block((*before, If(stmt.condition, then, otherwise, span=stmt.span)))

    def last_versions(self, tiles: Sequence[Buffer]) -> Iterator[Stmt]:
        """Copy the last iteration's version back into tiles that are read after the loop."""
        start, stop = self.source.starts[0], self.source.stops[0]
        if tiles:
            moves = []
            for tile in tiles:
                whole = Region(tile, tuple(Range(const(0, int32), size) for size in tile.shape))
                last = self._instance(simplify(stop - 1), fresh=False)(whole)
                moves.append(Copy(last, whole, span=self.source.span))
            yield If(start < stop, Block(tuple(moves)), Block(()), span=self.source.span)

    def _instance(self, iteration: Expr, fresh: bool) -> Instance:
        """Return the rewriter for one iteration, with its version of each tile."""
        versions = IdMap((b, (tile, simplify(iteration % self.versions[b]))) for b, tile in self.tiles.items())
        k = self.source.vars[0]
        return Instance(IdMap([] if iteration is k else [(k, iteration)]), versions, fresh)


class _Arrivals:
    """The groups that arrived at a point of a step: those below `arrived`. `committed` counts the step's."""

    def __init__(self, committed: int = 0, arrived: int = -(10**9)):
        self.committed, self.arrived = committed, arrived

    def copy(self) -> _Arrivals:
        """Return a copy, for another branch."""
        return _Arrivals(self.committed, self.arrived)

    def need(self, number: int | None) -> list[Stmt]:
        """Return the wait for a group, if it may not have arrived."""
        if number is None or number < self.arrived:
            return []
        self.arrived = number + 1
        return [cp_async_wait(self.committed - number - 1)]


def _nested(parts: Sequence[tuple[Path, Stmt]]) -> list[Stmt]:
    """Nest statements under their names and conditions; neighbours share their common ones."""
    made: list[Stmt] = []
    for head, group in groupby(parts, key=lambda part: part[0][0] if part[0] else None):
        found = list(group)
        if not head:
            made += [stmt for _, stmt in found]
            continue
        first, inner = found[0][0][0], _nested([(path[1:], stmt) for path, stmt in found])
        if isinstance(first, Let):
            made += [first, *inner]
        else:
            made += [If(first.condition, Block(tuple(inner)), Block(()), span=first.node.span)]
    return made


def _is_below(iteration: Expr, loop: For) -> Expr:
    """Compare an iteration with the end of its loop, without a division, for which the first copies would wait."""
    return is_below(iteration, loop.stops[0], Ranges().interval(loop.starts[0]).low >= 0)


def _guarded(guards: Sequence[Expr], stmt: Stmt, loop: For) -> list[Stmt]:
    """Put `stmt` under conditions; return its statements if there are none."""
    block = stmt if isinstance(stmt, Block) else Block((stmt,))
    guards = [g for g in map(simplify, guards) if not is_literal(g, True)]
    if not guards or not block.stmts:
        return list(block.stmts)
    if any(is_literal(g, False) for g in guards):
        return []
    return [If(reduce(lambda a, b: binary("and", a, b), guards), block, Block(()), span=loop.span)]


def _started(stmt: Stmt) -> Stmt:
    """Turn a copy or loop into its asynchronous form, which is not waited for."""
    if isinstance(stmt, For):
        return AsyncLoop(stmt, span=stmt.span)
    assert isinstance(stmt, Copy)
    return AsyncCopy(**{name: getattr(stmt, name) for name in field_names(stmt)}, commit=False, span=stmt.span)
