# SPDX-License-Identifier: Apache-2.0
"""Collect what a T.Parallel nest touches, and how: the facts from which its layout follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch_tile.ir.arith_util import Expand
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Binary, Call, Cast, Const, Expr, Load, Unary, Var
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, contains, equal, find, symbols, walk
from torch_tile.ir.stmt import Alloc, Assert, Do, For, Let, LoopKind, Print, Store
from torch_tile.tileop.base import is_one
from torch_tile.tileop.parallel.access import Places
from torch_tile.tileop.parallel.index_map import Index, index_of, moving


@dataclass(frozen=True)
class Use:
    """One access of a buffer, its indices with all names replaced by their values. `locates`: it reads an index."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    map: tuple[Index | None, ...]
    stored: bool
    locates: bool = False


@dataclass
class Nest:
    """A nest over constant extents. `inner` are loops of constant extent that one thread runs, with variables too:
    those in its body, and unrolled ones around it.

    `carried` numbers the variables along which iterations run in order in one thread. `meeting` are the buffers in
    which they meet. Both are empty if the author promises that iterations never meet. `uniform` says that the nest sets
    a variable of every thread, so that every thread runs all of it.
    """

    loop: For
    extents: tuple[int, ...]
    inner: tuple[For, ...]
    fragments: list[Use] = field(default_factory=list)
    memory: list[Use] = field(default_factory=list)
    carried: frozenset[int] = frozenset()
    meeting: frozenset[Buffer] = frozenset()
    uniform: bool = False
    effects: bool = False

    @property
    def rank(self) -> int:
        """Number of variables of the nest itself."""
        return len(self.extents)

    @property
    def all_extents(self) -> tuple[int, ...]:
        """Return the extents of the nest and of the loops inside."""
        inner = [loop.stops[0] for loop in self.inner]
        return (*self.extents, *(int(e.value) if isinstance(e, Const) else 1 for e in inner))


def is_static(loop: For) -> bool:
    """Return whether a nest begins at 0 and all of its extents are constants."""
    return all(isinstance(e, Const) for e in loop.stops) and all(
        isinstance(s, Const) and s.value == 0 for s in loop.starts
    )


def nest_of(loop: For, values: Mapping[Var, Expr], around: Sequence[For] = ()) -> Nest:
    """Collect the facts of a static nest; `values` are the names bound around it, `around` unrolled loops."""
    numbers: dict[Var, int] = {v: k for k, v in enumerate(loop.vars)}
    inner, allocated, values = list[For](), set[Buffer](), dict(values)
    for node in (*around, *find(loop.body, For, Let, Alloc)):
        if isinstance(node, For) and node.kind is not LoopKind.PARALLEL and is_static(node) and node.step == 1:
            numbers[node.vars[0]] = len(numbers)
            inner.append(node)
        elif isinstance(node, Let) and node.var.dtype.is_integer:
            values[node.var] = node.value
        elif isinstance(node, Alloc):
            allocated.add(node.buffer)
    inline = Expand(values)
    extents = tuple(int(e.value) for e in loop.stops if isinstance(e, Const))
    nest = Nest(loop, extents, tuple(inner))
    accesses: list[Load | Store | Address] = list(find(loop.body, Load, Store, Address))
    accesses += [Address(r.buffer, r.starts) for r in find(loop.body, Region) if all(map(is_one, r.extents))]
    locating = IdSet(load for access in accesses for index in access.indices for load in find(index, Load))
    for access in accesses:
        _enter(nest, access, inline, numbers, allocated, access in locating)
    nest.effects = contains(loop.body, Assert, Do, Print) or any(
        call.name == "atomic" for call in find(loop.body, Call)
    )
    met = [] if loop.independent else carriers(loop)
    nest.carried = frozenset(numbers[var] for var, _ in met)
    nest.meeting = frozenset(store.buffer for _, store in met)
    return nest


def _enter(
    nest: Nest, node: Load | Store | Address, inline: Expand, numbers: dict[Var, int], own: set[Buffer], locates: bool
) -> None:
    """Add one access to the nest's uses of fragments or memory."""
    scope = node.buffer.scope
    stored = isinstance(node, Store)
    if scope in ("local", "var"):
        nest.uniform |= stored and node.buffer not in own
        return
    indices: tuple[Expr, ...] = tuple(inline(i) for i in node.indices)
    extents = nest.all_extents
    maps = tuple(moving(index_of(i, numbers), extents) for i in indices)
    use = Use(node.buffer, indices, maps, stored, locates)
    if scope == "fragment":
        nest.fragments.append(use)
    else:
        nest.memory.append(use)


def mentions(nodes: Sequence[Node], wanted: Set[Node]) -> bool:
    """Return whether one of the symbols (by identity) occurs in the nodes."""
    return any(not wanted.isdisjoint(symbols(node)) for node in nodes)


