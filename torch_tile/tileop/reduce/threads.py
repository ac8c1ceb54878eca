# SPDX-License-Identifier: Apache-2.0
"""Reduce on the threads of a block: in registers, then in a warp by shuffles, then across warps in shared memory.

Shuffles go in butterflies. Assumes that fragments have layouts. Afterwards every thread that holds a part of a row
holds the row's result. All of them have the same bits: each step reduces in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics.memory import shuffle_xor
from torch_tile.ir import dtype as dt, layout as layouts
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr, Load, Var, cast, const, select
from torch_tile.ir.layout import Layout
from torch_tile.ir.layout_ops import owner_of
from torch_tile.ir.stmt import Alloc, Block, For, If, LoopKind, Stmt, Store
from torch_tile.tileop.base import conjunction, describe, identity_of, indices_at

if TYPE_CHECKING:
    from torch_tile.tileop.reduce.op import Reduce
    from torch_tile.tileop.threads import ThreadContext

Merge = Callable[[str, Expr, Expr], Expr]
ZERO = const(0, dt.int32)
MOST_WARPS = 32  # of a block; more entries than that are folded in a loop


@dataclass(frozen=True)
class Step:
    """A register digit of a layout as an unrolled loop: a turn moves `place` along `dim` and `stride` registers on."""

    var: Var
    size: int
    dim: int
    place: int
    stride: int


def steps_of(layout: Layout) -> list[Step]:
    """Return the register digits as steps, in the order of the dimensions, major to minor."""
    found: list[Step] = []
    for dim, digits in enumerate(layout.dims):
        place = math.prod(d.size for d in digits)
        for digit in digits:
            place //= digit.size
            if digit.axis == "r" and digit.size > 1:
                name = "ijklmn"[dim] + (str(len(found)) if len(found) else "")
                found.append(Step(Var(name, dt.int32, "loop"), digit.size, dim, place, digit.stride))
    return found


def coordinate(layout: Layout, dim: int, thread: Expr, steps: Sequence[Step]) -> Expr:
    """Compute the index along `dim` of the element that `thread` holds at a turn of the steps."""
    total: Expr = ZERO
    place = math.prod(d.size for d in layout.dims[dim])
    for digit in layout.dims[dim]:
        place //= digit.size
        if digit.axis == "t" and digit.size > 1:
            total = total + thread // digit.stride % digit.size * place
    for step in steps:
        if step.dim == dim:
            total = total + step.var * step.place
    return total


def unrolled(steps: Sequence[Step], body: Stmt) -> Stmt:
    """Repeat the body at every iteration of the steps."""
    for step in reversed(steps):
        body = For(LoopKind.UNROLLED, (step.var,), (ZERO,), (const(step.size, dt.int32),), Block((body,)))
    return body


def accumulator(source: dt.DType, target: dt.DType) -> dt.DType:
    """Return the type in which a reduction from `source` to `target` is computed: at least 32 bits."""
    if target.is_float:
        double = "float64" in (source.name, target.name)
        return dt.float64 if double else dt.float32
    if target.bits == 64:
        return target
    return dt.uint32 if target.kind == "uint" else dt.int32


def static(extents: Sequence[Expr], op: Reduce) -> tuple[int, ...]:
    """Return extents as integers; raise an author error where one is known only at run time."""
    sizes = [e.value for e in extents if isinstance(e, Const)]
    if len(sizes) < len(extents):
        what, fix = f"a reduction of {describe(extents)}", "copy to a tile of constant size and reduce that"
        raise error("unsupported_on_target", op.span, what=what, target="cuda", fix=fix)
    return tuple(int(s) for s in sizes)


def folded_dims(op: Reduce) -> set[int]:
    """Return the source fragment's dimensions that the result lacks: the reduced one, and those given by one index."""
    kept = [d for d, r in enumerate(op.src.ranges) if r.keep]
    return {d for d, r in enumerate(op.src.ranges) if not r.keep} | {kept[op.dim]}


def result_layout(op: Reduce, source: Layout, folded: set[int]) -> Layout:
    """Return the layout in which results need no move: the source's layout without the folded dimensions."""
    result = source
    for dim in sorted(folded, reverse=True):
        result = result.drop(dim)
    dims = list(result.dims)
    if len(op.dst.tile_shape) != len(dims):
        dims.insert(op.dim, ())
    for dim, r in enumerate(op.dst.ranges):
        if not r.keep:  # given by one index
            dims.insert(dim, ())
    return replace(result, dims=tuple(dims))


