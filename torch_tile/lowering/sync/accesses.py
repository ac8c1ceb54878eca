# SPDX-License-Identifier: Apache-2.0
"""Collect the accesses of a block's threads to shared and global memory, and decide which pairs need an order.

If indices are functions of the thread and of loops with known bounds, NumPy computes them for all threads. Other
indices are compared symbolically. A pair that is not shown to be harmless is a hazard.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch_tile.hardware import WARP
from torch_tile.intrinsics.base import lookup
from torch_tile.intrinsics.bulk import rows_and_columns
from torch_tile.intrinsics.traits import Engine
from torch_tile.ir.arith_util import Substitute, divisor_of, terms_of
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Binary, Call, Const, Expr, Load, Select, Unary, Var, const
from torch_tile.ir.node import NONE, Node, children, equal, symbols
from torch_tile.ir.polynomial import EXACT, structure
from torch_tile.ir.simplify import Simplifier
from torch_tile.ir.stmt import Block, For, If, LoopKind, Store
from torch_tile.lowering.analysis.thread_values import Numbers, is_unsure
from torch_tile.lowering.threads.allocate_shared import shared_size

LARGEST = 1 << 20  # most elements that are compared one by one
ANYWHERE, MATRIX = -1, -2  # in place of a number of elements


@dataclass(frozen=True, eq=False)
class Access:
    """An access to `count` elements from `indices` on, by every thread in every iteration of `loops`.

    It happens where all `conditions` hold. A `count` of ANYWHERE stands for any elements of the buffer, MATRIX for any
    of its last two dimensions. A warp makes a `collective` access together, so that it belongs to no single thread.
    `origin` is the node that makes the access. `age` says how many iterations ago that was, in a loop around. `in_warp`
    says that a barrier of the warp followed. The access is ordered with those of the same warp. All threads arrived
    since at the mbarriers in `arrived`. `level` counts the branches and loops around in which threads have parted.
    `met` says that the threads of each warp that came into the innermost of these have met since.
    """

    buffer: Buffer
    indices: tuple[Expr, ...]
    kind: str
    origin: Node
    count: int = 1
    asynchronous: bool = False
    atomic: bool = False
    collective: bool = False
    loops: tuple[For, ...] = ()
    conditions: tuple[Expr, ...] = ()
    age: int = 0
    in_warp: bool = False
    arrived: frozenset[Buffer] = frozenset()
    level: int = 0
    met: bool = False

    @property
    def writes(self) -> bool:
        """Return whether the access changes memory."""
        return "w" in self.kind

    @cached_property
    def landed(self) -> Access:
        """Return the access once a wait has completed it: no longer asynchronous."""
        return self.with_(asynchronous=False)

    @cached_property
    def _versions(self) -> dict[Hashable, Access]:
        """Return what `with_` has made of this access."""
        return {}

    def with_(self, **fields: Any) -> Access:
        """Return this access with other fields, as the same object each time: `Hazards` knows accesses by identity."""
        if all(getattr(self, name) is value for name, value in fields.items()):
            return self
        key = tuple(fields.items())
        found = self._versions.get(key)
        if found is None:
            found = self._versions[key] = replace(self, **fields)
        return found

    @cached_property
    def key(self) -> Hashable:
        """Return a key that accesses of one node to the same places share."""
        made = self.origin, self.buffer, self.kind, self.count, structure(self.indices), self.loops
        return *made, self.in_warp, self.arrived, self.level, self.met

    @cached_property
    def symbols(self) -> frozenset[Var | Buffer]:
        """Return variables and buffers in indices and conditions, without the variables of the access's own loops."""
        used = NONE.union(*map(symbols, (*self.indices, *self.conditions)))
        return used.difference(*(loop.vars for loop in self.loops))


