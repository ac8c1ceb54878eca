# SPDX-License-Identifier: Apache-2.0
"""T.copy between shared memory and fragments whose elements lie as in the matrices of ldmatrix and stmatrix.

Such a fragment consists of 8 x 8 blocks (of 4-byte units along the rows); every warp moves four of them at once. A
fragment of another type is converted in registers on its way to shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_tile.hardware import WARP
from torch_tile.intrinsics.matrix import Digits, ldmatrix, stmatrix
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import divides
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Address, Const, Expr, Load, Var, cast, const
from torch_tile.ir.layout import Digit
from torch_tile.ir.layout_ops import owner_of
from torch_tile.ir.stmt import Alloc, Block, For, If, LoopKind, Stmt, Store
from torch_tile.tileop.base import aligned_run, is_one, spread

if TYPE_CHECKING:
    from torch_tile.tileop.copy.op import Copy
    from torch_tile.tileop.threads import ThreadContext

ACROSS = (Digit(8, 4, "t"),)  # where the rows of a matrix lie


@dataclass(frozen=True)
class Blocks:
    """The digits that count a fragment's 8 x 8 blocks in each of its two dimensions.

    `across` is the dimension that runs across the rows in memory: 0 in the usual case, and with `trans` the matrices
    are turned on the way. `run` elements fill the 4 bytes of one lane; a row of a block has `size` elements.
    """

    outer: tuple[Digits, Digits]
    trans: bool
    run: int


def refuses(op: Copy, ctx: ThreadContext) -> str | None:
    """Return why ldmatrix and stmatrix cannot do the copy; None if they can."""
    store = op.src.buffer.scope == "fragment"
    fragment, shared = (op.src, op.dst) if store else (op.dst, op.src)
    if (fragment.buffer.scope, shared.buffer.scope) != ("fragment", "shared"):
        return "only copies between fragments and shared memory move matrices"
    if store and not ctx.target.has_stmatrix:
        return f"{ctx.target} has no stmatrix"
    if not store and op.src.buffer.dtype != op.dst.buffer.dtype:
        return f"{op.src.buffer.dtype} is converted to {op.dst.buffer.dtype}"
    blocks = blocks_of(fragment, shared.buffer.dtype)
    if isinstance(blocks, str):
        return blocks
    chunk = 16 // shared.buffer.dtype.itemsize
    held = aligned_run(shared.buffer)
    if is_one(shared.extents[-1]) or held % chunk or not divides(chunk, shared.starts[-1], ctx.ranges):
        return f"the rows of `{shared.buffer.name}` are not runs of 16 bytes"
    return None


def blocks_of(fragment: Region, dtype: dt.DType) -> Blocks | str:
    """Return the 8 x 8 blocks of a fragment whose elements are stored as `dtype`, or why it has none."""
    buffer, layout = fragment.buffer, fragment.buffer.layout
    sizes = buffer.static_shape
    layout = layout.canonical if layout is not None else None
    whole = sizes is not None and all(
        isinstance(e, Const) and e.value == size for e, size in zip(fragment.extents, sizes, strict=True)
    )
    if not whole or layout is None or dtype.itemsize > 4:
        return f"`{buffer.name}` is not copied whole"
    if layout.shape != sizes:
        return f"`{buffer.name}` is padded to {layout.shape}, and matrices would write the padding too"
    if any(d.stride % WARP for d in layout.replicas):
        return f"`{buffer.name}` is repeated inside warps"
    dims = [digits for digits, size in zip(layout.dims, sizes or (), strict=True) if size != 1]
    run = 4 // dtype.itemsize
    along = (Digit(4, 1, "t"), Digit(run, 1, "r")) if run > 1 else (Digit(4, 1, "t"),)
    for trans in (False, True) if run == 2 else (False,):
        if len(dims) != 2:
            break
        ends = (along, ACROSS) if trans else (ACROSS, along)
        rows, columns = (_without(digits, end) for digits, end in zip(dims, ends, strict=True))
        if rows is None or columns is None:
            continue
        if all(d.stride % (WARP if d.axis == "t" else run) == 0 for d in (*rows, *columns)):
            return Blocks((rows, columns), trans, run)
    return f"the elements of `{buffer.name}` do not lie as in 8 x 8 matrices"


def _without(digits: Digits, end: Digits) -> Digits | None:
    """Return `digits` without their end `end`, perhaps the lower part of a longer digit; None without it."""
    for wanted in reversed(end):
        if not digits or (digits[-1].axis, digits[-1].stride) != (wanted.axis, wanted.stride):
            return None
        *rest, last = digits
        size, uneven = divmod(last.size, wanted.size)
        if uneven:
            return None
        digits = (*rest, Digit(size, last.stride * wanted.size, last.axis)) if size > 1 else tuple(rest)
    return digits


def lower(op: Copy, ctx: ThreadContext) -> Stmt:
    """Emit one ldmatrix or stmatrix for every four blocks (two or one, if their number is odd)."""
    store = op.src.buffer.scope == "fragment"
    fragment, shared = (op.src, op.dst) if store else (op.dst, op.src)
    blocks = blocks_of(fragment, shared.buffer.dtype)
    assert isinstance(blocks, Blocks)
    run = blocks.run
    number = math.prod(d.size for digits in blocks.outer for d in digits if d.axis == "r")
    count = next(c for c in (4, 2, 1) if number % c == 0)
    iteration = Var("i", dt.int32, "loop")
    zero = const(0, dt.int32)
    step = iteration if number > count else zero
    registers = ctx.registers(fragment.buffer)
    place = Address(shared.buffer, spread(shared, _row_of_lane(blocks, ctx.thread, step * count, count, shared)))
    first = step * (count * run)
    suffix = f"_x{count}" + (".trans" if blocks.trans else "")
    body: list[Stmt]
    if not store:
        body = [ldmatrix(Address(registers, (first,)), place, count, blocks.trans)]
    elif fragment.buffer.dtype == shared.buffer.dtype:
        body = [stmatrix(place, Address(registers, (first,)), count, blocks.trans)]
    else:
        packed = ctx.local("packed", count * run, shared.buffer.dtype)
        v = Var("v", dt.int32, "loop")
        convert = Store(packed, (v,), cast(Load(registers, (first + v,)), shared.buffer.dtype))
        size = const(count * run, dt.int32)
        loop = For(LoopKind.UNROLLED, (v,), (zero,), (size,), Block((convert,)))
        body = [Alloc(packed), loop, stmatrix(place, Address(packed, (zero,)), count, blocks.trans)]
    ctx.build.remark(op.span, "T.copy", ("stmatrix" if store else "ldmatrix") + suffix)
    result: Stmt = Block(tuple(body))
    if number > count:
        result = For(LoopKind.UNROLLED, (iteration,), (zero,), (const(number // count, dt.int32),), Block((result,)))
    layout = fragment.buffer.layout
    owner = owner_of(layout, ctx.thread) if store and layout is not None else None
    return result if owner is None else If(owner, Block((result,)), Block(()))


def _row_of_lane(blocks: Blocks, thread: Expr, first: Expr, count: int, shared: Region) -> tuple[Expr, Expr]:
    """Return the row of 16 bytes that this lane addresses: row l % 8 of block `first + l // 8`."""
    block = first + thread // 8 % count if count > 1 else first
    rows, columns = (_outer(digits, thread, block * blocks.run) for digits in blocks.outer)
    chunk = 16 // shared.buffer.dtype.itemsize
    return rows * 8 + thread % 8, columns * chunk


def _outer(digits: Digits, thread: Expr, register: Expr) -> Expr:
    """Return the block number that the digits of a thread and register form."""
    total: Expr = const(0, dt.int32)
    place = math.prod(d.size for d in digits)
    for d in digits:
        place //= d.size
        total = total + (thread if d.axis == "t" else register) // d.stride % d.size * place
    return total
