# SPDX-License-Identifier: Apache-2.0
"""Decide which copies in front of a pipelined loop may begin with the loop's first stage.

A copy through registers holds its thread until memory answers. Only then would the loop's own copies begin. As part of
the first group of the loop, the copy arrives beside them. Every reader in the loop waits for that group or a later one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import symbols
from torch_tile.ir.stmt import Alloc, For, Let, LoopKind, Stmt, Store
from torch_tile.lowering.pipelining.copy_plan import filling, leaves
from torch_tile.lowering.pipelining.schedule import Schedule
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.uses import uses


def copies_before(stmts: Sequence[Stmt], loop: For, schedule: Schedule) -> list[Copy]:
    """Return the copies among the statements in front of a loop that may begin with its first stage, in order.

    A later statement must not read their tiles, which stay empty where the loop has no iteration.
    """
    found: list[Copy] = []
    between: IdSet[Buffer] = IdSet()
    if not max(item.ahead for item in schedule.items):
        return found
    for one in reversed(stmts):
        if not _is_plain(one):
            break
        if type(one) is Copy and _may_wait(one, between, loop, schedule):
            found.insert(0, one)
        else:
            between |= _buffers_of(one)
    return found


def _is_plain(one: Stmt) -> bool:
    """Return whether a statement neither leaves the block, nor orders threads or copies."""
    return isinstance(one, Alloc | Let | Store | RegisteredOp) or (
        isinstance(one, For) and one.kind is LoopKind.PARALLEL
    )


def _may_wait(copy: Copy, between: IdSet[Buffer], loop: For, schedule: Schedule) -> bool:
    """Return whether a copy may move behind what stands `between` it and the loop, and the loop's readers wait."""
    how = filling(copy)
    if how is None or how.converts or between & _buffers_of(copy):
        return False
    tile, staged, is_read = how.region.buffer, IdSet(schedule.staged), False
    for leaf in leaves(loop.body):
        reads, writes = uses(leaf.node)
        if tile in writes or copy.src.buffer in writes:
            return False
        if tile in reads:
            is_read = True
            if not reads & staged:
                return False
    return is_read


def _buffers_of(one: Stmt) -> IdSet[Buffer]:
    """Return the buffers that a statement allocates, reads or writes."""
    return IdSet(each for each in symbols(one) if isinstance(each, Buffer))