class Collector:
    """Find accesses of statements to `relevant` buffers. `names` maps names to values, loaded ones apart."""

    def __init__(self, names: Mapping[Var, Expr], relevant: Set[Buffer]):
        self.expand: Substitute = Substitute(names)
        self.relevant = relevant  # only accesses to these buffers count
        self.row_loops: dict[int, For] = {}  # loops over the rows of boxes, by their number

    def of(self, node: Node, loops: tuple[For, ...] = (), conditions: tuple[Expr, ...] = ()) -> Iterator[Access]:
        """Yield the accesses of a statement or expression and of all nodes below it."""
        if self.relevant.isdisjoint(symbols(node)):
            return
        if isinstance(node, For):
            for bound in (*node.starts, *node.stops):
                yield from self.of(bound, loops, conditions)
            yield from self.of(node.body, (*loops, node), conditions)
        elif isinstance(node, If):
            yield from self.of(node.condition, loops, conditions)
            condition = self.expand(node.condition)
            yield from self.of(node.then, loops, (*conditions, condition))
            yield from self.of(node.otherwise, loops, (*conditions, Unary("not", condition)))
        elif isinstance(node, Select):
            yield from self.of(node.condition, loops, conditions)
            condition = self.expand(node.condition)
            for value, holds in ((node.a, condition), (node.b, Unary("not", condition))):
                for access in self.of(value, loops, (*conditions, holds)):
                    # Loads of global memory may run before the condition is known (vectorize).
                    everywhere = access.buffer.scope == "global"
                    yield replace(access, conditions=conditions) if everywhere else access
        else:
            for child in children(node):
                yield from self.of(child, loops, conditions)
            if isinstance(node, Load):
                yield from self._access_at(node, node, "r", loops, conditions)
            elif isinstance(node, Store):
                yield from self._access_at(node, node, "w", loops, conditions)
            elif isinstance(node, Call):
                yield from self._called(node, loops, conditions)

    def _called(self, call: Call, loops: tuple[For, ...], conditions: tuple[Expr, ...]) -> Iterator[Access]:
        """Yield the accesses that an intrinsic declares as its effects."""
        intrinsic = lookup(call.name)
        warp = intrinsic.convergent == "warp"
        for effect in intrinsic.effects(call):
            place = call.args[effect.operand]
            if isinstance(place, Address):
                for found in self._access_at(place, call, effect.kind, loops, conditions):
                    moving = effect.asynchronous and ("w" in effect.kind or intrinsic.engine is Engine.WGMMA)
                    extra = {"asynchronous": moving, "atomic": intrinsic.atomic, "collective": warp}
                    whole = intrinsic.engine is Engine.WGMMA and effect.elements == ANYWHERE
                    one = replace(found, count=MATRIX if whole else effect.elements, **extra)  # type: ignore[arg-type]
                    yield self._boxed(one, call) if intrinsic.engine is Engine.BULK and effect.elements > 0 else one

    def _boxed(self, access: Access, call: Call) -> Access:
        """Return the access of a bulk copy to a box: row by row in the last two dimensions of its tile."""
        rows, columns = rows_and_columns(call)
        sizes = [size.value if isinstance(size, Const) else 0 for size in access.buffer.shape]
        if rows <= 1 and columns <= sizes[-1]:
            return access
        if len(sizes) < 2 or columns > sizes[-1] or rows > sizes[-2]:
            return replace(access, count=ANYWHERE)
        if rows not in self.row_loops:
            box_row = Var("box_row", role="loop")
            self.row_loops[rows] = For(
                LoopKind.SERIAL, (box_row,), (const(0, int32),), (const(rows, int32),), Block(())
            )
        loop = self.row_loops[rows]
        *outer, row, column = access.indices
        return replace(access, indices=(*outer, row + loop.vars[0], column), count=columns, loops=(*access.loops, loop))

    def _access_at(
        self,
        place: Load | Store | Address,
        origin: Node,
        kind: str,
        loops: tuple[For, ...],
        conditions: tuple[Expr, ...],
    ) -> Iterator[Access]:
        """Yield the access to a place, if its buffer is relevant."""
        if place.buffer in self.relevant:
            indices = tuple(self.expand(i) for i in place.indices)
            yield Access(place.buffer, indices, kind, origin, loops=loops, conditions=conditions)


