# SPDX-License-Identifier: Apache-2.0
"""Decide how many iterations ahead each part of a pipelined loop runs, and its place within a step.

The usual schedule has all copies `num_stages - 1` iterations ahead. With one stage there is one version of each tile:
its next copy starts as soon as the last reader of the current content is done. With `stage` given, a statement of stage
s runs `max(stage) - s` iterations ahead of the last ones. `order` is its place in the step. Stage -1 is a copy, as far
ahead as `num_stages` allows. A schedule by hand that would change results is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Rewriter, contains, find
from torch_tile.ir.stmt import Alloc, Block, For, If, Let, Stmt
from torch_tile.lowering.pipelining.copy_plan import Facts, Leaf, Move, Plan, filled, leaves
from torch_tile.tileop.atomic import ArriveLast
from torch_tile.tileop.uses import touched_by, uses


@dataclass(frozen=True)
class Item:
    """A part of a step, `ahead` iterations ahead: a group of copies, or a statement with the names that it needs."""

    ahead: int
    moves: tuple[Move, ...]
    is_group: bool = False

    @property
    def tiles(self) -> list[Buffer]:
        """Return the tiles that a group fills."""
        return [filled(m.stmt) for m in self.moves] if self.is_group else []


@dataclass(frozen=True)
class Schedule:
    """The parts of a step in their order, the versions of each tile, and the statements before the loop."""

    items: tuple[Item, ...]
    versions: IdMap[Buffer, int]
    before: tuple[Stmt, ...] = ()

    @property
    def staged(self) -> list[Buffer]:
        """Return the tiles with versions, in the order of their copies."""
        return list(dict.fromkeys(tile for item in self.items for tile in item.tiles))


def usual_schedule(body: Block, plan: Plan, stages: int) -> Schedule:
    """Schedule all copies first and `stages - 1` iterations ahead, then the rest in the author's order."""
    rest = without(body, IdSet(m.stmt for m in plan.moves))
    copies = tuple(Item(stages - 1, group, True) for group in plan.groups)
    items = (*copies, *(Item(0, (Move(s, ()),)) for s in rest.stmts))
    return Schedule(items, IdMap((tile, stages) for item in copies for tile in item.tiles))


def single_schedule(body: Block, plan: Plan) -> Schedule | None:
    """Schedule one version of each tile, whose copy starts right after its last reader.

    Return None if every copy would be waited for at once. A copy after the last statement moves over the end of the
    step. There it starts its own iteration, while statements before its first reader run.
    """
    rest = without(body, IdSet(m.stmt for m in plan.moves)).stmts
    touched = [touched_by(one) for one in rest]
    starts: dict[int, list[Move]] = {}  # copies by the number of statements before them
    gained = False
    for move in plan.moves:
        readers = [n for n, used in enumerate(touched) if filled(move.stmt) in used]
        place = (readers[-1] + 1) % len(rest)
        starts.setdefault(place, []).append(move)
        gained = gained or place > 0 or readers[0] > 0
    items: list[Item] = []
    for n, stmt in enumerate(rest):
        if n in starts:
            items.append(Item(1 if n else 0, tuple(starts[n]), True))
        items.append(Item(0, (Move(stmt, ()),)))
    return Schedule(tuple(items), IdMap((filled(m.stmt), 1) for m in plan.moves)) if gained else None


def misfit(loop: For) -> str:
    """Return why `order` and `stage` do not fit the statements of a loop; empty if they do, or are not given."""
    if not loop.stage:
        return "`order` is given without `stage`" if loop.order else ""
    count = len(_scheduled(loop))
    if len(loop.stage) != count or len(loop.order or loop.stage) != count:
        return f"`stage` and `order` need one entry for each of {count} statements"
    places = [place for place in loop.order if place >= 0]  # copies of stage -1 share -1
    return "`order` gives one place twice" if len(set(places)) < len(places) else ""


def _scheduled(loop: For) -> list[Stmt]:
    """Return the statements of a loop that `order` and `stage` count."""
    return [s for s in loop.body.stmts if not isinstance(s, Let | Alloc)]


