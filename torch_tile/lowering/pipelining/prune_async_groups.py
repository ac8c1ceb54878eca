# SPDX-License-Identifier: Apache-2.0
"""Remove commits and waits of groups that contain no asynchronous copy.

Copies that cp.async cannot make become ordinary ones in bind_threads, after their groups were counted. The pass follows
all ways through a kernel with the groups committed last. It removes a commit that no copy can precede, and waits then
count the other groups only. It removes a wait at which no copy can be in flight. If a wait would count differently on
different ways, the pass removes waits only.
"""

from __future__ import annotations

from dataclasses import replace

from torch_tile.intrinsics.base import lookup
from torch_tile.intrinsics.traits import Engine, Sync
from torch_tile.ir import stmt as st
from torch_tile.ir.expr import Call
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Rewriter, contains, find, with_fields
from torch_tile.ir.simplify import simplify_stmt
from torch_tile.ir.stmt import Block, Break, Continue, Do, For, If, Program, Role, Stmt, While
from torch_tile.lowering.sync.accesses import trips

DROPPED, LANDED, FLYING = range(3)  # the state of a group on one way
MOST_WAYS, MOST_TRIPS = 256, 32  # most ways, and most iterations of a loop, to follow one by one

Way = tuple[bool, tuple[int, ...]]  # whether copies started since the last commit; the groups before, oldest first


def prune_async_groups(program: Program) -> Program:
    """Remove commits and waits that order no copy; the copies and their times do not change."""
    new = with_fields(program, kernels=tuple(_dropped(kernel) for kernel in program.kernels))
    return program if new is program else simplify_stmt(new)


def _dropped(kernel: st.Kernel) -> st.Kernel:
    """Remove useless commits and waits from one kernel; return the same kernel if it has none."""
    waits = [_pending(n) for n in find(kernel, Call) if _group_sync(n) is Sync.DRAIN]
    if not waits or contains(kernel, Break, Continue):
        return kernel
    found = _Groups(max(waits), None)
    if found.kernel(kernel):
        found = _Groups(max(waits), found.needed)
    if not found.kernel(kernel):
        return kernel
    return _Drop(found)(kernel)  # type: ignore[no-any-return]


def _pending(wait: Call) -> int:
    """Return the groups that a wait leaves in flight."""
    (pending,) = wait.options
    assert isinstance(pending, int)
    return pending


class _Groups:
    """Facts about each commit and wait, by identity of its call. `commits` are those that stay, if known."""

    def __init__(self, most: int, commits: IdSet[Call] | None):
        self.most, self.commits = most, commits
        self.needed: IdSet[Call] = IdSet()  # commits of copies, and waits for copies
        self.lost = False  # whether there were too many ways
        self.counts: IdMap[Call, set[int]] = IdMap()  # how many groups that stay a wait leaves in flight

    def kernel(self, kernel: st.Kernel) -> bool:
        """Follow all ways through a kernel; return whether they are few enough."""
        self.block(kernel.body, {(False, (DROPPED,) * (self.most + 1))})
        return not self.lost

    def block(self, block: Block, ways: set[Way]) -> set[Way]:
        """Return all ways after a block, given those before it; threads of one role have not run another role."""
        before = ways
        for one in block.stmts:
            if isinstance(one, Role):
                ways = ways | self.block(one.body, before)
            else:
                ways = before = self.stmt(one, ways)
            if len(ways) > MOST_WAYS:
                self.lost, ways = True, set()
        return ways

    def stmt(self, one: Stmt, ways: set[Way]) -> set[Way]:
        """Return all ways after a statement."""
        if isinstance(one, Block):
            return self.block(one, ways)
        if isinstance(one, If):
            return self.block(one.then, ways) | self.block(one.otherwise, ways)
        if isinstance(one, For | While):
            return self.loop(one, ways) if any(map(_is_copy, find(one, Call))) else ways
        call = one.call if isinstance(one, Do) else None
        if not isinstance(call, Call) or not _is_copy(call):
            return ways
        if lookup(call.name).starts:
            return {(True, groups) for _, groups in ways}
        step = self.commit if _group_sync(call) is Sync.COMMIT else self.wait
        return {step(call, *way) for way in ways}

    def loop(self, loop: For | While, ways: set[Way]) -> set[Way]:
        """Follow a loop as often as it runs; if that is not known, until its body adds no state."""
        count = trips(loop) if isinstance(loop, For) else None
        if count is not None and count <= MOST_TRIPS:
            for _ in range(count):
                ways = self.block(loop.body, ways)
            return ways
        seen: set[Way] = set()
        while new := ways - seen:
            seen |= new
            ways = ways | self.block(loop.body, new)
        return ways

    def commit(self, call: Call, is_open: bool, groups: tuple[int, ...]) -> Way:
        """Close a group. The oldest entry stands for all groups that every wait covers."""
        if is_open:
            self.needed.add(call)
        stays = is_open if self.commits is None else call in self.commits
        oldest = max(groups[:2]) if self.most else groups[0]
        new = FLYING if stays else DROPPED
        return False, (oldest, *groups[2:], new) if self.most else (max(oldest, new),)

    def wait(self, call: Call, is_open: bool, groups: tuple[int, ...]) -> Way:
        """Complete all but the youngest groups."""
        first = len(groups) - _pending(call)
        old, young = groups[:first], groups[first:]
        if FLYING in old:
            self.needed.add(call)
        self.counts.setdefault(call, set()).add(sum(g != DROPPED for g in young))
        return is_open, (*(min(g, LANDED) for g in old), *young)

    def agree(self) -> bool:
        """Return whether commits can go: each wait that stays counts the same on all ways."""
        return all(len(count) == 1 for wait, count in self.counts.items() if wait in self.needed)


def _is_copy(call: Call) -> bool:
    """Return whether a call starts an asynchronous copy."""
    return lookup(call.name).engine is Engine.COPY


def _group_sync(call: Call) -> Sync | None:
    """Return COMMIT for a call that commits a group of copies, DRAIN for one that waits for groups, else None."""
    return lookup(call.name).sync if _is_copy(call) else None


class _Drop(Rewriter):
    """Remove commits and waits that `found` does not need."""

    def __init__(self, found: _Groups):
        self.found, self.agree = found, found.agree()

    def visit_Do(self, node: Do) -> Stmt:
        """Remove an unneeded commit or wait, and adjust the count of any other wait."""
        call = node.call
        if not isinstance(call, Call) or _group_sync(call) is None:
            return node
        is_wait = _group_sync(call) is Sync.DRAIN
        if call not in self.found.needed and (is_wait or self.agree):
            return Block(())
        count = min(self.found.counts[call]) if is_wait and self.agree else None
        return node if count is None or count == _pending(call) else replace(node, call=replace(call, options=(count,)))
