# SPDX-License-Identifier: Apache-2.0
"""T.async_copy: start moving a tile from global to shared memory. It has arrived after the wait for its group.

A thread moves runs of 16, 8 or 4 bytes by cp.async. It takes the widest to which both sides are provably aligned. Runs
of 16 bytes take no room in the L1 cache. Only they can have an eviction policy. Any other copy is an ordinary one, and
the schedule report says why. guard_bounds makes the elements of a run outside the tensor 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.intrinsics.memory import cp_async, cp_async_commit
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import Substitute, divides
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Address, Const, Expr, Load, Select, Var, const, select
from torch_tile.ir.node import find, node_class, symbols
from torch_tile.ir.scope_facts import values_for_names
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Block, For, If, Let, LoopKind, Stmt, Store
from torch_tile.tileop.base import (
    Annotations,
    RegisteredOp,
    Tile,
    aligned_run,
    is_one,
    number_of,
    spread,
    squeezed,
    strides_of,
    tile_op,
)
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.threads import ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env
    from torch_tile.tileop.threads import Demand, Layouts


WIDTHS = 16, 8, 4  # bytes that one cp.async can move
ZERO = const(0, dt.int32)


@tile_op("async_copy")
@node_class
class AsyncCopy(Copy):
    """Copy as T.copy, readable after `cp_async_commit` and `cp_async_wait`; `commit` joins both first steps."""

    commit: bool = True

    @classmethod
    def build(
        cls,
        src: Tile,
        dst: Tile,
        *,
        coalesced_width: int | None = None,
        disable_tma: bool = False,
        eviction_policy: str | None = None,
        prefer_instruction: str | None = None,
        annotations: Annotations = None,
        loop_layout: Any = None,
        commit: bool = True,
    ) -> AsyncCopy:
        """Start to copy `src` to `dst`, from a tensor to shared memory. T.ptx_wait_group waits for it.

        Operands and hints are those of T.copy. Each copy is a group of its own; without `commit` it belongs to the
        group that T.ptx_commit_group ends. Raises TileError where the shapes differ, and for other kinds of memory.
        """
        made = super().build(
            src, dst, coalesced_width=coalesced_width, disable_tma=disable_tma, eviction_policy=eviction_policy,
            prefer_instruction=prefer_instruction,
        )  # fmt: skip
        assert isinstance(made, AsyncCopy)
        return replace(made, commit=bool(commit))

    def check(self) -> list[Diagnostic]:
        """Check that extents agree, and that a tensor is copied to shared memory."""
        found = super().check()
        for name, region, wanted in (("src", self.src, "global"), ("dst", self.dst, "shared")):
            if region.buffer.scope != wanted:
                why = f"lies in {region.buffer.scope} memory"
                fix = "T.async_copy only supports global->shared/shared.dyn copies: write T.copy"
                found.append(diagnose("bad_argument", self.span, op="T.async_copy", name=name, why=why, fix=fix))
        return found

    def recorded(self) -> tuple[Stmt, ...]:
        """Return the copy, and the commit of its group."""
        return (replace(self, commit=False), cp_async_commit()) if self.commit else (self,)

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Emit this thread's cp.async calls, or an ordinary copy."""
        reasons = [refuses(self, width, ctx.ranges) for width in WIDTHS]
        width = next((w for w, reason in zip(WIDTHS, reasons, strict=True) if reason is None), None)
        why_not = reasons[0] or ""
        if width is None:
            ctx.build.remark(self.span, "T.async_copy", "an ordinary copy", reasons[-1] or "")
            return super().lower_cuda(ctx)
        ctx.build.remark(self.span, "T.async_copy", f"cp.async of {width} bytes", why_not)
        return _copies(self, width, ctx)


def refuses(op: Copy, width: int, ranges: Ranges) -> str | None:
    """Return why cp.async cannot move `width` bytes at a time; None if it can."""
    src, dst = op.src.buffer, op.dst.buffer
    if (src.scope, dst.scope) != ("global", "shared"):
        return f"cp.async goes from global to shared memory, not from {src.scope} to {dst.scope}"
    if src.dtype != dst.dtype:
        return f"{src.dtype} is converted to {dst.dtype} on the way"
    extents = squeezed(op.dst)
    if not extents or not all(isinstance(e, Const) for e in extents):
        return "the extents are known only at run time"
    run, uneven = divmod(width, src.dtype.itemsize)
    if uneven or not run:
        return f"{width} bytes are not whole elements of {src.dtype}"
    if op.eviction_policy and width < WIDTHS[0]:
        return _without_policy(width)
    if run > 1 and (is_one(op.src.extents[-1]) or is_one(op.dst.extents[-1])):
        return "the last dimension is not copied along"
    if not src.may_start_at(width):
        return f"`{src.name}` may not start at a multiple of {width} bytes"
    if not divides(run, extents[-1]):
        return f"rows of {number_of(extents[-1])} are not whole runs of {run}"
    if aligned_run(dst) % run or not divides(run, op.dst.starts[-1], ranges):
        return f"`{dst.name}` does not keep runs of {run} together"
    strides = strides_of(src)
    if run > 1 and not is_one(strides[-1]):
        return f"`{src.name}` is not dense along its last dimension"
    if not divides(run, op.src.starts[-1], ranges):
        return f"the columns of `{src.name}` may not start at a multiple of {run}"
    for dim, stride in enumerate(strides[:-1]):
        if not is_one(src.shape[dim]) and not divides(run, stride, ranges):
            return f"the stride of dimension {dim} of `{src.name}` may not be a multiple of {run}"
    return None


