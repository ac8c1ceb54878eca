# SPDX-License-Identifier: Apache-2.0
"""Write barriers and fences into a kernel at the places that `insert_barriers.Walk` found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.bulk import fence_proxy_async
from torch_tile.intrinsics.memory import barrier
from torch_tile.intrinsics.traits import Scope
from torch_tile.ir.expr import Call
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Node, Rewriter, with_fields
from torch_tile.ir.stmt import Block, Do, Role, Stmt

Place = tuple[Block, int]  # a block, and the number of the statement behind the place


class Found(Protocol):
    """The barriers and fences to insert, by place."""

    fences: set[Place]
    shown: set[Place]
    others: dict[Place, Do]
    own: dict[Role, Do]


def is_barrier(one: Node) -> bool:
    """Return whether a statement is a barrier of the block."""
    found = intrinsic_of(one)
    return found is not None and found.is_barrier and found.scope is Scope.BLOCK


def _is_any_barrier(one: Stmt) -> bool:
    """Return whether a statement is a barrier of any kind."""
    found = intrinsic_of(one)
    return found is not None and found.is_barrier


class Insert(Rewriter):
    """Insert barriers and fences into blocks."""

    places: set[Place]
    found: Found

    def __init__(self, places: set[Place], found: Found):
        self.places, self.found = places, found
        self.made: IdMap[Do, Place] = IdMap()  # the places of new barriers
        self.wait: Do | None = None  # the barrier of the role around

    def visit_Role(self, role: Role) -> Stmt:
        """Replace the author's block barriers in a role by the barrier of the role."""
        self.wait = self.found.own.get(role)
        new = self.children(role)
        self.wait = None
        return new

    def visit_Do(self, node: Do) -> Stmt:
        """Replace an author's barrier by the role's, and remove calls that only the search for places reads."""
        if isinstance(node.call, Call) and node.call.name == "own_phase":
            return Block(())
        return node if self.wait is None or not is_barrier(node) else replace(self.wait, span=node.span)

    def at(self, place: Place, one: Stmt, before: bool) -> Iterator[Stmt]:
        """Yield the fence and the barrier of a place, `before` a statement or after it. Fences precede barriers."""
        span = one.span
        fence = place in self.found.fences and (place in self.places or (before and _is_any_barrier(one)))
        if fence or (before and place in self.found.shown):
            yield replace(fence_proxy_async(), span=span)
        if place in self.places:
            new = replace(self.found.others.get(place) or barrier(), span=span)
            self.made[new] = place
            yield new

    def visit_Block(self, block: Block) -> Block:
        """Rewrite a block with barriers and fences between its statements."""
        new: list[Stmt] = []
        for n, one in enumerate(block.stmts):
            new += self.at((block, n), one, True)
            new.append(self(one))
        if block.stmts:
            new += self.at((block, len(block.stmts)), block.stmts[-1], False)
        return with_fields(block, stmts=tuple(new))
