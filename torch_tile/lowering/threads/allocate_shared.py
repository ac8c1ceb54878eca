# SPDX-License-Identifier: Apache-2.0
"""Assign offsets in the block's shared memory to shared buffers; buffers that are never alive together share bytes.

A buffer is alive from its first access to its last. If it outlives an iteration of a loop, it is alive through the
whole loop. Each buffer takes the smallest gap that it fits, larger buffers first. Memory used again may cost a barrier
(insert_barriers decides), so small buffers keep bytes of their own. So do mbarriers, tiles that an author's bulk copies
fill, and tiles that copies fill but nothing reads: no barrier of threads says when those are done. Different roles use
their buffers at the same time. A buffer that other blocks of a cluster read is alive until the cluster has met.

The compiler's own roles pass tiles on: who reads a tile has waited for each copy into it. Such a tile is alive from the
start of the roles to its last reader. A tile that bulk stores read is alive to the end of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import Span, error
from torch_tile.intrinsics.base import starts, syncs
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Expr, Load
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, children, contents, find, with_fields
from torch_tile.ir.stmt import Alloc, Block, For, Kernel, Program, Role, Stmt, Store, While

SCOPES = ("shared", "barrier")  # scopes of buffers in shared memory
ALIGNMENT = 128  # bytes: a row of all banks
BARRIER_ALIGNMENT = 8  # bytes: one mbarrier
SWIZZLED_ALIGNMENT = 1024  # bytes: eight such rows, after which every swizzle repeats
SMALL = 1024  # bytes: sharing memory of smaller buffers saves less than the barrier that it costs
SPARE = 4096  # most bytes to spend on small buffers of their own
_COUNTED = Load.bit | Store.bit | Address.bit | Call.bit | Alloc.bit | Role.bit | For.bit | While.bit  # at the clock


def allocate_shared(program: Program, build: Build) -> Program:
    """Assign every shared buffer its offset and every kernel its `shared_bytes`.

    Raises TileError (`shared_memory`) if a block needs more than the target has.
    """
    return with_fields(program, kernels=tuple(_placed(kernel, build) for kernel in program.kernels))


@dataclass
class Life:
    """The live range of a buffer, from its `first` to its `last` access, as positions in the kernel's text."""

    buffer: Buffer
    span: Span | None
    loops: tuple[int, ...]  # loops around its allocation
    first: int = -1
    last: int = -1
    roles: frozenset[tuple[int, int]] = frozenset()  # roles that use it: number of their group, first thread
    alone: bool = False

    def touch(self, at: int, role: tuple[int, int] | None) -> None:
        """Note an access at a position, in a role or outside of all."""
        self.first = at if self.first < 0 else self.first
        self.last = at
        self.roles |= {role} if role else frozenset()

    @property
    def size(self) -> int:
        """Return the size of the buffer in bytes."""
        return shared_size(self.buffer)

    def conflicts(self, other: Life) -> bool:
        """Return whether both buffers are alive at some point."""
        together = any(a[0] == b[0] and a != b for a in self.roles for b in other.roles)
        return self.alone or other.alone or together or (self.first <= other.last and other.first <= self.last)


def shared_size(buffer: Buffer) -> int:
    """Return the bytes that a shared buffer takes, holes of its layout included."""
    shape = buffer.static_shape
    assert shape is not None, f"`{buffer.name}` has a dynamic size"
    elements = math.prod(shape) if buffer.layout is None else buffer.layout.extent("m")
    return elements * buffer.dtype.itemsize


