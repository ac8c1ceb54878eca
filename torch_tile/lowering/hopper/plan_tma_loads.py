# SPDX-License-Identifier: Apache-2.0
"""Choose the copies that a producer warp can make by the tensor memory accelerator, and group them for waiting.

A tile qualifies if only bulk copies fill it, in the body of one loop (or of the kernel). That body also has all its
readers. The roles pass such a tile on in each iteration: the producer fills it, and the consumers read and release it.
Tiles that the same statement reads first form one group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch_tile.compiler.context import Build
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.traits import Scope, Sync
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Expr, Load, Var
from torch_tile.ir.idmap import IdMap, IdSet, mentions
from torch_tile.ir.node import Node, contains, find, walk
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, For, If, Kernel, Let, LoopKind, Role, Stmt, While, calls
from torch_tile.lowering.pipelining.copy_plan import filling, leaves, why_not_tile
from torch_tile.tileop.copy import tma
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.gemm import mma, wgmma
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.threads import ThreadContext
from torch_tile.tileop.uses import reads_of, touched_by, writes_of

BARRIER = 8  # bytes

VERSION = 128
"""Bytes of shared memory at multiples of which bulk copies may begin."""
SMALL = 1024
"""Bytes of a tile that may be released late."""


@dataclass(eq=False)
class Body:
    """The statements of a loop, or of a kernel (`loop` None), with the bulk loads among them outside inner loops."""

    loop: For | None
    block: Block
    outer: Body | None
    loads: list[Copy] = field(default_factory=list)

    @property
    def repeats(self) -> bool:
        """Return whether the body may run more than once."""
        return self.loop is not None

    @property
    def loops(self) -> list[For]:
        """Return the loops around the body and its own, outermost first."""
        above = [] if self.outer is None else self.outer.loops
        return above if self.loop is None else [*above, self.loop]


@dataclass(eq=False)
class Group:
    """Tiles of a body passed together, from statement `first` to `last`, `stages` iterations in flight."""

    body: Body
    tiles: list[Buffer]
    first: int
    last: int
    stages: int

    @property
    def name(self) -> str:
        """Return the prefix for the names of the group's barriers."""
        return "_".join(t.name for t in self.tiles)


@dataclass
class Loads:
    """The `groups` that producer warps can load, and `why_not` with the reason for each pipelined copy they cannot."""

    groups: list[Group]
    why_not: list[tuple[Stmt, str]]

    @property
    def copies(self) -> IdSet[Copy]:
        """Return the copies that the producer warps make."""
        tiles = IdMap((t, g.body) for g in self.groups for t in g.tiles)
        return IdSet(c for g in self.groups for c in g.body.loads if c.dst.buffer in tiles)


class Survey(Known):
    """Record each copy and product with the threads and facts of its place."""

    build: Build
    running: Var
    count: int

    def __init__(self, build: Build, thread: Var, count: int):
        super().__init__()
        self.build, self.running, self.count = build, thread, count
        self.contexts: IdMap[Stmt, ThreadContext] = IdMap()
        self.products: list[Gemm] = []
        self.of_registers: list[Gemm] = []

    def here(self) -> ThreadContext:
        """Return the threads and facts of the current statement."""
        known = dict(self.names)
        return ThreadContext(self.build, self.running, self.count, self.ranges, known, asynchronous=True)

    def visit_Copy(self, op: Copy) -> Copy:
        """Record the context of a copy of any kind."""
        self.contexts[op] = self.here()
        return op

    def visit_Gemm(self, op: Gemm) -> Gemm:
        """Record a product that wgmma can compute, and one by mma.sync whose operands are both in registers."""
        if wgmma.refuses(op, self.here()) is None:
            self.products.append(op)
        elif all(x.buffer.scope == "fragment" for x in (op.A, op.B)) and mma.refuses(op, self.here()) is None:
            self.of_registers.append(op)
        return op