class Hazards:
    """Decide which accesses of `threads` threads of a block, from thread `first` on, need a barrier between them.

    It caches its answers. If a thread of the kernel `polls`, the author orders threads by atomic accesses.
    """

    threads: int
    first: int
    polls: bool

    def __init__(self, threads: int, first: int = 0, polls: bool = False):
        self.threads, self.first, self.polls = threads, first, polls
        self.pairs: dict[Access, dict[Access, bool]] = {}  # by identity: keys take long to hash
        self.known: dict[Hashable, bool] = {}
        self.places: dict[Hashable, _AccessPlaces | None] = {}
        self.simplify: Simplifier = Simplifier(Ranges())  # one for all indices, since they share subexpressions

    def between(self, a: Access, b: Access) -> bool:
        """Return whether a thread's `b` may touch an address of another thread's `a`, one of them a write."""
        return any(True for _ in self.clashes((a,), b))

    def clashes(self, earlier: Iterable[Access], b: Access) -> Iterator[Access]:
        """Yield those of earlier accesses that need a barrier before `b`."""
        known = self.pairs.setdefault(b, {})
        for a in earlier:
            found = known.get(a)
            if found is None:
                found = known[a] = self._between(a, b)
            if found:
                yield a

    def _between(self, a: Access, b: Access) -> bool:
        """Decide about a pair of accesses without the cache of pairs."""
        if not (a.writes or b.writes) or (a.atomic and b.atomic and (self.polls or _are_alike(a, b))):
            return False
        if a.buffer is not b.buffer:
            return overlap(a.buffer, b.buffer)
        key = a.key, b.key
        if key not in self.known:
            self.known[key] = self._may_conflict(a, b)
        return self.known[key]

    def _may_conflict(self, a: Access, b: Access) -> bool:
        """Return whether two accesses to one buffer may touch the same element in different threads."""
        x, y = self._places(a), self._places(b)
        if x is None or y is None:
            if ANYWHERE in (a.count, b.count):
                return True
            decisive = len(a.indices) - (2 if MATRIX in (a.count, b.count) else 0)
            fixed = [[e if _is_fixed(e, side.loops) else None for e in side.indices[:decisive]] for side in (a, b)]
            pairs = zip(*fixed, strict=True)
            return not any(p is not None and q is not None and self._differ(p, q) for p, q in pairs)
        shifts: list[_Shift | None] = []
        for p, q in zip(x.sides, y.sides, strict=True):
            sure = p.sure and q.sure
            difference = self.simplify(p.rest - q.rest) if sure else None
            if isinstance(difference, Const):
                shifts.append(_Shift(int(difference.value)))
            elif sure and p.alone and q.alone and self._differ(p.rest, q.rest):
                return False
            else:  # but for a number both rests are multiples of the period: what is left of indices has to agree
                (rest, by), (other, less) = _number_apart(p.rest), _number_apart(q.rest)
                period = math.gcd(divisor_of(rest), divisor_of(other))
                shifts.append(_Shift(by - less, period) if period > 1 else None)
        if a.in_warp or a.met:  # what a warp accesses together is in order as well
            return x.of_warps.conflicts(y.of_warps, shifts, False)
        return x.conflicts(y, shifts, a.collective or b.collective)

    def _places(self, access: Access) -> _AccessPlaces | None:
        """Return the places of an access, from the cache if known."""
        if access.key not in self.places:
            self.places[access.key] = _places(access, self.threads, self.first, self.simplify)
        return self.places[access.key]

    def _differ(self, p: Expr, q: Expr) -> bool:
        """Return whether two values, each the same for all threads, certainly differ."""
        p, q = self.simplify(p), self.simplify(q)
        difference = self.simplify(p - q)
        if isinstance(difference, Const):
            return bool(difference.value != 0)
        (p, flipped), (q, changed) = _flipped(p), _flipped(q)
        if flipped != changed and equal(p, q):
            return True
        if flipped or changed:
            return False
        if not (isinstance(p, Binary) and isinstance(q, Binary) and p.op == q.op == "%"):
            return False
        m, n, difference = p.b, q.b, self.simplify(p.a - q.a)
        if not (isinstance(m, Const) and isinstance(n, Const) and isinstance(difference, Const)):
            return False
        return bool(m.value == n.value and difference.value % m.value)


def _are_alike(a: Access, b: Access) -> bool:
    """Return whether two atomic accesses make the same kind of update, so that their order makes no difference."""
    x, y = a.origin, b.origin
    like = isinstance(x, Call) and isinstance(y, Call) and x.name == y.name and x.options == y.options
    return x is y or (like and x.options != ("exchange",))  # type: ignore[attr-defined]


