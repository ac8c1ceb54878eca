# SPDX-License-Identifier: Apache-2.0
"""Find the buffers that a statement or value reads or writes, tile ops and calls inside it included.

A pointer that a call is given counts as both. Views count as themselves, not as the buffer that they show.
"""

from __future__ import annotations

from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Call, Load
from torch_tile.ir.idmap import IdSet, mentions
from torch_tile.ir.node import Node, find
from torch_tile.ir.stmt import Print, Store
from torch_tile.tileop.base import RegisteredOp


def uses(node: Node) -> tuple[IdSet[Buffer], IdSet[Buffer]]:
    """Return the buffers that `node` reads, and those that it writes."""
    reads: IdSet[Buffer] = IdSet()
    writes: IdSet[Buffer] = IdSet()
    for n in find(node, RegisteredOp, Load, Store, Call, Region):
        if isinstance(n, RegisteredOp):
            read, written = n.accesses()
            reads.update(r.buffer for r in read)
            writes.update(r.buffer for r in written)
        elif isinstance(n, Load):
            reads.add(n.buffer)
        elif isinstance(n, Store):
            writes.add(n.buffer)
        elif isinstance(n, Call):
            named = [a.buffer for a in n.args if isinstance(a, Address)]
            reads.update(named)
            writes.update(named)
        elif not isinstance(node, RegisteredOp):
            reads.add(n.buffer)  # regions of T.print; operands of tile ops inside count as read, which is safe
    return reads, writes


def reads_of(node: Node) -> IdSet[Buffer]:
    """Return the buffers that `node` reads."""
    return uses(node)[0]


def writes_of(node: Node) -> IdSet[Buffer]:
    """Return the buffers that `node` writes."""
    return uses(node)[1]


def touched_by(node: Node) -> IdSet[Buffer]:
    """Return the buffers that `node` reads or writes."""
    reads, writes = uses(node)
    reads.update(writes)
    return reads


def count_uses(buffer: Buffer, node: Node) -> int:
    """Count the places of `node` that read or write a buffer."""
    found = find(node, RegisteredOp, Load, Store, Address, Print)
    return sum(mentions(n, buffer) if isinstance(n, RegisteredOp | Print) else n.buffer is buffer for n in found)