def plan_tma_loads(kernel: Kernel, survey: Survey) -> Loads | str:
    """Plan the loads that producer warps make, or say why the kernel keeps all its threads together."""
    if not survey.products and not survey.of_registers:
        return "no product goes by wgmma, or takes both operands from registers"
    known = IdSet(n for one in (*waits_before_loads(kernel), *meetings(kernel)) for n in walk(one))
    own_loads = any(copy.barrier is not None for copy in find(kernel.body, tma.TmaCopy))  # a store waits for itself
    own_order = own_loads or contains(kernel.body, Role, Break, Continue)
    if own_order or any(_is_barrier(n) and n not in known for n in find(kernel.body, Call)):
        return "its author orders threads by hand, or leaves loops early"
    bodies = list(_bodies(Body(None, kernel.body, None), survey))
    written = IdSet(b for s in find(kernel.body, Stmt) if is_leaf(s) for b in writes_of(s))
    groups: list[Group] = []
    why_not: list[tuple[Stmt, str]] = []
    for body in bodies:
        reasons = IdMap((c, _why_not(c, body, bodies, kernel, written, survey)) for c in body.loads)
        bad = IdSet(c.dst.buffer for c in body.loads if reasons[c])
        pipelined = body.loop is not None and body.loop.kind is LoopKind.PIPELINED and body.loop.stages > 0
        why_not += [(c, reasons[c]) for c in body.loads if pipelined and reasons[c]]
        stages = body.loop.stages if pipelined and body.loop is not None else 1
        good = IdMap((c.dst.buffer, c.dst.buffer) for c in body.loads if c.dst.buffer not in bad)
        groups += _groups(body, list(good.values()), stages)
        if pipelined:
            others = [s for s in _outside_loops(body.block) if not isinstance(s, Copy) and filling(s) is not None]
            why_not += [(s, "it gathers elements") for s in others]
    pipelined_groups = [g for g in groups if g.body.loop is not None and g.body.loop.kind is LoopKind.PIPELINED]
    if not pipelined_groups and not why_not:
        return "no pipelined loop loads a tile that bulk copies can bring"
    _fit(groups, kernel, survey.build)
    return Loads(groups, why_not)


def waits_before_loads(kernel: Kernel) -> list[Stmt]:
    """Return the statements of the kernel itself, before its first load, that wait for the kernel before."""
    body = kernel.body.stmts
    first = next((n for n, one in enumerate(body) if any(map(is_load, walk(one)))), 0)
    return [one for one in body[:first] if calls(one, "grid_wait")]


def meetings(kernel: Kernel) -> list[Stmt]:
    """Return the statements of the kernel itself at which the blocks of a cluster meet after the last load."""
    body = kernel.body.stmts
    loading = [n for n, one in enumerate(body) if any(map(is_load, walk(one)))]
    return [one for one in body[max(loading, default=0) :] if calls(one, "cluster_arrive", "cluster_wait")]


def _fit(groups: list[Group], kernel: Kernel, build: Build) -> None:
    """Reduce the stages until all groups fit into shared memory beside the largest other tile.

    Producer warps fill stages up to the last turn of their loops. Only tiles that are used later reuse their memory; in
    kernels with measured tilings none does.
    """
    mine = IdSet(t for g in groups for t in g.tiles)
    ends = [n for n, one in enumerate(kernel.body.stmts) if mine.any_in(one)]
    during = Block(kernel.body.stmts[: max(ends, default=-1) + 1])
    touched = IdSet(b for s in find(during, Stmt) if is_leaf(s) for b in touched_by(s))
    allocs = [n.buffer for n in find(kernel.body, Alloc) if n.buffer.scope == "shared"]
    largest = max((_bytes(b) for b in allocs if b not in mine and (b in touched or build.options.measured)), default=0)
    while (
        largest + sum(g.stages * (sum(map(_bytes, g.tiles)) + 2 * BARRIER) for g in groups) > build.target.shared_limit
    ):
        deepest = max(groups, key=lambda g: g.stages)
        if deepest.stages == 1:
            return
        deepest.stages -= 1