def _placed(kernel: Kernel, build: Build) -> Kernel:
    """Assign offsets to the buffers of one kernel, with small buffers on their own if there is room.

    Tiles of bulk copies lend their bytes only if more blocks fit on a multiprocessor then: what takes their place may
    wait at another barrier. Tilings that were measured must ask for these by `min_blocks`.
    """
    lives = lives_of(kernel, lends=False)
    if all(n.buffer.offset is not None for n in find(kernel, Alloc) if n.buffer.scope in SCOPES):
        return kernel
    offsets, total = _offsets(lives)
    lending = lives_of(kernel)
    closer, least = _offsets(lending)
    fit, most = (build.target.blocks_at_once(math.prod(kernel.threads), 1, size) for size in (total, least))
    if fit < (min(kernel.min_blocks, most) if build.options.measured else most):
        lives, offsets, total = lending, closer, least
    apart, more = _offsets([replace(x, alone=True) if x.size <= SMALL else x for x in lives])
    if more <= min(total + SPARE, build.target.shared_limit):
        offsets, total = apart, more
    if total > build.target.shared_limit:
        worst = max(lives, key=lambda life: life.size)
        table = "\n".join(_row(life, offsets[life.buffer]) for life in sorted(lives, key=lambda x: -x.size))
        notes = [(None, table)]
        limit = build.target.shared_limit
        raise error("shared_memory", worst.span, notes, need=total, target=str(build.target), limit=limit)
    new: Kernel = _Place(offsets)(kernel)
    return replace(new, shared_bytes=total)


def _row(life: Life, offset: int) -> str:
    """Format one line of the error's table of shared memory."""
    shape = "x".join(str(n) for n in life.buffer.static_shape or ())
    return f"{life.size:8} bytes at {offset:6}: {life.buffer.name} ({shape} {life.buffer.dtype})"


def _written_by_others(kernel: Kernel) -> IdSet[Buffer]:
    """Return the mbarriers and the tiles that other blocks may write at any time."""
    found: IdSet[Buffer] = IdSet()
    for node in find(kernel, Alloc, Call):
        if isinstance(node, Alloc) and node.buffer.scope == "barrier":
            found.add(node.buffer)
        if isinstance(node, Call) and node.name == "store_at_rank":
            assert isinstance(node.args[0], Address)
            found.add(node.args[0].buffer)
    return found


def lives_of(kernel: Kernel, lends: bool = True) -> list[Life]:
    """Return the live ranges of a kernel's used shared buffers, in order; with `lends` copies' tiles end early."""
    found: IdMap[Buffer, Life] = IdMap()
    begins, ends = list[int](), list[int]()  # first and last position of each loop, by its number
    inside: list[tuple[Life, tuple[int, ...]]] = []
    filled: IdSet[Expr] = IdSet()  # addresses that asynchronous copies fill
    used: IdSet[Buffer] = IdSet()  # buffers that something else touches
    lent: IdMap[Buffer, Life] = IdMap()  # tiles that other blocks may be reading, as this block reads theirs
    passed: IdMap[Buffer, int] = IdMap()  # tiles that a role of the compiler fills, and when the roles begin
    stored: list[tuple[Life, tuple[int, ...]]] = []  # tiles that bulk stores read, and the loops around these
    apart = _written_by_others(kernel)
    clock = group = start = 0
    role: tuple[int, int] | None = None
    is_own = False  # whether the role is the compiler's

    def visit(node: Node, loops: tuple[int, ...]) -> None:
        """Advance the clock over a node and its children, and record their accesses."""
        nonlocal clock, role, is_own
        clock += 1
        if isinstance(node, Load | Store | Address):
            is_filled = node in filled
            if not is_filled:
                used.add(node.buffer)
            is_fill = is_filled and isinstance(node, Address) and node.buffer in passed
            if (life := found.get(node.buffer)) and not is_fill:
                life.touch(clock, role)
                inside.append((life, loops))
        elif isinstance(node, Call):
            if starts(node, Engine.BULK):
                for address in node.args:
                    if not isinstance(address, Address) or (life := found.get(address.buffer)) is None:
                        continue
                    if not lends or (node.name == "tma_load" and (role is None or not is_own)):
                        life.alone = True
                    elif node.name != "tma_load":
                        stored.append((life, loops))
                    else:
                        passed[address.buffer] = start
                        filled.add(address)
            if starts(node, Engine.COPY):
                filled.add(node.args[0])
            if node.name == "at_rank":
                lent.update((a.buffer, found[a.buffer]) for a in node.args if isinstance(a, Address))
            if syncs(node, Sync.WAIT, Scope.CLUSTER):  # other blocks have read the tiles by now
                for life in lent.values():
                    life.last = clock
                    inside.append((life, loops))
                lent.clear()
        elif isinstance(node, For | While):
            loops = (*loops, len(ends))
            begins.append(clock)
            ends.append(0)
        elif isinstance(node, Alloc) and node.buffer.scope in SCOPES:
            found[node.buffer] = Life(node.buffer, node.span, loops, alone=node.buffer in apart)
        elif isinstance(node, Role):
            role, is_own = (group, node.first), not node.by_hand
        for child in children(node):
            if contents(child) & _COUNTED:
                visit(child, loops)
        if isinstance(node, For | While):
            ends[loops[-1]] = clock
        if isinstance(node, Role):
            role = None

    for stmt in kernel.body.stmts:
        if not isinstance(stmt, Role):  # consecutive roles run at the same time
            group, start = group + 1, clock + 1
        visit(stmt, ())
    for life in lent.values():
        life.alone = True
    for life, loops in inside:
        for loop in loops[len(life.loops) :]:
            life.first, life.last = min(life.first, begins[loop]), max(life.last, ends[loop])
    for life, loops in stored:
        life.first, life.last = min(life.first, *(begins[loop] for loop in loops[:1]), life.first), clock
    for buffer, begin in passed.items():
        life = found[buffer]
        life.first, life.last = begin if life.first < 0 else min(begin, life.first), max(begin, life.last)
    return [replace(x, alone=x.alone or i not in used) for i, x in found.items() if x.first >= 0]