def source_layout(op: Reduce, known: Layout | None, threads: int) -> Layout | None:
    """Return the layout in which the source is walked: a fragment's own, or memory spread over the threads."""
    if op.src.buffer.scope == "fragment":
        return known
    return layouts.spread(static(op.src.tile_shape, op), threads, 1)


class ThreadReduce:
    """The code of one reduction for one thread; the methods give its statements in order."""

    dtype: dt.DType
    op: Reduce
    ctx: ThreadContext
    merge: Merge
    inner: list[Step]
    ways: int

    def __init__(self, op: Reduce, ctx: ThreadContext, merge: Merge):
        self.op, self.ctx, self.merge = op, ctx, merge
        self.registers: bool = op.src.buffer.scope == "fragment"
        layout = source_layout(op, op.src.buffer.layout, ctx.count)
        assert layout is not None
        self.layout = layout
        self.folded: set[int] = folded_dims(op) if self.registers else {op.dim}
        self.kept: list[int] = [d for d in range(len(layout.dims)) if d not in self.folded]
        steps = steps_of(layout)
        self.outer: list[Step] = [s for s in steps if s.dim in self.kept]
        self.inner, self.ways = _fold_in_two_chains([s for s in steps if s.dim in self.folded])
        self.dtype = accumulator(op.src.buffer.dtype, op.dst.buffer.dtype)
        count = math.prod(s.size for s in self.outer)
        self.partial: Buffer = ctx.local("partial", count * self.ways, self.dtype)

    def statements(self) -> Stmt:
        """Return the statements of the whole reduction."""
        return Block((Alloc(self.partial), *self.in_thread(), *self.in_warp(), *self.across_warps(), *self.deliver()))

    # Layouts of source and result.

    def slot(self) -> Expr:
        """Return the index of the thread's partial result that a turn of the outer steps works on."""
        index: Expr = ZERO
        for step in self.outer:
            index = index * step.size + step.var
        return index * self.ways

    def at(self, dim: int) -> Expr:
        """Return the thread's index along a dimension, relative to the source region."""
        here = coordinate(self.layout, dim, self.ctx.thread, [*self.outer, *self.inner])
        return here - self.op.src.ranges[dim].start if self.registers else here

    def inside(self, dims: Sequence[int]) -> list[Expr]:
        """Return the conditions for elements within the source region, for dimensions that reach beyond it."""
        found = []
        extents = self.op.src.extents if self.registers else self.op.src.tile_shape
        for dim in dims:
            size, start = math.prod(d.size for d in self.layout.dims[dim]), self.op.src.ranges[dim].start
            within = isinstance(start, Const) and start.value == 0 if self.registers else True
            if not within:
                found.append(self.at(dim) >= 0)
            extent = extents[dim]
            if not within or not isinstance(extent, Const) or size > extent.value:
                found.append(self.at(dim) < extent)
        return found

    # The stages.

    def in_thread(self) -> list[Stmt]:
        """Reduce each row's elements in the thread's registers."""
        op, slot = self.op, self.slot()
        if self.registers:
            index: Expr = ZERO
            for step in (*self.outer, *self.inner):
                index = index + step.var * step.stride
            value: Expr = Load(self.ctx.registers(op.src.buffer), (index,))
            conditions = self.inside(sorted(self.folded))
        else:
            point = [self.at(d) for d in range(len(self.layout.dims))]
            value = Load(op.src.buffer, indices_at(op.src, point))
            conditions = self.inside(range(len(self.layout.dims)))
        identity = identity_of(op.kind, self.dtype)
        kind = op.fold
        if op.of_magnitudes:
            value, kind = abs(cast(value, op.dst.buffer.dtype)), op.merging
        value = cast(value, self.dtype)
        if conditions:
            value = select(conjunction(conditions), value, identity)
        way = self.inner[-1].var if self.ways > 1 else ZERO
        total = Load(self.partial, (slot + way,))
        fold = Store(self.partial, (slot + way,), self.merge(kind, total, value))
        start = [Store(self.partial, (slot + n,), identity) for n in range(self.ways)]
        merged = [
            Store(self.partial, (slot,), self.plain(Load(self.partial, (slot,)), Load(self.partial, (slot + n,))))
            for n in range(1, self.ways)
        ]
        return [unrolled(self.outer, Block((*start, unrolled(self.inner, fold), *merged)))]

    def plain(self, a: Expr, b: Expr) -> Expr:
        """Fold two partial results into one."""
        return self.merge(self.op.merging, a, b)

    def in_warp(self) -> list[Stmt]:
        """Fold over the lanes that share a row, by butterflies of shuffles."""
        slot, masks = self.slot(), [1 << b for b in self.lane_bits()]
        here = Load(self.partial, (slot,))
        rounds = [Store(self.partial, (slot,), self.plain(here, shuffle_xor(here, mask))) for mask in masks]
        return [unrolled(self.outer, Block(tuple(rounds)))] if rounds else []

    def across_warps(self) -> list[Stmt]:
        """Reduce in shared memory, with an entry for each warp of a row, or each thread of an odd number."""
        parts = self.far_digits()
        count = math.prod(size for size, _ in parts)
        if count == 1:
            return []
        rank, _ = self.number_of(parts)
        rounds: list[Step] = []
        row: tuple[Expr, ...]
        if self.ctx.build.sparing and self.outer:
            digits = [(d.size, d.stride) for n in self.kept for d in self.layout.dims[n] if d.axis == "t"]
            place, most = self.number_of(digits)
            sizes, row, rounds = [most], (place,), self.outer
            why = "with all rows at once a block needs more shared memory than there is"
            self.ctx.build.remark(self.op.span, "T.reduce", "one row of each thread after the other", why)
        else:
            sizes = [math.prod(d.size for d in self.layout.dims[d]) for d in self.kept]
            row = tuple(coordinate(self.layout, d, self.ctx.thread, self.outer) for d in self.kept)
        within = [] if rounds else self.outer
        scratch = self.ctx.shared("partials", (count, *sizes), self.dtype)
        slot = self.slot()
        put: Stmt = Store(scratch, (rank, *row), Load(self.partial, (slot,)))
        put = guarded(self.writer(), unrolled(within, put))
        get: Expr = Load(scratch, (ZERO, *row))
        take: Stmt = Store(self.partial, (slot,), get)
        if count > MOST_WARPS:
            n = Var("entry", dt.int32, "loop")
            more = Store(self.partial, (slot,), self.plain(Load(self.partial, (slot,)), Load(scratch, (n, *row))))
            rest = For(LoopKind.SERIAL, (n,), (const(1, dt.int32),), (const(count, dt.int32),), Block((more,)))
            take = Block((take, rest))
        else:
            for number in range(1, count):
                get = self.plain(get, Load(scratch, (const(number, dt.int32), *row)))
            take = Store(self.partial, (slot,), get)
        if rounds:
            return [Alloc(scratch), unrolled(rounds, Block((put, take)))]
        return [Alloc(scratch), put, unrolled(within, take)]

    def number_of(self, digits: Sequence[tuple[int, int]]) -> tuple[Expr, int]:
        """Number threads by these digits, each a size and a stride; return the thread's number and their count."""
        number: Expr = ZERO
        for size, stride in digits:
            number = number * size + self.ctx.thread // stride % size
        return number, math.prod(size for size, _ in digits)

    def deliver(self) -> list[Stmt]:
        """Store the results at their destination, folded into its content unless it is cleared."""
        op, target = self.op, self.op.dst.buffer
        result = result_layout(op, self.layout, self.folded)
        moved = any(self.inside([d]) for d in self.kept)
        is_direct = op.dst.is_whole and not (moved and self.registers)
        if target.scope == "fragment" and is_direct and target.layout == result:
            index: Expr = ZERO
            for step in self.outer:
                point = [step.place if d == step.dim else 0 for d in range(len(self.layout.dims))]
                index = index + step.var * _register(result, op, [point[d] for d in self.kept])
            return [unrolled(self.outer, self.finish(self.ctx.registers(target), (index,)))]
        row = tuple(self.at(d) for d in self.kept)
        conditions = [*self.inside(self.kept), *self.writer(across=True)]
        if target.scope != "fragment":
            place = op._points(row, ZERO)[1]
            return [unrolled(self.outer, guarded(conditions, self.finish(target, place)))]
        shape = op.src.tile_shape
        sizes = static((*shape[: op.dim], *shape[op.dim + 1 :]), op)
        scratch = self.ctx.shared("results", sizes or (1,), self.dtype)
        put = guarded(conditions, Store(scratch, row or (ZERO,), Load(self.partial, (self.slot(),))))
        return [Alloc(scratch), unrolled(self.outer, put), self.fetch(scratch)]

    def finish(self, buffer: Buffer, place: tuple[Expr, ...], total: Expr | None = None) -> Stmt:
        """Store a result at `place`."""
        total = Load(self.partial, (self.slot(),)) if total is None else total
        if not self.op.clear:
            total = self.plain(cast(Load(buffer, place), self.dtype), total)
        return Store(buffer, place, cast(total, buffer.dtype))

    def fetch(self, scratch: Buffer) -> Stmt:
        """Copy results from shared memory into a fragment of another layout, or into a part of one."""
        target, ranges = self.op.dst.buffer, self.op.dst.ranges
        assert target.layout is not None
        steps = steps_of(target.layout)
        index: Expr = ZERO
        for step in steps:
            index = index + step.var * step.stride
        conditions, row = [], []
        for dim, (r, n) in enumerate(zip(ranges, target.shape, strict=True)):
            here = coordinate(target.layout, dim, self.ctx.thread, steps) - r.start
            padded = math.prod(d.size for d in target.layout.dims[dim])
            if not self.op.dst.is_whole or not isinstance(n, Const) or padded > n.value:
                conditions += [here >= 0, here < r.extent]
            if r.keep:
                row.append(here)
        if len(row) > len(self.kept):
            del row[self.op.dim]
        value = Load(scratch, tuple(row) or (ZERO,))
        return unrolled(steps, guarded(conditions, self.finish(self.ctx.registers(target), (index,), value)))

    # Threads that share a row.

    def lane_bits(self) -> list[int]:
        """Return the bits of the lane number that differ between lanes of one warp with a common row."""
        found = []
        for size, stride in self.thread_digits():
            if _power(stride):
                first = stride.bit_length() - 1
                found += [b for b in range(first, first + _evenness(size).bit_length() - 1) if b < 5]
        return sorted(found)

    def far_digits(self) -> list[tuple[int, int]]:
        """Return the size and stride of the thread digits of a row that shuffles do not reach."""
        found = []
        for size, stride in self.thread_digits():
            near = min(_evenness(size), max(1, 32 // stride)) if _power(stride) else 1
            if size > near:
                found.append((size // near, stride * near))
        return found

    def thread_digits(self) -> list[tuple[int, int]]:
        """Return the size and stride of the thread digits of the folded dimensions."""
        return [(d.size, d.stride) for n in self.folded for d in self.layout.dims[n] if d.axis == "t" and d.size > 1]

    def writer(self, across: bool = False) -> list[Expr]:
        """Return conditions that choose one thread of those with the same (partial, or with `across` final) result."""
        found = []
        owner = owner_of(self.layout, self.ctx.thread)
        if owner is not None:
            found.append(owner)
        mask = sum(1 << b for b in self.lane_bits())
        if mask:
            found.append((self.ctx.thread & mask) == 0)
        if across:
            found += [self.ctx.thread // stride % size == 0 for size, stride in self.far_digits()]
        return found


def _fold_in_two_chains(steps: list[Step]) -> tuple[list[Step], int]:
    """Fold long rows in two chains, as an addition takes several cycles; a last step of size 2 chooses one."""
    if math.prod(s.size for s in steps) < 8:
        return steps, 1
    for n, step in enumerate(steps):
        if step.size % 2 == 0:
            iteration = replace(step, size=step.size // 2, place=step.place * 2, stride=step.stride * 2)
            way = replace(step, var=Var(f"{step.var.name}_way", dt.int32, "loop"), size=2)
            return [*steps[:n], *([iteration] if iteration.size > 1 else []), *steps[n + 1 :], way], 2
    return steps, 1


def _register(result: Layout, op: Reduce, point: list[int]) -> int:
    """Return the register of a result, given its indices without the folded dimension."""
    if len(point) < len(op.dst.tile_shape):
        point.insert(op.dim, 0)
    for dim, r in enumerate(op.dst.ranges):
        if not r.keep:  # given by one index, of a dimension of size 1
            point.insert(dim, 0)
    return result.apply(point).get("r", 0)


def _power(n: int) -> bool:
    """Return whether a number is a power of two."""
    return n & (n - 1) == 0


def _evenness(n: int) -> int:
    """Return the largest power of two that divides a number."""
    return n & -n


def guarded(conditions: Sequence[Expr], body: Stmt) -> Stmt:
    """Guard the body by all conditions."""
    return If(conjunction(conditions), Block((body,)), Block(())) if conditions else body