def _bytes(tile: Buffer) -> int:
    """Return the bytes of shared memory that a tile takes."""
    return math.prod(tile.static_shape or ()) * tile.dtype.itemsize


def _bodies(body: Body, survey: Survey) -> Iterator[Body]:
    """Yield a body and the bodies of the loops inside it, outer ones first; record the loads of each."""
    inner: list[Body] = []
    for one in _outside_loops(body.block):
        if isinstance(one, Copy) and is_load(one):
            body.loads.append(one)
        elif isinstance(one, For) and one.kind is not LoopKind.PARALLEL:
            inner.append(Body(one, one.body, body))
    yield body
    for each in inner:
        yield from _bodies(each, survey)


def _outside_loops(block: Block) -> Iterator[Stmt]:
    """Yield the statements of a block outside inner loops, including those under conditions."""
    for one in block.stmts:
        yield one
        if isinstance(one, If):
            yield from _outside_loops(one.then)
            yield from _outside_loops(one.otherwise)


def _why_not(copy: Copy, body: Body, bodies: list[Body], kernel: Kernel, written: IdSet[Buffer], survey: Survey) -> str:
    """Say why a producer warp cannot make a copy ahead of time; return "" if it can."""
    tile = copy.dst.buffer
    if copy.disable_tma:
        return "its author does not want it"
    if why := tma.refuses(copy, survey.contexts[copy]):
        return why
    if body.loop is not None and body.loop.stages > 1 and _bytes(tile) % VERSION:
        return f"versions of `{tile.name}`, of {_bytes(tile)} bytes, do not begin at multiples of {VERSION}"
    if copy.src.buffer in written:
        return f"the kernel writes `{copy.src.buffer.name}`"
    needed = list(_deciding_nodes(copy, body))
    for node in needed:
        if isinstance(node, Var) and node.role == "thread":
            return "whether or where it reads depends on the thread"
        if isinstance(node, Load) and (node.buffer.scope != "global" or node.buffer in written):
            return f"where it reads depends on `{node.buffer.name}`, which the kernel's threads compute"
    loads = IdSet(c for b in bodies for c in b.loads if c.dst.buffer is tile)
    if not loads <= IdSet(body.loads):
        return f"`{tile.name}` is filled in several loops"
    leafs = (s for s in find(kernel.body, Stmt) if is_leaf(s) and s not in loads)
    touched = [s for s in leafs if mentions(s, tile)]
    inside = IdSet(find(body.block, Stmt))
    changed = not body.repeats or _is_changed(body.block, tile, survey)
    for stmt in touched:
        if tile in writes_of(stmt) and not (stmt in inside and changed):
            return f"`{tile.name}` is written by the kernel's threads, too"
        if tile in reads_of(stmt) and stmt not in inside:
            return f"`{tile.name}` is read outside the loop that fills it"
    return why_not_tile(body.block, list(leaves(body.block)), tile)


def _is_changed(block: Block, tile: Buffer, survey: Survey) -> bool:
    """Return whether a later product of the body reads what threads write to a tile.

    If all of this happens in one branch of the body, the product is in that branch. A fence before the product also
    orders the writes before the copies of a later iteration.
    """
    touching = [s for s in block.stmts if mentions(s, tile) and not _fills(s, tile) and not isinstance(s, Alloc)]
    if not touching:
        return False
    last = touching[-1]
    if isinstance(last, If) and len(touching) == 1:
        return not mentions(last.otherwise, tile) and _is_changed(last.then, tile, survey)
    return any(last is op for op in survey.products)


def _deciding_nodes(copy: Copy, body: Body) -> Iterator[Node]:
    """Yield all nodes that decide if, how often and from where a copy reads."""
    for expr, _ in decisive(copy, body):
        yield from walk(expr)


