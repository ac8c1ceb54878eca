# SPDX-License-Identifier: Apache-2.0
"""List the waits, arrivals and barriers of one block, in the order in which a thread comes to them.

Numbers must decide them: constants, indices of loops, variables, sizes that a caller assumes, and the thread. Where
data decide them, listing ends with `Undecided`. Threads that wait at the same places share one list.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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
from torch_tile.ir.node import Node, Rewriter, children, contains, contents, find, symbols
from torch_tile.ir.scope_facts import values_for_names
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, Do, For, If, Kernel, Let, Role, Stmt, Store, While
from torch_tile.lowering.analysis.thread_values import Numbers
from torch_tile.tileop.uses import writes_of


class Kind(Enum):
    """What threads do at an mbarrier or a barrier."""

    ARRIVE = "arrives at an mbarrier"
    WAIT = "waits for a phase of an mbarrier"
    BAR_ARRIVE = "counts at a barrier of threads and goes on, as bar.arrive"
    BAR_SYNC = "counts at a barrier of threads and waits, as bar.sync"


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
    """One wait, arrival or barrier: it waits for a phase of this `parity`, or counts `arrivals` of `needed` ones.

    Each warp of the threads that share the list has its own number of arrivals.
    """

    kind: Kind
    place: Place
    parity: int
    arrivals: tuple[int, ...]
    needed: int
    statement: Do
    span: Span | None


class Undecided(Exception):
    """Say that data or unknown sizes decide the events of a thread."""


def waits_between_warps(kernel: Kernel) -> bool:
    """Return whether roles or warps of one block wait for each other, and no other block takes part.

    Warpgroups that take turns by the compiler's order are left out.
    """
    calls = list(find(kernel, Call))
    if kernel.cluster != (1, 1, 1) or any(syncs(call, Sync.TURN) for call in calls):
        return False
    within = [call for role in find(kernel, Role) for call in find(role, Call) if _kind_of(call) is Kind.BAR_SYNC]
    kinds = [_kind_of(call) for call in calls if lookup(call.name).scope is not Scope.BLOCK]
    return bool(within) or Kind.WAIT in kinds or Kind.BAR_SYNC in kinds


def list_events(kernel: Kernel, size: int | None, most: int) -> list[tuple[list[int], list[Event]]]:
    """Return the events of block 0: the numbers of the warps whose threads wait at the same places, with their list.

    All dimensions and numbers that a call brings have this `size`; without one they are not decided. Raises Undecided,
    also where a list would have more than `most` events.
    """
    sizes = {} if size is None else _sizes(kernel, size)
    relevant = _Relevant(kernel)
    divided, taking = _divide_threads(kernel, relevant, sizes)
    return [(one.warps, _Listing(kernel, one, taking, sizes, relevant, most).events()) for one in divided]


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
        return Kind.BAR_SYNC if found.is_barrier else Kind.BAR_ARRIVE
    return Kind.BAR_SYNC if found.is_barrier and found.scope is Scope.BLOCK else None


def _is_event(call: Call) -> bool:
    """Return whether a call is an event, or does to an mbarrier what is not known."""
    found = lookup(call.name)
    if _kind_of(call) is not None:
        return True
    if found.scope is Scope.MBARRIER or found.engine is Engine.BULK or call.name == "own_phase":
        return False
    return any(isinstance(each, Address) and each.buffer.scope == "barrier" for each in call.args)


class _Relevant:
    """Keep the statements with events, and the statements whose names or variables decide events.

    All other statements, which are most of a kernel, are left out when events are listed.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.known: dict[Node, bool] = {}
        self.written: dict[Node, IdSet[Buffer]] = {}
        self.kept: dict[Block, list[Stmt]] = {}
        self.used: set[Var | Buffer] = set()
        for node in find(kernel.body, For, If, While, Do):
            if self.has_events(node):
                self.used |= symbols(node) if isinstance(node, Do) else _symbols_of_head(node)
        sets: list[tuple[Var | Buffer, Expr]] = [(n.var, n.value) for n in find(kernel.body, Let)]
        sets += [(n.buffer, n.init) for n in find(kernel.body, Alloc) if n.init is not None]
        sets += [(n.buffer, n.value) for n in find(kernel.body, Store) if not n.indices]
        size = -1
        while size != len(self.used):
            size = len(self.used)
            for name, value in sets:
                if name in self.used:
                    self.used |= symbols(value)

    def has_events(self, node: Node) -> bool:
        """Return whether a statement has events."""
        found = self.known.get(node)
        if found is None:
            found = isinstance(node, Call) and _is_event(node)
            found = found or any(self.has_events(one) for one in children(node) if contents(one) & Call.bit)
            self.known[node] = found
        return found

    def has_waits(self, node: Node) -> bool:
        """Return whether threads wait in a statement, or do what is not known."""
        return any(_is_event(c) and _kind_of(c) not in (Kind.ARRIVE, Kind.BAR_ARRIVE) for c in find(node, Call))

    def written_by(self, node: Node) -> IdSet[Buffer]:
        """Return the buffers that a statement writes."""
        if node not in self.written:
            self.written[node] = writes_of(node)
        return self.written[node]

    def statements_of(self, block: Block) -> list[Stmt]:
        """Return the statements of a block on which its events depend."""
        if block not in self.kept:
            self.kept[block] = [one for one in block.stmts if self._keeps(one)]
        return self.kept[block]

    def _keeps(self, one: Stmt) -> bool:
        """Return whether a statement has events, or sets what they depend on."""
        if isinstance(one, Let):
            return one.var in self.used or self.has_events(one)
        if isinstance(one, Alloc):
            return one.buffer in self.used or self.has_events(one)
        return self.has_events(one) or any(buffer in self.used for buffer in self.written_by(one))


