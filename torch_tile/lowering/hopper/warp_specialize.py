# SPDX-License-Identifier: Apache-2.0
"""Give pipelined products on Hopper producer warps: they copy tiles ahead, and the kernel's threads multiply.

The kernel gets more warps and two roles. In each iteration a producer warp waits until a stage of a group of tiles is
empty. It then starts the copies that fill it. The consumers wait until the stage is full, read it and release it.
Groups have producer warps of their own, so that no group waits for the stages of another. Iterations are counted in
closed form, from the loop's variable; a loop that runs again goes on counting.

Blocks of a cluster may share loads (multicast_loads). A stage is then empty when the readers of all these blocks
release it. No block ends before the other blocks. Afterwards no pipelined loop of such a kernel is left; other kernels
stay as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from torch_tile.compiler.context import Build
from torch_tile.hardware import MOST_THREADS, UNIT, WARP, WARPGROUP, equal_share
from torch_tile.intrinsics.bulk import cluster_arrive, cluster_wait, mbarrier_arrive, mbarrier_wait, warp_arrive
from torch_tile.intrinsics.wgmma import LARGEST_N
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Const, Expr, Load, Var, binary, const, is_zero
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Rewriter, find, symbols, with_fields
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, For, If, Kernel, Let, LoopKind, Program, Role, Stmt, Store
from torch_tile.lowering.analysis.clone import Instance, versions_of
from torch_tile.lowering.hopper.cluster_multicast import Sharers, multicast_loads
from torch_tile.lowering.hopper.plan_tma_loads import (
    Body,
    Group,
    Loads,
    Survey,
    is_leaf,
    is_load,
    meetings,
    plan_tma_loads,
    waits_before_loads,
)
from torch_tile.lowering.pipelining.count_stages import is_counted
from torch_tile.lowering.pipelining.schedule import without
from torch_tile.tileop.copy import tma
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.copy.tma import TmaCopy
from torch_tile.tileop.gemm.mma import problem
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.uses import reads_of

FEWEST_REGISTERS, MOST_REGISTERS = 24, 240  # registers of a thread
REGISTERS_OF_NESTS = 40  # registers of a thread that copies in nested loops, under conditions or to bounds of each turn
MOST_COPIERS = 4  # warps
MOST_IN_FRAGMENTS = 200  # registers of a thread, where two blocks share a multiprocessor
BESIDE_SUMS = 26  # registers of a thread that one product's instruction needs beside its sums
REST = 4096  # bytes of a block's shared memory for barriers, results of reductions and padding
NO_CLUSTER = (1, 1, 1)
SPLIT = "bulk copies by a warp of its own"  # of the report
ZERO = const(0, int32)


def specialize_warps(program: Program, build: Build, why_not: str = "") -> Program:
    """Give producer warps to kernels whose products run as wgmma; values do not change. `why_not` forbids them."""
    why_not = why_not or ("" if build.target.has_wgmma else f"{build.target} has no roles of warps")
    if why_not:
        for kernel in program.kernels:
            _each_its_own(kernel, why_not, build)
        return program
    return with_fields(program, kernels=tuple(_split_kernel(kernel, build) for kernel in program.kernels))


def _split_kernel(kernel: Kernel, build: Build) -> Kernel:
    """Split one kernel into roles, or report why it keeps all its threads together."""
    count = math.prod(kernel.threads)
    pipelined = [n for n in find(kernel.body, For) if n.kind is LoopKind.PIPELINED and n.stages]
    if not pipelined or count % WARPGROUP:
        _each_its_own(kernel, f"no pipelined loop of blocks of whole groups of {WARPGROUP} threads", build)
        return kernel
    thread = Var("thread", int32, "thread") if kernel.thread is None else kernel.thread
    normal: Kernel = _FromZero()(kernel)
    survey = Survey(build, thread, count)
    survey(normal)
    loads = plan_tma_loads(normal, survey)
    if isinstance(loads, str) or loads.why_not:
        if not isinstance(loads, str):
            for copy, why in loads.why_not:
                build.remark(copy.span, "T.copy", "no bulk copy, so that all threads copy and multiply in turn", why)
        _each_its_own(kernel, loads if isinstance(loads, str) else "not every pipelined copy is a bulk copy", build)
        return kernel
    if kernel.min_blocks == 1 and not build.options.measured and _leaves_room(normal, loads, build):
        kernel, normal = replace(kernel, min_blocks=2), replace(normal, min_blocks=2)
    few = equal_share(count + WARPGROUP, kernel.min_blocks) <= FEWEST_REGISTERS
    if few or count + WARPGROUP > MOST_THREADS:
        why = f"{kernel.min_blocks} blocks on a multiprocessor leave them no registers"
        why = why if few else f"a block has at most {MOST_THREADS} threads, and {count} of them multiply"
        build.remark(kernel.span, "T.Kernel", "no warps that copy, so that all threads copy and multiply in turn", why)
        _each_its_own(kernel, why, build)
        return kernel
    return _Roles(normal, loads, survey, thread, build).kernel()


def _leaves_room(kernel: Kernel, loads: Loads, build: Build) -> bool:
    """Return whether two blocks of one multiplying warpgroup and several producer warps surely fit on a multiprocessor.

    Each thread then has fewer registers, which its parts of all fragments must not fill. The assembler counts the
    registers of an instruction against an equal share, though roles share otherwise.
    """
    if math.prod(kernel.threads) != WARPGROUP or len(loads.groups) == 1:
        return False
    stages = IdMap((tile, group.stages) for group in loads.groups for tile in group.tiles)
    shared = registers = 0
    for buffer in (alloc.buffer for alloc in find(kernel.body, Alloc)):
        shape, bits = buffer.static_shape, buffer.dtype.bits
        if shape is None:
            return False
        if buffer.scope == "shared":
            shared += math.prod(shape) * bits // 8 * stages.get(buffer, 1)
        elif buffer.scope == "fragment":
            registers += max(1, math.prod(shape) * bits // 32 // WARPGROUP)
    sizes = [found for op in find(kernel.body, Gemm) if (found := problem(op)) is not None]
    sums = max((min(n, LARGEST_N) // 2 for _, n, _ in sizes), default=0)
    if sums + BESIDE_SUMS > equal_share(2 * WARPGROUP, 2):
        return False
    room = build.target.shared_limit // 2 - REST
    return shared <= room and registers <= MOST_IN_FRAGMENTS


def _each_its_own(kernel: Kernel, why: str, build: Build) -> None:
    """Report why the blocks of a cluster share no loads."""
    if kernel.cluster != NO_CLUSTER:
        build.remark(kernel.span, "T.Kernel", f"each block of a cluster loads its own tiles: {why}")


def _shares(count: int, warps: int, blocks: int, few: int) -> tuple[int, tuple[int, int]]:
    """Compute how many producer threads join `count` consumers, and the registers of each consumer and producer.

    `warps` is the number of producer warps, and `few` the registers of a producer thread. One warpgroup that has the
    multiprocessor to itself has enough registers. Otherwise consumers also get the registers that the warpgroup of the
    producer warps does not need.
    """
    groups = count // WARPGROUP
    if groups == blocks == 1:
        return warps * WARP, (0, 0)
    left = equal_share(count + WARPGROUP, blocks) * (groups + 1) - few
    return WARPGROUP, (min(left // groups // UNIT * UNIT, MOST_REGISTERS), few)


class LoopsOfRoles(Rewriter):
    """Base of passes over the loops of roles. Roles that the author wrote stay."""

    inside = False  # whether the visitor is in a role that the compiler made

    def visit_Role(self, role: Role) -> Role:
        """Visit the loops of a role that the compiler made, not of a role of the author."""
        self.inside = not role.by_hand
        new = self.children(role)
        self.inside = False
        return new


class _FromZero(Rewriter):
    """Rewrite loops that load tiles to count from 0 to a number or name, which the loop need not compute."""

    def visit_For(self, loop: For) -> Stmt:
        """Rewrite the range of a loop that loads tiles."""
        new: For = self.children(loop)
        if loop.kind is LoopKind.PARALLEL or not any(map(is_load, find(loop.body, Copy))):
            return new
        start, stop, name = loop.starts[0], loop.stops[0], loop.vars[0].name
        if not is_zero(start) or loop.step != 1:
            iteration = Var(f"{name}_turn", int32, "loop")
            stop = simplify((stop - start + (loop.step - 1)) // loop.step)
            body = Instance(IdMap([(loop.vars[0], simplify(start + iteration * loop.step))]), IdMap(), fresh=False)(
                new.body
            )
            new = replace(new, vars=(iteration,), starts=(ZERO,), stops=(stop,), step=1, body=body)
        if isinstance(stop, Const | Var):
            return new
        count = Var(f"{name}_turns", stop.dtype, "let")
        return Block((Let(count, stop, span=loop.span), replace(new, stops=(count,))))


class _Roles:
    """Split one kernel into consumers and the producer warps that make its loads."""

    def __init__(self, kernel: Kernel, loads: Loads, survey: Survey, thread: Var, build: Build):
        self.source, self.groups, self.copies = kernel, loads.groups, loads.copies
        self.survey, self.thread, self.build = survey, thread, build
        self.count = math.prod(kernel.threads)
        self.warps = min(len(self.groups), MOST_COPIERS)
        nested = self._asks() or any(_has_own_bounds(g.body) for g in self.groups)
        # A warp that copies for several groups has several loops; one warpgroup of consumers can spare the registers.
        crowded = len(self.groups) > MOST_COPIERS and self.count == WARPGROUP
        few = REGISTERS_OF_NESTS if (nested and kernel.min_blocks == 1) or crowded else FEWEST_REGISTERS
        self.producers, self.registers = _shares(self.count, self.warps, kernel.min_blocks, few)
        self.tiles = IdMap((t, versions_of(t, g.stages)) for g in self.groups for t in g.tiles)
        self.group_of = IdMap((t, g) for g in self.groups for t in g.tiles)
        self.full = IdMap((g, _barriers(g, "full", 1)) for g in self.groups)
        free = [g for g in self.groups if g.body.repeats]
        self.shared = multicast_loads(kernel, loads, survey, build)
        self.sharers = IdMap((g, found) for g in self.groups if (found := self._sharers(g)) is not None)
        self.empty = IdMap((g, _barriers(g, "empty", self._arrivals(g))) for g in free)
        self.bases = IdMap((b, self._base(b)) for b in self._counted())
        leaves = (n for n in find(kernel.body, Stmt) if is_leaf(n))
        self.read = IdSet(n.buffer for n in find(kernel.body, Load))
        for leaf in leaves:
            self.read.update(reads_of(leaf))

    def kernel(self) -> Kernel:
        """Build the kernel with its roles."""
        allocs = [Alloc(tile) for tile in self.tiles.values()]
        allocs += [Alloc(b) for b in (*self.full.values(), *self.empty.values())]
        versions = IdMap((t, (self.tiles[t], self.stage(self.group_of[t]))) for g in self.groups for t in g.tiles)
        place = Instance(IdMap(), versions, fresh=False)
        reading = place(Block((*self._bases(), *self._without_loads(self.source.body, self._top()))))
        # Each thread waits for the kernel before, and the barriers of a cluster count all its threads.
        copying = Block((*waits_before_loads(self.source), *self._producers(place), *meetings(self.source)))
        shared = [s for s in reading.stmts if isinstance(s, Alloc) and s.buffer.scope == "shared"]
        rest = Block(tuple(s for s in reading.stmts if s not in shared))
        theirs, few = self.registers
        roles = Role(0, self.count, rest, theirs), Role(self.count, self.producers, copying, few)
        self._report()
        # A block must not end while other blocks may send to it or release its tiles. This arrival is not a relaxed
        # one, so what is in flight completes before it.
        end = (cluster_arrive(), cluster_wait()) if self.sharers else ()
        body = Block((*allocs, *shared, *roles, *end))
        return replace(self.source, threads=(self.count + self.producers,), thread=self.thread, body=body)

    def _asks(self) -> bool:
        """Return whether a loop with another loop inside makes loads under a condition."""
        around = [b for g in self.groups if (b := g.body.outer) is not None and b.loop is not None]
        return any(
            isinstance(s, If) and any(c in self.copies for c in find(s, Copy)) for b in around for s in b.block.stmts
        )

    # Clusters.

    def _sharers(self, group: Group) -> Sharers | None:
        """Return the blocks that a group's producer warp sends to; the producer warps of these send to this block."""
        tiles = IdSet(group.tiles)
        mine = [self.shared[c] for c in group.body.loads if c in self.shared and c.dst.buffer in tiles]
        return functools.reduce(Sharers.union, mine) if mine else None

    def _arrivals(self, group: Group) -> int:
        """Count the arrivals that release a group: one of each warp that reads its tiles, in all receiving blocks."""
        sharers = self.sharers.get(group)
        return self.count // WARP * (1 if sharers is None else sharers.count)

    # Counting of iterations.

    def _top(self) -> Body:
        """Return the body of the kernel itself."""
        body = self.groups[0].body
        while body.outer is not None:
            body = body.outer
        return body

    def _counted(self) -> list[Body]:
        """Return the bodies of loops that run again; a variable has to count their earlier iterations."""
        bodies = IdMap((g.body, g.body) for g in self.groups)
        return [b for b in bodies.values() if len(b.loops) > 1]

    def iteration(self, body: Body) -> Expr:
        """Return the number of times that a body has run before."""
        if body.loop is None:
            return ZERO
        var = body.loop.vars[0]
        base = self.bases.get(body)
        return var if base is None else self._iterations_before(base, body) + var

    def _base(self, body: Body) -> Buffer:
        """Make the variable that counts the iterations of earlier runs, below the period if stages are counted."""
        period = self._period(body)
        return Buffer("turns", (), int32, "var", below=period if is_counted(period) else 0)

    def _iterations_before(self, base: Buffer, body: Body) -> Expr:
        """Return the number of iterations in earlier runs of a loop, as far as stages and parities need it.

        A mask by a power of two also tells the assembler that the number is not negative.
        """
        return Load(base, ()) if base.below else binary("max", Load(base, ()), ZERO) % self._period(body)

    def _period(self, body: Body) -> int:
        """Return after how many iterations of a body all stages and parities are as before."""
        return 2 * math.lcm(*(g.stages for g in self.groups if g.body is body))

    def stage(self, group: Group) -> Expr:
        """Return the stage of a group's tiles that the current iteration uses."""
        return simplify(self.iteration(group.body) % group.stages)

    def parity(self, group: Group, ahead: int) -> Expr:
        """Return the parity of the phase that an iteration waits for; with `ahead` 1, of the phase before."""
        return simplify((self.iteration(group.body) // group.stages + ahead) % 2)

    def _bases(self) -> list[Stmt]:
        """Allocate the variables that count the iterations of earlier runs."""
        return [Alloc(base, ZERO) for base in self.bases.values()]

    def counts(self, body: Body | None) -> list[Stmt]:
        """Return the statement behind a loop that adds its iterations, if the loop runs again.

        Where stages are counted, a comparison keeps the variable below the body's period.
        """
        if body is None or (base := self.bases.get(body)) is None or body.loop is None:
            return []
        trips, before = binary("max", body.loop.stops[0], ZERO), self._iterations_before(base, body)
        return [Store(base, (), (before + trips % base.below) % base.below if base.below else before + trips)]

    # Code of the consumers.

    def _without_loads(self, block: Block, body: Body) -> Iterator[Stmt]:
        """Yield a body without its loads, with waits before readers and arrivals after them."""
        mine = [g for g in self.groups if g.body.block is block]
        for n, one in enumerate(block.stmts):
            for group in mine:
                if group.first == n:
                    yield mbarrier_wait(self.barrier(self.full, group), self.parity(group, 0))
            yield from self._reader(one, body)
            for group in mine:
                if group.last == n and group in self.empty:
                    yield self._release(group, body)

    def _release(self, group: Group, body: Body) -> Stmt:
        """Build the arrival by which a warp releases an iteration's tiles, after waits for products that read them."""
        where = self.barrier(self.empty, group)
        tiles = IdSet(group.tiles)
        products = IdSet(self.survey.products)
        readers = [n for n in find(body.block, Stmt) if is_leaf(n) and tiles.any_in(n) and tiles & reads_of(n)]
        only_products = all(n in products or n in self.copies for n in readers)
        sharers = self.sharers.get(group)
        if not only_products:
            return warp_arrive(where, None if sharers is None else sharers.blocks)
        lane = binary("%", self.thread, const(WARP, int32))
        if sharers is None:
            return If(binary("==", lane, ZERO), Block((mbarrier_arrive(where),)), Block(()))
        return If(sharers.include(lane), Block((mbarrier_arrive(where, lane),)), Block(()))

    def _reader(self, one: Stmt, body: Body) -> Iterator[Stmt]:
        """Yield what the consumers run of a statement: no loads, and bulk stores where these fit."""
        if one in self.copies:
            return
        if isinstance(one, Alloc) and one.buffer in self.tiles:
            return
        if isinstance(one, If):
            then, other = (Block(tuple(self._without_loads(b, body))) for b in (one.then, one.otherwise))
            if then.stmts or other.stmts:
                yield If(one.condition, then, other, span=one.span)
        elif isinstance(one, For) and one.kind is not LoopKind.PARALLEL:
            inner = self.body_of(one)
            yield replace(_to_serial(one), body=Block(tuple(self._without_loads(one.body, inner or body))))
            yield from self.counts(inner)
        elif type(one) is Copy and self._is_store(one):
            yield TmaCopy(one.src, one.dst, span=one.span)
        else:
            yield one

    def _is_store(self, copy: Copy) -> bool:
        """Return whether a copy becomes a bulk store; report a reason that the author should know."""
        if (copy.src.buffer.scope, copy.dst.buffer.scope) != ("shared", "global") or copy.disable_tma:
            return False
        if copy.dst.buffer in self.read:
            why = f"the kernel reads `{copy.dst.buffer.name}`, and bulk stores would have to be waited for"
            self.build.remark(copy.span, "T.copy", "an ordinary copy", why)
            return False
        return tma.refuses(copy, self.survey.contexts[copy]) is None

    # Code of the producer warps.

    def _producers(self, place: Instance) -> Iterator[Stmt]:
        """Yield the loads of each producer warp."""
        for warp in range(self.warps):
            loads = _Copier(self, warp)
            stmts = Block((*self._bases(), *loads.block(self.source.body, self._top())))
            made: Block = Instance(IdMap(), IdMap(), fresh=True)(place(without(stmts, IdSet())))
            number = (self.count + warp * WARP) // WARP
            if self.producers == WARP:
                yield from made.stmts
            else:
                yield If(binary("==", self.thread // WARP, const(number, int32)), made, Block(()))

    def barrier(self, of: IdMap[Group, Buffer], group: Group) -> Address:
        """Return the mbarrier of a group for the stage of the current iteration."""
        return Address(of[group], (self.stage(group),))

    def body_of(self, loop: For) -> Body | None:
        """Return the body of a loop that has loads; None for other loops."""
        return next((g.body for g in self.groups if g.body.loop is loop), None)

    def _report(self) -> None:
        """Report the stages of each group to the author."""
        for group in self.groups:
            names = ", ".join(t.name for t in group.tiles)
            span = group.body.loop.span if group.body.loop is not None else None
            became = f"{names}: {SPLIT}, {group.stages} {'stages' if group.stages > 1 else 'stage'}"
            asked = 0 if group.body.loop is None else group.body.loop.stages
            fewer = group.stages < asked
            why_not = f"num_stages={asked} does not fit into shared memory beside other tiles" if fewer else ""
            self.build.remark(span, "T.Pipelined", became, why_not)


def _has_own_bounds(body: Body) -> bool:
    """Return whether each turn of the loop around a loop gives that one another number of iterations."""
    outer = body.outer
    if body.loop is None or outer is None or outer.loop is None:
        return False
    named = {let.var: let.value for let in find(outer.loop.body, Let)}
    waiting: list[Expr] = [body.loop.stops[0]]
    changing = set(outer.loop.vars)
    while waiting:
        names = symbols(waiting.pop())
        if not changing.isdisjoint(names):
            return True
        waiting += [named.pop(name) for name in names if name in named]
    return False


class _Copier:
    """Build the loads of one producer warp."""

    def __init__(self, roles: _Roles, warp: int):
        self.roles, self.by = roles, warp * WARP
        self.groups = roles.groups[warp :: roles.warps]
        tiles = IdSet(t for g in self.groups for t in g.tiles)
        self.copies = IdSet(c for g in self.groups for c in g.body.loads if c.dst.buffer in tiles)

    def block(self, block: Block, body: Body) -> Iterator[Stmt]:
        """Yield the loads of a body and what they depend on, with waits for empty stages and arrivals."""
        mine = [g for g in self.groups if g.body.block is block]
        places = IdMap((g, [n for n, s in enumerate(block.stmts) if self._loads(s, g)]) for g in mine)
        for n, one in enumerate(block.stmts):
            for group in mine:
                if places[group][0] == n and group in self.roles.empty:
                    yield mbarrier_wait(self.roles.barrier(self.roles.empty, group), self.roles.parity(group, 1))
            yield from self.stmt(one, body)
            for group in mine:
                if places[group][-1] == n:
                    arrive = mbarrier_arrive(self.roles.barrier(self.roles.full, group))
                    yield If(
                        binary("==", self.roles.thread, const(self.roles.count + self.by, int32)),
                        Block((arrive,)),
                        Block(()),
                    )

    def stmt(self, one: Stmt, body: Body) -> Iterator[Stmt]:
        """Yield the parts of a statement that the loads need."""
        if isinstance(one, Let):
            yield one
        elif isinstance(one, Copy) and one in self.copies:
            group = self.roles.group_of[one.dst.buffer]
            where = self.roles.barrier(self.roles.full, group)
            signal = Load(where.buffer, where.indices)
            made = TmaCopy(
                one.src, one.dst, eviction_policy=one.eviction_policy, barrier=signal, by=self.by, span=one.span
            )
            among = self.roles.shared.get(one)
            if among is not None:
                made = replace(made, blocks=among.blocks, share=among.number, shares=among.count)
            yield made
        elif not any(n in self.copies for n in find(one, Copy)):
            return
        elif isinstance(one, If):
            yield If(
                one.condition, *(Block(tuple(self.block(b, body))) for b in (one.then, one.otherwise)), span=one.span
            )
        elif isinstance(one, For):
            inner = self.roles.body_of(one)
            yield replace(_to_serial(one), body=Block(tuple(self.block(one.body, inner or body))))
            yield from self.roles.counts(inner)

    def _loads(self, one: Stmt, group: Group) -> bool:
        """Return whether a statement loads tiles of a group."""
        tiles = IdSet(group.tiles)
        return any(n in self.copies and n.dst.buffer in tiles for n in find(one, Copy))


def _to_serial(loop: For) -> For:
    """Turn a pipelined loop into a serial one."""
    if loop.kind is not LoopKind.PIPELINED:
        return loop
    return replace(loop, kind=LoopKind.SERIAL, stages=0, order=(), stage=())


def _barriers(group: Group, what: str, arrivals: int) -> Buffer:
    """Make the mbarriers of a group, one for each stage; each tells that its stage is `what`, "full" or "empty"."""
    shape = (const(group.stages, int32),)
    return Buffer(f"{group.name}_{what}", shape, dt.uint64, "barrier", arrivals=arrivals, guards=group.tiles[0])
