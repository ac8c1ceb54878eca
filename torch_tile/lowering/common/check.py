# SPDX-License-Identifier: Apache-2.0
"""Check the whole kernel for errors that the author can mend, and report them together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import Diagnostic, Span, TileError, diagnose
from torch_tile.diagnostics.kernel_warnings import warn_of
from torch_tile.hardware import GRID_LIMITS, MOST_THREADS, PER_THREAD
from torch_tile.intrinsics import lookup as lookup_of_intrinsics
from torch_tile.intrinsics.base import Intrinsic, intrinsic_of, is_pure, lookup
from torch_tile.intrinsics.memory import option
from torch_tile.intrinsics.traits import Scope, Sync
from torch_tile.ir import dtype as dt, stmt
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import (
    LOGICAL,
    Address,
    Binary,
    Call,
    Const,
    Expr,
    Load,
    Select,
    Var,
    binary,
    const,
    is_constant,
    unary,
)
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, contains, contents, equal, find
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, Break, Do, For, If, Kernel, Let, LoopKind, Program, Stmt, Store, dimensions
from torch_tile.lowering.analysis.reachability import LOST, Path
from torch_tile.lowering.analysis.thread_values import Divergence, Guard, comers, passing
from torch_tile.lowering.common.block_races import block_races, cleared_sums, iteration_races
from torch_tile.lowering.common.idle_indices import empty_grids, idle_indices
from torch_tile.lowering.common.miscounted_arrivals import Arrivals
from torch_tile.lowering.common.narrow_sums import kept_sums, narrow_sums
from torch_tile.lowering.common.never_waited import never_waited
from torch_tile.lowering.common.role_races import role_races
from torch_tile.lowering.common.stuck_waits import stuck_waits
from torch_tile.lowering.common.unread_tails import Ends
from torch_tile.lowering.common.unread_writes import unread_writes
from torch_tile.lowering.common.unwritten import unwritten_reads
from torch_tile.lowering.common.unwritten_results import partly_written
from torch_tile.lowering.pipelining.schedule import misfit
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.atomic import Atomic
from torch_tile.tileop.base import describe, is_per_thread
from torch_tile.tileop.copy.tma import TmaCopy
from torch_tile.tileop.uses import writes_of

TRUE = const(True, dt.bool_)
ONE = const(1, dt.int32)
MOST_SPILLED = 4  # times the registers of a thread that a fragment may take


def check_kernel(program: Program, known_later: Collection[Var] = ()) -> Program:
    """Return the program unchanged, or raise one TileError with every finding. Warn of gaps and block races.

    Shared tiles may have sizes of `known_later`: calls bring them, and the kernel is checked again with their values.
    """
    check = _Check(known_later)
    check.sizes(program)
    check(program)
    found = check.found or check_views(program) or unwritten_reads(program)
    if found:
        raise TileError(*found)
    stuck, same = stuck_waits(program)
    if stuck:
        raise TileError(*(each for each in check.warnings if each.code == "miscounted"), *stuck)
    if empty := empty_grids(program):  # what else is wrong there follows from it
        warn_of(empty)
        return program
    gaps = *partly_written(program), *Ends(program).diagnostics(), *unread_writes(program)
    sums = *narrow_sums(program), *kept_sums(program)
    races = *block_races(program), *cleared_sums(program), *iteration_races(program), *role_races(program)
    warn_of((*check.warnings, *same, *gaps, *sums, *idle_indices(program), *never_waited(program), *races))
    return program


def _of_several_by_one(node: Atomic) -> bool:
    """Return whether an atomic operation updates several elements by one value."""
    return isinstance(node.value, Expr) and not all(is_constant(n, 1) for n in node.dst.extents)


class _Check(Rewriter):
    """Collect the errors of a program, with the ranges and conditions of each place."""

    def __init__(self, known_later: Collection[Var] = ()) -> None:
        self.found: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []  # what is right, and hardly meant
        self.known_later = set(known_later)  # sizes of shared tiles that calls bring
        self.ranges = Ranges()
        self.path = Path()
        self.runs = True
        self.divergence: Divergence | None = None  # facts of a kernel that names its threads
        self.thread: Var | None = None
        self.in_nest = False  # whether the visitor is inside T.Parallel
        self.in_pipeline = False  # whether it is inside T.Pipelined
        self.guards: tuple[Guard, ...] = ()  # conditions of branches and loops around that only some threads enter
        self.here = range(0)  # the threads of the block or of the role around
        self.names: dict[Var, Expr] = {}  # values of names that differ between threads
        self.of_cluster: Divergence | None = None  # facts of a kernel whose clusters meet
        self.apart: Expr | None = None  # the condition around that only some threads of a cluster pass
        self.place: Span | None = None  # of the statement that is checked
        self.loops: list[For | None] = []  # around; None for a `while`
        self.is_choice = False  # whether a condition is around that is not one of threads
        self.arrivals = Arrivals()
        # Calls of named barriers: which threads come, if that is known, and the condition that parts them.
        self.meetings: dict[int, list[tuple[Do, tuple[int, ...] | None, Expr | None]]] = {}

    def __call__(self, node: Any) -> Any:
        """Skip values that name no memory, call nothing and divide by nothing: they can have no error."""
        silent = isinstance(node, Expr) and not contents(node) & (Load.bit | Address.bit | Call.bit)
        if silent and not _has_no_value(node):
            return node
        return super().__call__(node)

    def sizes(self, program: Program) -> None:
        """Report sizes known only at run time that no tensor has."""
        known = set(dimensions(program))
        for kernel in program.kernels:
            for var in find(kernel, Var):
                if var.role == "dim" and var not in known:
                    known.add(var)
                    self.found.append(diagnose("unbound_const", kernel.span, name=var.name))

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Check a kernel with the ranges of its block indices and of its thread."""
        self.ranges, self.path = Ranges().kernel(kernel), Path().kernel(kernel)
        self.thread = kernel.thread
        self.divergence = None
        if kernel.thread is not None:
            self.ranges = self.ranges.loop(kernel.thread, 0, math.prod(kernel.threads))
            self.divergence = Divergence(kernel, arrays=True)
        self.found += _endless_waits(kernel)
        self.here, self.meetings = range(math.prod(kernel.threads)), {}
        meets = any(found.scope is Scope.CLUSTER for one in find(kernel.body, Do) if (found := intrinsic_of(one)))
        self.of_cluster = Divergence(kernel, arrays=True, cluster=True) if meets else None
        self.arrivals = Arrivals()
        self.children(kernel)
        counts = ((node.buffer, node.span) for node in find(kernel.body, Alloc) if node.buffer.scope == "barrier")
        self.warnings += self.arrivals.diagnostics(IdMap(counts))
        self._report_lonely(len(self.here))
        return kernel

    def visit_Role(self, role: stmt.Role) -> Stmt:
        """Check a role with its own range of the thread."""
        outer, threads = (self.ranges, self.path), self.here
        self.here = range(role.first, role.first + role.count)
        if self.thread is not None:
            first, last = role.first, role.first + role.count - 1
            self.ranges = self.ranges.within(self.thread, first, last)
            self.path = self.path.assume(self.thread >= first).assume(self.thread <= last)
        self.children(role)
        (self.ranges, self.path), self.here = outer, threads
        return role

    def visit_For(self, loop: For) -> Stmt:
        """Check a loop, and its body with the ranges of its variables."""
        outer = self.ranges
        runs = not any(outer.prove(a >= b) for a, b in zip(loop.starts, loop.stops, strict=True))
        for var, start, stop in zip(loop.vars, loop.starts, loop.stops, strict=True):
            self.ranges = self.ranges.loop(var, start, stop, loop.step)
        if loop.kind in (LoopKind.PARALLEL, LoopKind.VECTOR):
            self._independent(loop)
        if loop.kind is LoopKind.PARALLEL:
            self._report_divergent(loop, "T.Parallel")
        if why := misfit(loop):
            self.warnings.append(diagnose("no_schedule", loop.span, why=why))
        inside = self.in_nest, self.in_pipeline
        self.in_nest |= loop.kind is LoopKind.PARALLEL
        self.in_pipeline |= loop.kind is LoopKind.PIPELINED
        self._iterations(loop, self.path.loop(loop), runs)
        self.ranges, (self.in_nest, self.in_pipeline) = outer, inside
        return loop

    def visit_While(self, loop: stmt.While) -> Stmt:
        self(loop.condition)
        if self.runs and _is_endless(loop):
            condition = repr(loop.condition)[:60]
            self.found.append(diagnose("endless_loop", loop.condition.span or loop.span, condition=condition))
        self._iterations(loop, LOST, True)
        return loop

    def _iterations(self, loop: For | stmt.While, path: Path, runs: bool) -> None:
        """Check the body of a loop, with the condition by which threads leave it at different times."""
        guards = []
        if self.divergence is not None:
            bound, leaving = self.divergence.divergent_bound(loop), self.divergence.divergent_exit(loop)
            counted = loop if isinstance(loop, For) else None
            guards = [Guard(bound, None, counted)] if bound is not None else []
            guards += [Guard(leaving, None)] if leaving is not None else []
        self.loops.append(loop if isinstance(loop, For) else None)
        outer, apart = self.apart, self.of_cluster.divergence_of(loop) if self.of_cluster is not None else None
        self.apart = outer if apart is None else apart
        self._within(self.ranges, path, loop.body, runs, tuple(guards))
        self.apart = outer
        self.loops.pop()

    def _parts(self, value: Expr) -> bool:
        """Return whether threads may see different values."""
        return self.divergence is not None and self.divergence.is_divergent(value)

    def _may_diverge(self, condition: Expr, between: Divergence | None) -> bool:
        """Return whether a condition may differ between the threads of the block or cluster."""
        if isinstance(condition, Binary) and condition.op in ("and", "or"):
            return self._may_diverge(condition.a, between) or self._may_diverge(condition.b, between)
        parts, known = between is not None and between.is_divergent(condition), self.ranges
        return parts and not known.prove(condition) and not known.refute(condition)

    @property
    def parted(self) -> Expr | None:
        """Return the condition of the innermost branch or loop around that only some threads enter; None if all do."""
        return self.guards[-1].condition if self.guards else None

    def _report_divergent(self, one: Stmt, what: str) -> None:
        """Report a block-wide operation that only some threads reach."""
        if self.parted is not None and self.runs:
            self.found.append(diagnose("parted_threads", one.span, what=what, condition=repr(self.parted)))

    def _within(self, ranges: Ranges, path: Path, body: Node, runs: bool, guards: tuple[Guard, ...] = ()) -> None:
        """Check a body, or a value, under the `guards` of some threads; in a dead body no index is outside."""
        outer = self.ranges, self.path, self.runs, self.guards
        self.ranges, self.path, self.runs = ranges, path, self.runs and runs
        self.guards += guards
        self(body)
        self.ranges, self.path, self.runs, self.guards = outer

    def visit_Block(self, block: Block) -> Block:
        """Check a block, with each name known to the statements behind it."""
        outer = self.ranges, self.path
        for one in block.stmts:
            self.place = one.span
            self(one)
            if isinstance(one, Let):
                if self._parts(one.value):
                    self.names[one.var] = Substitute(self.names)(one.value)
                self.ranges = self.ranges.define(one.var, one.value)
                self.path = self.path.define(one.var, one.value)
            self.path = self.path.after(one)
        self.ranges, self.path = outer
        return block

    def visit_If(self, node: If) -> Stmt:
        self(node.condition)
        outer = self.apart
        self.apart = node.condition if self._may_diverge(node.condition, self.of_cluster) else outer
        is_choice = self.is_choice
        self.is_choice |= not self._is_of_threads(node.condition)
        self._under(node.condition, True, node.then, self._guards(node.condition, True))
        self._under(node.condition, False, node.otherwise, self._guards(node.condition, False))
        self.apart, self.is_choice = outer, is_choice
        return node

    def _guards(self, condition: Expr, holds: bool) -> tuple[Guard, ...]:
        """Return the parts of a branch's condition that may hold for some threads only."""
        if not self._may_diverge(condition, self.divergence):
            return ()
        if isinstance(condition, Binary) and condition.op == ("and" if holds else "or"):
            return (*self._guards(condition.a, holds), *self._guards(condition.b, holds))
        return (Guard(condition, holds),)

    def _under(self, condition: Expr, holds: bool, node: Node, guards: tuple[Guard, ...] = ()) -> None:
        """Check a branch or a value that runs only if a condition holds, or only if it does not."""
        known, wanted = self.ranges, condition if holds else unary("not", condition)
        path = self.path if known.prove(wanted) else self.path.assume(condition, holds)
        self._within(known.assume(wanted), path, node, not known.refute(wanted), guards)

    def visit_Select(self, node: Select) -> Expr:
        self(node.condition)
        self._under(node.condition, True, node.a)
        self._under(node.condition, False, node.b)
        return node

    def visit_Binary(self, node: Binary) -> Expr:
        """Check both operands, the second one of `and` and `or` under the first."""
        if self.runs and (why := _no_value(node)):
            self.found.append(diagnose("bad_operand", node.span, op=node.op, got=why[0], fix=why[1]))
        most = self.ranges.interval(node.b).high if node.op in ("<<", ">>") and self.runs else 0
        if node.dtype.bits <= most < math.inf and not isinstance(node.b, Const):
            kind, bits = str(node.dtype), node.dtype.bits
            self.warnings.append(diagnose("far_shift", node.span, op=node.op, most=int(most), dtype=kind, bits=bits))
        self(node.a)
        if node.op in LOGICAL:
            self._under(node.a, node.op == "and", node.b)
        else:
            self(node.b)
        return node

    def visit_Alloc(self, node: Alloc) -> Stmt:
        """Check that a tile has a constant, positive shape, and a tensor one address for all threads."""
        buffer = node.buffer
        if buffer.scope == "global":
            self._address(node)
            return node
        for size in buffer.shape:
            if not isinstance(size, Const):
                if buffer.scope == "shared" and self.known_later.issuperset(find(size, Var)):
                    continue
                self.found.append(diagnose("dynamic_tile", node.span, buffer=buffer.name, size=repr(size)))
            elif size.value <= 0:
                self.found.append(
                    diagnose("bad_shape", node.span, what=f"`{buffer.name}`'s shape", want="positive", got=size.value)
                )
        return node

    def _address(self, node: Alloc) -> None:
        """Check that the whole block has one address, and that no pass takes its loop apart."""
        assert node.init is not None
        self(node.init)
        why = "is an address that differs between threads" if self._parts(node.init) else ""
        if self.in_nest:
            why = "is an address in a T.Parallel, whose iterations threads share"
        elif self.in_pipeline:
            why = "is an address in a T.Pipelined, whose copies run ahead"
        if why:
            fix = "make the tensor before the loop, from an address that all threads of the block compute alike"
            self.found.append(diagnose("bad_argument", node.span, op="T.make_tensor", name="ptr", why=why, fix=fix))

    def visit_Do(self, node: Do) -> Stmt:
        """Check that all threads reach a barrier for all of them, and enough threads one with a number."""
        found = intrinsic_of(node)
        if found is not None and self.runs:
            of_cluster = found.scope is Scope.CLUSTER
            parting = self.apart if of_cluster else self.parted
            if _is_for_all(found) and parting is not None and (of_cluster or not self._all_come()):
                whole = "cluster" if of_cluster else "block"
                self._report_meeting(_parted_barrier(self.place, parting, whole))
            elif found.scope is Scope.GROUP and found.sync in (Sync.BARRIER, Sync.ARRIVE):
                self._number(node)
        self._arrive(node)
        return self.children(node)

    def _arrive(self, node: Do) -> None:
        """Count the threads that arrive at an mbarrier or wait for it here."""
        assert isinstance(node.call, Call)
        call = node.call
        for at in (each for each in call.args if isinstance(each, Address) and each.buffer.scope == "barrier"):
            count = None if self.is_choice or not self.runs else self._count_of_comers()
            span = node.span or self.place
            if call.name == "mbarrier_arrive" and len(call.args) == 1:
                self.arrivals.arrive(at, self.loops, count, span)
            elif call.name == "mbarrier_wait":
                self.arrivals.wait(at, self.loops, count, span)
            elif call.name not in ("mbarrier_expect", "own_phase"):
                self.arrivals.unknown.add(at.buffer)

    def visit_Call(self, call: Call) -> Expr:
        """Check that whole warps reach what their lanes do together."""
        found = intrinsic_of(call)
        if found is not None and found.convergent in ("warp", "role") and not _is_for_all(found) and self.runs:
            splits = comers(self.guards, self.names, self.here)[1]
            if splits is not None:
                self._report_meeting(
                    diagnose(
                        "parted_warp", self.place, _where(splits), what=_called(self.place), condition=repr(splits)
                    )
                )
        return self.children(call)

    def _all_come(self) -> bool:
        """Return whether every thread certainly reaches this statement, and equally often."""
        threads = comers(self.guards, self.names, self.here)[0]
        return threads is not None and len(threads) == len(self.here)

    def _report_meeting(self, found: Diagnostic) -> None:
        """Report a meeting once, also if the author's call consists of several."""
        if not any(each.code == found.code and each.span == found.span for each in self.found):
            self.found.append(found)

    def _is_of_threads(self, condition: Expr) -> bool:
        """Return whether each part of a condition differs between threads."""
        if isinstance(condition, Binary) and condition.op in LOGICAL:
            return self._is_of_threads(condition.a) and self._is_of_threads(condition.b)
        return self._may_diverge(condition, self.divergence)

    def _count_of_comers(self) -> int | None:
        """Return how many threads reach this statement; None if that is not known."""
        if not self.guards:
            return len(self.here)
        if self.thread is None or any(holds is None for _, holds, _ in self.guards):
            return None
        known = Substitute(self.names)
        around = [known(c if holds else unary("not", c)) for c, holds, _ in self.guards]
        return len(passing(around, self.thread - self.here.start, len(self.here)) or ()) or None

    def _number(self, node: Do) -> None:
        """Record which threads come to a named barrier; report too many of them."""
        assert isinstance(node.call, Call)
        number, count = option(node.call), option(node.call, 1)
        threads = comers(self.guards, self.names, self.here)[0]
        self.meetings.setdefault(number, []).append((node, threads, self.parted))
        if threads is not None and len(threads) > count:
            why = f"is {count}, and {len(threads)} threads come here, so that some meet without the others"
            self._report_count(node, why, f"give {len(threads)}, or let fewer threads come by")

    def _report_lonely(self, block: int) -> None:
        """Report named barriers to which fewer threads come than wait there; the block has `block` threads."""
        for calls in self.meetings.values():
            (first, _, parted), come = calls[0], set[int]().union(*(threads or () for _, threads, _ in calls))
            assert isinstance(first.call, Call)
            number, count = option(first.call), option(first.call, 1)
            if all(threads is not None for _, threads, _ in calls):
                if 0 < len(come) < count:
                    why = f"is {count}, and only {len(come)} threads come to barrier {number}"
                    self._report_count(first, why, f"give {len(come)}, or let the other threads arrive there, too")
            elif len(calls) == 1 and count == block and parted is not None:
                self._report_meeting(_parted_barrier(first.span, parted, "block"))

    def _report_count(self, node: Do, why: str, fix: str) -> None:
        """Report the number of threads that a named barrier is for."""
        op, name = _called(node.span), "arrive_count"
        self.found.append(diagnose("bad_argument", node.span, op=op, name=name, why=why, fix=fix))

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Check the operands of a tile op, and that all threads reach it."""
        found = op.check()
        self.found += found
        if not found:
            reads, writes = op.accesses()
            for region in (*reads, *writes):
                self._region(region, op)
            self.warnings += op.warnings()
            if isinstance(op, TmaCopy):
                self._started_by_one(op)
            elif not is_per_thread((*reads, *writes)):
                self._report_divergent(op, f"T.{op.op_name}")
            self.children(op)
        return op

    def _started_by_one(self, op: TmaCopy) -> None:
        """Warn of a bulk copy whose tile depends on the thread: one thread starts the copy, of its own tile."""
        signal = () if op.barrier is None else op.barrier.indices
        named = (*(r.start for side in (op.src, op.dst) for r in side.ranges), *signal)
        places = list(filter(self._parts, named)) if self.runs else []
        if not places or self.thread is None or any(holds is None for _, holds, _ in self.guards):
            return
        known = Substitute(self.names)
        around = [known(c if holds else unary("not", c)) for c, holds, _ in self.guards]
        start = self.here.start
        numbers = passing(around, self.thread - start, len(self.here))
        if not numbers:
            return
        first = op.by if op.by in numbers else numbers[0]
        for place in map(known, places):
            values = {n: simplify(Substitute({self.thread: const(start + n, dt.int32)})(place)) for n in numbers}
            if not all(equal(values[first], value) for value in values.values()):
                at, index = start + first, repr(place)
                found = diagnose("one_starts", op.span, thread=at, index=index, value=repr(values[first]))
                self.warnings.append(found)
                return

    def visit_Load(self, load: Load) -> Expr:
        self._element(load.buffer, load.indices, load)
        return self.children(load)

    def visit_Address(self, node: Address) -> Expr:
        """Check the place of an mbarrier. Other addresses may lie outside: ldmatrix ignores those of some lanes."""
        if node.buffer.scope == "barrier":
            self._element(node.buffer, node.indices, node)
        return self.children(node)

    def visit_Store(self, store: Store) -> Stmt:
        """Check the place of a store, and that every thread stores to a fragment."""
        self._of_values(store.buffer, store)
        self._element(store.buffer, store.indices, store)
        if store.buffer.scope == "fragment" and not self.in_nest and self.runs:
            index = next(filter(self._parts, store.indices), None)
            name, span = store.buffer.name, store.span
            if index is not None:
                why = f"`{index!r}` differs between threads"
                self.found.append(diagnose("foreign_element", span, buffer=name, why=why))
            elif self.parted is not None:
                why = f"only the threads come by for which `{self.parted!r}` holds"
                self.found.append(diagnose("foreign_element", span, buffer=name, why=why))
        return self.children(store)

    def _region(self, region: Region, op: Stmt) -> None:
        """Check that a region is affine unless it is one element, and in a tile within the bounds."""
        self._of_values(region.buffer, op)
        single = all(isinstance(r.extent, Const) and r.extent.value == 1 for r in region.ranges)
        for dim, r in enumerate(region.ranges):
            if not single and not _is_affine(r.start):
                text = repr(r.start)
                self.found.append(diagnose("non_affine_region", op.span, buffer=region.buffer.name, start=text))
                return
            if region.buffer.scope == "global":
                self._somewhere(region.buffer, dim, r.start, r.extent, op)
            elif not r.covers(region.buffer.shape[dim]):
                stop = r.start + r.extent
                self._inside(region.buffer, dim, (r.start, stop), stop <= region.buffer.shape[dim], op)

    def _of_values(self, buffer: Buffer, node: Node) -> None:
        """Refuse mbarriers where values are read or written."""
        if buffer.scope == "barrier":
            self.found.append(diagnose("barrier_as_tile", node.span, buffer=buffer.name))

    def _element(self, buffer: Buffer, indices: tuple[Expr, ...], node: Node) -> None:
        """Check that an access is within a tile's bounds, and does not always miss a tensor."""
        for dim, (index, size) in enumerate(zip(indices, buffer.shape, strict=True)):
            if buffer.scope == "global":
                self._somewhere(buffer, dim, index, ONE, node)
            elif not self.ranges.inside(index, size):
                self._inside(buffer, dim, (index,), index < size, node)

    def _somewhere(self, buffer: Buffer, dim: int, start: Expr, extent: Expr, node: Node) -> None:
        """Warn of an index that is always outside of a tensor's known size; of several in a row, if all are."""
        size = buffer.shape[dim]
        if not (self.runs and isinstance(size, Const) and size.value > 0):
            return
        first = self.ranges.interval(start)
        if first.low >= size.value or (first + self.ranges.interval(extent)).high <= 0:
            row = "" if is_constant(extent, 1) else f":{simplify(start + extent)!r}"
            index = f"{simplify(start)!r}{row}"
            self.warnings.append(diagnose("outside", node.span, dim=dim, buffer=buffer.name, index=index, size=size))

    def _inside(self, buffer: Buffer, dim: int, index: tuple[Expr, ...], fits: Expr, node: Node) -> None:
        """Report an index that does not fit a tile's dimension, or the first and last of several in a row."""
        known, low = self.ranges, index[0] >= 0
        if not self.runs or (known.prove(low) and known.prove(fits)):
            return
        text, size = ":".join(map(repr, index)), buffer.shape[dim]
        name, shape, span = buffer.name, describe(buffer.shape), node.span
        some = index[0] < index[-1] if len(index) > 1 else TRUE
        if any(known.refute(kept) and not known.prove(kept) for kept in (low, fits)):
            found = diagnose("out_of_bounds", span, dim=dim, buffer=name, index=text, size=repr(size), shape=shape)
            self.found.append(found)
            return
        for kept in (fits, low):
            example = self.path.where(binary("and", some, unary("not", kept)), index, known)
            if example is not None:
                value = ":".join(map(str, example[0]))
                where = ", ".join(f"{var} = {n}" for var, n in example[1].items()) or "every iteration"
                found = diagnose(
                    "leaves_tile", span, dim=dim, buffer=name, index=text, size=repr(size), shape=shape,
                    value=value, where=where, kept=repr(kept),
                )  # fmt: skip
                self.found.append(found)
                return

    def _independent(self, loop: stmt.For) -> None:
        """Report operations of the whole block, and `break`, in iterations that may run at once."""
        parallel = f"T.{loop.kind.value}"
        for node in find(loop.body, RegisteredOp, Do):
            if isinstance(node, RegisteredOp) and not node.op_name.startswith("atomic"):
                fix = "tile operations are done by the whole block: use T.serial around them"
                self._refuse(node, f"T.{node.op_name} inside {parallel}", fix)
            elif isinstance(node, Atomic) and _of_several_by_one(node):
                fix = f"name the element, `{node.dst.buffer.name}[i]`: each iteration updates one"
                what = f"T.{node.op_name} of several elements of `{node.dst.buffer.name}` by one value"
                self._refuse(node, f"{what} inside {parallel}", fix)
            elif isinstance(node, Do) and isinstance(node.call, Call) and lookup(node.call.name).by_hand:
                fix = "threads run it together: write it before or after the loop, or use T.serial"
                self._refuse(node, f"`{node.call.name}` inside {parallel}", fix)
        for one in _own_statements(loop.body):
            if isinstance(one, Break):
                fix = "guard what follows instead, `if i < n:`; stores behind the end of a tensor are dropped anyway"
                self._refuse(one, f"`break` stands in {parallel}", fix)

    def _refuse(self, node: Node, what: str, fix: str) -> None:
        """Report what cannot stand in a T.Parallel."""
        self.found.append(diagnose("not_in_parallel", node.span, what=what, fix=fix))


