# SPDX-License-Identifier: Apache-2.0
"""Find writes of tiles that nothing reads afterwards, as where a tile is copied out too early.

Only certain ones count: no statement behind reads any part of the tile, or those that do are idle themselves. Where
threads or blocks run apart, reads that stand before a write count as well. Variables, clears and the library's own
lines are left alone: options of a kernel may leave them unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Set as AbstractSet

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Node, contains, find
from torch_tile.ir.stmt import Block, For, If, Kernel, Program, Role, Stmt, Store, While
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.uses import uses


def unread_writes(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for the last write of each tile that nothing reads afterwards."""
    return [found for kernel in program.kernels for found in _Needed(kernel).diagnostics()]


class _Needed:
    """Walk backwards from the end of a kernel, and keep the statements that something needs."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.needed: IdSet[Stmt] = IdSet()
        live: AbstractSet[Buffer] = IdSet()
        is_apart = kernel.thread is not None or kernel.cluster != (1, 1, 1) or contains(kernel.body, Role)
        while True:
            before = self.live_before(kernel.body, live)
            if not is_apart or len(before) == len(live):
                break
            live = before  # another thread may be where the kernel begins

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yield a diagnostic for the last write of each tile that no statement needs, unless one behind reads it."""
        writes = [(node, *_accesses(node)) for node in find(self.kernel.body, Store, RegisteredOp)]
        lines = {node.span for node, _, _ in writes if node in self.needed}  # one line may be unrolled by Python
        seen: IdSet[Buffer] = IdSet()  # written or passed on behind
        for node, read, written in reversed(writes):
            if (
                node in self.needed
                or node.span in lines
                or isinstance(node, Fill)
                or node.span is None
                or node.span.is_of_library  # a macro of ours, whose caller reads a part
            ):
                continue
            for buffer in written - seen:
                early = next((each.span for each, r, _ in writes if each in self.needed and buffer in r), None)
                notes = [(early, "it is read here, before")] if early else []
                yield diagnose("unread_write", node.span, notes, buffer=buffer.name)
            seen |= read | written

    def live_before(self, node: Node, after: AbstractSet[Buffer]) -> AbstractSet[Buffer]:
        """Return the buffers that are live before `node`, given those live after it."""
        if isinstance(node, Block):
            for one in reversed(node.stmts):
                after = self.live_before(one, after)
            return after
        if isinstance(node, If):
            return (
                self.live_before(node.then, after)
                | self.live_before(node.otherwise, after)
                | _accesses(node.condition)[0]
            )
        if isinstance(node, Role):
            return self.live_before(node.body, after)
        if isinstance(node, For | While):
            for bound in (node.condition,) if isinstance(node, While) else (*node.starts, *node.stops):
                after = after | _accesses(bound)[0]
            while len(again := after | self.live_before(node.body, after)) > len(after):
                after = again
            return after
        reads, writes = _accesses(node)
        is_own = isinstance(node, Store | RegisteredOp) and writes and not contains(node, Address)
        if is_own and all(b.scope not in ("global", "var") and b not in after for b in writes):
            return after
        if isinstance(node, Stmt):
            self.needed.add(node)
        return after | reads


def _accesses(node: Node) -> tuple[IdSet[Buffer], IdSet[Buffer]]:
    """Return the buffers that a node reads, and the buffers that it writes, each view by its base."""
    reads, writes = uses(node)
    return IdSet(b.base or b for b in reads), IdSet(b.base or b for b in writes)
