# SPDX-License-Identifier: Apache-2.0
"""Make mutants of a kernel, each without one ordering statement, which the thread interpreter must report.

If the interpreter reports nothing, the statement is superfluous or the interpreter misses its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch_tile.diagnostics.errors import Span
from torch_tile.intrinsics.base import lookup, names
from torch_tile.intrinsics.traits import Scope, Sync
from torch_tile.ir.expr import Call, const
from torch_tile.ir.node import Node, Rewriter, walk
from torch_tile.ir.stmt import Block, Do, Program, Stmt, Store

_SYNCS = Sync.BARRIER, Sync.ARRIVE, Sync.WAIT, Sync.DRAIN, Sync.FENCE, Sync.PROXY_FENCE
ORDERING = tuple(n for n in names() if lookup(n).sync in _SYNCS and lookup(n).scope is not Scope.GRID)


@dataclass(frozen=True)
class Removal:
    """A mutant: `program` is the kernel without its ordering statement number `number`, in the order of the text."""

    number: int
    name: str
    span: Span | None
    program: Program


def removals(program: Program, names: tuple[str, ...] = ORDERING) -> Iterator[Removal]:
    """Yield the program without each of its ordering statements in turn, then with each wait relaxed.

    A relaxed wait leaves one more group in flight, or ends before results are there; it must be as wrong as no wait.
    Without an arrival at a counter, every block takes itself for the last block.
    """
    for number, call in enumerate(ordering(program, names)):
        yield Removal(number, call.name, call.span, _Change(number, names, None)(program))
        if lookup(call.name).sync is Sync.DRAIN:
            laxer = replace(call, options=(int(str(call.options[0])) + 1, *call.options[1:]))
            yield Removal(number, f"{call.name}, one laxer", call.span, _Change(number, names, laxer)(program))
        if call.name == "bulk_wait" and not call.options[1]:
            laxer = replace(call, options=(call.options[0], True))
            yield Removal(number, f"{call.name}, for reads", call.span, _Change(number, names, laxer)(program))
    for number, arrival in enumerate(n for n in walk(program) if _arrives(n)):
        yield Removal(number, "arrive_last", arrival.span, _Arrived(number)(program))


def ordering(program: Program, names: tuple[str, ...] = ORDERING) -> list[Call]:
    """Return the calls that only order accesses, in the order of the text."""
    return [n.call for n in walk(program) if isinstance(n, Do) and isinstance(n.call, Call) and n.call.name in names]


def _arrives(node: Node) -> bool:
    """Return whether a statement stores the result of an arrival at a counter."""
    value = node.value if isinstance(node, Store) else None
    return value is not None and any(isinstance(n, Call) and n.name == "arrive_last" for n in walk(value))


class _Arrived(Rewriter):
    """Replaces the n-th arrival at a counter by the constant 1."""

    def __init__(self, left: int):
        self.left = left

    def visit_Store(self, node: Store) -> Stmt:
        self.left -= _arrives(node)
        return replace(node, value=const(1, node.buffer.dtype)) if self.left == -1 and _arrives(node) else node


class _Change(Rewriter):
    """Replaces or removes the n-th ordering call."""

    def __init__(self, number: int, names: tuple[str, ...], by: Call | None):
        self.left, self.names, self.by = number, names, by

    def visit_Do(self, node: Do) -> Stmt:
        if not isinstance(node.call, Call) or node.call.name not in self.names:
            return node
        self.left -= 1
        if self.left != -1:
            return node
        return Block(()) if self.by is None else replace(node, call=self.by)
