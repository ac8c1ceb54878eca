# SPDX-License-Identifier: Apache-2.0
"""Collect the facts about a kernel's names and memory that decide on the order of its threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from torch_tile.diagnostics.errors import Span, error
from torch_tile.intrinsics.base import Intrinsic, intrinsic_of, lookup, starts
from torch_tile.intrinsics.memory import option
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir import stmt as st
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Expr, Load, Var
from torch_tile.ir.node import children, contains, find, symbols
from torch_tile.ir.stmt import Break, Continue, Do, For, Let, Role, Stmt, Store, While
from torch_tile.lowering.analysis.thread_values import Divergence
from torch_tile.lowering.sync.accesses import Access, Collector, overlap, trips


def orders_earlier(intrinsic: Intrinsic) -> bool:
    """Return whether an intrinsic orders earlier accesses: all of a block, or copies and products counted in groups."""
    return intrinsic.is_barrier or intrinsic.is_grouped


def by_engine(node: object) -> bool:
    """Return whether an engine makes a call's accesses, outside the proxy of the threads."""
    found = intrinsic_of(node)
    return found is not None and found.engine is not None and found.engine.is_proxy


def _fills(call: Call) -> bool:
    """Return whether a bulk copy writes shared memory."""
    found = lookup(call.name)
    return starts(call, Engine.BULK) and any("w" in e.kind for e in found.effects(call))


def handed_over(kernel: st.Kernel) -> frozenset[Buffer]:
    """Return the tiles whose bytes only bulk copies write: mbarriers order the threads that touch them."""
    filled, written = set[Buffer](), set[Buffer]()
    for node in find(kernel, Store, Call):
        if isinstance(node, Store):
            written.add(node.buffer)
        else:
            for effect in lookup(node.name).effects(node):
                place = node.args[effect.operand]
                if isinstance(place, Address) and "w" in effect.kind:
                    (filled if _fills(node) else written).add(place.buffer)
    return frozenset(b for b in filled - written if not any(overlap(b, other) for other in written))


def refilled(kernel: st.Kernel) -> frozenset[Buffer]:
    """Return the shared buffers that bulk copies may fill again; none where the compiler made the roles."""
    loads = [n for n in find(kernel, Call) if _fills(n)]
    if not loads or any(not n.by_hand for n in find(kernel, Role)):
        return frozenset()
    often, filled = set[Buffer](), set[Buffer]()
    loops = list(find(kernel, For, While))
    inside = {n for loop in loops for n in find(loop, Call)}
    for call in loads:
        tile = call.args[0]
        assert isinstance(tile, Address)
        (often if call in inside or tile.buffer in filled else filled).add(tile.buffer)
    # Threads have used the buffers that held the same bytes before.
    for buffer in {n.buffer: None for n in find(kernel, Load, Store, Address)}:
        if any(overlap(buffer, other) for other in filled | often if other is not buffer):
            often.add(buffer)
    return frozenset(often)


def is_numbered(call: Call) -> bool:
    """Return whether a call names a barrier by its number."""
    found = lookup(call.name)
    return found.scope is Scope.GROUP and found.sync is not Sync.TURN


class BarrierGroups:
    """Assign numbers to the barriers of roles and of the first warps of a block. Each set of warps has one number."""

    def __init__(self, kernel: st.Kernel):
        self.kernel = kernel
        self.found: dict[tuple[int, int], int] = {}

    @cached_property
    def free(self) -> list[int]:
        """Return the barrier numbers that the author does not use."""
        calls = list(find(self.kernel, Call))
        taken = {option(call) for call in calls if is_numbered(call)}
        iterations = (call for call in calls if call.name == "turn_take")
        taken |= {number for call in iterations for number in range(option(call), option(call) + option(call, 2))}
        return [n for n in range(1, 16) if n not in taken]

    def number(self, first: int, count: int, span: Span | None) -> int:
        """Return the barrier number of `count` threads from `first` on. Raises TileError if no free number is left."""
        at = self.found.setdefault((first, count), len(self.found))
        if at >= len(self.free):
            why, fix = "leaves no number for what these threads wait for among themselves", "use fewer numbers"
            raise error("bad_argument", span, op="T.sync_threads", name="barrier_id", why=why, fix=fix)
        return self.free[at]


