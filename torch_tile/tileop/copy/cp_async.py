# SPDX-License-Identifier: Apache-2.0
"""T.async_copy: start moving a tile from global to shared memory; it has arrived after the wait for its group.

A thread moves runs of 16, 8 or 4 bytes by cp.async, the widest that both sides are proved to be aligned to. A copy
that cannot be made so is an ordinary one, and the schedule report says why. What of a run lies outside the tensor is
left to guard_bounds, which makes it 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_tile.intrinsics.memory import cp_async
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.divisor import divides
from torch_tile.ir.expr import Address, Const, Expr, Var, const
from torch_tile.ir.stmt import Block, For, If, LoopKind, Stmt
from torch_tile.tileop.alignment import aligned_run, strides_of
from torch_tile.tileop.base import is_one, spread, squeezed, tile_op
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.threads import ThreadContext

WIDTHS = 16, 8, 4  # bytes that one cp.async can move
ZERO = const(0, dt.int32)


@tile_op("async_copy")
@dataclass(frozen=True, eq=False, repr=False)
class AsyncCopy(Copy):
    """As T.copy, but the destination may be read only after `cp_async_commit` and `cp_async_wait`."""

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """This thread's cp.async calls, or an ordinary copy."""
        reasons = [refuses(self, width, ctx.ranges) for width in WIDTHS]
        width = next((w for w, reason in zip(WIDTHS, reasons, strict=True) if reason is None), None)
        why_not = reasons[0] or ""
        if width is None:
            ctx.build.note(self.span, "T.async_copy", "an ordinary copy", reasons[-1] or "")
            return super().lower_cuda(ctx)
        ctx.build.note(self.span, "T.async_copy", f"cp.async of {width} bytes", why_not)
        return _copies(self, width, ctx)


def refuses(op: Copy, width: int, ranges: Ranges) -> str | None:
    """Why cp.async cannot move `width` bytes at a time; None if it can."""
    src, dst = op.src.buffer, op.dst.buffer
    if (src.scope, dst.scope) != ("global", "shared"):
        return f"cp.async goes from global to shared memory, not from {src.scope} to {dst.scope}"
    if src.dtype != dst.dtype:
        return f"{src.dtype} is converted to {dst.dtype} on the way"
    extents = squeezed(op.dst)
    if not extents or not all(isinstance(e, Const) for e in extents):
        return "the extents are known only at run time"
    if is_one(op.src.extents[-1]) or is_one(op.dst.extents[-1]):
        return "the last dimension is not copied along"
    run, uneven = divmod(width, src.dtype.itemsize)
    if uneven or not run:
        return f"{width} bytes are not whole elements of {src.dtype}"
    if not src.may_start_at(width):
        return f"`{src.name}` may not start at a multiple of {width} bytes"
    if not divides(run, extents[-1]):
        return f"rows of {_number(extents[-1])} are not whole runs of {run}"
    if aligned_run(dst) % run or not divides(run, op.dst.starts[-1], ranges):
        return f"`{dst.name}` does not keep runs of {run} together"
    strides = strides_of(src)
    if not is_one(strides[-1]):
        return f"`{src.name}` is not dense along its last dimension"
    if not divides(run, op.src.starts[-1], ranges):
        return f"the columns of `{src.name}` may not start at a multiple of {run}"
    for dim, stride in enumerate(strides[:-1]):
        if not is_one(src.shape[dim]) and not divides(run, stride, ranges):
            return f"the stride of dimension {dim} of `{src.name}` may not be a multiple of {run}"
    return None


def _copies(op: Copy, width: int, ctx: ThreadContext) -> Stmt:
    def move(point: tuple[Expr, ...]) -> Stmt:
        source, target = spread(op.src, point), spread(op.dst, point)
        return cp_async(Address(op.dst.buffer, target), Address(op.src.buffer, source), width, width)

    extents = [_number(e) for e in squeezed(op.dst)]
    return deal_runs(extents, width // op.src.buffer.dtype.itemsize, move, ctx)


def deal_runs(extents: Sequence[int], run: int, move: Callable[[tuple[Expr, ...]], Stmt], ctx: ThreadContext) -> Stmt:
    """`move` at the first point of each run of `run` elements along the last dimension of a box.

    Runs are dealt to the threads in row-major order, so that neighbours move neighbouring runs.
    """
    *outer, last = extents
    per_row = last // run
    total = math.prod(outer) * per_row
    turns = -(-total // ctx.count)
    turn = Var("s", dt.int32, "loop")
    row, column = _split(turn if turns > 1 else ZERO, ctx.thread, ctx.count, per_row)
    body = move((*_digits(row, outer), column * run))
    if total % ctx.count:
        body = If(turn * ctx.count + ctx.thread < total, Block((body,)), Block(()))
        body = body if turns > 1 else If(ctx.thread < total, body.then, Block(()))
    if turns == 1:
        return body
    return For(LoopKind.UNROLLED, (turn,), (ZERO,), (const(turns, dt.int32),), Block((body,)))


def _split(turn: Expr, thread: Expr, count: int, per_row: int) -> tuple[Expr, Expr]:
    """Row and place in the row of run `turn * count + thread`."""
    if count % per_row == 0:
        return turn * (count // per_row) + thread // per_row, thread % per_row
    if per_row % count == 0:
        return turn // (per_row // count), turn % (per_row // count) * count + thread
    run = turn * count + thread
    return run // per_row, run % per_row


def _digits(row: Expr, sizes: Sequence[int]) -> tuple[Expr, ...]:
    """The index of row number `row` in each dimension."""
    found: list[Expr] = []
    for size in reversed(sizes[1:]):
        found.append(row % size)
        row = row // size
    return (row, *reversed(found)) if sizes else ()


def _number(extent: Expr) -> int:
    assert isinstance(extent, Const)
    return int(extent.value)
