# SPDX-License-Identifier: Apache-2.0
"""Decide which copies of a pipelined loop may run ahead of their iteration, and why the others may not.

A copy from global to shared memory may run ahead under two conditions. The copy and the values that its addresses need
can be computed before the iterations in between have run. The tile that it fills holds no values of an earlier
iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Const, Expr, Load, Var, unary
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, find
from torch_tile.ir.stmt import Block, For, If, Let, Stmt
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.base import same_extents
from torch_tile.tileop.copy.cp_async import gather_of
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.uses import reads_of, uses, writes_of


@dataclass(frozen=True)
class Branch:
    """The then-branch of `node` if `holds`, else its other branch."""

    node: If
    holds: bool

    @property
    def condition(self) -> Expr:
        """Return the condition that holds in the branch."""
        return self.node.condition if self.holds else unary("not", self.node.condition)


Path = tuple[Let | Branch, ...]


@dataclass(frozen=True)
class Leaf:
    """A statement (or the condition of an `if`) of a loop body outside inner loops, with names and branches around."""

    node: Node
    path: Path

    def excludes(self, other: Leaf) -> bool:
        """Return whether the two leaves stand in different branches of one `if`."""
        mine = IdMap((b.node, b.holds) for b in self.path if isinstance(b, Branch))
        return any(isinstance(b, Branch) and mine.get(b.node, b.holds) != b.holds for b in other.path)


@dataclass(frozen=True)
class Move:
    """A statement that may run ahead of its iteration, with the names and conditions around it as its `path`."""

    stmt: Stmt
    path: Path


@dataclass(frozen=True)
class Filling:
    """The effect of a statement that loads a tile: the region that it fills, and the buffers that it reads."""

    region: Region
    sources: tuple[Buffer, ...]

    @property
    def converts(self) -> str:
        """Return the reason that the load converts its elements; "" if it does not."""
        types = [str(b.dtype) for b in (self.sources[0], self.region.buffer)]
        return "" if types[0] == types[1] else f"it converts {types[0]} to {types[1]} on its way"


def filling(node: Node) -> Filling | None:
    """Describe how a statement fills a shared tile from global memory; None if it does not only do that.

    Such a statement is a T.copy, or a T.Parallel loop that only loads the tile.
    """
    if type(node) is Copy and (node.src.buffer.scope, node.dst.buffer.scope) == ("global", "shared"):
        return Filling(node.dst, (node.src.buffer,))
    found = gather_of(node) if isinstance(node, For) else None
    if found is None:
        return None
    assert isinstance(node, For)
    buffers = IdMap((n.buffer, n.buffer) for n in find(node, Load))
    return Filling(found.region, (found.src.buffer, *buffers.values()))


def filled(stmt: Stmt) -> Buffer:
    """Return the tile that a statement fills."""
    found = filling(stmt)
    assert found is not None
    return found.region.buffer


@dataclass(frozen=True)
class Plan:
    """The `groups` of copies that are waited for together, by their first use, and the reasons of refused copies."""

    groups: tuple[tuple[Move, ...], ...]
    refused: tuple[tuple[Stmt, str], ...]

    @property
    def moves(self) -> list[Move]:
        """Return all copies that run ahead."""
        return [m for group in self.groups for m in group]


def plan_copies(loop: For) -> Plan:
    """Plan the copies of `loop`'s body that can run ahead."""
    found = list(leaves(loop.body))
    facts = Facts(found)
    reasons: IdMap[Buffer, str] = IdMap()  # by destination: tiles are staged as a whole
    copies = [(leaf, how) for leaf in found if (how := filling(leaf.node)) is not None]
    for leaf, how in copies:
        why = facts.why_not(leaf, how) or why_not_tile(loop.body, found, how.region.buffer)
        if why:
            reasons.setdefault(how.region.buffer, why)
    late = [(leaf.node, reasons[how.region.buffer]) for leaf, how in copies if how.region.buffer in reasons]
    late += [(inner, "it is inside an inner loop") for leaf in found for inner in _inner_copies(leaf.node)]
    good = [(leaf, how.region.buffer) for leaf, how in copies if how.region.buffer not in reasons]
    groups = tuple(tuple(facts.move(leaf) for leaf in group) for group in _grouped(good, found))
    return Plan(groups, tuple((s, why) for s, why in late if isinstance(s, Stmt)))


def leaves(block: Block, path: Path = ()) -> Iterator[Leaf]:
    """Yield the statements of a body in order: those of an `if` after its condition, an inner loop as one leaf."""
    for one in block.stmts:
        if isinstance(one, If):
            yield Leaf(one.condition, path)
            yield from leaves(one.then, (*path, Branch(one, True)))
            yield from leaves(one.otherwise, (*path, Branch(one, False)))
            continue
        yield Leaf(one, path)
        if isinstance(one, Let):
            path = (*path, one)


def _inner_copies(node: Node) -> Iterator[Node]:
    """Yield the copies inside an inner loop that could fill a tile."""
    if isinstance(node, Stmt) and not isinstance(node, RegisteredOp) and filling(node) is None:
        yield from (n for n in find(node, Copy) if filling(n))