def _is_for_all(found: Intrinsic) -> bool:
    """Return whether all threads of a block or a cluster meet at an intrinsic, or arrive there."""
    return found.scope is Scope.CLUSTER or (found.is_barrier and found.scope is Scope.BLOCK)


def _parted_barrier(place: Span | None, condition: Expr, whole: str) -> Diagnostic:
    """Make the error for a barrier of a whole block or cluster to which only some threads come."""
    what, text = _called(place), repr(condition)
    return diagnose("parted_barrier", place, _where(condition), what=what, condition=text, whole=whole)


def _where(condition: Expr) -> list[tuple[Span | None, str]]:
    """Return a note about the place of a condition that parts threads; none if that is unknown."""
    return [] if condition.span is None else [(condition.span, "here the threads part")]


def _called(span: Span | None) -> str:
    """Return the function that an author calls at a place, as it is written there."""
    text = "" if span is None else span.source()[span.column :].partition("(")[0]
    return text if text.replace(".", "").isidentifier() else "what is called here"


def _own_statements(body: Block) -> Iterator[Stmt]:
    """Yield the statements of a loop body without those of inner loops."""
    for one in body.stmts:
        yield one
        if isinstance(one, Block):
            yield from _own_statements(one)
        elif isinstance(one, If):
            yield from (*_own_statements(one.then), *_own_statements(one.otherwise))


