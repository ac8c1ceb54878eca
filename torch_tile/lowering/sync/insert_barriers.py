# SPDX-License-Identifier: Apache-2.0
"""Insert the fewest barriers that order every hazard between the threads of a block.

The pass walks the statements in order, with the accesses since the last barrier. A barrier goes right before the first
statement that meets one of them, which is optimal in straight code. The pass walks a loop until what one iteration
leaves for the next no longer changes, from several starting points. It walks an inner loop once for each state in which
it is entered. Asynchronous copies count as writes from the wait that completes them. Products count as reads when they
start and when they are waited for. A barrier never stands where only some threads pass. Afterwards every hazard is
ordered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from torch_tile.diagnostics.errors import Span, error
from torch_tile.hardware import WARP
from torch_tile.intrinsics.base import intrinsic_of, lookup, syncs
from torch_tile.intrinsics.bulk import named_barrier
from torch_tile.intrinsics.memory import lanes_barrier, option, warp_barrier
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir import stmt as st
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Binary, Call, Const, Expr, Var, unary
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, contains, equal, find, symbols, with_fields
from torch_tile.ir.simplify import is_literal, simplify
from torch_tile.ir.stmt import Block, Break, Continue, Do, For, If, Program, Role, Stmt, Store, While
from torch_tile.lowering.analysis.run_waits import FEW_EVENTS, outcomes, run_waits
from torch_tile.lowering.analysis.wait_events import waits_between_warps
from torch_tile.lowering.sync.accesses import Access, Hazards, trips
from torch_tile.lowering.sync.facts import (
    BarrierGroups,
    Facts,
    by_engine,
    handed_over,
    is_numbered,
    orders_earlier,
    refilled,
)
from torch_tile.lowering.sync.state import Shifts, State, most_pending
from torch_tile.lowering.sync.write_barriers import Insert, Place, is_barrier

PASSES = 12  # walks of a loop body before a barrier at its start cuts off its hazards
DIVERGENT_PASSES = 2  # walks of a divergent loop body before its accesses count as being anywhere
STARTS = 16  # points of a loop body from which placing is tried


def insert_barriers(program: Program) -> Program:
    """Add the barriers that the program lacks. Raises TileError (`divergent_hazard`) where none can stand."""
    return with_fields(program, kernels=tuple(_synchronised(kernel) for kernel in program.kernels))


def _synchronised(kernel: st.Kernel) -> st.Kernel:
    """Insert the barriers of one kernel; return the same kernel if it lacks none.

    Branches of warps may wait for each other, by way of other threads. A barrier between them would stop both. Their
    author orders them, so the barriers are placed once more without it.
    """
    threads, reused, barred = math.prod(kernel.threads), refilled(kernel), set[Place]()
    # The compiler's own roles wait in one order, so that no barrier stops them.
    may_stop = all(role.by_hand for role in find(kernel, Role)) and waits_between_warps(kernel)
    while True:
        walker = Walk(kernel, threads, barred=barred)
        if reused:
            walker.by_hand(reused)
        walker.engages = False
        insert = Insert(set(walker.block(kernel.body, State(most_pending(kernel.body)))), walker)
        new: st.Kernel = insert(kernel)
        stopping = _stopping(kernel, new, insert.made) if insert.made and may_stop else []
        if not stopping:
            return new
        if barred.issuperset(stopping):
            block, n = stopping[0]
            raise error("waiting_hazard", block.stmts[min(n, len(block.stmts) - 1)].span)
        barred.update(stopping)


def _stopping(kernel: st.Kernel, new: st.Kernel, made: IdMap[Do, Place]) -> list[Place]:
    """Return the places of new barriers at which threads wait for ever, as far as sizes of some calls tell."""
    for size, before in outcomes(kernel, FEW_EVENTS):
        # Threads that wait for ever without the new barriers are the author's mistake, which `stuck_waits` reports.
        after = None if before.waiting else run_waits(new, size, 2 * FEW_EVENTS)
        if after is not None:
            stopped = [runner.event.statement for runner in after.waiting]
            return [made[one] for one in stopped if one in made]
    return []


@dataclass(frozen=True, eq=False)
class Group:
    """Consecutive threads, alone in a branch, with the accesses in front and the `splits` branches and loops around."""

    threads: range
    splits: int
    before: dict[Hashable, Access]

    @property
    def key(self) -> Hashable:
        """Return a key that equal groups share."""
        return self.threads, self.splits, frozenset(self.before.values())

    def meets(self, call: Call, splits: int) -> bool:
        """Return whether a call is a barrier for the group."""
        found = lookup(call.name)
        named = found.is_barrier and found.scope is Scope.GROUP
        return named and splits == self.splits and option(call, 1) == len(self.threads)


@dataclass(frozen=True)
class LoopWalk:
    """What one walk of a loop found: places, the state behind it, and whether the group around `gathers`."""

    places: dict[Place, float]
    state: State
    gathers: bool
    after_roles: bool


def threads_in(condition: Expr, thread: Var | None, around: range) -> range:
    """Return which threads of `around` a condition lets in, if it compares the thread with a number; else none."""
    if not (isinstance(condition, Binary) and condition.a is thread and isinstance(condition.b, Const)):
        return range(0)
    bound = max(around.start, min(int(condition.b.value) + (condition.op in ("<=", ">")), around.stop))
    if condition.op in ("<", "<="):
        return range(around.start, bound)
    return range(bound, around.stop) if condition.op in (">", ">=") else range(0)


def _polls(kernel: st.Kernel | Block) -> bool:
    """Return whether a loop repeats an atomic access until it ends: a wait for other threads."""
    loops = (n for n in find(kernel, For, While) if isinstance(n, While) or any(find(n, Break)))
    return any(lookup(call.name).atomic for loop in loops for call in find(loop, Call))


class Walk:
    """Find the places of barriers in one kernel or role.

    At `barred` places a barrier would stop threads for ever. `fences` are places before barriers, where a fence shows
    the threads' writes to wgmma and bulk copies. `shown` are such places before barriers of warps, and before arrivals
    by which authors hand tiles over. `others` maps places to barriers that are not the block's. `own` maps roles in
    which an author calls for a barrier to the barrier of the role.
    """

    threads: int
    publishes: bool
    depth: int
    branches: int
    showing: bool

    def __init__(
        self,
        kernel: st.Kernel,
        threads: int,
        first: int = 0,
        filled: frozenset[Buffer] | None = None,
        polls: bool | None = None,
        barred: Set[Place] = frozenset(),
    ):
        self.kernel, self.threads, self.barred = kernel, threads, barred
        self.filled: frozenset[Buffer] = handed_over(kernel) if filled is None else filled
        self.facts: Facts = Facts(kernel, self.filled)
        self.fills_in_turn = False  # mbarriers of the compiler order the bulk copies that fill a tile again
        self.hazards: Hazards = Hazards(threads, first, _polls(kernel) if polls is None else polls)
        self.fences: set[Place] = set()
        self.others: dict[Place, Do] = {}
        self.own: dict[Role, Do] = {}
        self.shown: set[Place] = set()
        self.publishes = False  # whether authors order the threads, so that their arrivals hand tiles over
        self.arriving: bool = False  # the statement before arrives at the cluster's barrier
        self.barrier_groups: BarrierGroups = BarrierGroups(kernel)
        self.after_roles: bool = False
        self.awaited: IdSet[Buffer] = IdSet()  # mbarriers on which roles wait that an author orders by hand
        self.collected: dict[Stmt, list[Access]] = {}
        # By nodes that access memory: the mbarriers of the branch of some threads around, of waits and of other calls.
        self.handing: IdMap[Node, tuple[IdSet[Buffer], IdSet[Buffer]]] = IdMap()
        self.compared: IdSet[If] = IdSet()  # branches of some threads whose ways have been compared
        self.parting: dict[Node, If] = {}  # by nodes that access memory: the outermost branch of some threads around
        self.read: dict[Stmt, list[Access]] = {}  # by conditions and bounds alone
        self.forced: set[Place] = set()
        self.depth = 0  # number of loops around
        self.branches = 0
        self.divergent: bool = False
        self.splits = 0  # number of branches and loops around that only some threads enter
        # Whether the author orders warps by hand. The lanes of a branch then come to a place in it together.
        self.in_warps = any(syncs(n, Sync.BARRIER, Scope.WARP) for n in find(kernel, Call))
        self.group: Group | None = None  # the threads of a branch around, which meet at barriers of their own
        self.gathered: set[Group] = set()  # groups that got a barrier here
        self.walked: dict[Hashable, LoopWalk] = {}  # by the place of a loop and what its walk depends on
        self.showing = False  # whether a fence of all threads stands before a branch around
        self.engages = True  # whether engines may work after this place
        self.conditions: tuple[Expr, ...] = ()  # conditions of the branches around
        self.exits: list[list[State]] = []  # states of the loops around, at their breaks
        self.iterations: list[list[State]] = []  # states of the loops around, where they continue
        self.heads: list[list[Access]] = []  # reads of their conditions before each further iteration
        self.trying: bool = False
        self.last: list[Place] = []  # places of the barriers inside the loop walked last
        self.leaves: dict[Stmt, bool] = {}
        self.failing: dict[tuple[For, Expr], bool] = {}
        self.shifts: Shifts = Shifts(self.facts.forgotten, self.hazards.simplify)

    def by_hand(self, refilled: frozenset[Buffer]) -> None:
        """Treat the threads as ordered by the author: explicit arrivals hand memory over to the copy engines."""
        self.facts.refilled, self.publishes = refilled, True
        self.facts.ordered = lambda found: orders_earlier(found) or found.publishes

    def block(self, block: Block, state: State) -> dict[Place, float]:
        """Return the places of a block's barriers with their cost, and update `state` to hold after the block.

        A place costs more in loops, and less in branches.
        """
        places: dict[Place, float] = {}
        self.arriving = False
        behind = self.engages
        later = [*itertools.accumulate(map(self.facts.engages, reversed(block.stmts)), or_, initial=behind)][::-1]
        for n, one in enumerate(block.stmts):
            place = block, n
            self.engages = later[n]
            if place in self.forced and place not in self.barred:
                self._barrier(place, state, places)
            self._statement(one, place, state, places)
            self.arriving = st.calls(one, "cluster_arrive")
        self.engages = behind
        if (end := _end_of(block)) in self.forced:
            self._barrier(end, state, places)
        return places

    def _barrier(self, place: Place, state: State, places: dict[Place, float]) -> None:
        """Place a barrier, with its cost."""
        places[place] = self._cost()
        self._clear(place, state)

    def _cost(self) -> float:
        """Return the cost of a barrier in the loops and branches around."""
        return float(100.0**self.depth / 2**self.branches)

    def _clear(self, place: Place, state: State) -> None:
        """Clear the accesses at a barrier; if engines have yet to see what threads did, place a fence there."""
        if state.is_hidden and self.engages:
            self.fences.add(place)
        state.since.clear()
        state.used = state.wrote = False

    def _statement(self, one: Stmt, place: Place, state: State, places: dict[Place, float]) -> None:
        """Update the state by one statement, with a barrier before it if it needs one."""
        call = one.call if isinstance(one, Do) and isinstance(one.call, Call) else None
        if syncs(call, Sync.BARRIER, Scope.WARP):
            if state.wrote and self.engages:  # engines may read what the warp wrote: no barrier of the block follows
                self.shown.add(place)
                state.wrote = self.divergent  # threads elsewhere pass no fence here
            state.in_warps(_is_of_one_warp)
        if isinstance(one, Role):
            self._place_in_role(one, place, state, places)
        elif call is not None and _is_for_all(call, self.threads):
            self._clear(place, state)
        elif call is not None and self.group is not None and self.group.meets(call, self.splits):
            state.since = dict(self.group.before)
        elif syncs(call, Sync.ARRIVE, Scope.CLUSTER) and self.publishes:
            self._show(place, state)  # copies of all its blocks may fill the tiles again
        elif syncs(call, Sync.WAIT, Scope.CLUSTER) and self.arriving and not state.is_hidden:
            self._clear(place, state)  # the barrier of the cluster
        elif call is not None and self.publishes and lookup(call.name).publishes:
            self._show(place, state)
            if syncs(call, Sync.ARRIVE, Scope.MBARRIER) and not self.splits:
                state.arrive(_barrier_of(call))
        elif call is not None and call.name == "own_phase":
            state.met(_barrier_of(call))
        elif syncs(call, Sync.PROXY_FENCE):
            state.used = state.wrote = False
        elif call is not None and lookup(call.name).is_grouped:
            of_copies = lookup(call.name).engine is Engine.COPY
            if syncs(call, Sync.COMMIT):
                state.commit(of_copies)
            else:
                pending = call.options[0]
                assert isinstance(pending, int)
                # A barrier between a copy's start and its end has shown engines nothing of it.
                state.wrote |= any(map(self.facts.is_behind, state.wait(pending, of_copies)))
        elif isinstance(one, Block):
            places |= self.block(one, state)
        elif isinstance(one, Break | Continue):
            if isinstance(one, Continue):
                self._meet(self.heads[-1], one, place, state, places)
            (self.exits if isinstance(one, Break) else self.iterations)[-1].append(state.copy())
            state.become(State(state.most))  # no thread goes on here
        elif not self._accesses(one) and not self.facts.orders(one):
            state.used |= self.facts.uses_refilled(one)
        elif isinstance(one, If):
            self._if(one, place, state, places)
        elif isinstance(one, For | While) and not self._is_leaf(one):
            self._loop(one, place, state, places)
        else:
            self._meet(self._accesses(one), one, place, state, places)
            self._add(self._accesses(one), state)
            state.wrote |= any(map(self.facts.is_behind, self._accesses(one)))
            state.used |= self.facts.uses_refilled(one)

    def _add(self, made: Iterable[Access], state: State) -> None:
        """Record the accesses of all threads that run this statement."""
        for access in made:
            state.add(access.with_(level=self.splits))

    def _show(self, place: Place, state: State) -> None:
        """Place a fence before an arrival, for the threads that wait for it."""
        if state.is_hidden and not self.showing:
            self.shown.add(place)
            state.used = state.wrote = False

    def _meet(self, new: list[Access], one: Stmt, place: Place, state: State, places: dict[Place, float]) -> None:
        """Place a barrier before `one` if its accesses conflict with earlier ones."""
        alone = self.group is not None and len(self.group.threads) == 1  # a thread orders its own accesses
        clashes = iter(()) if alone else self._clashes(new, state)
        if place in self.barred:
            clashes = (pair for pair in clashes if not self._are_of_branches(*pair))
        if not self.divergent:
            if any(True for _ in clashes) or (self.after_roles and new and not self._frees_roles(one)):
                self.after_roles = False
                self._barrier(place, state, places)
            return
        found = [(a, b) for a, b in clashes if b.buffer.scope == "shared" and not (a.atomic and b.atomic)]
        if not found or self._group_barrier(one, place, state, places):
            return
        if not self.in_warps or not all(self._meets_in_warp(*pair) for pair in found):
            clash = found[0][1]
            raise error("divergent_hazard", one.span or clash.origin.span, buffer=clash.buffer.name)
        self.others[place] = lanes_barrier()
        places[place] = self._cost()
        state.order_in_warp(self.splits)

    def _frees_roles(self, one: Stmt) -> bool:
        """Return whether a role may wait for arrivals in a branch: a barrier in front would stop both."""
        return isinstance(one, If) and any(barrier in self.awaited for barrier in _mbarriers_of(one)[1])

    def _meets_in_warp(self, old: Access, new: Access) -> bool:
        """Return whether a barrier among the running threads of a warp orders two accesses.

        Both have to be accesses of these threads, since they parted from the other threads. They may clash within warps
        alone.
        """
        engines = [found.engine for a in (old, new) if (found := intrinsic_of(a.origin)) is not None]
        by_threads = not any(engines) and not (old.collective or new.collective)
        return by_threads and old.level == self.splits and not self.hazards.between(old.with_(met=True), new)

    def _group_barrier(self, one: Stmt, place: Place, state: State, places: dict[Place, float]) -> bool:
        """Place a barrier for the threads of the branch around, and return True, if they are whole warps that meet."""
        group = self.group
        if group is None or group.splits != self.splits or self.hazards.first:
            return False
        if group.threads.start % WARP or group.threads.stop % WARP:
            return False
        self.others[place] = self._own_barrier(group.threads.start, len(group.threads), one.span)
        self._barrier(place, state, places)
        state.since = dict(group.before)
        self.gathered.add(group)
        return True

    def _place_in_role(self, role: Role, place: Place, state: State, places: dict[Place, float]) -> None:
        """Place the barriers among the threads of a role. Accesses before all roles count; mbarriers order roles."""
        awaited, arrivals = _mbarriers_of(role) if role.by_hand else (IdSet[Buffer](), IdSet[Buffer]())
        self.awaited |= awaited
        if not all(self._waits_for(old, arrivals) for old in state.since.values()):
            self._barrier(place, state, places)
        kernel, polls = replace(self.kernel, body=role.body), self.hazards.polls
        inner = Walk(kernel, role.count, role.first, self.filled, polls, self.barred)
        inner.facts.read_by_engines |= self.facts.read_by_engines  # engines that run in another role read it
        if role.by_hand:
            inner.by_hand(self.facts.refilled)
        inner.fills_in_turn = not role.by_hand
        end = State(most_pending(role.body))
        found = inner.block(role.body, end)
        state.used, state.wrote = state.used or end.used, state.wrote or end.wrote  # the next barrier needs a fence
        conflicts = any(map(is_barrier, find(role.body, Do)))
        if found or conflicts:
            wait = self._own_barrier(role.first, role.count, role.span)
            self.others |= dict.fromkeys(found, wait)
            self.own |= {role: wait} if conflicts else {}
        self.fences |= inner.fences
        self.shown |= inner.shown
        places |= found
        self.after_roles = True

    def _own_barrier(self, first: int, count: int, span: Span | None) -> Do:
        """Return a barrier for `count` threads from `first` on alone."""
        return warp_barrier() if count == WARP else named_barrier(self.barrier_groups.number(first, count, span), count)

    def _clashes(self, new: list[Access], state: State) -> Iterator[tuple[Access, Access]]:
        """Yield the earlier accesses and new ones that conflict."""
        for access in new:
            filled = self.fills_in_turn and by_engine(access.origin)
            for old in self.hazards.clashes(state.since.values(), access):
                if not (filled and by_engine(old.origin)) and not self._answers(old, access):
                    yield old, access

    def _answers(self, old: Access, new: Access) -> bool:
        """Return whether threads of an earlier branch wait for those of a later one, by an author's mbarrier."""
        other = self.handing.get(new.origin)
        return other is not None and other is not self.handing.get(old.origin) and self._waits_for(old, other[1])

    def _are_of_branches(self, old: Access, new: Access) -> bool:
        """Return whether threads in different branches make two accesses."""
        mine, other = self.parting.get(old.origin), self.parting.get(new.origin)
        return mine is not None and other is not None and mine is not other

    def _waits_for(self, old: Access, arrivals: IdSet[Buffer]) -> bool:
        """Return whether the branch of an earlier access waits for one of these arrivals: a barrier would stop both."""
        mbarriers = self.handing.get(old.origin)
        return mbarriers is not None and any(barrier in arrivals for barrier in mbarriers[0])

    def _accesses(self, one: Stmt) -> list[Access]:
        """Return the accesses of a statement, from the cache if they are known."""
        if one not in self.collected:
            self.collected[one] = list(self.facts.collector.of(one, (), self.conditions))
        return self.collected[one]

    def _is_leaf(self, loop: For | While) -> bool:
        """Return whether a loop needs no barrier inside: its accesses do not conflict, and it waits for nothing."""
        if isinstance(loop, While) or self.facts.orders(loop):
            return False
        if loop not in self.leaves:
            found = self._accesses(loop)
            # Threads that repeat one store write the same value.
            pairs = ((a, b) for n, a in enumerate(found) for b in found[n + 1 :] if a.origin is not b.origin)
            self.leaves[loop] = not any(self.hazards.between(a, b) for a, b in pairs)
        return self.leaves[loop]

    def _if(self, one: If, place: Place, state: State, places: dict[Place, float]) -> None:
        """Place barriers in a branch; conflicts with earlier accesses are ordered in front, for both ways."""
        splits = self.facts.is_divergent(one.condition)
        if splits and not self.divergent:
            mbarriers = _mbarriers_of(one)
            for access in self._accesses(one):
                self.parting[access.origin] = one
                if any(mbarriers):
                    self.handing[access.origin] = mbarriers
        self._meet(self._accesses(one), one, place, state, places)
        self._add(self._head(one), state)
        outer = self.divergent, self.conditions, self.showing, self.group
        condition = self.facts.collector.expand(one.condition)
        if splits:
            self._check_ways(one, condition)
        around = self._threads_here() if splits else range(0)
        before, met = dict(state.since), False
        self.splits += splits
        self.divergent = self.divergent or splits
        if self.divergent and self.publishes and any(lookup(n.name).publishes for n in find(one, Call)):
            self._show(place, state)  # a fence of all threads, although only some arrive
            self.showing = True
        other = state.copy()
        self.branches += 1
        for way, branch, known in ((state, one.then, condition), (other, one.otherwise, unary("not", condition))):
            self.conditions = (*outer[1], known)
            if splits:
                inside = threads_in(simplify(known), self.kernel.thread, around)
                self.group = Group(inside, self.splits, before) if inside else outer[3]
            places |= self.block(branch, way)
            met |= self.group is not outer[3] and self._has_met(branch)
        self.branches -= 1
        self.divergent, self.conditions, self.showing, self.group = outer
        self.splits -= splits
        state.become(state.join(other))
        if splits and contains(one, Break, Continue):  # the threads that leave and those that go on run side by side
            self._add(self._accesses(one), state)
        state.leave(self.splits)
        if met:  # the other threads have met no barrier of the group
            for access in self._accesses(one):
                state.since[access.key] = access.with_(count=-1)

    def _check_ways(self, one: If, condition: Expr) -> None:
        """Raise TileError if threads of both ways of a branch meet at one place: no barrier can stand between them.

        Ways that wait for each other are ordered by the author.
        """
        if one in self.compared or _wait_for_each_other(one.then, one.otherwise):
            return
        self.compared.add(one)
        ways = (one.then, condition), (one.otherwise, unary("not", condition))
        then, other = (
            [a for a in self.facts.collector.of(way, (), (*self.conditions, known)) if a.buffer.scope == "shared"]
            for way, known in ways
        )
        for new in other:
            for old in self.hazards.clashes(then, new):
                if not (old.atomic and new.atomic) and not _stores_the_same(old.origin, new.origin):
                    raise error("divergent_hazard", new.origin.span or one.span, buffer=new.buffer.name)

    def _threads_here(self) -> range:
        """Return the threads that run this statement, if they are known."""
        if not self.divergent:
            return range(self.hazards.first, self.hazards.first + self.threads)
        return self.group.threads if self.group is not None and self.group.splits == self.splits else range(0)

    def _has_met(self, branch: Block) -> bool:
        """Return whether the threads of a branch have a barrier of their own, of the author's or a placed one."""
        group = self.group
        if group is None or group in self.gathered:
            return group is not None
        return any(isinstance(n.call, Call) and group.meets(n.call, self.splits) for n in find(branch, Do))

    # Loops.

    def _loop(self, loop: For | While, place: Place, state: State, places: dict[Place, float]) -> None:
        """Place the barriers of a loop; walk it once for each of the few different states in which it is entered."""
        group = self.group.key if self.group is not None else None
        key = place, self.trying, self.after_roles, group, state.key
        known = self.walked.get(key)
        if known is None:
            found: dict[Place, float] = {}
            self._cheapest(loop, place, state, found)
            gathers = self.group is not None and self.group in self.gathered
            known = self.walked[key] = LoopWalk(found, state.copy(), gathers, self.after_roles)
        elif known.gathers and self.group is not None:
            self.gathered.add(self.group)
        places |= known.places
        state.become(known.state.copy())
        self.after_roles = known.after_roles

    def _cheapest(self, loop: For | While, place: Place, state: State, places: dict[Place, float]) -> None:
        """Choose the cheapest barriers of a loop: one in front or none, and a first one in the body or none.

        Reads of the loop's bounds or condition are ordered in front of it. Otherwise threads would count differently.
        """
        head, parted = self._head(loop), self.facts.is_divergent_loop(loop)
        # No barrier can be inside a loop in which threads diverge.
        self._meet(self._accesses(loop) if parted else head, loop, place, state, places)
        self._add(head, state)
        outer, self.divergent = self.divergent, self.divergent or parted
        self.splits += parted
        if isinstance(loop, For) and trips(loop) == 1:
            found, ends, exits = self._body(loop, state)
            places |= found
            state.become(self._state_behind(loop, ends, exits))
            self.divergent = outer
            self.splits -= parted
            state.leave(self.splits)
            return
        runs = isinstance(loop, For) and is_literal(simplify(loop.starts[0] < loop.stops[0]), True)
        fronts = [False]
        if not outer and place not in self.barred and any(True for _ in self._clashes(self._accesses(loop), state)):
            fronts.append(True)
            if state.is_hidden and self.engages:
                self.fences.add(place)  # for a barrier there, if one is chosen
        best: tuple[float, dict[Place, float], State] | None = None
        for front in fronts:
            entry = state.copy()
            if front:
                entry.since.clear()
                entry.used = entry.wrote = False
                self._add(head, entry)  # the bounds are read behind the barrier
            first = self._state_at_first(loop, entry)
            for start in self._starts(loop):
                found, leaves = self._fixed_point(loop, first, start)
                here = {place: self._cost()} if front else {}
                cost = sum(found.values()) + sum(here.values())
                if best is None or cost < best[0]:
                    after = leaves if runs else self._skipped(loop, entry).join(leaves)
                    best = cost, found | here, after
        assert best is not None
        self.divergent = outer
        self.splits -= parted
        places |= best[1]
        state.become(best[2])
        state.leave(self.splits)

    def _body(self, loop: For | While, state: State) -> tuple[dict[Place, float], State, State]:
        """Return the places in a loop's body, and the states at the end of an iteration and at early exits."""
        engages = self.engages
        self.engages = engages or self.facts.engages(loop)
        self.exits.append([])
        self.iterations.append([])
        self.heads.append(self._head(loop) if isinstance(loop, While) else [])
        places = self.block(loop.body, state)
        self._meet(self.heads.pop(), loop, _end_of(loop.body), state, places)
        self.engages = engages
        ends = reduce(State.join, self.iterations.pop(), state)
        return places, ends, reduce(State.join, self.exits.pop(), State(state.most))

    def _starts(self, loop: For | While) -> Iterator[Place | None]:
        """Yield first barriers to try: none, before a statement of the body if it needs several, or ending a branch."""
        yield None
        if self.divergent or self.trying or not self.last:
            return
        self.trying = True
        for one in loop.body.stmts:
            if isinstance(one, If) and not self.facts.is_divergent(one.condition):
                yield from (_end_of(b) for b in (one.then, one.otherwise) if self._publishes(b))
        # If the body has a barrier already, placing from there is optimal anyway.
        if len(self.last) > 1 and not any(map(is_barrier, loop.body.stmts)):
            yield from ((loop.body, n) for n in self._between(loop)[:STARTS])
        self.trying = False

    def _between(self, loop: For | While) -> list[int]:
        """Return a range of a body's statements such that every placement has a barrier before one of them.

        Something has to be ordered between two barriers that were placed as late as possible. Of several such ranges,
        the one with the fewest statements is enough.
        """
        busy = [n for n, s in enumerate(loop.body.stmts) if self._accesses(s) or self.facts.orders(s)]
        here = sorted(n for block, n in self.last if block is loop.body)
        ranges = [[n for n in busy if first < n <= last] for first, last in itertools.pairwise(here)]
        return min([*ranges, busy], key=len)

    def _publishes(self, branch: Block) -> bool:
        """Return whether a branch writes shared memory for later statements."""
        found = [a for one in branch.stmts for a in self._accesses(one)]
        return any(a.writes and not a.asynchronous and a.buffer.scope == "shared" for a in found)

    def _fixed_point(self, loop: For | While, entry: State, start: Place | None) -> tuple[dict[Place, float], State]:
        """Walk a loop until its state stays the same. Return the places of barriers, and the state behind it."""
        forced = self.forced
        self.forced = forced | {start} if start else forced
        self.depth += 1
        back = State(entry.most)
        for iteration in itertools.count():
            if iteration == PASSES and not self.divergent:
                self.forced = self.forced | {(loop.body, 0)}
            elif iteration == DIVERGENT_PASSES and self.divergent:
                back = self._anywhere(loop, back)
            state = entry.join(back)
            self._add(self._head(loop) if isinstance(loop, While) else (), state)
            places, ends, exits = self._body(loop, state)
            if iteration == DIVERGENT_PASSES and self.divergent:  # only some threads come here: no barrier is possible
                ends = self._anywhere(loop, ends)
                break
            before, back = back, ends.earlier(self.shifts.of(loop, leave=False))
            if self.facts.is_divergent_loop(loop):
                back.leave(self.splits - 1)
            if iteration > PASSES:  # from here on the state only grows, up to all accesses of the body
                back = before.join(back)
            if back.same(before):
                break
        self.depth -= 1
        self.forced = forced
        if not self.trying:
            self.last = list(places)
        return places, self._state_behind(loop, ends, exits)

    def _anywhere(self, loop: For | While, state: State) -> State:
        """Return the state with all accesses of a loop, made in any of its iterations."""
        found = state.copy()
        forget = self.shifts.of(loop, leave=True)
        for access in self._accesses(loop.body):
            own = [a for a in state.since.values() if a.origin is access.origin]
            earlier = forget(access).with_(in_warp=bool(own) and all(a.in_warp for a in own))
            found.since[earlier.key] = earlier
        return found

    def _state_at_first(self, loop: For | While, entry: State) -> State:
        """Return the state before a loop as its first iteration sees it."""
        if isinstance(loop, While):
            return entry
        return entry.earlier(self.shifts.into(loop, self._accesses(loop)))

    def _skipped(self, loop: For | While, state: State) -> State:
        """Return the state after a loop that runs zero times: without accesses that need the loop to run."""
        kept = state.copy()
        if isinstance(loop, For):
            known = self.hazards.simplify
            runs = known(self.facts.collector.expand(loop.starts[0] < loop.stops[0]))
            kept.since = {k: a for k, a in kept.since.items() if not any(equal(known(c), runs) for c in a.conditions)}
        return kept

    def _state_behind(self, loop: For | While, state: State, exits: State) -> State:
        """Return the state behind a loop, without accesses that the last iteration makes only for a next one."""
        left = state.copy()
        if isinstance(loop, For) and loop.step == 1:
            for key, access in state.since.items():
                # If the place changes with the iteration, no earlier iteration made an access of the same key.
                changes = any(loop.vars[0] in symbols(i) for i in access.indices)
                if changes and any(self._fails_last(loop, c) for c in access.conditions):
                    del left.since[key]
        return left.join(exits).earlier(self.shifts.of(loop, leave=True))

    def _fails_last(self, loop: For, condition: Expr) -> bool:
        """Return whether a condition certainly fails in the last iteration."""
        key = loop, condition
        if key not in self.failing:
            last = Substitute({loop.vars[0]: loop.stops[0] - 1})(condition)
            self.failing[key] = is_literal(self.hazards.simplify(last), False)
        return self.failing[key]

    def _head(self, one: For | While | If) -> list[Access]:
        """Return the accesses of a statement's bounds or condition, from the cache if they are known."""
        if one not in self.read:
            read = (*one.starts, *one.stops) if isinstance(one, For) else (one.condition,)
            self.read[one] = [a for part in read for a in self.facts.collector.of(part, (), self.conditions)]
        return self.read[one]