def _offsets(lives: Sequence[Life]) -> tuple[IdMap[Buffer, int], int]:
    """Choose an offset for each buffer, the smallest gap that fits between live buffers; also return the total."""
    placed: list[tuple[Life, int]] = []
    for life in sorted(lives, key=lambda x: -x.size):
        unit = _alignment(life.buffer)
        taken = sorted((offset, offset + other.size) for other, offset in placed if other.conflicts(life))
        fitting = [(end - at, at) for at, end in _gaps(taken, unit) if end - at >= life.size]
        placed.append((life, min(fitting)[1]))
    total = max((offset + life.size for life, offset in placed), default=0)
    return IdMap((life.buffer, offset) for life, offset in placed), total


def _alignment(buffer: Buffer) -> int:
    """Return the alignment of a buffer's offset in bytes."""
    if buffer.scope == "barrier":
        return BARRIER_ALIGNMENT
    swizzled = buffer.layout is not None and buffer.layout.swizzle is not None
    return SWIZZLED_ALIGNMENT if swizzled else ALIGNMENT


def _gaps(taken: Sequence[tuple[int, int]], unit: int) -> Iterator[tuple[int, float]]:
    """Yield the free ranges that start at a multiple of `unit`; the last range has no end."""
    at = 0
    for start, end in taken:
        if start > at:
            yield at, start
        at = max(at, -(-end // unit) * unit)
    yield at, math.inf


class _Place(Rewriter):
    """Replace buffers by copies with an offset, and drop allocations of unused buffers."""

    def __init__(self, offsets: IdMap[Buffer, int]):
        self.offsets = offsets
        self.made: IdMap[Buffer, Buffer] = IdMap()

    def visit_Alloc(self, node: Alloc) -> Stmt:
        new = self.made_for(node.buffer)
        if new.scope in SCOPES and new.offset is None:
            return Block(())  # never used
        node = self.children(node)  # an initial value may be an element of another buffer
        return with_fields(node, buffer=new)

    def made_for(self, buffer: Buffer) -> Buffer:
        """Return the copy of `buffer` that has its offset."""
        if buffer not in self.offsets:
            return buffer
        if buffer not in self.made:
            self.made[buffer] = replace(buffer, offset=self.offsets[buffer])
        return self.made[buffer]

    def visit_Buffer(self, buffer: Buffer) -> Buffer:
        return self.made_for(buffer)