class Facts:
    """The buffers that the loop writes, and the names in its body."""

    def __init__(self, found: Sequence[Leaf]):
        self.written: IdMap[Buffer, Buffer] = IdMap((b, b) for leaf in found for b in writes_of(leaf.node))
        self.lets: list[Let] = [leaf.node for leaf in found if isinstance(leaf.node, Let)]

    def why_names_change(self) -> str:
        """Say why the names of the body cannot be computed for another iteration; return "" if they can."""
        for let in self.lets:
            for node in find(let.value, Load):
                if node.buffer in self.written:
                    return f"`{let.var.name}` depends on `{node.buffer.name}`, which the loop writes"
        return ""

    def why_not(self, leaf: Leaf, how: Filling) -> str:
        """Say why a copy cannot run before earlier iterations have ended; return "" if it can."""
        if how.converts:
            return how.converts
        for src in how.sources:
            if src in self.written:
                return f"the loop writes `{src.name}`"
        for item in (*self.needed(leaf), leaf.node):
            value = item.condition if isinstance(item, Branch) else item.value if isinstance(item, Let) else item
            for node in find(value, Load):
                if node.buffer in self.written:
                    return f"where it reads depends on `{node.buffer.name}`, which the loop writes"
        return ""

    def needed(self, leaf: Leaf) -> Path:
        """Return the conditions around a statement, and the names that they and the statement use."""
        wanted = _names(leaf.node)
        kept: list[Let | Branch] = []
        for item in reversed(leaf.path):
            if isinstance(item, Branch):
                wanted |= _names(item.condition)
            elif item.var in wanted:
                wanted |= _names(item.value)
            else:
                continue
            kept.append(item)
        return tuple(reversed(kept))

    def move(self, leaf: Leaf) -> Move:
        """Return a statement that may run ahead, with its names and conditions."""
        assert isinstance(leaf.node, Stmt)
        return Move(leaf.node, self.needed(leaf))


def _names(node: Node) -> IdSet[Var]:
    """Return the variables in a node."""
    return IdSet(find(node, Var))


def why_not_tile(body: Block, found: Sequence[Leaf], tile: Buffer) -> str:
    """Say why a tile cannot have a version for each iteration; return "" if it can."""
    if first_access(body.stmts, tile) == "read":
        return f"`{tile.name}` holds values of an earlier iteration"
    earlier: list[Leaf] = []
    fills: list[tuple[Leaf, Region]] = []
    read = False
    for leaf in found:
        reads, writes = uses(leaf.node)
        read = read or tile in reads
        if (how := filling(leaf.node)) is not None and how.region.buffer is tile:
            if not all(leaf.excludes(other) for other in earlier):
                return f"`{tile.name}` is filled again after it was used"
            if any(not leaf.excludes(other) and not _are_disjoint(how.region, box) for other, box in fills):
                return f"`{tile.name}` is filled twice"
            fills.append((leaf, how.region))
        elif tile in reads or tile in writes:
            earlier.append(leaf)
    return "" if read else f"`{tile.name}` is not read in the loop"


def first_access(stmts: Iterable[Stmt], tile: Buffer, boxes: list[Region] | None = None) -> str:
    """Return how `stmts` first access the old content of `tile`: "read" (perhaps), "written" over, or "none"."""
    boxes = [] if boxes is None else boxes
    for one in stmts:
        if isinstance(one, If):
            if tile in reads_of(one.condition):
                return "read"
            ways = [first_access(branch.stmts, tile, list(boxes)) for branch in (one.then, one.otherwise)]
            if "read" in ways or all(w == "written" for w in ways):
                return "read" if "read" in ways else "written"
        elif (how := filling(one)) is not None:
            boxes += [how.region] if how.region.buffer is tile else []
            if _cover(boxes, tile):
                return "written"
        elif isinstance(one, For) and not any(tile in reads_of(b) for b in (*one.starts, *one.stops)):
            if first_access(one.body.stmts, tile, list(boxes)) == "read":
                return "read"
        elif tile in reads_of(one):
            return "read"
        elif isinstance(one, RegisteredOp):
            boxes += [r for r in one.accesses()[1] if r.buffer is tile]
            if _cover(boxes, tile):
                return "written"
    return "none"


def _cover(boxes: Sequence[Region], tile: Buffer) -> bool:
    """Return whether the boxes fill the tile; several boxes count only if they are disjoint."""
    if any(same_extents(b.extents, tile.shape) for b in boxes):
        return True
    shape, volume, seen = tile.static_shape, 0, list[Region]()
    for box in boxes:
        sides = [side for side in _literal_bounds(box) if side is not None]
        if len(sides) != tile.rank or not all(_are_disjoint(box, other) for other in seen):
            return False
        seen.append(box)
        size = 1
        for low, high in sides:
            size *= high - low
        volume += size
    total = 1
    for extent in shape or (0,):
        total *= extent
    return bool(boxes) and volume == total


def _are_disjoint(a: Region, b: Region) -> bool:
    """Return whether two boxes of a tile certainly have no element in common."""
    sides = zip(_literal_bounds(a), _literal_bounds(b), strict=True)
    return any(x is not None and y is not None and (x[1] <= y[0] or y[1] <= x[0]) for x, y in sides)


def _literal_bounds(box: Region) -> list[tuple[int, int] | None]:
    """Return the first index and the end of each dimension where both are literals, else None."""
    return [
        (int(r.start.value), int(r.start.value) + int(r.extent.value))
        if isinstance(r.start, Const) and isinstance(r.extent, Const)
        else None
        for r in box.ranges
    ]


def _grouped(copies: Sequence[tuple[Leaf, Buffer]], found: Sequence[Leaf]) -> list[list[Leaf]]:
    """Group copies by the place where their tile is first read, neighbouring places together, for one wait."""
    moved = IdSet(leaf.node for leaf, _ in copies)
    rest = [leaf.node for leaf in found if leaf.node not in moved and not isinstance(leaf.node, Let)]
    readers = [reads_of(node) for node in rest]
    place = IdMap((tile, next(n for n, r in enumerate(readers) if tile in r)) for _, tile in copies)
    groups: list[list[Leaf]] = []
    last = -2
    for leaf, tile in sorted(copies, key=lambda pair: place[pair[1]]):
        where = place[tile]
        if where > last + 1:
            groups.append([])
        groups[-1].append(leaf)
        last = where
    return groups
