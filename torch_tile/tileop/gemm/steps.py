# SPDX-License-Identifier: Apache-2.0
"""Emit one thread's code of a product by mma.sync: load the operands of a step along k into registers, multiply.

The steps are unrolled. A comes a step at a time, B two tiles at a time, right before their products. The assembler
moves later loads up among these as far as registers allow, and knows best how far that is. Assumes the layouts that
`gemm/mma.py` demands. If an operand in shared memory does not suit ldmatrix, its elements are loaded one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_tile.intrinsics.matrix import Digits, ldmatrix, mma, round_tf32
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import divides
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Expr, Load, Var, cast, const
from torch_tile.ir.stmt import Alloc, Block, For, LoopKind, Stmt, Store
from torch_tile.tileop.base import aligned_run, number_of
from torch_tile.tileop.gemm.partition import Partition

if TYPE_CHECKING:
    from torch_tile.tileop.gemm.op import Gemm
    from torch_tile.tileop.threads import ThreadContext

ZERO = const(0, dt.int32)


def unrolled(name: str, count: int, body: Callable[[Expr], Stmt]) -> Stmt:
    """Unroll `body` for 0 to `count - 1`; a single turn needs no loop."""
    if count == 1:
        return body(ZERO)
    var = Var(name, dt.int32, "loop")
    return For(LoopKind.UNROLLED, (var,), (ZERO,), (const(count, dt.int32),), Block((body(var),)))


Index = Callable[[Expr, Expr], Expr]  # from a tile and a step along k
LoadBatch = Callable[[Expr, Expr], Stmt]  # of the tiles from a first one on, of a step along k


@dataclass(frozen=True)
class Operand:
    """A or B in registers: `index` gives the first register of a tile; `load` loads a batch of `batch` tiles.

    `load` is None where all is in place. `how` tells the schedule report where the operand comes from, `why_not` what
    kept it from a better way.
    """

    registers: Buffer
    index: Index
    load: LoadBatch | None
    batch: int
    how: str
    why_not: str = ""

    def bring(self, first: Expr, step: Expr) -> list[Stmt]:
        """Load the batch that starts with tile `first`."""
        return [self.load(first, step)] if self.load is not None else []


@dataclass(frozen=True)
class Source:
    """An operand as tiles of `unit` rows (of A) or columns (of B): `tiles` per warp, from `offset` on.

    `place(i, k)` is where the element in row or column `i` at `k` lies in the buffer behind `region`. `digits` are the
    places in a tile of i and k; `across` says that memory runs along i, not along k. `batch` tiles are loaded at once.
    The instruction takes elements of `dtype`. `in_byte_order` and `alternating` are those of the partition.
    """

    name: str
    region: Region
    tiles: int
    batch: int
    unit: int
    offset: Expr
    digits: tuple[Digits, Digits]
    across: bool
    step: int
    each: int
    tf32: bool
    dtype: dt.DType
    in_byte_order: bool
    alternating: bool

    @property
    def widens(self) -> bool:
        """Return whether elements are fewer bits in memory than in registers."""
        return self.dtype != self.region.buffer.dtype

    def outer(self, tile: Expr, i: Expr) -> Expr:
        """Return the row or column of element `i` of a tile."""
        if self.alternating:
            return self.offset + tile // 2 * (2 * self.unit) + i * 2 + tile % 2
        return self.offset + tile * self.unit + i

    def place(self, i: Expr, k: Expr) -> tuple[Expr, ...]:
        """Return the indices into the buffer."""
        *lead, rows, columns = self.region.starts
        return (*lead, rows + k, columns + i) if self.across else (*lead, rows + i, columns + k)


def product(op: Gemm, p: Partition, ctx: ThreadContext, widens: bool) -> Stmt:
    """Emit the whole product: `C += A B`, after a clear if asked."""
    m, n, k = (number_of(e) for e in (*op.C.extents[-2:], op.A.extents[-2 if op.transpose_A else -1]))
    shape, (m_tiles, n_tiles) = p.shape, p.tiles(m, n)
    tf32 = ctx.build.options.tf32 and op.A.buffer.dtype == dt.float32
    warp = ctx.thread // 32
    row, column = warp // p.columns % p.rows * (m // p.rows), warp % p.columns * (n // p.columns)
    widened = op.A.buffer.dtype if widens else op.B.buffer.dtype
    in_byte_order = widens and op.transpose_B
    a = Source(
        name="a", region=op.A, tiles=m_tiles, batch=m_tiles, unit=shape.m, offset=row, digits=shape.a,
        across=op.transpose_A, step=shape.k, each=shape.registers("a"), tf32=tf32, dtype=op.A.buffer.dtype,
        in_byte_order=in_byte_order, alternating=False,
    )  # fmt: skip
    b = Source(
        name="b", region=op.B, tiles=n_tiles, batch=_batch(n_tiles, in_byte_order), unit=shape.n, offset=column,
        digits=shape.b[::-1], across=not op.transpose_B, step=shape.k, each=shape.registers("b"), tf32=tf32,
        dtype=widened, in_byte_order=in_byte_order, alternating=p.alternating,
    )  # fmt: skip
    left, right = _operand(a, ctx), _operand(b, ctx)
    types = ("tf32", "tf32") if tf32 else (op.A.buffer.dtype.name, widened.name)
    name = f"m{shape.m}n{shape.n}k{shape.k}"
    became = f"mma.sync {name} {types[0]}, {p.rows} x {p.columns} warps of {m // p.rows} x {n // p.columns}"
    why_not = "; ".join(filter(None, (left.why_not, right.why_not)))
    ctx.build.remark(op.span, "T.gemm", f"{became}; A: {left.how}; B: {right.how}", why_not)
    total = ctx.registers(op.C.buffer)
    each, all_columns = shape.registers("d"), number_of(op.C.buffer.shape[-1]) // (p.columns * shape.n)
    first = number_of(op.C.starts[-1]) // shape.n

    def one(i: Expr, j: Expr, step: Expr) -> Stmt:
        """Emit one mma."""
        d = Address(total, ((i * all_columns + (j + first)) * each,))
        x, y = (Address(o.registers, (o.index(tile, step),)) for o, tile in ((left, i), (right, j)))
        return mma(d, x, y, name, (*types, op.C.buffer.dtype.name))

    def batch(j: Expr, step: Expr) -> Stmt:
        """Multiply all of A's tiles with a batch of B's."""
        products = unrolled("mi", m_tiles, lambda i: unrolled("nj", right.batch, lambda n: one(i, j + n, step)))
        return Block((*right.bring(j, step), products))

    def along_n(step: Expr) -> Stmt:
        """Emit all products of one step of K, batch by batch of B's tiles."""
        batches = unrolled("j", n_tiles // right.batch, lambda j: batch(j * right.batch, step))
        return Block((*left.bring(ZERO, step), batches))

    allocs = [Alloc(o.registers) for o in (left, right) if o.load is not None]
    clear = _clear(op, ctx, p, first, n_tiles, all_columns)
    return Block((*allocs, *clear, unrolled("ks", k // shape.k, along_n)))


def _batch(tiles: int, in_byte_order: bool) -> int:
    """Return how many tiles of B are loaded at once: by ldmatrix two, of float8 in the order of bytes four."""
    return next(n for n in ((4, 2, 1) if in_byte_order else (2, 1)) if tiles % n == 0)


def _clear(op: Gemm, ctx: ThreadContext, p: Partition, first: int, n_tiles: int, all_columns: int) -> list[Stmt]:
    """Set the accumulators of this product to zero, if it starts afresh."""
    if not op.clear_accum:
        return []
    total, each = ctx.registers(op.C.buffer), p.shape.registers("d")
    m_tiles = p.tiles(number_of(op.C.extents[-2]), 0)[0]
    zero = const(0, op.C.buffer.dtype)

    def row(i: Expr) -> Stmt:
        """Emit the clearing of one row of tiles."""
        return unrolled("v", n_tiles * each, lambda v: Store(total, ((i * all_columns + first) * each + v,), zero))

    return [unrolled("mi", m_tiles, row)]


def _operand(s: Source, ctx: ThreadContext) -> Operand:
    """Choose how an operand gets into registers."""
    buffer = s.region.buffer
    kept = _in_place(s, ctx) if buffer.scope == "fragment" else None
    if kept is not None and not s.tf32:
        return kept
    registers = ctx.local(s.name, s.batch * s.each, s.dtype)

    def index(tile: Expr, step: Expr) -> Expr:
        """Return the first register of a tile's operand in the batch."""
        return tile % s.batch * s.each

    def element(tile: Expr, step: Expr, v: Expr) -> Expr:
        """Load element `v` of a tile's operand, from a fragment or by its layout."""
        if kept is not None:
            return Load(kept.registers, (kept.index(tile, step) + v,))
        i, k = (_coordinate(digits, ctx.thread, v) for digits in s.digits)
        return cast(Load(buffer, s.place(s.outer(tile, i), step * s.step + k)), s.dtype)

    why_not = "" if kept is not None or buffer.dtype.bits > 32 else _no_ldmatrix(s, ctx)
    if kept is None and s.widens and not why_not:
        load, how = _by_bytes(s, registers, index, ctx), f"ldmatrix{'.trans' * s.across}, widened in registers"
    elif kept is None and buffer.dtype.bits <= 32 and not why_not:
        load, how = _by_matrix(s, registers, index, ctx.thread), "ldmatrix.trans" if s.across else "ldmatrix"
    else:
        load, how = _by_element(s, registers, index, element), "registers" if kept is not None else "single elements"
    if s.tf32:
        load = _rounded(s, registers, index, load)
    return Operand(registers, index, load, s.batch, how, why_not)


def _in_place(s: Source, ctx: ThreadContext) -> Operand:
    """Return an operand that is read from the registers of its fragment, without a copy."""
    rows, columns = (number_of(size) for size in s.region.buffer.shape[-2:])
    along, start = (rows, s.region.starts[-2]) if s.across else (columns, s.region.starts[-1])
    steps, first = along // s.step, number_of(start) // s.step

    def index(tile: Expr, step: Expr) -> Expr:
        """Return the first register of a tile's operand in the fragment."""
        return (tile * steps + (step + first)) * s.each

    return Operand(ctx.registers(s.region.buffer), index, None, s.batch, "registers in place")


def _no_ldmatrix(s: Source, ctx: ThreadContext) -> str:
    """Return why ldmatrix cannot load an operand of at most 32 bits from shared memory; empty if it can."""
    buffer = s.region.buffer
    if s.in_byte_order and not s.widens:
        return f"the other operand is widened from memory, so that k does not go as ldmatrix reads `{buffer.name}`"
    if s.across and s.widens and not s.alternating:
        return f"a warp has no two tiles of columns of `{buffer.name}`, of which ldmatrix turns pairs"
    if s.across and buffer.dtype.bits != 16 and not s.widens:
        return f"`{buffer.name}` runs across k, and ldmatrix turns only 16-bit elements"
    chunk = 16 // buffer.dtype.itemsize
    if aligned_run(buffer) % chunk:
        return f"the rows of `{buffer.name}` are not runs of 16 bytes"
    if not divides(chunk, s.region.starts[-1], ctx.ranges):
        return f"the slice of `{buffer.name}` may not start at a multiple of 16 bytes"
    return ""


def _by_matrix(s: Source, registers: Buffer, index: Index, thread: Expr) -> LoadBatch:
    """Load by ldmatrix: a tile of A, or two tiles of B, are 2 x 2 matrices of 8 rows of 16 bytes.

    Lane l names row l % 8 of matrix l // 8; the matrices of A are counted along i first, those of B along k first.
    """
    chunk = 16 // s.region.buffer.dtype.itemsize
    lane, low, high = thread % 8, thread // 8 % 2, thread // 16 % 2
    count = 4 if s.unit == 16 or s.batch == 2 else 2
    at_once = 1 if s.unit == 16 else s.batch

    def matrices(tile: Expr, step: Expr) -> Stmt:
        """Emit the ldmatrix of one tile."""
        along_i, along_k = (low, high) if s.unit == 16 else (high if count == 4 else ZERO, low)
        i, k = s.offset + tile * s.unit + along_i * 8, step * s.step + along_k * chunk
        i, k = (i, k + lane) if s.across else (i + lane, k)
        dst, src = Address(registers, (index(tile, step),)), Address(s.region.buffer, s.place(i, k))
        return ldmatrix(dst, src, count, s.across)

    return lambda first, step: unrolled("i", s.batch // at_once, lambda n: matrices(first + n * at_once, step))


def _by_bytes(s: Source, registers: Buffer, index: Index, ctx: ThreadContext) -> LoadBatch:
    """Load float8 by ldmatrix and widen them. Its lanes get four bytes of each matrix of 8 rows of 16 bytes.

    Along k, a matrix is a tile of B, and a lane's bytes are neighbours along k. Across k, a matrix is half the step of
    two tiles: a lane has two bytes of both of two rows, and the even columns are one tile's.
    """
    count, lane = s.batch if not s.across else 2, ctx.thread % 8
    raw = ctx.local(f"{s.name}_bytes", 4 * count, s.region.buffer.dtype)

    def load(first: Expr, step: Expr) -> Stmt:
        """Emit one ldmatrix, and the conversions of its bytes."""
        matrix = ctx.thread // 8 % count if count > 1 else ZERO
        if s.across:
            i, k = s.offset + first * s.unit, step * s.step + matrix * 8 + lane
        else:
            i, k = s.offset + (first + matrix) * s.unit + lane, step * s.step
        read = ldmatrix(Address(raw, (ZERO,)), Address(s.region.buffer, s.place(i, k)), count, s.across)

        def widen(v: Expr) -> Stmt:
            """Emit the conversion of one element, in the order of the registers of all tiles."""
            source = v
            if s.across:  # registers count tile, half of the step, row; bytes half, row, tile
                source = v // 2 % 2 * 4 + v % 2 * 2 + v // 4
            return Store(registers, (v,), cast(Load(raw, (source,)), s.dtype))

        return Block((Alloc(raw), read, unrolled("v", s.batch * s.each, widen)))

    return load


def _by_element(s: Source, registers: Buffer, index: Index, element: Callable[[Expr, Expr, Expr], Expr]) -> LoadBatch:
    """Load or move one element at a time."""

    def load(first: Expr, step: Expr) -> Stmt:
        """Emit the loads of a batch, element by element."""

        def load_one(tile: Expr, v: Expr) -> Stmt:
            """Emit the load of one element into its register."""
            return Store(registers, (index(tile, step) + v,), element(tile, step, v))

        return unrolled("i", s.batch, lambda n: unrolled("v", s.each, lambda v: load_one(first + n, v)))

    return load


def _rounded(s: Source, registers: Buffer, index: Index, load: LoadBatch) -> LoadBatch:
    """Wrap the loads of an operand so that each value is then rounded to tf32."""

    def rounding(first: Expr, step: Expr) -> Stmt:
        """Emit the loads of a batch, and the rounding of its registers."""

        def one(v: Expr) -> Stmt:
            """Emit the rounding of one register."""
            place = index(first, step) + v
            return Store(registers, (place,), round_tf32(Load(registers, (place,))))

        return Block((load(first, step), unrolled("v", s.batch * s.each, one)))

    return rounding


def _coordinate(digits: Digits, thread: Expr, register: Expr) -> Expr:
    """Return the index within a tile of the element that a thread holds in a register."""
    total: Expr = ZERO
    place = math.prod(d.size for d in digits)
    for d in digits:
        place //= d.size
        total = total + (thread if d.axis == "t" else register) // d.stride % d.size * place
    return total
