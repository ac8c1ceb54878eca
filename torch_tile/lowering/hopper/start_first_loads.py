# SPDX-License-Identifier: Apache-2.0
"""Load the operands of a block's first product before all other tiles.

A persistent block may start each next tile's first product early (start_next_tiles.py). Its very first product then
stands in front of the loop over tiles. Until its operands are there, the block waits: 4 us of the 25 that attention
over 1024 keys takes. The thread that initialises the mbarriers asks for them itself, before the barrier of the block:

    thread 0: initialise mbarriers            thread 0: initialise mbarriers; load q0, k0
    barrier of the block                      barrier of the block
    producer of q: load q0, q1, q2, ...       producer of q: wait for q0; load q1, q2, ...
    producer of k: load k0, k1, ...           producer of k: wait for q0; load k1, ...
    producer of v: load v0, v1, ...           producer of v: wait for q0; load v0, v1, ...

The first tile's other loads wait for the first operand, as all loads share the memory's bandwidth. Such a wait surely
ends: consumers release that operand's place only behind the tile, which needs those loads. Assumes stage THREAD, with
all barriers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch_tile.compiler.context import Build
from torch_tile.intrinsics.base import starts, syncs
from torch_tile.intrinsics.bulk import mbarrier_wait
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Call, Const, Expr, Load, Var, binary, const, is_zero
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Rewriter, contains, find, symbols, with_fields
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Kernel, Let, LoopKind, Program, Role, Stmt
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.lowering.analysis.first_iteration import FirstIteration

ZERO, ONE = const(0, int32), const(1, int32)


def start_first_loads(program: Program, build: Build) -> Program:
    """Let the thread that initialises mbarriers load the operands of each block's first product."""
    known = Ranges().launched(program)
    kernels = tuple(_with_first_loads(kernel, known.kernel(kernel), build) for kernel in program.kernels)
    return with_fields(program, kernels=kernels)


def _with_first_loads(kernel: Kernel, known: Ranges, build: Build) -> Kernel:
    """Rewrite a kernel; the same one if it has another form."""
    stmts = kernel.body.stmts
    met = next((n for n, one in enumerate(stmts) if syncs(one, Sync.BARRIER, Scope.BLOCK)), 0)
    if not met:
        return kernel
    init, behind = stmts[met - 1], stmts[met + 1 :]
    roles = [one for one in behind if isinstance(one, Role) and not one.by_hand]
    pure = all(isinstance(one, Alloc | Let | Role) for one in behind)
    if not isinstance(init, If) or len(roles) != 2 or roles != list(behind[-2:]) or not pure:
        return kernel
    assert kernel.thread is not None
    consumer, producer = roles
    operands = _first_operands(consumer)
    parts = [one.then if isinstance(one, If) and not one.otherwise.stmts else None for one in producer.body.stmts]
    loads: list[Stmt] = []
    for barrier in operands:
        names = tuple(one for one in behind if isinstance(one, Let))
        bodies = [(*names, *part.stmts) for part in parts if part]
        found = [first for body in bodies if (first := _FirstLoad(barrier, kernel.thread, known).of(body))]
        if len(found) != 1:
            return kernel
        loads += found[0]
    if not loads or any(part is None for part in parts):
        return kernel
    certain = _certain_waits(consumer)
    made = []
    for one in producer.body.stmts:
        assert isinstance(one, If)
        made.append(replace(one, then=_Later(operands, certain).part(one.then)))
    build.remark(next(find(producer, For)).span, "T.copy", "of a block's first operands ahead of all other copies")
    started = replace(init, then=Block((*init.then.stmts, *loads)))
    role = replace(producer, body=replace(producer.body, stmts=tuple(made)))
    return replace(kernel, body=replace(kernel.body, stmts=(*stmts[: met - 1], started, *stmts[met:-1], role)))


def _barriers(one: Stmt) -> list[Buffer]:
    """Return the mbarriers that a statement names, in order."""
    return [node.buffer for node in find(one, Address) if node.buffer.scope == "barrier"]


def _first_operands(consumer: Role) -> list[Buffer]:
    """Return the mbarriers that consumers wait for, once each, before a product in front of their loop over tiles."""
    found: list[Buffer] = []
    for one in consumer.body.stmts:
        waits = _waits(one)
        if any(_waits(loop) for loop in find(one, For)):  # over tiles, or over the steps of a block's only tile
            return []
        found += [b for call in waits for b in _barriers(call)]
        if any(starts(call, Engine.WGMMA) for call in find(one, Call)):
            return found if len(IdSet(found)) == len(found) and _certain_waits(consumer) else []
    return []


def _waits(one: Stmt) -> list[Do]:
    """Return the waits in a statement."""
    return [call for call in find(one, Do) if syncs(call, Sync.WAIT)]


def _certain_waits(consumer: Role) -> list[Buffer]:
    """Return the mbarriers that consumers wait for in each of their tiles."""
    loops = (one for one in consumer.body.stmts if isinstance(one, For))
    found = (one for loop in loops for one in loop.body.stmts if syncs(one, Sync.WAIT))
    return [b for one in found for b in _barriers(one)]


def _is_load(one: Stmt, barrier: Buffer) -> bool:
    """Return whether one thread of a producer fills a stage here: it starts copies, or arrives at their mbarrier."""
    return isinstance(one, If) and not one.otherwise.stmts and barrier in _barriers(one)