class Facts(Divergence):
    """Facts about a kernel: values of names, which of them differ between threads, and which memory matters."""

    def __init__(self, kernel: st.Kernel, handed_over: frozenset[Buffer] = frozenset()):
        self.kernel = kernel
        super().__init__(kernel)
        written = {n.buffer for n in find(kernel, Store, Address)}
        touched = (n.buffer for n in find(kernel, Store, Address, Load))
        relevant = {b for b in touched if b.scope == "shared" or (b.scope == "global" and b in written)}
        relevant -= handed_over
        calls = [n for n in find(kernel, Call) if by_engine(n) and lookup(n.name).starts and not _fills(n)]
        addresses = [a for call in calls for a in call.args if isinstance(a, Address)]
        # Memory that wgmma and bulk copies read by another proxy than threads write.
        self.read_by_engines: set[Buffer] = {a.buffer for a in addresses if a.buffer.scope == "shared"}
        self.refilled: frozenset[Buffer] = frozenset[
            Buffer
        ]()  # memory that bulk copies fill again, if fences hand it over
        self.lets: list[Let] = list(find(kernel, Let))
        names: dict[Var, Expr] = {}
        expand = Substitute(names)
        for let in self.lets:
            value = expand(let.value)
            if not contains(value, Load, Call):
                names[let.var] = value
        self.collector: Collector = Collector(names, relevant)
        self.memory: dict[Stmt, bool] = {}
        self.engaging: dict[Stmt, bool] = {}
        self.ordered: Callable[[Intrinsic], bool] = orders_earlier
        self.unknown: dict[Var, Var] = {}
        self.stand_ins: dict[Stmt, Mapping[Var, Expr]] = {}

    @cached_property
    def divergence_of_arrays(self) -> Divergence:
        """Return the analysis that also knows which local arrays hold other values in other threads."""
        return Divergence(self.kernel, arrays=True)

    def is_divergent_loop(self, loop: For | While) -> bool:
        """Return whether threads may be in different iterations of a loop, or leave it at different times.

        Conditions on arrays count as equal in all threads, which all take part in a reduction's result. But the turn of
        a nest that `continue` leaves is each thread's own.
        """
        if super().is_divergent_loop(loop):
            return True
        return (
            isinstance(loop, For)
            and trips(loop) == 1
            and contains(loop, Continue)
            and self.divergence_of_arrays.is_divergent_loop(loop)
        )

    def orders(self, one: Stmt) -> bool:
        """Return whether a statement has a barrier, a commit of or wait for copies, or an exit from an iteration."""
        if one not in self.memory:
            call = one.call if isinstance(one, Do) else None
            found = intrinsic_of(call)
            ordered = isinstance(one, Break | Continue) or (found is not None and self.ordered(found))
            below = (child for child in children(one) if isinstance(child, Stmt))
            self.memory[one] = ordered or any(map(self.orders, below))
        return self.memory[one]

    def engages(self, one: Stmt) -> bool:
        """Return whether engines work in a statement, so that a fence before it may be needed."""
        if one not in self.engaging:
            self.engaging[one] = any(map(by_engine, find(one, Call)))
        return self.engaging[one]

    def is_behind(self, access: Access) -> bool:
        """Return whether threads write, outside the engines' proxy, memory that engines read."""
        return access.writes and not by_engine(access.origin) and access.buffer in self.read_by_engines

    def uses_refilled(self, one: Stmt) -> bool:
        """Return whether threads touch, outside the engines' proxy, memory that bulk copies fill again."""
        if self.refilled.isdisjoint(symbols(one)):
            return False
        engines = {a for n in find(one, Call) if by_engine(n) for a in n.args}
        touched = (n for n in find(one, Load, Store, Address) if n not in engines)
        return any(n.buffer in self.refilled for n in touched)

    def forgotten(self, loop: For | While) -> Mapping[Var, Expr]:
        """Replace the variables of a loop by unknown values, for accesses that outlive it."""
        if loop in self.stand_ins:
            return self.stand_ins[loop]
        inner = [v for n in find(loop, For) for v in n.vars]
        inner += [n.var for n in find(loop, Let)]
        for v in inner:
            self.unknown.setdefault(v, Var(f"earlier_{v.name}", v.type, "let"))
        self.stand_ins[loop] = {v: self.unknown[v] for v in inner}
        return self.stand_ins[loop]
