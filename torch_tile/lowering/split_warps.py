# SPDX-License-Identifier: Apache-2.0
"""Pipelined products on Hopper: a warp of its own copies tiles ahead, the threads of the kernel multiply.

The kernel gets a warp or warpgroup more, and two roles. Turn after turn the copier waits until a stage of a group of
tiles is empty and starts the copies that fill it; the others wait until it is full, read it and let it go. Turns are
counted in closed form, from the loop's variable; a loop that is run again goes on counting. Afterwards no pipelined
loop of such a kernel is left; other kernels stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..build import Build
from ..intrinsics.bulk import mbarrier_arrive, mbarrier_wait, warp_arrive
from ..ir import dtype as dt
from ..ir.buffer import Buffer
from ..ir.dtype import int32
from ..ir.expr import Address, Expr, Load, Var, binary, const
from ..ir.node import Rewriter, walk
from ..ir.simplify import simplify
from ..ir.stmt import Alloc, Block, For, If, Kernel, Let, LoopKind, Program, Role, Stmt, Store
from ..tileop import copy_tma
from ..tileop.copy import Copy
from ..tileop.copy_tma import TmaCopy
from .bulk_loads import Body, Group, Loads, Survey, bulk_loads, is_load, is_zero
from .instance import Instance, versions_of
from .pipeline_schedule import without

WARP, WARPGROUP = 32, 128
ALL_REGISTERS, FEWEST_REGISTERS = 65536, 24  # of a block; of a thread
ZERO = const(0, int32)


def split_warps(program: Program, build: Build) -> Program:
    """Give kernels whose products go by wgmma a warp that copies; values do not change."""
    if build.target.capability != 90:
        return program
    kernels = tuple(_split(kernel, build) for kernel in program.kernels)
    same = all(a is b for a, b in zip(kernels, program.kernels, strict=True))
    return program if same else replace(program, kernels=kernels)


def _split(kernel: Kernel, build: Build) -> Kernel:
    count = math.prod(kernel.threads)
    pipelined = [n for n in walk(kernel.body) if isinstance(n, For) and n.kind is LoopKind.PIPELINED and n.stages]
    if not pipelined or count % WARPGROUP:
        return kernel
    thread = Var("thread", int32, "thread") if kernel.thread is None else kernel.thread
    normal: Kernel = _FromZero()(kernel)
    survey = Survey(build, thread, count)
    survey(normal)
    loads = bulk_loads(normal, survey)
    if isinstance(loads, str) or loads.why_not:
        if not isinstance(loads, str):
            for copy, why in loads.why_not:
                build.note(copy.span, "T.copy", "no bulk copy, so that all threads copy and multiply in turn", why)
        return kernel
    return _Roles(normal, loads, survey, thread, build).kernel()


def _shares(count: int) -> tuple[int, tuple[int, int]]:
    """How many threads copy beside `count` that multiply, and the registers of each of both.

    One warp copies where the others have registers enough. Several warpgroups get those that a fourth does not need.
    """
    groups = count // WARPGROUP
    if groups == 1:
        return WARP, (0, 0)
    entry = ALL_REGISTERS // (count + WARPGROUP) // 8 * 8
    left = entry * (groups + 1) - FEWEST_REGISTERS
    return WARPGROUP, (min(left // groups // 8 * 8, 240), FEWEST_REGISTERS)


class _FromZero(Rewriter):
    """Loops that load tiles count their turns from 0."""

    def For(self, loop: For) -> For:
        new: For = self.children(loop)
        from_zero = is_zero(loop.starts[0]) and loop.step == 1
        if loop.kind is LoopKind.PARALLEL or from_zero or not any(map(is_load, walk(loop.body))):
            return new
        start, stop, turn = loop.starts[0], loop.stops[0], Var(f"{loop.vars[0].name}_turn", int32, "loop")
        count = simplify((stop - start + (loop.step - 1)) // loop.step)
        body = Instance({id(loop.vars[0]): simplify(start + turn * loop.step)}, {}, fresh=False)(new.body)
        return replace(new, vars=(turn,), starts=(ZERO,), stops=(count,), step=1, body=body)


class _Roles:
    """One kernel, its loads the work of one more warp."""

    def __init__(self, kernel: Kernel, loads: Loads, survey: Survey, thread: Var, build: Build):
        self.source, self.groups, self.copies = kernel, loads.groups, loads.copies
        self.survey, self.thread, self.build = survey, thread, build
        self.count = math.prod(kernel.threads)
        self.copiers, self.registers = _shares(self.count)
        self.tiles = {id(t): versions_of(t, g.stages) for g in self.groups for t in g.tiles}
        self.group_of = {id(t): g for g in self.groups for t in g.tiles}
        self.full = {id(g): _barriers(f"{g.name}_full", g.stages, 1) for g in self.groups}
        free = [g for g in self.groups if g.body.repeats]
        self.empty = {id(g): _barriers(f"{g.name}_empty", g.stages, self.count // WARP) for g in free}
        self.bases = {id(b): Buffer("turns", (), int32, "var") for b in self._counted()}

    def kernel(self) -> Kernel:
        """The kernel with its roles."""
        allocs = [Alloc(tile) for tile in self.tiles.values()]
        allocs += [Alloc(b) for b in (*self.full.values(), *self.empty.values())]
        versions = {id(t): (self.tiles[id(t)], self.stage(self.group_of[id(t)])) for g in self.groups for t in g.tiles}
        place = Instance({}, versions, fresh=False)
        reading = place(Block((*self._bases(), *self._read(self.source.body, self._top()))))
        copying = Block((*self._bases(), *self._copy(self.source.body, self._top())))
        copying = Instance({}, {}, fresh=True)(place(without(copying, set())))
        if self.copiers > WARP:  # the others are there only because warpgroups give registers as a whole
            copying = Block((If(self.thread < self.count + WARP, copying, Block(())),))
        shared = [s for s in reading.stmts if isinstance(s, Alloc) and s.buffer.scope == "shared"]
        rest = Block(tuple(s for s in reading.stmts if s not in shared))
        theirs, few = self.registers
        roles = Role(0, self.count, rest, theirs), Role(self.count, self.copiers, copying, few)
        self._report()
        body = Block((*allocs, *shared, *roles))
        return replace(self.source, threads=(self.count + self.copiers,), thread=self.thread, body=body)

    # Turns.

    def _top(self) -> Body:
        body = self.groups[0].body
        while body.outer is not None:
            body = body.outer
        return body

    def _counted(self) -> list[Body]:
        """Bodies of loops that are run again, so that somebody has to remember how often they ran."""
        bodies = {id(g.body): g.body for g in self.groups}
        return [b for b in bodies.values() if len(b.loops) > 1]

    def turn(self, body: Body) -> Expr:
        """How often a body has run before."""
        if body.loop is None:
            return ZERO
        var = body.loop.vars[0]
        base = self.bases.get(id(body))
        return var if base is None else binary("max", Load(base, ()), ZERO) + var

    def stage(self, group: Group) -> Expr:
        """Which version of its tiles a turn uses."""
        return simplify(self.turn(group.body) % group.stages)

    def parity(self, group: Group, ahead: int) -> Expr:
        """The parity of the phase that a turn waits for; of the one before with `ahead` 1."""
        return simplify((self.turn(group.body) // group.stages + ahead) % 2)

    def _bases(self) -> list[Stmt]:
        return [Alloc(base, ZERO) for base in self.bases.values()]

    def _counts(self, body: Body | None) -> list[Stmt]:
        """After a loop that is run again: its turns are added."""
        if body is None or (base := self.bases.get(id(body))) is None or body.loop is None:
            return []
        trips = binary("max", body.loop.stops[0], ZERO)
        return [Store(base, (), Load(base, ()) + trips)]

    # What the threads of the kernel do.

    def _read(self, block: Block, body: Body) -> Iterator[Stmt]:
        """A body without its loads, with waits before readers and arrivals after them."""
        mine = [g for g in self.groups if g.body.block is block]
        for n, one in enumerate(block.stmts):
            for group in mine:
                if group.first == n:
                    yield mbarrier_wait(self._barrier(self.full, group), self.parity(group, 0))
            yield from self._reader(one, body)
            for group in mine:
                if group.last == n and id(group) in self.empty:
                    yield warp_arrive(self._barrier(self.empty, group))

    def _reader(self, one: Stmt, body: Body) -> Iterator[Stmt]:
        if id(one) in self.copies:
            return
        if isinstance(one, Alloc) and id(one.buffer) in self.tiles:
            return
        if isinstance(one, If):
            then, other = (Block(tuple(self._read(b, body))) for b in (one.then, one.otherwise))
            if then.stmts or other.stmts:
                yield If(one.condition, then, other, span=one.span)
        elif isinstance(one, For) and one.kind is not LoopKind.PARALLEL:
            inner = self._body_of(one)
            yield replace(_plain(one), body=Block(tuple(self._read(one.body, inner or body))))
            yield from self._counts(inner)
        elif type(one) is Copy and self._is_store(one):
            yield TmaCopy(one.src, one.dst, span=one.span)
        else:
            yield one

    def _is_store(self, copy: Copy) -> bool:
        if (copy.src.buffer.scope, copy.dst.buffer.scope) != ("shared", "global") or copy.disable_tma:
            return False
        return copy_tma.refuses(copy, self.survey.contexts[id(copy)]) is None

    # What the copier does.

    def _copy(self, block: Block, body: Body) -> Iterator[Stmt]:
        """The loads of a body with what they depend on, in stages that are empty."""
        mine = [g for g in self.groups if g.body.block is block]
        places = {id(g): [n for n, s in enumerate(block.stmts) if self._loads(s, g)] for g in mine}
        for n, one in enumerate(block.stmts):
            for group in mine:
                if places[id(group)][0] == n and id(group) in self.empty:
                    yield mbarrier_wait(self._barrier(self.empty, group), self.parity(group, 1))
            yield from self._copier(one, body)
            for group in mine:
                if places[id(group)][-1] == n:
                    arrive = mbarrier_arrive(self._barrier(self.full, group))
                    yield If(binary("==", self.thread, const(self.count, int32)), Block((arrive,)), Block(()))

    def _copier(self, one: Stmt, body: Body) -> Iterator[Stmt]:
        if isinstance(one, Let):
            yield one
        elif isinstance(one, Copy) and id(one) in self.copies:
            group = self.group_of[id(one.dst.buffer)]
            where = self._barrier(self.full, group)
            policy = one.eviction_policy
            yield TmaCopy(one.src, one.dst, None, False, policy, None, Load(where.buffer, where.indices), span=one.span)
        elif not any(id(n) in self.copies for n in walk(one)):
            return
        elif isinstance(one, If):
            yield If(
                one.condition, *(Block(tuple(self._copy(b, body))) for b in (one.then, one.otherwise)), span=one.span
            )
        elif isinstance(one, For):
            inner = self._body_of(one)
            yield replace(_plain(one), body=Block(tuple(self._copy(one.body, inner or body))))
            yield from self._counts(inner)

    def _loads(self, one: Stmt, group: Group) -> bool:
        tiles = {id(t) for t in group.tiles}
        return any(isinstance(n, Copy) and id(n) in self.copies and id(n.dst.buffer) in tiles for n in walk(one))

    def _barrier(self, of: dict[int, Buffer], group: Group) -> Address:
        return Address(of[id(group)], (self.stage(group),))

    def _body_of(self, loop: For) -> Body | None:
        return next((g.body for g in self.groups if g.body.loop is loop), None)

    def _report(self) -> None:
        for group in self.groups:
            names = ", ".join(t.name for t in group.tiles)
            span = group.body.loop.span if group.body.loop is not None else None
            became = (
                f"{names}: bulk copies by a warp of its own, {group.stages} {'stages' if group.stages > 1 else 'stage'}"
            )
            self.build.note(span, "T.Pipelined", became)


def _plain(loop: For) -> For:
    if loop.kind is not LoopKind.PIPELINED:
        return loop
    return replace(loop, kind=LoopKind.SERIAL, stages=0, order=(), stage=())


def _barriers(name: str, count: int, arrivals: int) -> Buffer:
    return Buffer(name, (const(count, int32),), dt.uint64, "barrier", arrivals=arrivals)