def _end_of(block: Block) -> Place:
    """Return the place behind the last statement of a block."""
    return block, len(block.stmts)


def _barrier_of(call: Call) -> Buffer:
    """Return the mbarrier of a call."""
    (place, *_) = call.args
    assert isinstance(place, Address)
    return place.buffer


def _mbarriers_of(branch: Block | If | Role) -> tuple[IdSet[Buffer], IdSet[Buffer]]:
    """Return the mbarriers on which threads of a branch wait, and those that its other calls name, as arrivals do."""
    calls = [call for call in find(branch, Call) if call.args and isinstance(call.args[0], Address)]
    waits = IdSet(_barrier_of(call) for call in calls if syncs(call, Sync.WAIT, Scope.MBARRIER))
    others = (a for call in calls if not syncs(call, Sync.WAIT, Scope.MBARRIER) for a in call.args)
    return waits, IdSet(a.buffer for a in others if isinstance(a, Address) and a.buffer.scope == "barrier")


def _wait_for_each_other(one: Block, other: Block) -> bool:
    """Return whether threads of one block wait for those of another: by an mbarrier, a barrier's number or atomics."""
    (waits, arrivals), (awaited, arriving) = _mbarriers_of(one), _mbarriers_of(other)
    mine, others = ({option(c) for c in find(block, Call) if is_numbered(c)} for block in (one, other))
    handed = any(b in arriving for b in waits) or any(b in arrivals for b in awaited)
    return handed or not mine.isdisjoint(others) or _polls(one) or _polls(other)


def _stores_the_same(old: Node, new: Node) -> bool:
    """Return whether two nodes store the same number."""
    if not (isinstance(old, Store) and isinstance(new, Store) and isinstance(old.value, Const)):
        return False
    return equal(old.value, new.value)


def _is_of_one_warp(access: Access) -> bool:
    """Return whether threads make an access, or a bulk store whose reads its own thread waits for."""
    found = intrinsic_of(access.origin)
    return not by_engine(access.origin) or (found is not None and found.engine is Engine.BULK and not access.writes)


def _is_for_all(call: Call, threads: int) -> bool:
    """Return whether a call is a barrier for at least all threads of the role."""
    found = lookup(call.name)
    is_wide = found.scope is Scope.BLOCK or (found.scope is Scope.GROUP and option(call, 1) >= threads)
    return found.is_barrier and is_wide
