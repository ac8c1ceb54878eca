# SPDX-License-Identifier: Apache-2.0
"""Move the wait for a bulk store from its start to the next write of its tile.

In straight code, and around a loop, the pass knows the next statement that writes a store's tile. Reads in between
need no wait. As many groups may be in flight there as are committed between the two. Stored values, and the time when a
tile is free, do not change. The wait names the tile, so that insert_barriers puts a barrier between the wait and the
writers. Where each warp stores its rows, the wait names these rows, and a barrier of the warp follows it.
T.arrive_last and fences of all memory tell other blocks that a block's results are there. In kernels with them, some
stores are waited for at once and completely: those to a tensor that the kernel also touches elsewhere, and those that
combine with what is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch_tile.hardware import WARP
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.bulk import bulk_wait, rows_and_columns
from torch_tile.intrinsics.memory import warp_barrier
from torch_tile.intrinsics.traits import Engine, Sync
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Binary, Call, Const, Expr, Load, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Rewriter, contains, equal, find, symbols, with_fields
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, Do, For, If, Kernel, LoopKind, Program, Stmt, Store, calls
from torch_tile.lowering.sync.accesses import Collector

ZERO = const(0, int32)
TELL = "arrive_last", "memory_fence"  # what tells other blocks of results


def sink_store_waits(program: Program) -> Program:
    """Move the waits of bulk stores to the next write of their tiles; values do not change."""
    return _Defer()(program)  # type: ignore[no-any-return]


def _completed(kernel: Kernel) -> Kernel:
    """Make the kernel wait completely for stores whose results other blocks may read or overwrite."""
    if not any(call.name in TELL for call in find(kernel.body, Call)):
        return kernel
    touched = Counter(n.buffer for n in find(kernel.body, Load, Store, Address, TensorMap))
    alone = IdSet[Buffer]()  # tensors that only the stores of one IR block touch
    for block in find(kernel.body, Block):
        stored = Counter(n.buffer for one in block.stmts if isinstance(one, Do) for n in find(one, TensorMap))
        alone |= {n for n, count in stored.items() if count == touched[n]}
    combined = [call for call in find(kernel.body, Call) if call.name == "tma_store" and any(call.options)]
    alone -= IdSet(n.buffer for call in combined for n in find(call, TensorMap))  # by other blocks, too
    return _Complete(alone)(kernel)  # type: ignore[no-any-return]


class _Complete(Rewriter):
    """Wait until the results of stores are in memory, except for stores to the tensors `alone` (by identity)."""

    def __init__(self, alone: IdSet[Buffer]):
        self.alone = alone

    def visit_Block(self, block: Block) -> Block:
        """Make the waits of a block complete if it stores to a tensor that the kernel touches elsewhere."""
        new: Block = self.children(block)
        stores = [one for one in block.stmts if calls(one, "tma_store")]
        if all(n.buffer in self.alone for one in stores for n in find(one, TensorMap)):
            return new
        done = bulk_wait(0, False)
        return replace(new, stmts=tuple(replace(done, span=s.span) if calls(s, "bulk_wait") else s for s in new.stmts))


@dataclass
class _Started:
    """Stores of `tiles` that begin at statement `place` of a block, in the threads with `condition`, and wait."""

    place: int
    condition: Expr
    tiles: list[Buffer]
    stores: list[Call]


class _Defer(Rewriter):
    """Move waits in blocks, inner blocks first; the body of a loop is followed by itself."""

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Complete the stores that other blocks wait for, then move the remaining waits."""
        return self.children(_completed(kernel))

    def visit_Block(self, block: Block) -> Block:
        """Move the waits of straight code."""
        new: Block = self.children(block)
        return _deferred(new, iterations=False)[0]

    def visit_For(self, loop: For) -> Stmt:
        """Move the waits of a loop's body, also into its next iteration."""
        if loop.kind is not LoopKind.SERIAL or contains(loop.body, Break, Continue):
            new: For = self.children(loop)
            return new
        body, left = _deferred(self.children(loop.body), iterations=True)
        new = with_fields(loop, body=body)
        return Block((new, *left)) if left else new


def _deferred(block: Block, iterations: bool) -> tuple[Block, list[Stmt]]:
    """Move the waits of a block as late as possible; also return the waits that its last iteration leaves."""
    stmts = block.stmts
    waits: dict[int, list[_Started]] = {}  # by the statement that they precede
    left: list[_Started] = []
    moved = set()
    own = IdSet(n.buffer for n in find(block, Alloc))  # buffers that end with an iteration
    for one in _starts(stmts):
        again = iterations and not any(t in own for t in one.tiles)
        later = [*range(one.place + 1, len(stmts)), *(range(one.place) if again else ())]
        to = next((n for n in later if _writes(stmts[n], one.tiles)), None)
        if to is None:
            continue
        moved.add(one.place)
        waits.setdefault(to, []).append(one)
        if to < one.place:
            left.append(one)
    if not moved:
        return block, []
    new: list[Stmt] = []
    for n, stmt in enumerate(stmts):
        groups = _alike(waits.get(n, []))
        new += (_wait(group, _pending(stmts, group, n), stmt) for group in groups)
        new += [warp_barrier()] if any(_is_first_of_warp(group[0].condition) for group in groups) else []
        new.append(_without_wait(stmt) if n in moved else stmt)
    return Block(tuple(new), span=block.span), [_wait(group, 0, stmts[group[-1].place]) for group in _alike(left)]