# Variables of a T.Parallel nest that carry a value from iteration to iteration. A nest carries a value in two cases. It
# accumulates into a place that does not move with a loop variable. Or it reads an element that another iteration writes
# (insert_barriers.py says which meet). Along such a variable the iterations run in order, in one thread.


def carried_vars(loop: For) -> list[Var]:
    """Return the variables of a nest whose iterations are not independent."""
    return list(IdSet(var for var, _ in carriers(loop)))


def carriers(loop: For) -> list[tuple[Var, Store]]:
    """Return the variables with dependent iterations, each with every store through which iterations may meet."""
    known: list[tuple[Var, Store]] | None = loop.__dict__.get("_carriers")
    if known is None:  # nests are asked about often, and never change
        known = loop.__dict__["_carriers"] = _find_carriers(loop)
    return known


def _find_carriers(loop: For) -> list[tuple[Var, Store]]:
    """Find the variables and stores of `carriers`: compare each store with all accesses of its buffer."""
    uses, places = Uses(loop), Places(loop)
    stores = [n for n in find(loop.body, Store) if not uses.is_private(n.buffer)]
    accesses = list(find(loop.body, Load, Store))
    found = []
    for store in stores:
        others = [x for x in accesses if x.buffer is store.buffer and x is not store and not places.disjoint(x, store)]
        for var in loop.vars:
            moves = _moves_with(store.indices, var, uses) or places.meet_in_one_iteration(var, store, store)
            conflicts = any(not places.meet_in_one_iteration(var, x, store) for x in others)
            if conflicts or (not moves and uses.depends(store.value, var)):
                found.append((var, store))
    return found


class Uses:
    """Find the loop variables that a value depends on, through names bound in the body."""

    def __init__(self, loop: For):
        self.lets: IdMap[Var | Buffer, Expr] = IdMap()
        self.private: IdSet[Buffer] = IdSet()
        for node in find(loop.body, Let, Alloc):
            if isinstance(node, Let):
                self.lets[node.var] = node.value
            else:
                self.private.add(node.buffer)
                if node.init is not None:
                    self.lets[node.buffer] = node.init

    def is_private(self, buffer: Buffer) -> bool:
        """Return whether each iteration has its own copy of a buffer."""
        return buffer in self.private

    def depends(self, expr: Expr, var: Var) -> bool:
        """Return whether the value may change with `var`."""
        return any(n is var or (isinstance(n, Load) and self.is_private(n.buffer)) for n in self._reach(expr))

    def _reach(self, expr: Node) -> Iterator[Node]:
        """Yield the nodes of an expression, with names replaced by their values."""
        for node in walk(expr):
            yield node
            if isinstance(node, Var) and node in self.lets:
                yield from self._reach(self.lets[node])

    def resolve(self, expr: Expr) -> Expr:
        """Return the definition of a bound name, or the expression itself."""
        while isinstance(expr, Var) and expr in self.lets:
            expr = self.lets[expr]
        return expr


def _moves_with(indices: tuple[Expr, ...], var: Var, uses: Uses) -> bool:
    """Return whether different values of `var` certainly give different places, as some index is affine in `var`.

    So is a pair of indices `x // c` and `x % c` that together tell such an `x`.
    """
    if any(_is_affine(index, var, uses) for index in indices):
        return True
    parts = [i for i in map(uses.resolve, indices) if isinstance(i, Binary)]
    return any(
        a.op == "//" and b.op == "%" and equal(a.a, b.a) and equal(a.b, b.b)
        and _is_affine(a.a, var, uses) and not uses.depends(a.b, var)
        for a in parts
        for b in parts
    )  # fmt: skip


def _is_affine(expr: Expr, var: Var, uses: Uses) -> bool:
    """Return whether an index is `var` times a non-zero constant plus an expression free of `var`."""
    expr = uses.resolve(expr)
    if expr is var:
        return True
    if isinstance(expr, Cast | Unary) and getattr(expr, "op", "-") == "-":
        return _is_affine(expr.a, var, uses)
    if isinstance(expr, Binary) and expr.op in ("+", "-"):
        for a, b in ((expr.a, expr.b), (expr.b, expr.a)):
            if _is_affine(a, var, uses) and not uses.depends(b, var):
                return True
    if isinstance(expr, Binary) and expr.op == "//" and isinstance(expr.b, Const) and expr.b.value == 1:
        return _is_affine(expr.a, var, uses)
    if isinstance(expr, Binary) and expr.op == "*":
        for a, b in ((expr.a, expr.b), (expr.b, expr.a)):
            if _is_affine(a, var, uses) and isinstance(b, Const) and b.value:
                return True
    return False