def _is_affine(expr: Expr) -> bool:
    """Return whether no product has two factors that loops change; a loaded value counts as one unknown."""
    return not any(n.op == "*" and _moves(n.a) and _moves(n.b) for n in find(expr, Binary))


def _moves(expr: Expr) -> bool:
    """Return whether an expression depends on a loop."""
    return any(n.role == "loop" for n in find(expr, Var))


# Limits of GPUs: threads of a block, blocks of a grid, and tiles, which no single thread can have.


def check_limits(program: Program, build: Build) -> Program:
    """Return the program unchanged, or raise one TileError with every finding. Launches check run-time sizes."""
    checks = _check_threads, _check_grid, _check_clusters, _check_tiles, _check_registers
    found = [each for kernel in program.kernels for check in checks for each in check(kernel, build)]
    if found:
        raise TileError(*found)
    return program


def _check_tiles(kernel: Kernel, build: Build) -> list[Diagnostic]:
    """Report tiles allocated inside T.Parallel, whose iterations are divided among the threads of a block."""
    found = {}
    for loop in (n for n in find(kernel.body, For) if n.kind is LoopKind.PARALLEL):
        for node in (n for n in find(loop.body, Alloc) if n.buffer.scope in ("fragment", "shared")):
            what = f"T.alloc_{node.buffer.scope} inside T.Parallel"
            fix = "allocate the tile before the loop; T.alloc_local and T.alloc_var are of each iteration"
            found[node] = diagnose("unsupported_on_target", node.span, what=what, target=str(build.target), fix=fix)
    return list(found.values())