def _symbols_of_head(node: Node) -> set[Var | Buffer]:
    """Return the symbols of a loop's bounds or of a condition."""
    parts = (*node.starts, *node.stops) if isinstance(node, For) else (node.condition,)  # type: ignore[attr-defined]
    return set[Var | Buffer]().union(*map(symbols, parts))


class _Threads(NamedTuple):
    """Threads that wait at the same places, and which branches around waits they take."""

    numbers: list[int]
    taken: IdMap[If, bool]

    @property
    def warps(self) -> list[int]:
        """Return the numbers of the threads' warps."""
        return list(dict.fromkeys(thread // WARP for thread in self.numbers))


def _divide_threads(
    kernel: Kernel, relevant: _Relevant, sizes: Mapping[Var, int]
) -> tuple[list[_Threads], IdMap[If, list[bool]]]:
    """Divide the threads of a block into those that wait at the same places.

    Also return, for each branch with events, whether each thread of the block takes it. Branches with arrivals only
    divide nothing: the threads in them are counted.
    """
    import numpy as np

    in_full = values_for_names(kernel.body)
    expanded = [(node, in_full(node.condition)) for node in find(kernel.body, If) if relevant.has_events(node)]
    threads = np.arange(math.prod(kernel.threads))
    numbers, taking = Numbers({}, threads), IdMap[If, list[bool]]()
    for node, condition in expanded:
        if kernel.thread not in symbols(condition):
            continue
        if numbers.knows(condition):
            taking[node] = np.broadcast_to(numbers(condition) != 0, threads.shape).tolist()
        else:
            thread = kernel.thread
            values = ({**sizes, thread: at} if thread is not None else sizes for at in threads.tolist())
            taking[node] = [bool(_value(condition, known)) for known in values]
    parting = [node for node in taking if relevant.has_waits(node)]
    roles = [(threads >= role.first) & (threads < role.first + role.count) for role in find(kernel.body, Role)]
    columns = [*(np.array(taking[node]) for node in parting), *roles]
    groups: dict[tuple[bool, ...], list[int]] = {}
    for at, taken in enumerate(np.stack(columns, 1).tolist() if columns else [[]] * len(threads)):
        groups.setdefault(tuple(taken), []).append(at)
    divided = [_Threads(each, IdMap(zip(parting, taken, strict=False))) for taken, each in groups.items()]
    return divided, taking


def _value(expr: Expr, values: Mapping[Var, Any]) -> Any:
    """Return the value of an expression. Raises Undecided where data, sizes or a thread decide it."""
    try:
        return evaluate(expr, values)
    except (KeyError, ValueError, ZeroDivisionError):
        raise Undecided from None


class _PutNumbers(Rewriter):
    """Put numbers in the places of variables."""

    def __init__(self, values: Mapping[Buffer, Any]) -> None:
        self.values = values

    def visit_Load(self, load: Load) -> Expr:
        """Return the number that a variable holds, if it is known."""
        found = None if load.indices else self.values.get(load.buffer)
        return load if found is None else const(found, load.dtype)


class _Listing:
    """Walk a kernel as some of its threads do, and list their events.

    `taking` says for each branch with events whether each thread of the block takes it.
    """

    def __init__(
        self, kernel: Kernel, threads: _Threads, taking: IdMap[If, list[bool]],
        sizes: Mapping[Var, int], relevant: _Relevant, most: int,
    ) -> None:  # fmt: skip
        self.kernel, self.relevant, self.most = kernel, relevant, most
        self.first, self.taken, self.taking = threads.numbers[0], threads.taken, taking
        self.warps = threads.warps
        self.present = threads.numbers  # those that come to the statement
        self.found: list[Event] = []
        self.names: dict[Var, Any] = {**sizes, **dict.fromkeys(kernel.blocks, 0)}
        self.variables: dict[Buffer, Any] = {}  # what each holds, None if that is not decided
        self.barrier = (
            Place(None, (0,)),
            math.prod(kernel.threads),
        )  # of all threads of the block or role around, and their number

    def events(self) -> list[Event]:
        """Return the events of the whole kernel."""
        self.visit(self.kernel.body)
        return self.found

    def number(self, value: Expr) -> int:
        """Return the value of an integer expression. Raises Undecided."""
        if not (value.dtype.is_integer or value.dtype.kind == "bool"):
            raise Undecided
        found = _PutNumbers(self.variables)(value) if contains(value, Load) else value
        return int(_value(found, self.names))

    def number_or_none(self, value: Expr) -> int | None:
        """Return the value of an expression; None if that is not decided."""
        try:
            return self.number(value)
        except Undecided:
            return None

    def visit(self, node: Stmt) -> None:
        """List the events of a statement."""
        if isinstance(node, Block):
            for one in self.relevant.statements_of(node):
                self.visit(one)
        elif isinstance(node, Let | Alloc | Store) and self.relevant.has_events(node):
            raise Undecided  # a value that all threads count together
        elif isinstance(node, Let):
            self.names.pop(node.var, None)
            if (found := self.number_or_none(node.value)) is not None:
                self.names[node.var] = found
        elif isinstance(node, Alloc):
            self.variables[node.buffer] = None if node.init is None else self.number_or_none(node.init)
        elif isinstance(node, Store):
            self.variables[node.buffer] = None if node.indices else self.number_or_none(node.value)
        elif isinstance(node, Do):
            self._call(node)
        elif isinstance(node, Role):
            if node.first <= self.first < node.first + node.count:
                outer, self.barrier = self.barrier, (Place(None, (-1 - node.first,)), node.count)
                self.visit(node.body)
                self.barrier = outer
        elif isinstance(node, For | If | While):
            self._branch(node)
        else:
            self._forget(node)

    def _forget(self, node: Node) -> None:
        """Forget the values of variables that a statement writes."""
        self.variables.update(dict.fromkeys(self.relevant.written_by(node)))

    def _branch(self, node: For | If | While) -> None:
        """List the events of a loop or branch."""
        holds = self._condition(node) if isinstance(node, If) else None
        if holds is not None and isinstance(node, If):
            self.visit(node.then if holds else node.otherwise)
        elif isinstance(node, If) and node in self.taking:
            outer, takes = self.present, self.taking[node]
            for way, branch in ((True, node.then), (False, node.otherwise)):
                self.present = [thread for thread in outer if takes[thread] is way]
                if self.present:
                    self.visit(branch)
            self.present = outer
            self._forget(node)
        elif not self.relevant.has_events(node):
            self._forget(node)
        elif isinstance(node, If | While) or contains(node.body, Break, Continue):
            raise Undecided
        else:
            bounds = [(self.number(a), self.number(b)) for a, b in zip(node.starts, node.stops, strict=True)]
            for count, point in enumerate(itertools.product(*(range(a, b, node.step) for a, b in bounds))):
                if count > self.most:
                    raise Undecided
                self.names.update(zip(node.vars, point, strict=True))
                self.visit(node.body)

    def _condition(self, node: If) -> bool | None:
        """Return whether a condition holds for these threads; None if that is not decided."""
        if node in self.taken:
            return self.taken[node]
        found = None if node in self.taking else self.number_or_none(node.condition)
        return None if found is None else bool(found)

    def _call(self, node: Do) -> None:
        """List the event of a call."""
        call = node.call
        assert isinstance(call, Call)
        self._forget(call)
        kind = _kind_of(call)
        if kind is None:
            if _is_event(call):
                raise Undecided
            return
        parity, present = 0, Counter(thread // WARP for thread in self.present)
        if kind in (Kind.BAR_SYNC, Kind.BAR_ARRIVE):
            place, needed = self.barrier
            if lookup(call.name).scope is Scope.GROUP:
                place, needed = Place(None, (option(call),)), option(call, 1)
        else:
            at, *rest = call.args
            if not isinstance(at, Address) or (kind is Kind.ARRIVE and rest):
                raise Undecided
            place, needed = Place(at.buffer, tuple(map(self.number, at.indices))), at.buffer.arrivals
            parity = self.number(rest[0]) & 1 if kind is Kind.WAIT else 0
            if call.name == "warp_arrive":
                present = Counter(present.keys())
        arrivals = tuple(present[warp] for warp in self.warps)
        self.found.append(Event(kind, place, parity, arrivals, needed, node, node.span or call.span))
        if len(self.found) > self.most:
            raise Undecided
