# SPDX-License-Identifier: Apache-2.0
"""T.gemm by multiply-adds of single elements, for types and sizes that the tensor cores do not take.

Each thread owns a grid of elements of C and goes along k; what it loads of A's rows and B's columns serves the whole
grid. Takes every product that `check` lets through.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Expr, Load, Var, cast, const
from torch_tile.ir.layout import Digit, Layout, replicated
from torch_tile.ir.stmt import Alloc, Block, For, LoopKind, Stmt, Store
from torch_tile.tileop.base import parallel
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.tileop.gemm.op import Gemm


def refuses(op: Gemm, ctx: ThreadContext) -> str | None:
    """Return None: this implementation takes every product."""
    return None


def infer_layout(op: Gemm, known: Layouts, ctx: ThreadContext) -> list[Demand]:
    """Spread C over the threads, and give fragment operands each thread's rows or columns, whole along k."""
    demands = []
    accumulator = None
    shape = op.C.buffer.static_shape
    if op.C.buffer.scope == "fragment" and shape is not None:
        accumulator = known.get(op.C.buffer) or _grid(shape, ctx.count)
        demands.append(Demand(op.C.buffer, accumulator, False, "each thread multiplies its own elements", op.span))
    for region, dim in ((op.A, 0), (op.B, 1)):
        sizes = region.buffer.static_shape
        if region.buffer.scope != "fragment" or sizes is None:
            continue
        transposed = op.transpose_A if dim == 0 else not op.transpose_B
        fits = accumulator is not None and len(sizes) == len(shape or ()) == 2 and op.C.is_whole and region.is_whole
        if fits and accumulator is not None:
            layout = _follow(accumulator, dim, sizes[0] if transposed else sizes[1], transposed)
        else:
            layout = replicated(sizes, ctx.count)
        demands.append(Demand(region.buffer, layout, True, "read along k by the threads that hold C", op.span))
    return demands


def lower(op: Gemm, ctx: ThreadContext) -> Stmt:
    """Emit the loops of a thread: k outside, so that elements of C share loads, or inside if C is narrow."""
    zero = const(0, dt.int32)
    m, n = op.C.extents[-2:]
    extent = op.A.extents[-2 if op.transpose_A else -1]
    kind = op.C.buffer.dtype
    wide = kind if kind.bits >= 32 else dt.float32
    fragments = any(region.buffer.scope == "fragment" for region in (op.A, op.B))
    k = Var("k", dt.int32, "loop")

    def product(i: Expr, j: Expr) -> Expr:
        """Build the product of one pair of elements."""
        a = Load(op.A.buffer, _place(op.A, k, i) if op.transpose_A else _place(op.A, i, k))
        b = Load(op.B.buffer, _place(op.B, j, k) if op.transpose_B else _place(op.B, k, j))
        return cast(a, wide) * cast(b, wide)

    def along_k(body: Stmt) -> Stmt:
        """Wrap a statement in the loop along K."""
        loop = LoopKind.UNROLLED if fragments else LoopKind.SERIAL
        return For(loop, (k,), (zero,), (extent,), Block((body,)))

    def add(point: tuple[Var, ...], value: Expr) -> Stmt:
        """Build the addition of a value to an element of C."""
        place = _place(op.C, *point)
        return Store(op.C.buffer, place, cast(cast(Load(op.C.buffer, place), wide) + value, kind))

    def narrow(point: tuple[Var, ...]) -> Stmt:
        """Build the sum along K in a variable of the wide type."""
        total = Buffer("total", (), wide, "var")
        step = Store(total, (), Load(total, ()) + product(*point))
        return Block((Alloc(total, const(0, wide)), along_k(step), add(point, Load(total, ()))))

    if wide == kind:
        loops = along_k(parallel((m, n), lambda point: add(point, product(*point))))
    else:
        loops = parallel((m, n), narrow)
    if not op.clear_accum:
        return loops
    return Block((parallel((m, n), lambda point: Store(op.C.buffer, _place(op.C, *point), const(0, kind))), loops))


def _place(region: Region, i: Expr, j: Expr) -> tuple[Expr, ...]:
    """Return the buffer indices of row `i`, column `j` of the matrix that a region is."""
    *lead, rows, columns = region.starts
    return (*lead, rows + i, columns + j)


def _grid(shape: tuple[int, ...], threads: int) -> Layout:
    """Lay C over a grid of threads in the last two dimensions, neighbours along columns; surplus threads hold replicas.

    As many threads as divide the sizes take part. Their grid is the one that reads the fewest elements per step along
    k.
    """
    m, n = shape[-2:]
    choices = [
        (rows, columns)
        for rows in range(1, min(m, threads) + 1)
        for columns in range(1, min(n, threads // rows) + 1)
        if m % rows == 0 and n % columns == 0 and threads % (rows * columns) == 0
    ]
    rows, columns = min(choices, key=lambda c: (-c[0] * c[1], m // c[0] + n // c[1]))
    dims = (Digit(m // rows, n // columns, "r"), Digit(rows, columns, "t")), (
        Digit(n // columns, 1, "r"), Digit(columns, 1, "t"),
    )  # fmt: skip
    copies = Digit(threads // (rows * columns), rows * columns, "t")
    lead = math.prod(shape[:-2])
    assert lead == 1, "a matrix has leading dimensions of size 1"
    kept = tuple(tuple(d for d in dim if d.size > 1) for dim in dims)
    return Layout((((),) * (len(shape) - 2)) + kept, (copies,) if copies.size > 1 else ())


def _follow(accumulator: Layout, dim: int, k: int, transposed: bool) -> Layout:
    """Lay out an operand with its rows (`dim` 0) or columns (1) in C's threads. All of k lies in registers."""
    stride = k * math.prod(d.size for d in accumulator.dims[dim] if d.axis == "r")
    digits = []
    for d in accumulator.dims[dim]:
        if d.axis == "r":
            stride //= d.size
            digits.append(Digit(d.size, stride, "r"))
        else:
            digits.append(d)
    along_k = (Digit(k, 1, "r"),) if k > 1 else ()
    others = tuple(d for d in accumulator.dims[1 - dim] if d.axis == "t")
    dims = (along_k, tuple(digits)) if transposed else (tuple(digits), along_k)
    return Layout(dims, (*others, *accumulator.replicas))