def _check_clusters(kernel: Kernel, build: Build) -> list[Diagnostic]:
    """Report a grid that clusters do not divide: a GPU refuses its launch."""
    sizes = [int(n.value) if isinstance(n, Const) else 0 for n in kernel.grid]
    misfit = next(((a, b) for a, b in zip(sizes, kernel.cluster, strict=False) if a % b), None)
    if misfit is None:
        return []
    fix = "round the grid up to whole clusters, or give other cluster_dims"
    return [_refusal(kernel, f"a grid of {misfit[0]} blocks in clusters of {misfit[1]}", fix, build)]


def _check_registers(kernel: Kernel, build: Build) -> list[Diagnostic]:
    """Report fragments that need many times the registers of their threads.

    Code for each element would be written out, and hardly compiled within minutes.
    """
    found, threads = [], math.prod(kernel.threads)
    for node in (n for n in find(kernel.body, Alloc) if n.buffer.scope == "fragment"):
        total = math.prod(node.buffer.static_shape or (0,)) * node.buffer.dtype.itemsize // 4
        if total <= MOST_SPILLED * PER_THREAD * threads:
            continue
        what = f"the fragment `{node.buffer.name}` of {total // threads} registers for each of {threads} threads"
        enough = next((n for n in (32, 64, 128, 256, 512) if total <= n * PER_THREAD // 2), 0)
        wider = f"give T.Kernel threads={enough}, " if enough > threads else "take a smaller tile, "
        fix = f"a thread has {PER_THREAD}: {wider}or keep the tile in T.alloc_shared"
        found.append(diagnose("unsupported_on_target", node.span, what=what, target=str(build.target), fix=fix))
    return found


def _no_value(node: Binary) -> tuple[str, str] | None:
    """Return why an operator on integers has no value whatever its first operand is, and a fix; None if it may have."""
    if not isinstance(node.b, Const) or not node.b.dtype.is_integer:
        return None
    if node.op in ("//", "%") and node.b.value == 0:
        return "the divisor 0", "divide by another number, or leave the statement out by a Python `if`"
    if node.op in ("<<", ">>") and node.b.value < 0:
        return f"the negative distance {node.b.value}", "shift the other way: << is to the left, >> to the right"
    if node.op in ("<<", ">>") and node.b.value >= node.dtype.bits:
        fix = f"shift by less than {node.dtype.bits}, or widen the value first, as by T.cast(x, 'int64')"
        return f"the distance {node.b.value} of {node.dtype}, which has {node.dtype.bits} bits", fix
    return None


def _has_no_value(value: Expr) -> bool:
    """Return whether some operator in a value certainly has none."""
    return bool(contents(value) & Binary.bit) and any(_no_value(node) for node in find(value, Binary))


def _is_endless(loop: stmt.While) -> bool:
    """Return whether nothing in a loop ends it, or changes what its condition reads, but other threads' writes."""
    read = IdSet(load.buffer for load in find(loop.condition, Load))
    shared = any(buffer.scope in ("global", "shared") for buffer in read)
    if shared or any(not is_pure(call) for call in find(loop.condition, Call)):
        return False
    return not contains(loop.body, Break) and not any(b in read or b.base in read for b in writes_of(loop.body))


def _endless_waits(kernel: Kernel) -> list[Diagnostic]:
    """Report mbarriers that the kernel waits for, and does nothing else with: nobody arrives."""
    calls = (node.call for node in find(kernel.body, Do) if isinstance(node.call, Call))
    waits = [call for call in calls if call.name in ("mbarrier_wait", "own_phase")]
    places = IdSet(place for call in waits for place in call.args if isinstance(place, Address))
    lost = IdMap((place.buffer, place.span) for place in places)
    for use in find(kernel.body, Address, Load) if lost else ():
        if use not in places:
            lost.pop(use.buffer, None)
    return [diagnose("endless_wait", span, buffer=buffer.name) for buffer, span in lost.items()]


def _check_threads(kernel: Kernel, build: Build) -> list[Diagnostic]:
    """Report a block of more threads than a GPU runs."""
    count = math.prod(kernel.threads)
    if count <= MOST_THREADS:
        return []
    fix = f"a block has at most {MOST_THREADS} threads: give threads=..., each of which takes more elements of a tile"
    return [_refusal(kernel, f"a block of {count} threads", fix, build)]


def _check_grid(kernel: Kernel, build: Build) -> list[Diagnostic]:
    """Report a grid of more blocks than a GPU runs."""
    sizes = [int(n.value) if isinstance(n, Const) else 1 for n in kernel.grid]
    all_of_x, most = GRID_LIMITS[:2]
    if any(n > most for n in sizes[1:]) and kernel.cluster == (1, 1, 1):  # then all blocks lie in x
        if math.prod(sizes) <= all_of_x:
            return []
        fix = f"together at most {all_of_x}, or {most} in y and z: let each block loop over several tiles"
        return [_refusal(kernel, f"a grid of {' x '.join(map(str, sizes))} blocks", fix, build)]
    found = []
    for axis, size, limit in zip("xyz", sizes, GRID_LIMITS, strict=False):
        if size > limit:
            fix = f"at most {limit} in {axis}: let each block loop over several tiles"
            if axis != "x":
                fix += ", or leave out cluster_dims"
            found.append(_refusal(kernel, f"a grid of {size} blocks in {axis}", fix, build))
    return found


def _refusal(kernel: Kernel, what: str, fix: str, build: Build) -> Diagnostic:
    """Make the error for a kernel that exceeds a limit."""
    return diagnose("unsupported_on_target", kernel.span, what=what, target=str(build.target), fix=fix)


# A kernel that writes a tensor uses it by one name: passes take buffers of different names for different memory.


def check_views(program: Program) -> list[Diagnostic]:
    """Report kernels that write a tensor and use it by two names, as by a view."""
    return [d for kernel in program.kernels for d in _check_views_of(kernel)] if program.views else []


def _check_views_of(kernel: Kernel) -> list[Diagnostic]:
    """Report the buffers of one kernel that are written by one name and used by another."""
    names: dict[Buffer, dict[Buffer, None]] = {}  # names by the memory of their buffer
    for node in find(kernel.body, Load, Store, Region, Address):
        names.setdefault(_memory(node.buffer), {})[node.buffer] = None
    found: dict[Buffer, Diagnostic] = {}
    for writer in find(kernel.body, Store, RegisteredOp, Call):
        for buffer in _writes(writer):
            others = [b.name for b in names[_memory(buffer)] if b is not buffer]
            if others:
                why = f"is written as `{buffer.name}` and used as `{others[0]}` in one kernel"
                fix = "use one of the two names there"
                problem = diagnose("bad_argument", writer.span, op="T.view", name="src", why=why, fix=fix)
                found.setdefault(_memory(buffer), problem)
    return list(found.values())


def _memory(buffer: Buffer) -> Buffer:
    """Return the buffer whose memory a view names."""
    return buffer.base or buffer


def _writes(node: Node) -> list[Buffer]:
    """Return the buffers that a node writes."""
    if isinstance(node, Store):
        return [node.buffer]
    if isinstance(node, RegisteredOp):
        return [region.buffer for region in node.accesses()[1]]
    if not isinstance(node, Call):
        return []
    places = [(e.kind, node.args[e.operand]) for e in lookup_of_intrinsics(node.name).effects(node)]
    return [place.buffer for kind, place in places if "w" in kind and isinstance(place, Address)]