def _flipped(e: Expr) -> tuple[Expr, int]:
    """Return `e` as a value and the bits that differ from it: `x ^ 1` as x and 1."""
    if isinstance(e, Binary) and e.op == "^" and isinstance(e.b, Const):
        return e.a, int(e.b.value)
    return e, 0


def _number_apart(e: Expr) -> tuple[Expr, int]:
    """Split a sum into an expression and a number; `e` and 0 if its type wraps."""
    if isinstance(e, Const) and e.dtype.is_integer:
        return const(0, int32), int(e.value)
    if isinstance(e, Binary) and e.op in ("+", "-") and e.dtype in EXACT:
        (a, n), (b, m) = _number_apart(e.a), _number_apart(e.b)
        return (a + b, n + m) if e.op == "+" else (a - b, n - m)
    return e, 0


def overlap(a: Buffer, b: Buffer) -> bool:
    """Return whether two different buffers share bytes."""
    if a.scope != "shared" or b.scope != "shared" or a.offset is None or b.offset is None:
        return False
    return a.offset < b.offset + shared_size(b) and b.offset < a.offset + shared_size(a)


def _is_fixed(e: Expr, loops: Sequence[For]) -> bool:
    """Return whether `e` is the same for all threads and all iterations of `loops`."""
    turning = {v for loop in loops for v in loop.vars}
    return turning.isdisjoint(symbols(e)) and not is_unsure(e)


@dataclass(frozen=True)
class _Side:
    """An index as a sum: `rest` is the same for all threads, and `values` has one value per thread and iteration.

    `alone` says that all values are 0. A `rest` that is not `sure` may differ between threads or iterations.
    """

    rest: Expr
    values: Any
    alone: bool
    sure: bool

    @cached_property
    def step(self) -> int:
        """Return the greatest common divisor of the values."""
        import numpy as np

        return int(np.gcd.reduce(self.values.astype(np.int64))) if self.values.size else 0


@dataclass(frozen=True)
class _Shift:
    """How to compare indices of two accesses: the first's are moved `by` a number, then modulo a `period` (0: none)."""

    by: int
    period: int = 0


