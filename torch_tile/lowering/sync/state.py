# SPDX-License-Identifier: Apache-2.0
"""Track the accesses that may still conflict at a point of a kernel: those since the last barrier or in flight."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_tile.intrinsics.base import lookup
from torch_tile.intrinsics.traits import Sync
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Binary, Call, Const, Expr, Var, binary
from torch_tile.ir.node import equal, find, symbols
from torch_tile.ir.polynomial import structure
from torch_tile.ir.stmt import Block, For, Stmt, While
from torch_tile.lowering.sync.accesses import Access

# A write of a copy or read of a product, with the possible numbers of its kind's later committed groups.
Flight = tuple[Access, frozenset[int]]


@dataclass
class State:
    """Accesses `since` the last barrier, and copies and products in flight (`flying`).

    `used` says that threads used memory that copy engines fill again, with no fence after it. `wrote` says that they
    wrote memory that engines read, with no fence after it. Each flight has the numbers of groups that may have been
    committed after its own. The number is -1 if its own group is still open. It has several numbers if several flights
    are alike. Numbers from `most` on are not told apart: any wait completes them.
    """

    most: int = 0  # most groups that a wait of the kernel leaves in flight
    since: dict[Hashable, Access] = field(default_factory=dict)
    flying: dict[Hashable, Flight] = field(default_factory=dict)
    used: bool = False
    wrote: bool = False

    @property
    def is_hidden(self) -> bool:
        """Return whether a fence has yet to show engines what threads did."""
        return self.used or self.wrote

    @property
    def key(self) -> Hashable:
        """Return a key that states with the same accesses share."""
        return frozenset(self.since.values()), frozenset(self.flying.values()), self.used, self.wrote

    def copy(self) -> State:
        """Return a copy of the state, for another branch."""
        return State(self.most, dict(self.since), dict(self.flying), self.used, self.wrote)

    def become(self, other: State) -> None:
        """Take over the contents of another state."""
        self.since, self.flying, self.used, self.wrote = other.since, other.flying, other.used, other.wrote

    def join(self, other: State) -> State:
        """Return the state that holds if either of two states may hold."""
        used, wrote = self.used or other.used, self.wrote or other.wrote
        joined = State(self.most, self.since | other.since, dict(self.flying), used, wrote)
        for key, access in self.since.items():
            if (found := other.since.get(key, access)) is not access:
                joined.since[key] = _later(access, found)
        for flight in other.flying.values():
            joined.fly(*flight)
        return joined

    def same(self, other: State) -> bool:
        """Return whether two states are equal."""
        mine, theirs = ({k: n for k, (_, n) in s.flying.items()} for s in (self, other))
        shown = self.used is other.used and self.wrote is other.wrote
        return self.since.keys() == other.since.keys() and mine == theirs and shown

    def earlier(self, shift: Callable[[Access], Access]) -> State:
        """Return the state as a later iteration sees it, with each access moved by `shift`."""
        new = State(self.most, used=self.used, wrote=self.wrote)
        for access in self.since.values():
            old = shift(access)
            new.since[old.key] = _later(old, new.since.get(old.key, old))
        for access, younger in self.flying.values():
            new.fly(shift(access), younger)
        return new

    def fly(self, access: Access, younger: frozenset[int]) -> None:
        """Add an access in flight, and merge it with an equal one."""
        alike, others = self.flying.get(access.key, (access, younger))
        self.flying[access.key] = _later(access, alike), younger | others

    def add(self, access: Access) -> None:
        """Record an access; a product may read from now on until it is waited for."""
        if access.asynchronous:
            self.fly(access, frozenset((-1,)))
        if not access.asynchronous or not access.writes:
            self.since[access.key] = _later(access.landed, self.since.get(access.key, access.landed))

    def in_warps(self, by_threads: Callable[[Access], bool]) -> None:
        """Order the accesses of threads before the next accesses of the same warp."""
        found = [a.with_(in_warp=a.in_warp or by_threads(a)) for a in self.since.values()]
        self.since = {access.key: access for access in found}

    def order_in_warp(self, level: int) -> None:
        """Record a warp barrier in divergent code: within each warp it orders the accesses made at `level`."""
        found = [a.with_(met=True) if a.level == level else a for a in self.since.values()]
        self.since = {access.key: access for access in found}

    def leave(self, level: int) -> None:
        """Go back to this level: other threads of a warp have not met those that met above it."""
        if any(a.level > level for a in self.since.values()):
            found = [a.with_(level=level, met=False) if a.level > level else a for a in self.since.values()]
            self.since = {}
            for access in found:
                self.since[access.key] = _later(access, self.since.get(access.key, access))

    def arrive(self, barrier: Buffer) -> None:
        """Remember of all accesses so far that the threads arrived at an mbarrier behind them."""
        found = [a.with_(arrived=a.arrived | {barrier}) if barrier not in a.arrived else a for a in self.since.values()]
        self.since = {access.key: access for access in found}

    def met(self, barrier: Buffer) -> None:
        """Forget what stood before the threads' last arrival at an mbarrier, for which they have waited."""
        self.since = {key: access for key, access in self.since.items() if barrier not in access.arrived}

    def commit(self, copies: bool = True) -> None:
        """Close the current group of copies, or of products."""
        self.flying = {
            key: (access, frozenset(min(n + 1, self.most) for n in younger) if access.writes is copies else younger)
            for key, (access, younger) in self.flying.items()
        }

    def wait(self, pending: int, copies: bool = True) -> list[Access]:
        """Complete all but the `pending` youngest groups, for the thread that started them. Return their accesses."""
        landed = []
        for key, (access, younger) in list(self.flying.items()):
            if access.writes is not copies:
                continue
            left = frozenset(n for n in younger if n < pending)
            if left != younger:
                self.since[key] = access.landed
                landed.append(access.landed)
                del self.flying[key]
            if left:
                self.flying[key] = access, left
        return landed


