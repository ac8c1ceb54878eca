# SPDX-License-Identifier: Apache-2.0
"""Find waits for mbarriers that never end, or that pass before what they wait for, by running a block's phases.

Only waits and arrivals run, of one block, where numbers decide them: constants, indices of loops, variables, and the
thread. Each group of threads that does the same is one runner. Runners take turns in two orders; a wait counts as stuck
if it is so in both. Kernels whose conditions, counts or parities depend on data or on sizes of a call are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_tile.diagnostics.errors import Diagnostic, Span, diagnose
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Expr, Load, Var, const
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Node, Rewriter, contains, find, symbols
from torch_tile.ir.scope_facts import values_for_names
from torch_tile.ir.stmt import (
    Alloc,
    Block,
    Break,
    Continue,
    Do,
    For,
    If,
    Kernel,
    Let,
    Program,
    Role,
    Stmt,
    Store,
    While,
)
from torch_tile.tileop.uses import writes_of

MOST_EVENTS = 2000  # of one runner
MOST_STEPS = 20000  # of all runners together

Place = tuple[Buffer, tuple[int, ...]]  # an element of an array of mbarriers


class Event(NamedTuple):
    """A wait for a phase of this parity, or an arrival of all threads of the runner (`parity` is None)."""

    place: Place
    parity: int | None
    span: Span | None


@dataclass
class Runner:
    """Threads that do the same."""

    threads: Sequence[int]
    events: Sequence[Event]
    done: int = 0


class _Unknown(Exception):
    """Something depends on what only a call brings."""


def stuck_waits(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for the first wait of each kernel that never ends, or always asks for one parity."""
    return [found for kernel in program.kernels if (found := _of_kernel(kernel)) is not None]


def _of_kernel(kernel: Kernel) -> Diagnostic | None:
    """Return a diagnostic for a kernel whose waits are certain."""
    waits = any(isinstance(do.call, Call) and do.call.name == "mbarrier_wait" for do in find(kernel.body, Do))
    if not waits or kernel.cluster != (1, 1, 1):
        return None
    try:
        runners = [Runner(threads, _Events(kernel, threads, taken).events()) for threads, taken in _groups(kernel)]
    except _Unknown:
        return None
    if sum(len(runner.events) for runner in runners) > MOST_STEPS:
        return None
    for choose in (_latest, _all_of):
        found = _run(runners, choose)
        if found is None:
            return None
        phases, stuck = found, [runner for runner in runners if runner.done < len(runner.events)]
        if not stuck:
            return _of_one_parity(runners, phases)
    return _stuck(stuck, phases)


def _groups(kernel: Kernel) -> list[tuple[Sequence[int], IdMap[If, bool]]]:
    """Divide the threads of a block into those that do the same, with the branches that each takes."""
    in_full = values_for_names(kernel.body)
    expanded = [(node, in_full(node.condition)) for node in find(kernel.body, If) if _matters(node)]
    parting = [(node, condition) for node, condition in expanded if kernel.thread in symbols(condition)]
    roles = [range(role.first, role.first + role.count) for role in find(kernel.body, Role)]
    groups: dict[tuple[bool, ...], list[int]] = {}
    for thread in range(math.prod(kernel.threads)):
        values = {} if kernel.thread is None else {kernel.thread: thread}
        taken = [bool(_value(condition, values)) for _, condition in parting]
        groups.setdefault((*taken, *(thread in role for role in roles)), []).append(thread)
    return [(threads, IdMap(zip((n for n, _ in parting), taken, strict=False))) for taken, threads in groups.items()]


def _value(expr: Expr, values: Mapping[Var, Any]) -> Any:
    """Return the value of an expression. Raises _Unknown where data, sizes or a thread decide it."""
    try:
        return evaluate(expr, values)
    except (KeyError, ValueError, ZeroDivisionError):
        raise _Unknown from None


class _Variables(Rewriter):
    """Put numbers in the places of variables."""

    def __init__(self, values: Mapping[Buffer, Any]) -> None:
        self.values = values

    def visit_Load(self, load: Load) -> Expr:
        """Return the number that a variable holds, if it is known."""
        found = None if load.indices else self.values.get(load.buffer)
        return load if found is None else const(found, load.dtype)