@dataclass(frozen=True)
class _AccessPlaces:
    """The elements that an access touches: for each, its index in every dimension and its thread."""

    sides: tuple[_Side, ...]
    thread: Any
    count: int

    @property
    def of_warps(self) -> _AccessPlaces:
        """Return the same places, with the warp at each."""
        return replace(self, thread=self.thread // WARP)

    def conflicts(self, other: _AccessPlaces, shifts: Sequence[_Shift | None], collective: bool) -> bool:
        """Return whether different threads (any threads, if `collective`) touch an element of both accesses."""
        import numpy as np

        unit = self._unit(other, shifts)
        mine = self._keys(shifts, unit)
        theirs = other._keys([s and replace(s, by=0) for s in shifts], unit)
        low = [min(int(a.min()), int(b.min())) for a, b in zip(mine, theirs, strict=True) if a.size and b.size]
        size = [max(int(a.max()), int(b.max())) + 1 for a, b in zip(mine, theirs, strict=True) if a.size and b.size]
        if not self.thread.size or not other.thread.size:
            return False
        spans = [s - at for s, at in zip(size, low, strict=True)]
        if math.prod(spans) > 4 * LARGEST:
            return True
        # For each place: one of the threads that touch it, and whether other threads do.
        owner, several = np.full((2, math.prod(spans)), -1, np.int32), np.zeros((2, math.prod(spans)), bool)
        for n, (table, sides) in enumerate(((self, mine), (other, theirs))):
            key = np.zeros_like(sides[0]) if sides else np.zeros(table.thread.size, np.int64)
            for side, span, at in zip(sides, spans, low, strict=True):
                key = key * span + (side - at)
            thread = np.repeat(table.thread, key.size // table.thread.size)
            owner[n][key] = thread
            several[n][key[owner[n][key] != thread]] = True
        both = (owner[0] >= 0) & (owner[1] >= 0)
        if collective:
            return bool(both.any())
        return bool((both & (several[0] | several[1] | (owner[0] != owner[1]))).any())

    def _unit(self, other: _AccessPlaces, shifts: Sequence[_Shift | None]) -> int:
        """Return how many elements of the last dimension count as one: runs of both begin and end at multiples."""
        if not shifts or shifts[-1] is None:
            return 1
        mine, theirs = self.sides[-1], other.sides[-1]
        return math.gcd(self.count, other.count, mine.step, theirs.step, shifts[-1].by, shifts[-1].period)

    def _keys(self, shifts: Sequence[_Shift | None], unit: int) -> list[Any]:
        """Return the indices of the known dimensions, with an entry for each unit of a run."""
        import numpy as np

        run = self.count // unit if shifts and shifts[-1] is not None else 1
        found = []
        for dim, (side, shift) in enumerate(zip(self.sides, shifts, strict=True)):
            if shift is None:
                continue
            values, period = side.values + shift.by, shift.period
            if dim == len(shifts) - 1:
                values, period = (values[:, None] // unit + np.arange(run)).reshape(-1), period // unit
            else:
                values = np.repeat(values, run)
            found.append(values % period if period else values)
        return found


def _places(access: Access, threads: int, first: int, simplify: Simplifier) -> _AccessPlaces | None:
    """Compute the places of an access; return None if there are too many, or if only its buffer is known.

    An index by a loop of unknown length is unknown. The others tell threads apart as they do without the loop.
    """
    import numpy as np

    if access.count < 0:
        return None
    lengths = [(loop, trips(loop)) for loop in access.loops]
    loops, extents = [loop for loop, n in lengths if n is not None], [n for _, n in lengths if n is not None]
    unknown = {v for loop, n in lengths if n is None for v in loop.vars}
    if threads * math.prod(e for e in extents if e) * access.count > LARGEST:
        return None
    # Each of these arrays varies along one axis only.
    thread, *iterations = np.ogrid[tuple(slice(e) for e in (threads, *extents))]
    thread = thread + first
    values: dict[Var, Any] = {}
    for loop, iteration in zip(loops, iterations, strict=True):
        values[loop.vars[0]] = int(loop.starts[0].value) + iteration * loop.step  # type: ignore[attr-defined]
    numbers = Numbers(values, thread)
    active = np.ones((threads, *extents), bool)
    for condition in access.conditions:
        for part in terms_of("and", condition):
            if numbers.knows(part):
                active &= numbers(part)
    sides = tuple(_thread_parts(simplify(i), numbers, active, unknown) for i in access.indices)
    return _AccessPlaces(sides, np.broadcast_to(thread, active.shape)[active], access.count)


def trips(loop: For) -> int | None:
    """Return how often a loop of one variable runs; None if that is not known."""
    start, stop = loop.starts[0], loop.stops[0]
    if len(loop.vars) != 1 or not isinstance(start, Const) or not isinstance(stop, Const):
        return None
    return len(range(int(start.value), int(stop.value), loop.step))


def _thread_parts(index: Expr, numbers: Numbers, active: Any, unknown: Set[Var]) -> _Side:
    """Split an index into its part that all threads share and its value in each active thread."""
    import numpy as np

    rest, own = _split_by_thread(index, numbers)
    values = np.broadcast_to(numbers(own), active.shape)[active]
    sure = not numbers.touches(rest) and unknown.isdisjoint(symbols(rest))
    return _Side(rest, values, isinstance(own, Const) and own.value == 0, sure)


def _split_by_thread(e: Expr, numbers: Numbers) -> tuple[Expr, Expr]:
    """Split `e` into a sum: what all threads share (and the rest), and what NumPy computes for each thread."""
    zero = const(0, int32)
    if numbers.knows(e):
        return zero, e
    if not numbers.touches(e):
        return e, zero
    if isinstance(e, Binary) and e.op in ("+", "-"):
        a, b = _split_by_thread(e.a, numbers), _split_by_thread(e.b, numbers)
        return (a[0] + b[0], a[1] + b[1]) if e.op == "+" else (a[0] - b[0], a[1] - b[1])
    if isinstance(e, Binary) and e.op == "*" and isinstance(e.b, Const):
        a = _split_by_thread(e.a, numbers)
        return a[0] * e.b, a[1] * e.b
    return e, zero
