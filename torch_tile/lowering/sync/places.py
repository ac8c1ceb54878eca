# SPDX-License-Identifier: Apache-2.0
"""Barriers and fences put into the blocks of a kernel where insert_sync found that they belong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.bulk import fence_proxy_async
from torch_tile.intrinsics.memory import barrier
from torch_tile.intrinsics.traits import Scope
from torch_tile.ir.node import Node, Rewriter
from torch_tile.ir.stmt import Block, Do, Role, Stmt

Place = tuple[int, int]  # a block by identity, and before which of its statements


class Found(Protocol):
    """What stands where; see `insert_sync.Walk`."""

    fences: set[Place]
    shown: set[Place]
    others: dict[Place, Do]
    own: dict[int, Do]


def is_barrier(one: Node) -> bool:
    """Whether a statement is the block's barrier."""
    found = intrinsic_of(one)
    return found is not None and found.meets and found.scope is Scope.BLOCK


def _is_any_barrier(one: Stmt) -> bool:
    found = intrinsic_of(one)
    return found is not None and found.meets


class Insert(Rewriter):
    """Puts barriers and fences into blocks."""

    def __init__(self, places: set[Place], found: Found):
        self.places, self.found = places, found
        self.wait: Do | None = None  # what threads of the role around wait for

    def visit_Role(self, role: Role) -> Stmt:
        """The block's barrier is for those of the role only."""
        self.wait = self.found.own.get(id(role))
        new = self.children(role)
        self.wait = None
        return new

    def visit_Do(self, node: Do) -> Stmt:
        """An author's barrier."""
        return node if self.wait is None or not is_barrier(node) else replace(self.wait, span=node.span)

    def at(self, place: Place, one: Stmt, before: bool) -> Iterator[Stmt]:
        """What stands there, `before` a statement or after it; fences only in front of barriers that stand there."""
        span = one.span
        fence = place in self.found.fences and (place in self.places or (before and _is_any_barrier(one)))
        if fence or (before and place in self.found.shown):
            yield replace(fence_proxy_async(), span=span)
        if place in self.places:
            yield replace(self.found.others.get(place) or barrier(), span=span)

    def visit_Block(self, block: Block) -> Block:
        """With what stands between its statements."""
        new: list[Stmt] = []
        for n, one in enumerate(block.stmts):
            new += self.at((id(block), n), one, True)
            new.append(self(one))
        if block.stmts:
            new += self.at((id(block), len(block.stmts)), block.stmts[-1], False)
        same = len(new) == len(block.stmts) and all(a is b for a, b in zip(new, block.stmts, strict=True))
        return block if same else Block(tuple(new), span=block.span)