def _starts(stmts: Sequence[Stmt]) -> Iterator[_Started]:
    """Yield the bulk stores of a block, each with the tiles that it reads."""
    for place, one in enumerate(stmts):
        if isinstance(one, If) and _is_start(one):
            calls = [s.call for s in one.then.stmts if isinstance(s, Do) and isinstance(s.call, Call)]
            stores = [call for call in calls if call.name == "tma_store"]
            addresses = [a for call in stores for a in call.args if isinstance(a, Address)]
            yield _Started(place, one.condition, list(dict.fromkeys(a.buffer for a in addresses)), stores)


def _is_start(one: Stmt) -> bool:
    """Return whether a statement is a branch that only makes bulk stores, commits them and waits for them."""
    if not isinstance(one, If) or one.otherwise.stmts:
        return False
    if len(one.then.stmts) < 3:
        return False
    *stores, commit, wait = (s.call if isinstance(s, Do) else None for s in one.then.stmts)
    if not all(isinstance(s, Call) and s.name == "tma_store" for s in stores) or not _is_group(commit, Sync.COMMIT):
        return False
    return _is_group(wait, Sync.DRAIN) and isinstance(wait, Call) and wait.options == (0, True) and not wait.args


def _is_group(node: object, how: Sync) -> bool:
    """Return whether a call commits (`how` is COMMIT) or waits for (DRAIN) groups of bulk stores."""
    found = intrinsic_of(node)
    return found is not None and (found.engine, found.sync) == (Engine.BULK, how)


def _writes(one: Stmt, tiles: Sequence[Buffer]) -> bool:
    """Return whether a statement writes one of the tiles."""
    return any(access.writes for access in Collector({}, IdSet(tiles)).of(one))


def _pending(stmts: Sequence[Stmt], group: Sequence[_Started], to: int) -> int:
    """Count the groups that the same threads certainly commit between the last of these stores and statement `to`."""

    def between(one: _Started) -> int:
        way = range(one.place + 1, to) if to > one.place else (*range(one.place + 1, len(stmts)), *range(to))
        return sum(_commits(stmts[n], one.condition) for n in way)

    return min(map(between, group))


def _commits(one: Stmt, condition: Expr) -> bool:
    """Return whether a statement commits a group in the threads for which `condition` holds."""
    if not isinstance(one, If) or not equal(one.condition, condition):
        return False
    return any(isinstance(s, Do) and _is_group(s, Sync.COMMIT) for s in one.then.stmts)


def _alike(group: Sequence[_Started]) -> list[list[_Started]]:
    """Group stores that start under the same condition."""
    found: list[list[_Started]] = []
    for one in group:
        mine = next((g for g in found if equal(g[0].condition, one.condition)), None)
        if mine is None:
            found.append([one])
        else:
            mine.append(one)
    return found


def _wait(group: Sequence[_Started], pending: int, at: Stmt) -> Stmt:
    """Build the wait for a group of stores that leaves `pending` groups in flight."""
    condition = group[0].condition
    boxes = {rows_and_columns(call) for one in group for call in one.stores}
    places = [a for one in group for call in one.stores for a in call.args if isinstance(a, Address)]
    steady = symbols(condition)  # the thread alone: it is the same at the wait
    known = len(boxes) == 1 and all(symbols(i) <= steady for a in places for i in a.indices)
    if _is_first_of_warp(condition) and known:
        wait = bulk_wait(pending, True, places, *boxes)
    else:
        tiles = IdMap((t, t) for one in group for t in one.tiles).values()
        wait = bulk_wait(pending, True, [Address(t, (ZERO,) * t.rank) for t in tiles])
    return If(condition, Block((replace(wait, span=at.span),)), Block(()), span=at.span)


def _is_first_of_warp(condition: Expr) -> bool:
    """Return whether a condition holds for the first thread of each warp, as of T.tma_copy with `by_warps`."""
    match condition:
        case Binary("==", Binary("%", _, Const(value=size)), Const(value=0)):
            return bool(size == WARP)
    return False


def _without_wait(one: Stmt) -> Stmt:
    """Remove the wait at the end of a branch that starts stores."""
    assert isinstance(one, If)
    return replace(one, then=Block(one.then.stmts[:-1], span=one.then.span))
