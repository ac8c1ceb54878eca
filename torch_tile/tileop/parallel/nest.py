# SPDX-License-Identifier: Apache-2.0
"""What a T.Parallel nest touches, and how: the facts from which its layout follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Const, Expr, Load
from torch_tile.ir.node import Node, contains, find, symbols
from torch_tile.ir.stmt import Alloc, Assert, Do, For, Let, LoopKind, Print, Store
from torch_tile.ir.substitute import Expand
from torch_tile.tileop.parallel.carried import carried_vars
from torch_tile.tileop.parallel.index_map import Index, index_of


@dataclass(frozen=True)
class Use:
    """One access of a buffer, its indices with all names replaced by their values."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    map: tuple[Index | None, ...]
    stored: bool


@dataclass
class Nest:
    """A nest over constant extents. `inner` are loops of constant extent in its body, whose variables count on.

    `carried` numbers the variables along which iterations run in order in one thread, none if the author says that they
    never meet; `uniform` says that the nest
    sets a variable that every thread has for itself, so that every thread runs it all.
    """

    loop: For
    extents: tuple[int, ...]
    inner: tuple[For, ...]
    fragments: list[Use] = field(default_factory=list)
    memory: list[Use] = field(default_factory=list)
    carried: frozenset[int] = frozenset()
    uniform: bool = False
    effects: bool = False

    @property
    def rank(self) -> int:
        """Number of variables of the nest itself."""
        return len(self.extents)

    @property
    def all_extents(self) -> tuple[int, ...]:
        """Extents of the nest and of the loops inside."""
        inner = [loop.stops[0] for loop in self.inner]
        return (*self.extents, *(int(e.value) if isinstance(e, Const) else 1 for e in inner))


def is_static(loop: For) -> bool:
    """Whether a nest begins at 0 and all of its extents are constants."""
    return all(isinstance(e, Const) for e in loop.stops) and all(
        isinstance(s, Const) and s.value == 0 for s in loop.starts
    )


def nest_of(loop: For, values: Mapping[int, Expr]) -> Nest:
    """The facts of a static nest; `values` are the names bound around it."""
    numbers = {id(v): k for k, v in enumerate(loop.vars)}
    inner, allocated, values = [], set(), dict(values)
    for node in find(loop.body, For, Let, Alloc):
        if isinstance(node, For) and node.kind is not LoopKind.PARALLEL and is_static(node) and node.step == 1:
            numbers[id(node.vars[0])] = len(numbers)
            inner.append(node)
        elif isinstance(node, Let) and node.var.dtype.is_integer:
            values[id(node.var)] = node.value
        elif isinstance(node, Alloc):
            allocated.add(id(node.buffer))
    inline = Expand(values)
    extents = tuple(int(e.value) for e in loop.stops if isinstance(e, Const))
    nest = Nest(loop, extents, tuple(inner))
    for access in find(loop.body, Load, Store, Address):
        _enter(nest, access, inline, numbers, allocated)
    nest.effects = contains(loop.body, Assert, Do, Print) or any(
        call.name == "atomic" for call in find(loop.body, Call)
    )
    nest.carried = frozenset() if loop.independent else frozenset(numbers[id(v)] for v in carried_vars(loop))
    return nest


def _enter(nest: Nest, node: Load | Store | Address, inline: Expand, numbers: dict[int, int], own: set[int]) -> None:
    scope = node.buffer.scope
    stored = isinstance(node, Store)
    if scope in ("local", "var"):
        nest.uniform |= stored and id(node.buffer) not in own
        return
    indices: tuple[Expr, ...] = tuple(inline(i) for i in node.indices)
    use = Use(node.buffer, indices, tuple(index_of(i, numbers) for i in indices), stored)
    if scope == "fragment":
        nest.fragments.append(use)
    else:
        nest.memory.append(use)


def mentions(nodes: Sequence[Node], wanted: set[int]) -> bool:
    """Whether one of the symbols (by identity) occurs in the nodes."""
    return any(not wanted.isdisjoint(symbols(node)) for node in nodes)