class _Events:
    """Collect the waits and arrivals of some threads in order; `taken` says which branches of threads they take."""

    def __init__(self, kernel: Kernel, threads: Sequence[int], taken: IdMap[If, bool]) -> None:
        self.kernel, self.threads, self.taken = kernel, threads, taken
        self.found: list[Event] = []
        self.names: dict[Var, Any] = dict.fromkeys(kernel.blocks, 0)
        self.variables: dict[Buffer, Any] = {}  # None if unknown

    def events(self) -> list[Event]:
        """Return the events of the whole kernel."""
        self.statement(self.kernel.body)
        return self.found

    def number(self, value: Expr) -> int:
        """Return the value of an integer expression. Raises _Unknown."""
        if not (value.dtype.is_integer or value.dtype.kind == "bool"):
            raise _Unknown
        found = _Variables(self.variables)(value) if contains(value, Load) else value
        return int(_value(found, self.names))

    def perhaps(self, value: Expr) -> int | None:
        """Return the value of an expression; None if it is unknown."""
        try:
            return self.number(value)
        except _Unknown:
            return None

    def statement(self, node: Stmt) -> None:
        """Take the events of a statement."""
        if isinstance(node, Block):
            for one in node.stmts:
                self.statement(one)
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
                self.statement(node.body)
        elif isinstance(node, For | If | While):
            self._branch(node)
        else:
            self.variables.update(dict.fromkeys(writes_of(node)))

    def _branch(self, node: For | If | While) -> None:
        """Take the events of a loop or branch."""
        holds = self._condition(node) if isinstance(node, If) else None
        if holds is not None and isinstance(node, If):
            self.statement(node.then if holds else node.otherwise)
        elif not _matters(node):
            self.variables.update(dict.fromkeys(writes_of(node)))
        elif isinstance(node, If | While) or contains(node.body, Break, Continue):
            raise _Unknown
        else:
            bounds = [(self.number(a), self.number(b)) for a, b in zip(node.starts, node.stops, strict=True)]
            for point in itertools.product(*(range(a, b, node.step) for a, b in bounds)):
                self.names.update(zip(node.vars, point, strict=True))
                self.statement(node.body)

    def _condition(self, node: If) -> bool | None:
        """Return whether a condition holds for these threads; None if that is unknown."""
        if node in self.taken:
            return self.taken[node]
        found = self.perhaps(node.condition)
        return None if found is None else bool(found)

    def _call(self, node: Do) -> None:
        """Take a wait or an arrival."""
        call = node.call
        assert isinstance(call, Call)
        self.variables.update(dict.fromkeys(writes_of(call)))
        for at in (each for each in call.args if isinstance(each, Address) and each.buffer.scope == "barrier"):
            place = at.buffer, tuple(map(self.number, at.indices))
            if call.name == "mbarrier_wait":
                self.found.append(Event(place, self.number(call.args[1]) & 1, node.span or call.span))
            elif call.name == "mbarrier_arrive" and len(call.args) == 1:
                self.found.append(Event(place, None, node.span or call.span))
            elif call.name not in ("own_phase", "mbarrier_expect"):
                raise _Unknown
        if len(self.found) > MOST_EVENTS:
            raise _Unknown


def _matters(node: Node) -> bool:
    """Return whether a loop or branch holds waits or arrivals."""
    return any(at.buffer.scope == "barrier" for at in find(node, Address))


def _all_of(ready: Sequence[Runner]) -> Sequence[Runner]:
    """Let all runners take a step."""
    return ready


def _latest(ready: Sequence[Runner]) -> Sequence[Runner]:
    """Let the last runner that can go on take a step."""
    return ready[-1:]


def _run(runners: Sequence[Runner], choose: Callable[[Sequence[Runner]], Sequence[Runner]]) -> dict[Place, int] | None:
    """Run all events that can; return how many phases of each mbarrier are complete, None if that takes too long."""
    phases: dict[Place, int] = {}
    come: dict[Place, int] = {}
    for runner in runners:
        runner.done = 0
    for _ in range(MOST_STEPS):
        ready = [r for r in runners if r.done < len(r.events) and _passes(r.events[r.done], phases)]
        if not ready:
            return phases
        for runner in choose(ready):
            event = runner.events[runner.done]
            if event.parity is None:
                buffer = event.place[0]
                total = come.get(event.place, 0) + len(runner.threads)
                phases[event.place] = phases.get(event.place, 0) + total // buffer.arrivals
                come[event.place] = total % buffer.arrivals
            runner.done += 1
    return None


def _passes(event: Event, phases: dict[Place, int]) -> bool:
    """Return whether a runner can go on: a fresh mbarrier is in phase 0, so that a wait for parity 1 passes."""
    return event.parity is None or phases.get(event.place, 0) & 1 != event.parity


def _stuck(stuck: Sequence[Runner], phases: dict[Place, int]) -> Diagnostic:
    """Return the diagnostic for one of the runners that wait forever, at best one for which no arrival is left."""
    left = {event.place for each in stuck for event in each.events[each.done :] if event.parity is None}
    runner = min(stuck, key=lambda each: (each.events[each.done].place in left, each.done))
    event = runner.events[runner.done]
    places = dict.fromkeys(each.events[each.done].span for each in stuck if each is not runner)
    notes = [(span, "others wait here") for span in places if span is not None and span != event.span]
    passed = sum(e.place == event.place and e.parity is not None for e in runner.events[: runner.done])
    name = f"{event.place[0].name}[{', '.join(map(str, event.place[1]))}]"
    complete = phases.get(event.place, 0)
    before = [e.parity for e in runner.events[: runner.done] if e.place == event.place and e.parity is not None]
    if before and set(before) == {event.parity} and complete > 1:
        fix = "ask for the other parity in each next phase: `(k // stages) % 2` for iteration k"
    elif not before and event.parity == 0 and any(e.place == event.place for e in runner.events[runner.done + 1 :]):
        fix = "begin with parity 1, `parity ^ 1`, where a buffer is free at first: such a wait passes before any phase"
    else:
        fix = "let as many phases complete as are waited for: mend the counts of loops, the stage, or the arrivals"
        fix += "" if event.place in left else f"; no arrival at `{name}` is left"
    return diagnose(
        "stuck_wait", event.span, notes, name=name, parity=event.parity, passed=passed, complete=complete, fix=fix
    )


def _of_one_parity(runners: Sequence[Runner], phases: dict[Place, int]) -> Diagnostic | None:
    """Return a diagnostic for a wait that asks for one parity again and again while several phases complete."""
    for runner in runners:
        asked: dict[tuple[Span | None, Place], list[int]] = {}
        for event in runner.events:
            if event.parity is not None:
                asked.setdefault((event.span, event.place), []).append(event.parity)
        for (span, place), parities in asked.items():
            if len(parities) > 1 and len(set(parities)) == 1 and phases.get(place, 0) > 1:
                return diagnose("same_parity", span, buffer=place[0].name, parity=parities[0], count=phases[place])
    return None