def most_pending(body: Block) -> int:
    """Return the largest number of groups that a wait in the body leaves in flight."""
    waits = (n.options[0] for n in find(body, Call) if lookup(n.name).sync is Sync.DRAIN and lookup(n.name).is_grouped)
    return max((int(str(n)) for n in waits), default=0)


def _later(a: Access, b: Access) -> Access:
    """Merge two accesses to the same places: keep the younger one, under the conditions that both share."""
    if a.age > b.age:
        a, b = b, a
    if a is b or a.conditions is b.conditions:
        return a
    kept = tuple(c for c in a.conditions if any(c is d or equal(c, d) for d in b.conditions))
    return a if len(kept) == len(a.conditions) else a.with_(conditions=kept)


def _versions(accesses: Sequence[Access]) -> dict[Buffer, set[int]]:
    """Map each buffer to its dimensions whose indices are all modulo their size."""
    found: dict[Buffer, set[int]] = {}
    for access in accesses:
        pairs = enumerate(zip(access.indices, access.buffer.shape, strict=True))
        dims = {
            n for n, (index, size) in pairs if _modulo_base(index, size) is not None and not isinstance(index, Const)
        }
        found[access.buffer] = dims & found.get(access.buffer, dims)
    return found


def _entering(access: Access, iterations: Expr, dims: set[int], simplify: Callable[[Expr], Expr]) -> Access:
    """Express the version indices of an access by the iteration of the loop that it enters."""
    indices = list(access.indices)
    for dim in dims:
        size = access.buffer.shape[dim]
        base = _modulo_base(indices[dim], size)
        if base is not None and not any(e.role == "let" for e in find(base, Var)):
            indices[dim] = simplify(binary("%", base + iterations, size))
    return replace(access, indices=tuple(indices))


def _modulo_base(index: Expr, size: Expr) -> Expr | None:
    """Return `a` of an index `a % size`, and a literal index as it is; None for other indices."""
    if isinstance(index, Const):
        return index
    return index.a if isinstance(index, Binary) and index.op == "%" and equal(index.b, size) else None


# Shifts express the accesses of one iteration as seen from the next one, or from after the loop.
#
# Loops are walked many times, and each iteration moves accesses that are equal but not the same object. So the caches
# go by the structure of expressions, not by their identity: one index is substituted and simplified once for a loop.
# Equal accesses become one object, which `Hazards` and `State` then know by identity.

ITERATIONS = 6  # iterations after which an access may be of any earlier iteration

Shift = Callable[[Access], Access]


