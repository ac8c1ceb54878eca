# SPDX-License-Identifier: Apache-2.0
"""Find how much the buffers take that are alive at once, on stage TILE.

A buffer is alive from a statement that writes all of it to its last reader. If an iteration reads what the one before
left, the buffer is alive through the whole loop. Loops are taken to run at least once, and to be left at their end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Node, find
from torch_tile.ir.stmt import Alloc, Block, For, If, LoopKind, Role, While
from torch_tile.lowering.pipelining.copy_plan import first_access
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.uses import reads_of, uses


def most_alive(body: Block, threads: int, size: Callable[[Buffer], int]) -> int:
    """Return the largest sum of `size` of buffers that are alive at once in `body`, which `threads` threads run.

    Roles count as if all threads held as much as theirs.
    What a statement reads is alive together with what it writes. A nest over elements replaces them one by one.
    """
    found = _Liveness(threads, size)
    found.before(body, IdSet())
    return found.most


class _Liveness:
    """Walk backwards from the end of a body, and keep the largest sum."""

    def __init__(self, threads: int, size: Callable[[Buffer], int]):
        self.threads, self.size, self.most = threads, size, 0
        self.working = threads  # that run the statement

    def before(self, node: Node, after: IdSet[Buffer]) -> IdSet[Buffer]:
        """Return the buffers that are alive before `node`, given those behind it."""
        if isinstance(node, Block):
            for one in reversed(node.stmts):
                after = self.before(one, after)
            return after
        if isinstance(node, Role):
            self.working = node.count
            after = self.before(node.body, after)
            self.working = self.threads
            return after
        if isinstance(node, If):
            branches = (self.before(branch, after) for branch in (node.then, node.otherwise))
            return IdSet(b for part in (reads_of(node.condition), *branches) for b in part)
        if isinstance(node, While) or (isinstance(node, For) and node.kind is not LoopKind.PARALLEL):
            bounds = (node.condition,) if isinstance(node, While) else (*node.starts, *node.stops)
            first = self.before(node.body, after)
            first = self.before(node.body, IdSet((*after, *first)))  # which the next iteration reads
            return IdSet((*first, *(b for bound in bounds for b in reads_of(bound))))
        return self.leaf(node, after)

    def leaf(self, node: Node, after: IdSet[Buffer]) -> IdSet[Buffer]:
        """Return the buffers that are alive before a statement, and count those that are alive at it."""
        read, written = uses(node)
        begun = IdSet(alloc.buffer for alloc in find(node, Alloc))
        by_elements = isinstance(node, For)
        if by_elements:
            begun = IdSet((*begun, *(b for b in written if b not in read)))
        elif isinstance(node, RegisteredOp):
            begun = IdSet((*begun, *(b for b in written if first_access((node,), b) == "written")))
        before = IdSet(b for b in (*after, *read) if b not in begun)
        together = self.sum((*before, *after, *written))
        if by_elements:
            together = max(self.sum(before), self.sum((*after, *written)))
        self.most = max(self.most, together * self.threads // self.working)
        return before

    def sum(self, buffers: Iterable[Buffer]) -> int:
        """Add up the sizes of buffers, each once."""
        return sum(self.size(one) for one in IdSet(buffers))