def _copies(op: Copy, width: int, ctx: ThreadContext) -> Stmt:
    """Emit this thread's cp.async calls of `width` bytes for a copy."""

    def move(point: tuple[Expr, ...]) -> Stmt:
        """Emit the cp.async at one point."""
        source, target = spread(op.src, point), spread(op.dst, point)
        to, come = Address(op.dst.buffer, target), Address(op.src.buffer, source)
        return cp_async(to, come, width, width, op.eviction_policy or "")

    extents = [number_of(e) for e in squeezed(op.dst)]
    return deal_runs(extents, width // op.src.buffer.dtype.itemsize, move, ctx)


def _without_policy(width: int) -> str:
    """Return why an eviction policy rules out runs of `width` bytes."""
    return f"cp.async of {width} bytes takes no eviction_policy"


def deal_runs(extents: Sequence[int], run: int, move: Callable[[tuple[Expr, ...]], Stmt], ctx: ThreadContext) -> Stmt:
    """Call `move` at the start of each run of `run` elements of a box, dealt to threads in row-major order."""
    *outer, last = extents
    per_row = last // run
    total = math.prod(outer) * per_row
    iterations = -(-total // ctx.count)
    iteration = Var("s", dt.int32, "loop")
    row, column = _place_of_run(iteration if iterations > 1 else ZERO, ctx.thread, ctx.count, per_row)
    body = move((*_digits(row, outer), column * run))
    if total % ctx.count:
        body = If(iteration * ctx.count + ctx.thread < total, Block((body,)), Block(()))
        body = body if iterations > 1 else If(ctx.thread < total, body.then, Block(()))
    if iterations == 1:
        return body
    return For(LoopKind.UNROLLED, (iteration,), (ZERO,), (const(iterations, dt.int32),), Block((body,)))


def _place_of_run(iteration: Expr, thread: Expr, count: int, per_row: int) -> tuple[Expr, Expr]:
    """Return the row of run `iteration * count + thread`, and its place in the row."""
    if count % per_row == 0:
        return iteration * (count // per_row) + thread // per_row, thread % per_row
    if per_row % count == 0:
        return iteration // (per_row // count), iteration % (per_row // count) * count + thread
    run = iteration * count + thread
    return run // per_row, run % per_row


def _digits(row: Expr, sizes: Sequence[int]) -> tuple[Expr, ...]:
    """Return the index of row number `row` in each dimension."""
    found: list[Expr] = []
    for size in reversed(sizes[1:]):
        found.append(row % size)
        row = row // size
    return (row, *reversed(found)) if sizes else ()


# A T.Parallel loop that fills a tile from global memory, started now and waited for later: rows gathered by a table.
# Pipelined loops make it, or an author by `T.Parallel(..., asynchronous=True)`. If neighbours along the last variable
# are neighbours in memory, a thread moves runs by cp.async. Runs have 16, 8 or 4 bytes. Elements that a condition
# excludes become 0. Any other loop is an ordinary one, and the schedule report says why.


@dataclass(frozen=True)
class Gather:
    """The gather of a loop: `dst[...] = src[...]` where `condition` holds (None: everywhere), else 0."""

    dst: tuple[Buffer, tuple[Expr, ...]]
    src: Load
    condition: Expr | None
    region: Region


def gather_of(loop: For) -> Gather | None:
    """Return the gather of a T.Parallel loop; None if the loop does anything but fill a box of a shared tile."""
    if loop.kind is not LoopKind.PARALLEL or not loop.body.stmts:
        return None
    *names, last = loop.body.stmts
    sizes = all(isinstance(e, Const) for e in (*loop.starts, *loop.stops)) and not any(
        number_of(s) for s in loop.starts
    )
    if not sizes or not isinstance(last, Store) or not all(isinstance(s, Let) for s in names):
        return None
    inline = values_for_names(*names)
    value: Expr = inline(last.value)
    condition: Expr | None = None
    if isinstance(value, Select) and isinstance(value.b, Const) and value.b.value == 0:
        condition, value = value.condition, value.a
    if not isinstance(value, Load) or (value.buffer.scope, last.buffer.scope) != ("global", "shared"):
        return None
    indices = tuple(inline(i) for i in last.indices)
    region = _box(loop, last.buffer, indices)
    if region is None or value.buffer.dtype != last.buffer.dtype:
        return None
    return Gather((last.buffer, indices), value, condition, region)


def _box(loop: For, buffer: Buffer, indices: tuple[Expr, ...]) -> Region | None:
    """Return the box that a loop fills, if each variable counts along one dimension, in their order."""
    left = list(zip(loop.vars, loop.stops, strict=True))
    own = set(loop.vars)
    ranges = []
    for index in indices:
        offset = simplify(index - left[0][0]) if left else index
        if left and not _mentions(offset, own):
            ranges.append(Range(offset, left.pop(0)[1]))
        elif not _mentions(index, own):
            ranges.append(Range(index, const(1, dt.int32), keep=False))
        else:
            return None
    return None if left else Region(buffer, tuple(ranges))


def _mentions(e: Expr, wanted: set[Var]) -> bool:
    """Return whether an expression uses one of the symbols."""
    return not wanted.isdisjoint(symbols(e))


@tile_op("async_loop")
@node_class
class AsyncLoop(RegisteredOp):
    """Run `loop`, whose writes may be read only after `cp_async_commit` and `cp_async_wait`."""

    loop: For

    @classmethod
    def build(cls, loop: Any) -> AsyncLoop:
        """Fill shared memory by `loop`, a T.Parallel nest, by cp.async; the compiler makes it of T.Parallel."""
        return cls(loop)

    def check(self) -> list[Diagnostic]:
        """Check that the loop fills a box of a shared tile from global memory."""
        if gather_of(self.loop) is not None:
            return []
        why, fix = "is set for a loop that does not only fill a shared tile from global memory", "leave it out"
        return [diagnose("bad_argument", self.span, op="T.Parallel", name="asynchronous", why=why, fix=fix)]

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return the regions that the loop loads as read, and the box as written."""
        found = gather_of(self.loop)
        assert found is not None
        buffers = {n.buffer: n.buffer for n in find(self.loop, Load)}
        whole = [Region(b, tuple(Range(ZERO, size) for size in b.shape)) for b in buffers.values()]
        return whole, [found.region]

    def lower_cpu(self) -> Stmt:
        """Return the loop itself."""
        return self.loop

    def evaluate(self, env: Env) -> None:
        """Run the loop."""
        env.block(Block((self.loop,)))

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Demand no layout, as threads take runs in the order of memory."""
        return []

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Emit this thread's cp.async calls, or an ordinary loop."""
        found = gather_of(self.loop)
        if found is None:  # nothing of it lies inside the tensor, as has turned out since: zeros are stored
            return self.loop
        reasons = [self._refuses(found, width, ctx) for width in WIDTHS]
        width = next((w for w, reason in zip(WIDTHS, reasons, strict=True) if not reason), None)
        if width is None:
            ctx.build.remark(self.span, "T.Parallel", "an ordinary loop, not copied ahead", reasons[-1])
            return self.loop
        ctx.build.remark(self.span, "T.Parallel", f"cp.async of {width} bytes", reasons[0])
        return self._copies(found, width, ctx)

    def _refuses(self, found: Gather, width: int, ctx: ThreadContext) -> str:
        """Return why cp.async cannot move `width` bytes at a time; "" if it can."""
        dst, src = found.dst[0], found.src.buffer
        along, extent = self.loop.vars[-1], self.loop.stops[-1]
        run, uneven = divmod(width, src.dtype.itemsize)
        if uneven or not run or not divides(run, extent):
            return f"rows of {number_of(extent)} are not whole runs of {width} bytes"
        if found.src.policy and width < WIDTHS[0]:
            return _without_policy(width)
        if not src.may_start_at(width):
            return f"`{src.name}` may not start at a multiple of {width} bytes"
        for buffer, indices in (found.dst, (src, found.src.indices)):
            start = simplify(indices[-1] - along)
            if any(_mentions(i, {along}) for i in (start, *indices[:-1])):
                return f"`{along.name}` does not count along the last dimension of `{buffer.name}`"
            if not divides(run, start, ctx.ranges):
                return f"runs of {run} in `{buffer.name}` may not be aligned"
        if found.condition is not None and _mentions(found.condition, {along}):
            return f"the condition depends on `{along.name}`"
        if aligned_run(dst) % run:
            return f"`{dst.name}` does not keep runs of {run} together"
        strides = strides_of(src)
        if not is_one(strides[-1]) or not all(divides(run, s, ctx.ranges) for s in strides[:-1]):
            return f"rows of `{src.name}` may not start at multiples of {run}"
        return ""

    def _copies(self, found: Gather, width: int, ctx: ThreadContext) -> Stmt:
        """Emit this thread's cp.async calls of `width` bytes for the loop's gather."""
        (dst, dst_indices), src = found.dst, found.src.buffer

        def move(point: tuple[Expr, ...]) -> Stmt:
            """Emit the cp.async at one point, with zeros where the condition fails."""
            at = Substitute(dict(zip(self.loop.vars, point, strict=True)))
            valid: Expr = const(width, dt.int32)
            if found.condition is not None:
                valid = select(at(found.condition), valid, ZERO)
            target, source = (tuple(at(i) for i in x) for x in (dst_indices, found.src.indices))
            return cp_async(Address(dst, target), Address(src, source), valid, width, found.src.policy)

        extents = [number_of(e) for e in self.loop.stops]
        return deal_runs(extents, width // src.dtype.itemsize, move, ctx)