class Shifts:
    """Make the functions that move accesses to later iterations; `forgotten` stands in for unknown variables."""

    forgotten: Callable[[For | While], Mapping[Var, Expr]]
    simplify: Callable[[Expr], Expr]

    def __init__(self, forgotten: Callable[[For | While], Mapping[Var, Expr]], simplify: Callable[[Expr], Expr]):
        self.forgotten, self.simplify = forgotten, simplify
        self.known: dict[tuple[Stmt, bool], Shift] = {}
        self.entries: dict[For, Shift] = {}
        self.alike: dict[Hashable, Access] = {}

    def of(self, loop: For | While, leave: bool) -> Shift:
        """Return the shift of accesses to the next iteration, or with `leave` to what comes after the loop."""
        if (loop, leave) not in self.known:
            self.known[loop, leave] = self._build_shift(loop, leave)
        return self.known[loop, leave]

    def into(self, loop: For, inside: Sequence[Access]) -> Shift:
        """Return the shift of accesses to the first iteration of a loop with the accesses `inside`.

        Indices that the loop takes modulo the number of versions are expressed by its variable minus its start. That
        is 0 there.
        """
        if loop not in self.entries:
            versions, iterations = _versions(inside), loop.vars[0] - loop.starts[0]

            def entering(access: Access) -> Access:
                dims = versions.get(access.buffer, set())
                return _entering(access, iterations, dims, self.simplify) if dims else access

            self.entries[loop] = _once(entering)
        return self.entries[loop]

    def _build_shift(self, loop: For | While, leave: bool) -> Shift:
        """Build the shift for a loop."""
        forget = _Mover(self.forgotten(loop), self.simplify)
        step = forget
        if isinstance(loop, For) and not leave:
            step = _Mover({**forget.values, loop.vars[0]: loop.vars[0] - loop.step}, self.simplify)
        return _once(lambda access: self._shifted(access, step, forget))

    def _shifted(self, access: Access, step: _Mover, forget: _Mover) -> Access:
        """Move an access by `step`; after ITERATIONS iterations, and after the loop, move it by `forget`."""
        if access.symbols.isdisjoint(step.values):
            return access
        move = step if access.age < ITERATIONS else forget
        turning = tuple(v for loop in access.loops for v in loop.vars)  # of inner loops, whose iterations all count
        indices = tuple(move.index(i, turning) for i in access.indices)
        conditions = tuple(move.condition(c, turning) for c in access.conditions)
        new = replace(access, indices=indices, conditions=conditions, age=0 if step is forget else access.age + 1)
        says = new.key, structure(conditions), new.age, new.asynchronous, new.count, new.atomic, new.collective
        return self.alike.setdefault(says, new)


def _once(shift: Shift) -> Shift:
    """Return a shift that moves each access once and then keeps the result."""
    seen: dict[Access, Access] = {}

    def moved(access: Access) -> Access:
        found = seen.get(access)
        if found is None:
            found = seen[access] = shift(access)
        return found

    return moved


class _Mover:
    """Replace variables by `values`, except those in `turning`; cache results by the structure of expressions."""

    def __init__(self, values: Mapping[Var, Expr], simplify: Callable[[Expr], Expr]):
        self.values, self.simplify = values, simplify
        self.swaps: dict[tuple[Var, ...], _Swap] = {}
        self.indices: dict[Hashable, Expr] = {}
        self.conditions: dict[Hashable, Expr] = {}

    def index(self, e: Expr, turning: tuple[Var, ...]) -> Expr:
        """Return an index with its variables replaced, simplified."""
        key = structure(e), turning
        if key not in self.indices:
            self.indices[key] = self.simplify(self._swap(turning)(e))
        return self.indices[key]

    def condition(self, e: Expr, turning: tuple[Var, ...]) -> Expr:
        """Return a condition with its variables replaced; the same object if it uses none of them."""
        if self.values.keys().isdisjoint(symbols(e)):
            return e
        key = structure(e), turning
        if key not in self.conditions:
            self.conditions[key] = self._swap(turning)(e)
        return self.conditions[key]

    def _swap(self, turning: tuple[Var, ...]) -> _Swap:
        """Return the substitution of all variables but `turning`, from the cache if it is known."""
        if turning not in self.swaps:
            self.swaps[turning] = _Swap({v: e for v, e in self.values.items() if v not in set(turning)})
        return self.swaps[turning]


class _Swap(Substitute):
    """Substitute variables, visiting each shared expression once: names are the same objects in all expressions."""

    def __init__(self, known: Mapping[Var, Expr]):
        super().__init__(known)
        self.done: dict[Any, Any] = {}

    def __call__(self, node: Any) -> Any:
        """Return the node after substitution, from the cache if it is known."""
        found = self.done.get(node)
        if found is None:
            found = self.done[node] = super().__call__(node)
        return found