def schedule_by_hand(loop: For, plan: Plan) -> Schedule | str:
    """Return the schedule by `order` and `stage` of a loop, or the reason against it."""
    stmts = _scheduled(loop)
    if contains(loop.body, ArriveLast):
        return "T.arrive_last orders all that other blocks read and write"
    if why := misfit(loop):
        return why
    facts = Facts(list(leaves(loop.body)))
    if why := facts.why_names_change():
        return why
    movable = IdSet(m.stmt for m in plan.moves)
    depth = max(loop.stage)
    parts: list[tuple[int, Item, Stmt]] = []
    for n, stmt in enumerate(stmts):
        stage, place = loop.stage[n], (loop.order or range(len(stmts)))[n]
        if stage < 0 and stmt not in movable:
            return "a statement of stage -1 is not a copy that can run ahead"
        ahead = depth - stage if stage >= 0 else depth + max(loop.stages, 1) - 1
        move = facts.move(Leaf(stmt, _names_before(loop.body, stmt)))
        parts.append((place, Item(ahead, (move,), stmt in movable), stmt))
    items = [item for _, item, _ in sorted(parts, key=lambda part: part[0])]
    versions = _versions(items)
    place_of = IdMap((item, n) for n, item in enumerate(items))
    timed = [(stmt, item.ahead, place_of[item]) for _, item, stmt in parts]
    groups = _grouped(items)
    filled = [i for group in groups for i in IdSet(group.tiles)]
    if len(filled) != len(set(filled)):
        return "copies into one tile are apart from each other"
    before = tuple(s for s in loop.body.stmts if isinstance(s, Alloc))
    return _conflict(timed, versions) or Schedule(tuple(groups), versions, before)


def _names_before(body: Block, stmt: Stmt) -> tuple[Let, ...]:
    """Return the names that a body binds before a statement."""
    found = []
    for one in body.stmts:
        if one is stmt:
            break
        if isinstance(one, Let):
            found.append(one)
    return tuple(found)


def _grouped(items: Sequence[Item]) -> list[Item]:
    """Group neighbouring copies that run equally far ahead."""
    made: list[Item] = []
    for (is_group, ahead), found in groupby(items, key=lambda item: (item.is_group, item.ahead)):
        if is_group:
            made.append(Item(ahead, tuple(m for item in found for m in item.moves), True))
        else:
            made += list(found)
    return made


def _versions(items: Sequence[Item]) -> IdMap[Buffer, int]:
    """Count the versions of each tile: one for each iteration between the copy into it and its last use."""
    filled = IdMap((tile, (item.ahead, n)) for n, item in enumerate(items) for tile in item.tiles)
    count = IdMap((tile, 1) for tile in filled)
    for n, item in enumerate(items):
        if not item.is_group:
            for move in item.moves:
                for i in touched_by(move.stmt) & filled.keys():
                    ahead, place = filled[i]
                    count[i] = max(count[i], ahead - item.ahead + (n > place))
    return count


def _conflict(timed: Sequence[tuple[Stmt, int, int]], versions: IdMap[Buffer, int]) -> str:
    """Name the access that the schedule would make in the wrong order; return "" if there is none.

    Iteration m of a statement that runs `ahead` at place p of a step runs at time (m - ahead, p). Take two accesses to
    one buffer, one of them a write. The later one must stay later, within an iteration and across iterations.
    Iterations that use different versions of a tile do not conflict.
    """
    touched = [(*uses(stmt), ahead, place) for stmt, ahead, place in timed]
    for i, (reads, writes, ahead, place) in enumerate(touched):
        for j, (reads2, writes2, ahead2, place2) in enumerate(touched):
            for buffer in (writes & (writes2 | reads2)) | (writes2 & reads):
                if i < j and not (-ahead, place) < (-ahead2, place2):
                    return f"the given order lets a statement meet `{buffer.name}` too early"
                if i != j and not (-ahead, place) < (versions.get(buffer, 1) - ahead2, place2):
                    return f"in the given order an iteration overwrites `{buffer.name}` while an earlier one needs it"
    return ""


def without(body: Block, gone: IdSet[Stmt]) -> Block:
    """Remove some statements from a body, and the branches and names that then serve no purpose."""
    new: Block = _Without(gone)(body)
    while True:
        used = IdSet(find(new, Var))
        dead = IdSet[Stmt](n for n in find(new, Let) if n.var not in used)
        if not dead:
            return new
        new = _Without(dead)(new)


class _Without(Rewriter):
    """Remove the statements in `gone`, and branches that become empty."""

    def __init__(self, gone: IdSet[Stmt]):
        self.gone = gone

    def visit_If(self, node: If) -> Stmt:
        new = self.children(node)
        return new if new is node or new.then.stmts or new.otherwise.stmts else Block(())

    def visit_Stmt(self, stmt: Stmt) -> Stmt:
        return Block(()) if stmt in self.gone else self.children(stmt)