class _FirstLoad:
    """Find the statements by which one thread makes the first load of a producer's part."""

    def __init__(self, barrier: Buffer, thread: Var, known: Ranges):
        self.barrier, self.thread = barrier, thread
        self.copies = _InFirstIteration()
        self.first = FirstIteration(self.copies, known)

    def of(self, stmts: Sequence[Stmt]) -> list[Stmt]:
        """Return the first load of a part; nothing if the part has none, or if it has another form."""
        if not any(isinstance(one, For) and self.barrier in _barriers(one) for one in stmts):
            return []
        found = list(self._first(stmts, inside=False))
        calls = [call for one in found for call in find(one, Do)]
        complete = all(any(syncs(call, sync) for call in calls) for sync in (Sync.EXPECT, Sync.ARRIVE))
        return found if complete and not any(self.thread in symbols(one) for one in found) else []

    def _first(self, stmts: Sequence[Stmt], inside: bool) -> Iterator[Stmt]:
        """Yield the statements of the first iteration, up to the last one of the load."""
        last = max(n for n, one in enumerate(stmts) if self.barrier in _barriers(one))
        for one in stmts[: last + 1]:
            if isinstance(one, Let) and _is_pure(one.value):
                yield from self.first.named(one)
            elif isinstance(one, Alloc) and one.buffer.scope == "var" and isinstance(one.init, Const):
                self.copies.counts[one.buffer] = one.init
            elif isinstance(one, For) and _is_counted(one) and _loads_alone(one, self.barrier):
                self.copies.values[one.vars[0]] = ZERO
                stop = self.copies(one.stops[0])
                inner = tuple(self._first(one.body.stmts, inside=True))
                yield If(binary("<", ZERO, stop), Block(inner), Block(()), span=one.span)
            elif inside and _is_load(one, self.barrier):
                assert isinstance(one, If)
                yield from (self.copies(each) for each in one.then.stmts)
            elif not syncs(one, Sync.WAIT):  # stages are free at first
                return


def _loads_alone(loop: For, barrier: Buffer) -> bool:
    """Return whether an iteration only waits for a stage and loads it, or holds another loop that does."""
    if not any(_is_load(one, barrier) for one in loop.body.stmts):
        return True
    rest = (one for one in loop.body.stmts if not isinstance(one, Let) and not _is_load(one, barrier))
    return all(syncs(one, Sync.WAIT) for one in rest)


def _is_counted(loop: For) -> bool:
    """Return whether a loop counts from 0 by 1."""
    return loop.kind is LoopKind.SERIAL and len(loop.vars) == 1 and loop.step == 1 and is_zero(loop.starts[0])


def _is_pure(value: Expr) -> bool:
    """Return whether a value is computed from numbers and indices alone, and from counts of steps."""
    return not contains(value, Address) and all(load.buffer.scope == "var" for load in find(value, Load))


class _InFirstIteration(Instance):
    """Copy statements as the first iteration runs them: counts of steps have their first values."""

    def __init__(self) -> None:
        super().__init__(IdMap(), IdMap(), fresh=True)
        self.counts: IdMap[Buffer, Expr] = IdMap()

    def visit_Load(self, load: Load) -> Expr:  # type: ignore[override]
        """Return the value of a count."""
        found = self.counts.get(load.buffer)
        return super().visit_Load(load) if found is None else found


@dataclass
class _Later(Rewriter):
    """Rewrite what producers do behind the first loads."""

    operands: Sequence[Buffer]
    certain: Sequence[Buffer]  # mbarriers whose first load the first tile needs

    def __post_init__(self) -> None:
        self.loops: tuple[Var, ...] = ()

    def part(self, body: Block) -> Block:
        """Rewrite what one warp of a producer runs."""
        if any(barrier in _barriers(one) for one in body.stmts for barrier in self.operands):
            new: Block = self(body)
            return new
        if not any(barrier in _barriers(one) for one in body.stmts for barrier in self.certain):
            return body
        found: list[Stmt] = []
        for one in body.stmts:
            if isinstance(one, For):
                found.append(If(binary("<", one.starts[0], one.stops[0]), Block((self._wait(),)), Block(())))
            found.append(one)
        return replace(body, stmts=tuple(found))

    def _wait(self) -> Do:
        """Return a wait for the first operand."""
        return mbarrier_wait(Address(self.operands[0], (ZERO,)), ZERO)

    def visit_For(self, loop: For) -> For:
        """Skip the first load of the outermost iteration, and let the second one wait for the first operand.

        The load's wait for a free stage goes, too. Consumers may release that stage before: then it would not end.
        """
        outer, self.loops = self.loops, (*self.loops, loop.vars[0])
        stmts = [self.visit_For(one) if isinstance(one, For) else one for one in loop.body.stmts]
        if any(_is_load(one, barrier) for one in stmts for barrier in self.operands):
            names = list(takewhile(lambda one: isinstance(one, Let), stmts))
            later = functools.reduce(_either, [binary("<", ZERO, var) for var in self.loops])
            wait = If(self._is_second(), Block((self._wait(),)), Block(()))
            load = Block((wait, *stmts[len(names) :]))
            stmts = [*names, If(later, load, Block(()), span=loop.span)]
        self.loops = outer
        return replace(loop, body=replace(loop.body, stmts=tuple(stmts)))

    def _is_second(self) -> Expr:
        """Return whether this is the second iteration of the innermost loop, and the first one of others."""
        *before, last = self.loops
        tests = [binary("==", last, ONE), *(binary("==", var, ZERO) for var in before)]
        return functools.reduce(_both, tests)


def _both(a: Expr, b: Expr) -> Expr:
    return binary("and", a, b)


def _either(a: Expr, b: Expr) -> Expr:
    return binary("or", a, b)
