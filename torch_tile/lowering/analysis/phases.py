# SPDX-License-Identifier: Apache-2.0
"""Run the waits, arrivals and barriers of one block, to see which threads wait for ever.

Only these run, where numbers decide them: constants, indices of loops, variables, sizes that a caller assumes, and the
thread. Threads that wait at the same places are one runner, which goes step by step. Runners take turns in several
orders, as any of them may be slow. Bytes of copies are taken to have come.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import WARP
from torch_tile.intrinsics.base import lookup, syncs
from torch_tile.intrinsics.memory import option
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Expr, Load, Var, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, contains, find, symbols
from torch_tile.ir.scope_facts import values_for_names
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, Do, For, If, Kernel, Let, Role, Stmt, Store, While
from torch_tile.lowering.analysis.thread_values import Numbers
from torch_tile.tileop.uses import writes_of

MOST_EVENTS = 2000  # of one runner, where a caller does not say
MOST_STEPS = 20000  # of all runners together


class Kind(Enum):
    """What threads do at an mbarrier or a barrier."""

    ARRIVE = "arrives at an mbarrier"
    WAIT = "waits for a phase of an mbarrier"
    COME = "counts at a barrier and goes on"
    MEET = "counts at a barrier and waits"


@dataclass(frozen=True)
class Place:
    """An element of an array of mbarriers, or a barrier of threads by its `number`: 0 is that of the block.

    The barrier of a role has the role's first thread as its number, below 0.
    """

    buffer: Buffer | None
    number: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name that messages use."""
        if self.buffer is not None:
            return f"{self.buffer.name}[{', '.join(map(str, self.number))}]"
        (number,) = self.number
        return f"barrier {number}" if number > 0 else "the barrier of the block" if not number else "that of the role"


class Event(NamedTuple):
    """What a runner does: it waits for a phase of this `parity`, or counts `come` of `needed` arrivals."""

    kind: Kind
    place: Place
    parity: int
    come: int
    needed: int
    do: Do
    span: Span | None


@dataclass
class Runner:
    """Threads that wait at the same places. At a barrier they wait for the end of number `use`."""

    threads: Sequence[int]
    events: Sequence[Event]
    done: int = 0
    use: int | None = None

    @property
    def event(self) -> Event:
        """Return what the runner does next."""
        return self.events[self.done]


class Unknown(Exception):
    """Something depends on what only a call brings."""


def stopped(kernel: Kernel, size: int | None = None, most: int = MOST_EVENTS) -> tuple[list[Runner], Run] | None:
    """Run a kernel; return the runners, and where they stand at the end. All dimensions and numbers have a `size`.

    Return None if that is unknown, takes too long, or is more than `most` events of a runner. Of several orders it is
    one in which some runner waits for ever, if there is.
    """
    try:
        runners = runners_of(kernel, {} if size is None else _sizes(kernel, size), most)
    except Unknown:
        return None
    if sum(len(runner.events) for runner in runners) > MOST_STEPS:
        return None
    for choose in (_latest, _first, _all_of):
        run = Run()
        if not run.all(runners, choose):
            return None
        if stuck(runners):
            break
    return runners, run


def stuck(runners: Sequence[Runner]) -> list[Runner]:
    """Return the runners that have not ended."""
    return [runner for runner in runners if runner.done < len(runner.events)]


def waits(kernel: Kernel) -> bool:
    """Return whether roles or warps of a kernel wait for each other, and all of them are of one block.

    Warpgroups that take turns by the compiler's order are left out.
    """
    calls = list(find(kernel, Call))
    if kernel.cluster != (1, 1, 1) or any(syncs(call, Sync.TURN) for call in calls):
        return False
    within = [call for role in find(kernel, Role) for call in find(role, Call) if _kind_of(call) is Kind.MEET]
    kinds = [_kind_of(call) for call in calls if lookup(call.name).scope is not Scope.BLOCK]
    return bool(within) or Kind.WAIT in kinds or Kind.MEET in kinds


def runners_of(kernel: Kernel, sizes: Mapping[Var, int], most: int) -> list[Runner]:
    """Return the runners of a kernel's block 0, with what they do. Raises Unknown."""
    matters = _Matters(kernel)
    groups, taking = _groups(kernel, matters, sizes)
    return [Runner(each, _Events(kernel, each, taken, taking, sizes, matters, most).events()) for each, taken in groups]


