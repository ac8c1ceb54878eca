# SPDX-License-Identifier: Apache-2.0
"""The fewest barriers that order every hazard between the threads of a block.

Walks the statements in order with the accesses since the last barrier; a barrier comes right before the first statement
that meets one of them, which in straight code is the best that can be done. Loops are walked until what one iteration
leaves for the next no longer changes, and from several starting points. Asynchronous copies count as writes from the
wait that completes them on, products as reads when they start and when they are waited for. A barrier never stands
where only some threads come by. Afterwards every hazard is ordered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from typing import Protocol

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics.base import intrinsic_of, lookup, syncs
from torch_tile.intrinsics.bulk import fence_proxy_async, named_barrier
from torch_tile.intrinsics.memory import barrier, option, warp_barrier
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir import stmt as st
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Expr, unary
from torch_tile.ir.node import Node, Rewriter, equal, find, symbols
from torch_tile.ir.simplify import is_literal, simplify
from torch_tile.ir.stmt import Block, Break, Continue, Do, For, If, Program, Role, Stmt, While
from torch_tile.lowering.sync.accesses import Access, Hazards, trips
from torch_tile.lowering.sync.facts import BarrierGroups, Facts, handed_over, is_ordered, refilled
from torch_tile.lowering.sync.state import Shifts, State, most_pending

PASSES = 12  # over a loop body, before its hazards are cut off by a barrier at its start
DIVERGENT_PASSES = 2  # over one that only some threads run, before its accesses count as being anywhere
STARTS = 16  # points of a loop body from which placing is tried


def insert_barriers(program: Program, build: Build) -> Program:
    """Add the barriers that the program lacks. Raises TileError (`divergent_hazard`) where none can stand."""
    kernels = tuple(_synchronised(kernel) for kernel in program.kernels)
    same = all(a is b for a, b in zip(kernels, program.kernels, strict=True))
    return program if same else replace(program, kernels=kernels)


def _synchronised(kernel: st.Kernel) -> st.Kernel:
    threads = 1
    for extent in kernel.threads:
        threads *= extent
    walker = Walk(kernel, threads)
    if again := refilled(kernel):
        walker.by_hand(again)
    places = walker.block(kernel.body, State(most_pending(kernel.body)))
    if not places and not walker.fences and not walker.shown and not walker.own:
        return kernel
    return Insert(set(places), walker)(kernel)  # type: ignore[no-any-return]


class Walk:
    """Finds the places of barriers in one kernel, or role.

    `fences` are places before barriers where what threads wrote is shown to wgmma and bulk copies, `shown` those before
    `arrivals` at what others wait for, by which authors hand tiles over. `others` are the barriers that are not the
    block's, `own` those of the roles in which an author calls for one.
    """

    def __init__(self, kernel: st.Kernel, threads: int, first: int = 0, filled: frozenset[Buffer] | None = None):
        self.kernel, self.threads = kernel, threads
        self.filled = handed_over(kernel) if filled is None else filled
        self.facts = Facts(kernel, self.filled)
        self.hazards = Hazards(threads, first)
        self.fences: set[Place] = set()
        self.others: dict[Place, Do] = {}
        self.own: dict[Role, Do] = {}
        self.shown: set[Place] = set()
        self.hands_over = False  # whether authors order the threads, so that what they arrive at hands tiles over
        self.arriving = False  # the statement before arrives at the cluster's barrier
        self.barrier_groups = BarrierGroups(kernel)
        self.after_roles = False
        self.collected: dict[Stmt, list[Access]] = {}
        self.forced: set[Place] = set()
        self.depth = 0  # of loops
        self.branches = 0
        self.divergent = False
        self.showing = False  # within a branch before which all threads have shown what they did
        self.conditions: tuple[Expr, ...] = ()  # of the branches around
        self.exits: list[list[State]] = []  # of the loops around, at their breaks
        self.iterations: list[list[State]] = []  # and where they continue
        self.heads: list[list[Access]] = []  # and what their conditions read before each further iteration
        self.trying = False
        self.last: list[Place] = []  # of the barriers that the loop walked last has inside
        self.leaves: dict[Stmt, bool] = {}
        self.failing: dict[tuple[For, Expr], bool] = {}
        self.shifts = Shifts(self.facts.forgotten, self.hazards.simplify)

    def by_hand(self, refilled: frozenset[Buffer]) -> None:
        """Authors order the threads: what they arrive at, or meet at, passes what engines read or fill again."""
        self.facts.refilled, self.hands_over = refilled, True
        self.facts.ordered = lambda found: is_ordered(found) or found.hands_over

    def block(self, block: Block, state: State) -> dict[Place, float]:
        """Places with their cost, more in loops, less in branches; `state` becomes what holds after the block."""
        places: dict[Place, float] = {}
        self.arriving = False
        for n, one in enumerate(block.stmts):
            place = block, n
            if place in self.forced:
                self._barrier(place, state, places)
            self._statement(one, place, state, places)
            self.arriving = st.calls(one, "cluster_arrive")
        if (end := _end_of(block)) in self.forced:
            self._barrier(end, state, places)
        return places

    def _barrier(self, place: Place, state: State, places: dict[Place, float]) -> None:
        places[place] = 100.0**self.depth / 2**self.branches
        self._clear(place, state)

    def _clear(self, place: Place, state: State) -> None:
        """At a barrier, all is ordered; for engines what threads did needs a fence besides."""
        if state.is_hidden:
            self.fences.add(place)
        state.since.clear()
        state.used = state.wrote = False

    def _statement(self, one: Stmt, place: Place, state: State, places: dict[Place, float]) -> None:
        call = one.call if isinstance(one, Do) and isinstance(one.call, Call) else None
        if isinstance(one, Role):
            self._role(one, place, state, places)
        elif call is not None and _is_for_all(call, self.threads):
            self._clear(place, state)
        elif syncs(call, Sync.WAIT, Scope.CLUSTER) and self.arriving and not state.is_hidden:
            self._clear(place, state)  # a barrier of all blocks
        elif call is not None and self.hands_over and lookup(call.name).hands_over:
            self._show(place, state)
        elif syncs(call, Sync.PROXY_FENCE):
            state.used = state.wrote = False
        elif call is not None and lookup(call.name).is_grouped:
            of_copies = lookup(call.name).engine is Engine.COPY
            if syncs(call, Sync.COMMIT):
                state.commit(of_copies)
            else:
                pending = call.options[0]
                assert isinstance(pending, int)
                state.wait(pending, of_copies)
        elif isinstance(one, Block):
            places |= self.block(one, state)
        elif isinstance(one, Break | Continue):
            if isinstance(one, Continue):
                self._meet(self.heads[-1], one, place, state, places)
            (self.exits if isinstance(one, Break) else self.iterations)[-1].append(state.copy())
            state.become(State(state.most))  # nobody goes on here
        elif not self._accesses(one) and not self.facts.orders(one):
            state.used |= self.facts.uses_refilled(one)
        elif isinstance(one, If):
            self._if(one, place, state, places)
        elif isinstance(one, For | While) and not self._is_leaf(one):
            self._loop(one, place, state, places)
        else:
            self._meet(self._accesses(one), one, place, state, places)
            for access in self._accesses(one):
                state.add(access)
                state.wrote |= self.facts.is_behind(access)
            state.used |= self.facts.uses_refilled(one)

    def _show(self, place: Place, state: State) -> None:
        """Before an arrival, to those who wait for it."""
        if state.is_hidden and not self.showing:
            self.shown.add(place)
            state.used = state.wrote = False

    def _meet(self, new: list[Access], one: Stmt, place: Place, state: State, places: dict[Place, float]) -> None:
        """A barrier before `one` if what it does meets what was done."""
        clash = self._clash(new, state)
        if clash is None and not (self.after_roles and new):
            return
        self.after_roles = False
        if clash is None or not self.divergent:
            self._barrier(place, state, places)
        elif clash.buffer.scope == "shared":
            raise error("divergent_hazard", one.span or clash.origin.span, buffer=clash.buffer.name)

    def _role(self, role: Role, place: Place, state: State, places: dict[Place, float]) -> None:
        """Its threads among themselves; what was before is seen by all roles, mbarriers order them among each other."""
        if state.since:
            self._barrier(place, state, places)
        inner = Walk(replace(self.kernel, body=role.body), role.count, role.first, self.filled)
        inner.facts.read_by_engines |= self.facts.read_by_engines  # in another role
        if role.by_hand:
            inner.by_hand(self.facts.refilled)
        end = State(most_pending(role.body))
        found = inner.block(role.body, end)
        state.used, state.wrote = state.used or end.used, state.wrote or end.wrote  # to be shown at the next barrier
        conflicts = any(map(is_barrier, find(role.body, Do)))
        if found or conflicts:
            wait = warp_barrier() if role.count == 32 else named_barrier(self.barrier_groups.number(role), role.count)
            self.others |= dict.fromkeys(found, wait)
            self.own |= {role: wait} if conflicts else {}
        self.fences |= inner.fences
        self.shown |= inner.shown
        places |= found
        self.after_roles = True

    def _clash(self, new: list[Access], state: State) -> Access | None:
        found = (a for a in new if any(self.hazards.between(old, a) for old in state.since.values()))
        return next(found, None)

    def _accesses(self, one: Stmt) -> list[Access]:
        if one not in self.collected:
            self.collected[one] = list(self.facts.collector.of(one, (), self.conditions))
        return self.collected[one]

    def _is_leaf(self, loop: For | While) -> bool:
        """Whether a loop needs nothing inside: its iterations do not meet each other, and it waits for nothing."""
        if isinstance(loop, While) or self.facts.orders(loop):
            return False
        if loop not in self.leaves:
            found = self._accesses(loop)
            # Threads that repeat one store write the same.
            pairs = ((a, b) for n, a in enumerate(found) for b in found[n + 1 :] if a.origin is not b.origin)
            self.leaves[loop] = not any(self.hazards.between(a, b) for a, b in pairs)
        return self.leaves[loop]

    def _if(self, one: If, place: Place, state: State, places: dict[Place, float]) -> None:
        """What the branches meet of what was before is ordered in front of them, so that it counts on both ways."""
        self._meet(self._accesses(one), one, place, state, places)
        for access in self.facts.collector.of(one.condition):
            state.add(access)
        outer = self.divergent, self.conditions, self.showing
        self.divergent = self.divergent or self.facts.is_divergent(one.condition)
        if self.divergent and self.hands_over and any(lookup(n.name).hands_over for n in find(one, Call)):
            self._show(place, state)  # by all threads, some of which arrive
            self.showing = True
        condition = self.facts.collector.expand(one.condition)
        other = state.copy()
        self.branches += 1
        for way, branch, known in ((state, one.then, condition), (other, one.otherwise, unary("not", condition))):
            self.conditions = (*outer[1], known)
            places |= self.block(branch, way)
        self.branches -= 1
        self.divergent, self.conditions, self.showing = outer
        state.become(state.join(other))

    # Loops.

    def _loop(self, loop: For | While, place: Place, state: State, places: dict[Place, float]) -> None:
        """The cheapest of: a barrier in front or none, and a first barrier at some point of the body or none.

        What the loop's bounds or its condition read is ordered in front of it, or threads would count differently.
        """
        head, parted = self._head(loop), self.facts.parts(loop)
        # No barrier can be inside where threads part.
        self._meet(self._accesses(loop) if parted else head, loop, place, state, places)
        for access in head:
            state.add(access)
        outer, self.divergent = self.divergent, self.divergent or parted
        if isinstance(loop, For) and trips(loop) == 1:
            found, ends, exits = self._body(loop, state)
            places |= found
            state.become(self._left(loop, ends, exits))
            self.divergent = outer
            return
        runs = isinstance(loop, For) and is_literal(simplify(loop.starts[0] < loop.stops[0]), True)
        fronts = [False]
        if not outer and self._clash(self._accesses(loop), state) is not None:
            fronts.append(True)
            self.fences |= {place} if state.is_hidden else set()  # of the barrier, if it comes to stand there
        best: tuple[float, dict[Place, float], State] | None = None
        for front in fronts:
            entry = state.copy()
            if front:
                entry.since.clear()
                entry.used = entry.wrote = False
            first = self._entered(loop, entry)
            for start in self._starts(loop):
                found, leaves = self._steady(loop, first, start)
                here = {place: 100.0**self.depth / 2**self.branches} if front else {}
                cost = sum(found.values()) + sum(here.values())
                if best is None or cost < best[0]:
                    after = leaves if runs else self._skipped(loop, entry).join(leaves)
                    best = cost, found | here, after
        assert best is not None
        self.divergent = outer
        places |= best[1]
        state.become(best[2])

    def _body(self, loop: For | While, state: State) -> tuple[dict[Place, float], State, State]:
        """Places in a body, and what holds where an iteration ends and where the loop is left early."""
        self.exits.append([])
        self.iterations.append([])
        self.heads.append(self._head(loop) if isinstance(loop, While) else [])
        places = self.block(loop.body, state)
        self._meet(self.heads.pop(), loop, _end_of(loop.body), state, places)
        ends = reduce(State.join, self.iterations.pop(), state)
        return places, ends, reduce(State.join, self.exits.pop(), State(state.most))

    def _starts(self, loop: For | While) -> Iterator[Place | None]:
        """A barrier to begin with: none, before a statement of the body if several are needed, or ending a branch."""
        yield None
        if self.divergent or self.trying or not self.last:
            return
        self.trying = True
        for one in loop.body.stmts:
            if isinstance(one, If) and not self.facts.is_divergent(one.condition):
                yield from (_end_of(b) for b in (one.then, one.otherwise) if self._hands_over(b))
        # From a barrier that stands in the body already, placing is best anyway.
        if len(self.last) > 1 and not any(map(is_barrier, loop.body.stmts)):
            yield from ((loop.body, n) for n in self._between(loop)[:STARTS])
        self.trying = False

    def _between(self, loop: For | While) -> list[int]:
        """Statements of a body before one of which a barrier stands however they are placed.

        Between two barriers that were placed as late as can be, something is to be ordered: where there are several
        such ranges, the one with the fewest statements will do.
        """
        busy = [n for n, s in enumerate(loop.body.stmts) if self._accesses(s) or self.facts.orders(s)]
        here = sorted(n for block, n in self.last if block is loop.body)
        ranges = [[n for n in busy if first < n <= last] for first, last in itertools.pairwise(here)]
        return min([*ranges, busy], key=len)

    def _hands_over(self, branch: Block) -> bool:
        """Whether a branch leaves something in shared memory for what follows."""
        found = [a for one in branch.stmts for a in self._accesses(one)]
        return any(a.writes and not a.asynchronous and a.buffer.scope == "shared" for a in found)

    def _steady(self, loop: For | While, entry: State, start: Place | None) -> tuple[dict[Place, float], State]:
        """Places inside a loop entered with `entry`, and what an iteration leaves, seen from after the loop."""
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
            for access in self._head(loop) if isinstance(loop, While) else ():
                state.add(access)
            places, ends, exits = self._body(loop, state)
            if iteration == DIVERGENT_PASSES and self.divergent:  # threads come here or not: no barrier cuts it off
                ends = self._anywhere(loop, ends)
                break
            before, back = back, self._next(loop, ends)
            if iteration > PASSES:  # from here on it only grows, up to what the body can do
                back = before.join(back)
            if back.same(before):
                break
        self.depth -= 1
        self.forced = forced
        if not self.trying:
            self.last = list(places)
        return places, self._left(loop, ends, exits)

    def _anywhere(self, loop: For | While, state: State) -> State:
        """The state with all accesses of a loop at unknown places."""
        found = state.copy()
        for access in self._accesses(loop):
            found.since[access.key] = replace(access, count=-1)
        return found

    def _entered(self, loop: For | While, entry: State) -> State:
        """What was before a loop as its first iteration sees it."""
        if isinstance(loop, While):
            return entry
        return entry.entering(loop.vars[0], loop.starts[0], self._accesses(loop), self.hazards.simplify)

    def _skipped(self, loop: For | While, state: State) -> State:
        """State after a loop that runs zero times: drops accesses guarded by "the loop runs"."""
        kept = state.copy()
        if isinstance(loop, For):
            known = self.hazards.simplify
            runs = known(self.facts.collector.expand(loop.starts[0] < loop.stops[0]))
            kept.since = {k: a for k, a in kept.since.items() if not any(equal(known(c), runs) for c in a.conditions)}
        return kept

    def _left(self, loop: For | While, state: State, exits: State) -> State:
        """What an iteration leaves, seen from after the loop: the last one has not done what is for a next one."""
        left = state.copy()
        if isinstance(loop, For) and loop.step == 1:
            for key, access in state.since.items():
                # Where the place changes with the iteration, no earlier one has made an access of the same key.
                changes = any(loop.vars[0] in symbols(i) for i in access.indices)
                if changes and any(self._fails_last(loop, c) for c in access.conditions):
                    del left.since[key]
        return left.join(exits).earlier(self.shifts.of(loop, leave=True))

    def _fails_last(self, loop: For, condition: Expr) -> bool:
        """Whether a condition certainly fails in the last iteration."""
        key = loop, condition
        if key not in self.failing:
            last = Substitute({loop.vars[0]: loop.stops[0] - 1})(condition)
            self.failing[key] = is_literal(self.hazards.simplify(last), False)
        return self.failing[key]

    def _head(self, loop: For | While) -> list[Access]:
        read = (loop.condition,) if isinstance(loop, While) else (*loop.starts, *loop.stops)
        return [access for part in read for access in self.facts.collector.of(part)]

    def _next(self, loop: For | While, state: State) -> State:
        """What an iteration leaves, as the next one sees it."""
        return state.earlier(self.shifts.of(loop, leave=False))


def _end_of(block: Block) -> Place:
    """The place behind the last statement of a block."""
    return block, len(block.stmts)


def _is_for_all(call: Call, threads: int) -> bool:
    """Whether it is a barrier for all threads of the role, and maybe others."""
    found = lookup(call.name)
    return found.meets and (found.scope is Scope.BLOCK or (found.scope is Scope.GROUP and option(call, 1) >= threads))


# Barriers and fences put into the blocks of a kernel where insert_barriers found that they belong.

Place = tuple[Block, int]  # a block, and before which of its statements


class Found(Protocol):
    """What stands where; see `insert_barriers.Walk`."""

    fences: set[Place]
    shown: set[Place]
    others: dict[Place, Do]
    own: dict[Role, Do]


def is_barrier(one: Node) -> bool:
    """Whether a statement is the block's barrier."""
    found = intrinsic_of(one)
    return found is not None and found.meets and found.scope is Scope.BLOCK


