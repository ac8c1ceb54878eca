# SPDX-License-Identifier: Apache-2.0
"""Warpgroups take turns (`ping_pong`) only where they do not meet within a turn.

One that waits at a barrier for the others, while they wait for their turn, would wait for ever. Where a barrier has
come to lie between `turn_take` and `turn_pass`, for what threads write to a tile that a product reads, the turns go:
they order time only, never values. A loop that asks for turns and has none is reported with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch_tile.compiler.context import Build
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.traits import Sync
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Rewriter, find
from torch_tile.ir.stmt import Block, Do, For, Program, Stmt

OTHERWISE = "only several warpgroups take them, by wgmma, in a loop of products, arithmetic, and products again"


def settle_turns(program: Program, build: Build) -> Program:
    """Drop the turns of warpgroups that meet within one, and report what became of all."""
    asked = {n.span: OTHERWISE for n in find(program, For) if n.ping_pong}
    if not asked:
        return program
    dropped: IdSet[Do] = IdSet()
    for calls, meets in _turns(program):
        why = "threads meet at a barrier between the products" if meets else "" if len(calls) > 2 else "no turn is left"
        asked[calls[0].span] = why
        dropped |= IdSet(calls if why else ())
    for span, why in asked.items():
        build.note(span, "T.Pipelined", f"{'no ' if why else ''}turns of warpgroups in starting products", why)
    return _Drop(dropped)(program) if dropped else program


def _turns(program: Program) -> Iterator[tuple[list[Do], bool]]:
    """The calls of each kind of turns, from `turn_open` to `turn_close`, and whether threads meet within one."""
    calls: list[Do] = []
    inside = meets = False
    for node in find(program, Do):
        found = intrinsic_of(node)
        if found is not None and found.sync is Sync.TURN:
            calls.append(node)
            inside = found.name == "turn_take"
        elif inside:
            meets |= found is not None and found.meets
        if found is not None and found.name == "turn_close":
            yield calls, meets
            calls, meets = [], False


class _Drop(Rewriter):
    """Drops statements."""

    def __init__(self, dropped: IdSet[Do]):
        self.dropped = dropped

    def visit_Do(self, node: Do) -> Stmt:
        """Nothing, or what it was."""
        return Block(()) if node in self.dropped else node