def _sizes(kernel: Kernel, size: int) -> dict[Var, int]:
    """Return a value near `size` for all dimensions and numbers that a call brings."""
    found = (var for var in find(kernel, Var) if var.role in ("dim", "param") and var.dtype.is_integer)
    return {var: -(-size // var.multiple) * var.multiple for var in found}


def _kind_of(call: Call) -> Kind | None:
    """Return what a call does at an mbarrier or a barrier of several warps."""
    found = lookup(call.name)
    if found.scope is Scope.MBARRIER:
        return {Sync.WAIT: Kind.WAIT, Sync.ARRIVE: Kind.ARRIVE}.get(found.sync) if found.sync else None
    if found.scope is Scope.GROUP and found.sync in (Sync.BARRIER, Sync.ARRIVE):
        return Kind.MEET if found.is_barrier else Kind.COME
    return Kind.MEET if found.is_barrier and found.scope is Scope.BLOCK else None


def _is_event(call: Call) -> bool:
    """Return whether a call is an event, or does to an mbarrier what is not known."""
    found = lookup(call.name)
    if _kind_of(call) is not None:
        return True
    if found.scope is Scope.MBARRIER or found.engine is Engine.BULK or call.name == "own_phase":
        return False
    return any(isinstance(each, Address) and each.buffer.scope == "barrier" for each in call.args)


class _Matters:
    """Tell which statements of a kernel have events, and which set names and variables on which events depend."""

    def __init__(self, kernel: Kernel) -> None:
        self.has: dict[Node, bool] = {}
        self.written: dict[Node, IdSet[Buffer]] = {}
        self.kept: dict[Block, list[Stmt]] = {}
        self.used: set[Var | Buffer] = set()
        for node in find(kernel.body, For, If, While, Do):
            if self.events(node):
                self.used |= symbols(node) if isinstance(node, Do) else _decide(node)
        sets: list[tuple[Var | Buffer, Expr]] = [(n.var, n.value) for n in find(kernel.body, Let)]
        sets += [(n.buffer, n.init) for n in find(kernel.body, Alloc) if n.init is not None]
        sets += [(n.buffer, n.value) for n in find(kernel.body, Store) if not n.indices]
        size = -1
        while size != len(self.used):
            size = len(self.used)
            for name, value in sets:
                if name in self.used:
                    self.used |= symbols(value)

    def events(self, node: Node) -> bool:
        """Return whether a statement has events."""
        if node not in self.has:
            self.has[node] = any(map(_is_event, find(node, Call)))
        return self.has[node]

    def waits(self, node: Node) -> bool:
        """Return whether threads wait in a statement, or do what is not known."""
        return any(_is_event(c) and _kind_of(c) not in (Kind.ARRIVE, Kind.COME) for c in find(node, Call))

    def writes(self, node: Node) -> IdSet[Buffer]:
        """Return the buffers that a statement writes."""
        if node not in self.written:
            self.written[node] = writes_of(node)
        return self.written[node]

    def of(self, block: Block) -> list[Stmt]:
        """Return the statements of a block on which its events depend."""
        if block not in self.kept:
            self.kept[block] = [one for one in block.stmts if self._keeps(one)]
        return self.kept[block]

    def _keeps(self, one: Stmt) -> bool:
        """Return whether a statement has events, or sets what they depend on."""
        if isinstance(one, Let):
            return one.var in self.used or self.events(one)
        if isinstance(one, Alloc):
            return one.buffer in self.used or self.events(one)
        return self.events(one) or any(buffer in self.used for buffer in self.writes(one))


def _decide(node: Node) -> set[Var | Buffer]:
    """Return the symbols of a loop's bounds or of a condition."""
    parts = (*node.starts, *node.stops) if isinstance(node, For) else (node.condition,)  # type: ignore[attr-defined]
    return set[Var | Buffer]().union(*map(symbols, parts))


Groups = list[tuple[Sequence[int], IdMap[If, bool]]]


def _groups(kernel: Kernel, matters: _Matters, sizes: Mapping[Var, int]) -> tuple[Groups, IdMap[If, Any]]:
    """Divide the threads of a block into those that wait at the same places, with the branches that each takes.

    Also return which threads take branches that have arrivals only.
    """
    import numpy as np

    in_full = values_for_names(kernel.body)
    expanded = [(node, in_full(node.condition)) for node in find(kernel.body, If) if matters.events(node)]
    threads = np.arange(math.prod(kernel.threads))
    numbers, taking = Numbers({}, threads), IdMap[If, Any]()
    for node, condition in expanded:
        if kernel.thread not in symbols(condition):
            continue
        if numbers.knows(condition):
            taking[node] = np.broadcast_to(numbers(condition) != 0, threads.shape)
        else:
            thread = kernel.thread
            values = ({**sizes, thread: at} if thread is not None else sizes for at in threads.tolist())
            taking[node] = np.array([bool(_value(condition, known)) for known in values])
    parting = [node for node in taking if matters.waits(node)]
    roles = [(threads >= role.first) & (threads < role.first + role.count) for role in find(kernel.body, Role)]
    columns = [*(taking[node] for node in parting), *roles]
    groups: dict[tuple[bool, ...], list[int]] = {}
    for at, taken in enumerate(np.stack(columns, 1).tolist() if columns else [[]] * len(threads)):
        groups.setdefault(tuple(taken), []).append(at)
    return [(each, IdMap(zip(parting, taken, strict=False))) for taken, each in groups.items()], taking


def _value(expr: Expr, values: Mapping[Var, Any]) -> Any:
    """Return the value of an expression. Raises Unknown where data, sizes or a thread decide it."""
    try:
        return evaluate(expr, values)
    except (KeyError, ValueError, ZeroDivisionError):
        raise Unknown from None


class _Variables(Rewriter):
    """Put numbers in the places of variables."""

    def __init__(self, values: Mapping[Buffer, Any]) -> None:
        self.values = values

    def visit_Load(self, load: Load) -> Expr:
        """Return the number that a variable holds, if it is known."""
        found = None if load.indices else self.values.get(load.buffer)
        return load if found is None else const(found, load.dtype)


class _Events:
    """Collect the events of some threads in order.

    `taken` says which branches of threads they all take, and `taking` which threads of the block take each branch.
    """

    def __init__(
        self, kernel: Kernel, threads: Sequence[int], taken: IdMap[If, bool], taking: IdMap[If, Any],
        sizes: Mapping[Var, int], matters: _Matters, most: int,
    ) -> None:  # fmt: skip
        self.kernel, self.threads, self.matters, self.most = kernel, threads, matters, most
        self.taken, self.taking = taken, taking
        self.here = list(threads)  # those that come to the statement
        self.found: list[Event] = []
        self.names: dict[Var, Any] = {**sizes, **dict.fromkeys(kernel.blocks, 0)}
        self.variables: dict[Buffer, Any] = {}  # None if unknown
        self.meeting = Place(None, (0,)), math.prod(kernel.threads)  # the barrier of all threads here

    def events(self) -> list[Event]:
        """Return the events of the whole kernel."""
        self.statement(self.kernel.body)
        return self.found

    def number(self, value: Expr) -> int:
        """Return the value of an integer expression. Raises Unknown."""
        if not (value.dtype.is_integer or value.dtype.kind == "bool"):
            raise Unknown
        found = _Variables(self.variables)(value) if contains(value, Load) else value
        return int(_value(found, self.names))

    def perhaps(self, value: Expr) -> int | None:
        """Return the value of an expression; None if it is unknown."""
        try:
            return self.number(value)
        except Unknown:
            return None

    def statement(self, node: Stmt) -> None:
        """Take the events of a statement."""
        if isinstance(node, Block):
            for one in self.matters.of(node):
                self.statement(one)
        elif isinstance(node, Let | Alloc | Store) and self.matters.events(node):
            raise Unknown  # a value that all threads count together
        elif isinstance(node, Let):
            self.names.pop(node.var, None)
            if (found := self.perhaps(node.value)) is not None:
                self.names[node.var] = found
        elif isinstance(node, Alloc):
            self.variables[node.buffer] = None if node.init is None else self.perhaps(node.init)
        elif isinstance(node, Store):
            self.variables[node.buffer] = None if node.indices else self.perhaps(node.value)
        elif isinstance(node, Do):
            self._call(node)
        elif isinstance(node, Role):
            if node.first <= self.threads[0] < node.first + node.count:
                outer, self.meeting = self.meeting, (Place(None, (-1 - node.first,)), node.count)
                self.statement(node.body)
                self.meeting = outer
        elif isinstance(node, For | If | While):
            self._branch(node)
        else:
            self._forget(node)

    def _forget(self, node: Node) -> None:
        """Forget the values of variables that a statement writes."""
        self.variables.update(dict.fromkeys(self.matters.writes(node)))

    def _branch(self, node: For | If | While) -> None:
        """Take the events of a loop or branch."""
        holds = self._condition(node) if isinstance(node, If) else None
        if holds is not None and isinstance(node, If):
            self.statement(node.then if holds else node.otherwise)
        elif isinstance(node, If) and node in self.taking:
            outer = self.here
            for way, branch in ((True, node.then), (False, node.otherwise)):
                self.here = [thread for thread in outer if bool(self.taking[node][thread]) is way]
                if self.here:
                    self.statement(branch)
            self.here = outer
            self._forget(node)
        elif not self.matters.events(node):
            self._forget(node)
        elif isinstance(node, If | While) or contains(node.body, Break, Continue):
            raise Unknown
        else:
            bounds = [(self.number(a), self.number(b)) for a, b in zip(node.starts, node.stops, strict=True)]
            for count, point in enumerate(itertools.product(*(range(a, b, node.step) for a, b in bounds))):
                if count > self.most:
                    raise Unknown
                self.names.update(zip(node.vars, point, strict=True))
                self.statement(node.body)

    def _condition(self, node: If) -> bool | None:
        """Return whether a condition holds for these threads; None if that is unknown."""
        if node in self.taken:
            return self.taken[node]
        found = None if node in self.taking else self.perhaps(node.condition)
        return None if found is None else bool(found)

    def _call(self, node: Do) -> None:
        """Take an event."""
        call = node.call
        assert isinstance(call, Call)
        self._forget(call)
        kind = _kind_of(call)
        if kind is None:
            if _is_event(call):
                raise Unknown
            return
        parity, threads = 0, len(self.here)
        if kind in (Kind.MEET, Kind.COME):
            place, needed = self.meeting
            if lookup(call.name).scope is Scope.GROUP:
                place, needed = Place(None, (option(call),)), option(call, 1)
        else:
            at, *rest = call.args
            if not isinstance(at, Address) or (kind is Kind.ARRIVE and rest):
                raise Unknown
            place, needed = Place(at.buffer, tuple(map(self.number, at.indices))), at.buffer.arrivals
            parity = self.number(rest[0]) & 1 if kind is Kind.WAIT else 0
            if call.name == "warp_arrive":
                threads = len({thread // WARP for thread in self.here})
        self.found.append(Event(kind, place, parity, threads, needed, node, node.span or call.span))
        if len(self.found) > self.most:
            raise Unknown


def _all_of(ready: Sequence[Runner]) -> Sequence[Runner]:
    """Let all runners take a step."""
    return ready


def _first(ready: Sequence[Runner]) -> Sequence[Runner]:
    """Let the first runner that can go on take a step."""
    return ready[:1]


def _latest(ready: Sequence[Runner]) -> Sequence[Runner]:
    """Let the last runner that can go on take a step."""
    return ready[-1:]


@dataclass
class Run:
    """How many phases or uses of each place are complete, and how many arrivals the next one has."""

    complete: dict[Place, int] = field(default_factory=dict)
    come: dict[Place, int] = field(default_factory=dict)

    def all(self, runners: Sequence[Runner], choose: Callable[[Sequence[Runner]], Sequence[Runner]]) -> bool:
        """Run all events that can; return False if that takes too long."""
        for runner in runners:
            runner.done, runner.use = 0, None
        for _ in range(2 * MOST_STEPS):
            ready = [r for r in runners if r.done < len(r.events) and self._passes(r)]
            if not ready:
                return True
            for runner in choose(ready):
                self._step(runner)
        return False

    def _passes(self, runner: Runner) -> bool:
        """Return whether a runner can go on: a fresh mbarrier is in phase 0, so that a wait for parity 1 passes."""
        event, complete = runner.event, self.complete.get(runner.event.place, 0)
        if event.kind is Kind.WAIT:
            return complete & 1 != event.parity
        return event.kind is not Kind.MEET or runner.use is None or complete > runner.use

    def _step(self, runner: Runner) -> None:
        """Let a runner do its next event, or the first half of a meeting."""
        event = runner.event
        if event.kind is Kind.MEET and runner.use is None:
            runner.use = self.complete.get(event.place, 0)
            self._count(event)
            return
        if event.kind in (Kind.ARRIVE, Kind.COME):
            self._count(event)
        runner.done, runner.use = runner.done + 1, None

    def _count(self, event: Event) -> None:
        """Count the arrivals of an event."""
        total = self.come.get(event.place, 0) + event.come
        self.complete[event.place] = self.complete.get(event.place, 0) + total // event.needed
        self.come[event.place] = total % event.needed