def decisive(copy: Copy, body: Body) -> Iterator[tuple[Expr, str]]:
    """Yield the expressions that decide on a copy, each with what it decides, "" for values of names."""
    wanted = IdSet(find(copy.src, Var))
    for region in (copy.src, copy.dst):
        yield from ((e, "where it reads") for e in (*region.starts, *region.extents))
    above: Body | None = body
    while above is not None:
        for one in _outside_loops(above.block):
            if isinstance(one, If) and any(n is copy for n in find(one, Copy)):
                yield one.condition, "whether it is made"
                wanted |= IdSet(find(one.condition, Var))
        if above.loop is not None:
            for bound in (*above.loop.starts, *above.loop.stops):
                yield bound, "how often it is made"
                wanted |= IdSet(find(bound, Var))
        lets = [s for s in _outside_loops(above.block) if isinstance(s, Let)]
        for let in reversed(lets):
            if let.var in wanted:
                yield let.value, ""
                wanted |= IdSet(find(let.value, Var))
        above = above.outer


def _groups(body: Body, tiles: list[Buffer], stages: int) -> Iterator[Group]:
    """Group the tiles of a body by the first statement that needs them.

    Small tiles of one reader wait with the tiles of the next statement, if a product reads these: a barrier costs more
    than a late release of so few bytes.
    """
    by_first: dict[int, list[Buffer]] = {}
    for tile in tiles:
        by_first.setdefault(_users(body, tile)[0], []).append(tile)
    for first in sorted(by_first):
        found, after = by_first[first], first + 1
        single = all(_bytes(tile) <= SMALL and _users(body, tile) == [first] for tile in found)
        if single and after in by_first and isinstance(body.block.stmts[after], Gemm):
            by_first[after] += by_first.pop(first)
    for _, found in sorted(by_first.items()):
        users = [n for tile in found for n in (_users(body, tile)[0], _users(body, tile)[-1])]
        yield Group(body, found, min(users), max(users), stages)


def _users(body: Body, tile: Buffer) -> list[int]:
    """Return the statements of a body that read a tile, or write it by anything but a copy."""
    found = []
    for n, one in enumerate(body.block.stmts):
        if not mentions(one, tile):
            continue
        leaves = [s for s in find(one, Stmt) if is_leaf(s)]
        bounds = [n for s in find(one, For, While, If) for n in _heads(s)]
        used = any(tile in touched_by(s) for s in leaves if not _fills(s, tile))
        if used or any(x.buffer is tile for b in bounds for x in find(b, Load)):
            found.append(n)
    return found


def _heads(one: For | While | If) -> tuple[Expr, ...]:
    """Return the bounds of a loop, or the condition of a loop or branch."""
    return (*one.starts, *one.stops) if isinstance(one, For) else (one.condition,)


def _fills(stmt: Stmt, tile: Buffer) -> bool:
    """Return whether a statement is a copy into a tile."""
    return isinstance(stmt, Copy) and stmt.dst.buffer is tile


def is_leaf(stmt: Stmt) -> bool:
    """Return whether a statement contains no other statement, or is a parallel nest."""
    if isinstance(stmt, For):
        return stmt.kind is LoopKind.PARALLEL
    return not isinstance(stmt, Block | If | While | Role)


def _is_barrier(node: Node) -> bool:
    """Return whether a call orders warps by hand. One that lets the next kernel begin orders none of this kernel."""
    found = intrinsic_of(node) if isinstance(node, Call) else None
    if found is None or not found.by_hand or found.scope is Scope.WARP:
        return False
    return (found.sync, found.scope) != (Sync.ARRIVE, Scope.GRID)


def is_load(node: Node) -> bool:
    """Return whether a node is a T.copy from global to shared memory."""
    return type(node) is Copy and (node.src.buffer.scope, node.dst.buffer.scope) == ("global", "shared")
