# SPDX-License-Identifier: Apache-2.0
"""Decide whether the iterations of a T.Parallel nest can be computed side by side.

`plan` decides from the text. INDEPENDENT: each iteration touches places of its own in every buffer that the nest
writes. ORDERED: the nest holds an operation that only a whole block can do. UNSURE: any other nest. An UNSURE nest is
tried side by side under a `Watch`. The watch tells whether an iteration touched a place that another iteration wrote.
If so, the nest's writes are undone and the nest runs in order. The result is always that of running the iterations one
after another.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence

import torch

from torch_tile.intrinsics import foreign
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Binary, Call, Const, Expr, Load, Var
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, equal, walk
from torch_tile.ir.stmt import Alloc, Break, Continue, For, Let, LoopKind, Print, Store, TileOp, While
from torch_tile.simulator.memory import Storage
from torch_tile.simulator.values import Value

ALONE = ("atomic", "store_at_rank", foreign.NAME)  # calls that iterations make one after another


class Plan(enum.Enum):
    """The way in which a nest runs."""

    INDEPENDENT = "side by side"
    UNSURE = "side by side, watched"
    ORDERED = "one after another"


def plan(nest: For) -> Plan:
    """Choose how to run a nest from what its text says about its iterations."""
    nodes = list(walk(nest.body))
    if any(isinstance(n, TileOp | Print) or (isinstance(n, Call) and n.name in ALONE) for n in nodes):
        return Plan.ORDERED
    facts = _Facts(nest, nodes)
    if any(isinstance(n, Break | Continue | While) or (isinstance(n, For) and not facts.is_uniform(n)) for n in nodes):
        return Plan.UNSURE
    if all(_are_independent(accesses, nest, facts) for accesses in facts.accesses()):
        return Plan.INDEPENDENT
    return Plan.UNSURE


def written(nest: For) -> list[Buffer]:
    """Return the buffers that the nest writes and does not allocate itself."""
    nodes = list(walk(nest.body))
    own = IdSet(n.buffer for n in nodes if isinstance(n, Alloc))
    return list(dict.fromkeys(n.buffer for n in nodes if isinstance(n, Store) and n.buffer not in own))


class _Facts:
    """Names that a nest binds, and its accesses to buffers that it writes."""

    def __init__(self, nest: For, nodes: Sequence[Node]):
        self.nodes = nodes
        self.targets = IdSet(written(nest))
        self.lets = IdMap((n.var, n.value) for n in nodes if isinstance(n, Let))
        self.bound = IdSet(nest.vars) | IdSet(v for n in nodes if isinstance(n, For) for v in n.vars)
        self.own = IdSet(n.buffer for n in nodes if isinstance(n, Alloc))

    def accesses(self) -> Iterator[list[tuple[Expr, ...]]]:
        """Yield the index tuples of each written buffer."""
        found: IdMap[Buffer, list[tuple[Expr, ...]]] = IdMap()
        for n in self.nodes:
            if isinstance(n, Load | Store) and n.buffer in self.targets:
                found.setdefault(n.buffer, []).append(n.indices)
        yield from found.values()

    def is_free(self, expr: Expr) -> bool:
        """Return whether an expression has the same value in every iteration of the nest."""
        for n in walk(expr):
            if isinstance(n, Var) and (n in self.bound or n in self.lets):
                return False
            if isinstance(n, Load) and (n.buffer in self.targets or n.buffer in self.own):
                return False
        return True

    def is_uniform(self, loop: For) -> bool:
        """Return whether an inner loop has the same bounds in every iteration."""
        return all(self.is_free(e) for e in (*loop.starts, *loop.stops))

    def moves_with(self, index: Expr) -> Expr | None:
        """Return the variable `v` if the index is `v` plus a value that is the same in every iteration."""
        while isinstance(index, Var) and index in self.lets:
            index = self.lets[index]
        if isinstance(index, Var):
            return index
        if isinstance(index, Binary) and index.op in ("+", "-"):
            if self.is_free(index.b):
                return self.moves_with(index.a)
            if index.op == "+" and self.is_free(index.a):
                return self.moves_with(index.b)
        return None


def _are_independent(accesses: list[tuple[Expr, ...]], nest: For, facts: _Facts) -> bool:
    """Return whether different iterations certainly touch different elements of one buffer."""
    covered: IdSet[Expr] = IdSet()
    for dim, first in enumerate(accesses[0]):
        var = facts.moves_with(first)
        if var is not None and all(equal(first, other[dim]) for other in accesses[1:]):
            covered.add(var)
    return all(v in covered or _is_single(nest, d) for d, v in enumerate(nest.vars))


def _is_single(nest: For, dim: int) -> bool:
    """Return whether a nest's dimension has one iteration."""
    start, stop = nest.starts[dim], nest.stops[dim]
    return isinstance(start, Const) and isinstance(stop, Const) and stop.value - start.value <= 1


def is_nest(loop: For) -> bool:
    """Return whether the author declared a loop's iterations independent."""
    return loop.kind in (LoopKind.PARALLEL, LoopKind.VECTOR)


class Watch:
    """Records the addresses that each iteration of a nest touches, separately for each lane of the nests around it."""

    count: int

    def __init__(self, targets: Sequence[Buffer], extents: Sequence[int], outer: Sequence[int]):
        self.targets: IdSet[Buffer] = IdSet(targets)
        self.count, groups = math.prod(extents), math.prod(outer)
        iteration = torch.arange(self.count).reshape(*extents, *[1] * len(outer))
        self.owner: torch.Tensor = iteration + self.count * torch.arange(groups).reshape(tuple(outer))
        self.owners: int = self.count * groups
        self.places: list[torch.Tensor] = []
        self.owned: list[torch.Tensor] = []
        self.writes: list[torch.Tensor] = []

    def note(self, storage: Storage, index: Sequence[Value], lanes: Sequence[int], active: Value, write: bool) -> None:
        """Record an access of the active lanes at `index`, which includes the storage's prefix."""
        place: Value = 0
        for i, stride in zip(index, storage.raw.stride(), strict=True):
            place = place + i * stride
        place = torch.as_tensor(place * storage.raw.itemsize + storage.raw.data_ptr())
        where = active.expand(tuple(lanes)) if isinstance(active, torch.Tensor) else slice(None)
        self.places.append(place.expand(tuple(lanes))[where].flatten())
        self.owned.append(self.owner.expand(tuple(lanes))[where].flatten())
        self.writes.append(torch.full_like(self.places[-1], write, dtype=torch.bool))

    def found_conflict(self) -> bool:
        """Return whether an iteration touched an element that another iteration wrote."""
        if not self.places:
            return False
        place = torch.unique(torch.cat(self.places), return_inverse=True)[1]
        pair = torch.unique(place * self.owners + torch.cat(self.owned))  # sorted by place, then group, then iteration
        key = pair // self.count  # place and group
        crowded = key[1:][key[1:] == key[:-1]]
        written = (place * self.owners + torch.cat(self.owned))[torch.cat(self.writes)] // self.count
        return bool(torch.isin(written, crowded).any())