def _is_any_barrier(one: Stmt) -> bool:
    found = intrinsic_of(one)
    return found is not None and found.meets


class Insert(Rewriter):
    """Puts barriers and fences into blocks."""

    def __init__(self, places: set[Place], found: Found):
        self.places, self.found = places, found
        self.wait: Do | None = None  # what threads of the role around wait for

    def visit_Role(self, role: Role) -> Stmt:
        """The block's barrier is for those of the role only."""
        self.wait = self.found.own.get(role)
        new = self.children(role)
        self.wait = None
        return new

    def visit_Do(self, node: Do) -> Stmt:
        """An author's barrier."""
        return node if self.wait is None or not is_barrier(node) else replace(self.wait, span=node.span)

    def at(self, place: Place, one: Stmt, before: bool) -> Iterator[Stmt]:
        """What stands there, `before` a statement or after it; fences only in front of barriers that stand there."""
        span = one.span
        fence = place in self.found.fences and (place in self.places or (before and _is_any_barrier(one)))
        if fence or (before and place in self.found.shown):
            yield replace(fence_proxy_async(), span=span)
        if place in self.places:
            yield replace(self.found.others.get(place) or barrier(), span=span)

    def visit_Block(self, block: Block) -> Block:
        """With what stands between its statements."""
        new: list[Stmt] = []
        for n, one in enumerate(block.stmts):
            new += self.at((block, n), one, True)
            new.append(self(one))
        if block.stmts:
            new += self.at((block, len(block.stmts)), block.stmts[-1], False)
        same = len(new) == len(block.stmts) and all(a is b for a, b in zip(new, block.stmts, strict=True))
        return block if same else Block(tuple(new), span=block.span)
