# SPDX-License-Identifier: Apache-2.0
"""T.gemm by wgmma: whole warpgroups multiply what lies in panels of shared memory, A also from registers.

Decides the split of C over the warpgroups (`partition.py`) and how each operand is walked. Assumes at
lowering that fragments have the layouts demanded here and shared operands are panels (`ir.layout.shared_tile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import Diagnostic, InternalError
from torch_tile.hardware import WARPGROUP
from torch_tile.intrinsics import wgmma
from torch_tile.intrinsics.wgmma import Descriptor, wgmma_hold, wgmma_results
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import divides
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Binary, Expr, const
from torch_tile.ir.layout import Layout, shared_tile
from torch_tile.ir.node import node_class
from torch_tile.ir.stmt import Block, If, Stmt, Store
from torch_tile.tileop.base import RegisteredOp, is_one, need_region, tile_op
from torch_tile.tileop.gemm.mma import matrix_sizes, operand_types, problem
from torch_tile.tileop.gemm.partition import WarpgroupPartition, instruction_columns, warpgroup_partitions
from torch_tile.tileop.gemm.steps import ZERO, unrolled
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env
    from torch_tile.tileop.gemm.op import Gemm


NO_BULK_COPIES = "its operands do not come by bulk copies"


def refuses(op: Gemm, ctx: ThreadContext) -> str | None:
    """Return why wgmma cannot compute this product; None if it can."""
    types = operand_types(op, ctx)
    step, sizes = wgmma.step_of(*types, ctx.target), problem(op)
    if not ctx.asynchronous and not op.wgmma:
        return NO_BULK_COPIES
    if not step:
        return f"no wgmma on {ctx.target} multiplies {types[0]} by {types[1]} into {types[2]}"
    if ctx.count % WARPGROUP:
        return f"{ctx.count} threads are not whole warpgroups"
    if sizes is None:
        return "its extents are known only at run time"
    if sizes[2] % step:
        return f"K = {sizes[2]} is not a multiple of {step}"
    if op.C.buffer.scope != "fragment" or not _is_whole_matrix(op.C):
        return f"`{op.C.buffer.name}` is no whole fragment"
    if op.B.buffer.scope != "shared":
        return f"`{op.B.buffer.name}` is in {op.B.buffer.scope} memory, and wgmma reads B from shared memory"
    if op.A.buffer.scope == "fragment":
        if op.transpose_A or not _is_whole_matrix(op.A):
            return f"`{op.A.buffer.name}` in registers is transposed, or a slice"
        if op.A.buffer.dtype.bits == 32:
            return f"`{op.A.buffer.name}` in registers would have to be rounded to tf32"
    elif op.A.buffer.scope != "shared":
        return f"`{op.A.buffer.name}` is in {op.A.buffer.scope} memory"
    for region, across in _shared_operands(op):
        if why := _no_panels(region, across, step, ctx):
            return why
    return None if _choices(op, ctx) else f"{sizes[0]} x {sizes[1]} is not shared by {ctx.count // 128} warpgroups"


def infer_layout(op: Gemm, known: Layouts, ctx: ThreadContext) -> list[Demand]:
    """Demand accumulators for C, A in registers as the instruction reads it, and swizzled panels if shared."""
    choices = _choices(op, ctx)
    chosen = next((p for p in choices if known.get(op.C.buffer) in (None, _accumulator(op, p))), choices[0])
    demands = [Demand(op.C.buffer, _accumulator(op, chosen), True, "wgmma accumulator", op.span)]
    if op.A.buffer.scope == "fragment":
        demands.append(Demand(op.A.buffer, _operand_a(op, chosen), True, "wgmma A operand", op.span))
    for region, _ in _shared_operands(op):
        if (sizes := region.buffer.static_shape) is not None:
            layout = shared_tile(sizes, region.buffer.dtype.bits)
            demands.append(Demand(region.buffer, layout, False, "panels that wgmma reads", op.span))
    return demands


def lower(op: Gemm, ctx: ThreadContext) -> Stmt:
    """Emit what one thread does: all products of the tile as one group, and the wait that the author asks for."""
    sizes, p = problem(op), _partition_of(op, ctx)
    assert sizes is not None
    m, n, k = sizes
    types = operand_types(op, ctx)
    step, m_tiles, columns = wgmma.step_of(*types, ctx.target), p.tiles(m), n // p.columns
    width = instruction_columns(columns, types[0])
    group = ctx.thread // WARPGROUP
    row, column = group // p.columns % p.rows * (m // p.rows), group % p.columns * columns
    total = ctx.registers(op.C.buffer)
    right = Walk.of(op.B, not op.transpose_B)
    left = Walk.of(op.A, op.transpose_A) if op.A.buffer.scope == "shared" else None
    _remark(op, p, (width, step, columns), types, (left, right), ctx)
    each_a = wgmma.M * step // WARPGROUP

    def one(ks: Expr, mi: Expr, nj: Expr) -> Stmt:
        """Emit one wgmma of step `ks` along k, tile row `mi` and column tile `nj`."""
        d = Address(total, (mi * (columns // 2) + nj * (width // 2),))
        a_step: Expr = ZERO
        if left is None:
            a = Address(ctx.registers(op.A.buffer), ((mi * (k // step) + ks) * each_a,))
        else:
            a, a_step = left.start, left.offset(row + mi * wgmma.M, ks * step)
        b_step = right.offset(column + nj * width, ks * step)
        keep: Expr | bool = Binary(">", ks, ZERO) if op.clear_accum and k > step else True
        walks = None if left is None else left.walk, right.walk
        return wgmma.wgmma(d, a, right.start, width, types, *walks, a_step, b_step, keep)

    def products(ks: Expr) -> Stmt:
        """Emit all wgmmas of one step of K."""
        return unrolled(
            "mi", m_tiles, lambda mi: unrolled("nj", columns // width, lambda nj: one(ks, mi, nj))
        )  # fmt: skip

    before: list[Stmt] = []
    if op.clear_accum and k == step:
        zero, size = const(0, op.C.buffer.dtype), m_tiles * columns // 2
        before = [unrolled("v", size, lambda v: Store(total, (v,), zero))]
    held = wgmma.wgmma_results(Address(total, (ZERO,)), m_tiles * columns // 2)
    if op.wgmma and op.wg_wait == 0 and not op.clear_accum:
        before = [held]  # sums that arithmetic began are in their registers before the fence
    after = [wgmma.wgmma_wait(op.wg_wait)] if op.wg_wait >= 0 else []
    if op.wg_wait == 0:
        after.append(held)
    half = k // step // 2 if op.used is not None and op.wg_wait <= 0 and k // step % 2 == 0 else 0
    if not half:
        return Block((*before, wgmma.wgmma_fence(), unrolled("ks", k // step, products), wgmma.wgmma_commit(), *after))
    assert op.used is not None
    # A group for each half: of one group that ends behind a branch, the assembler fences and closes the parts itself.
    first, second = (
        (wgmma.wgmma_fence(), unrolled("ks", half, each), wgmma.wgmma_commit())
        for each in (products, lambda ks: products(ks + half))
    )
    rest = If(Binary(">", op.used, const(half * step, op.used.dtype)), Block(second), Block(()))
    return Block((*before, *first, rest, *after))


@dataclass(frozen=True)
class Walk:
    """The strides of a wgmma operand in shared memory, the address of its tile, and the starts of its parts.

    `rows` are those of the buffer, padded. `across` says that memory runs along M or N.
    """

    start: Address
    walk: Descriptor
    region: Region
    rows: int

    @staticmethod
    def of(region: Region, across: bool) -> Walk:
        """Derive the walk from the layout of the buffer."""
        buffer = region.buffer
        span = panel_span(buffer)
        assert span is not None and buffer.static_shape is not None
        rows = -(-buffer.static_shape[-2] // 8) * 8
        first = Address(buffer, (*region.starts[:-2], ZERO, ZERO))
        return Walk(first, Descriptor(span, rows * span if across else 16, 8 * span, across), region, rows)

    def offset(self, i: Expr, k: Expr) -> Expr:
        """Compute the bytes from the tile's start to the part that begins at row (of B: column) `i` and step `k`."""
        span, size = self.walk.swizzle, self.region.buffer.dtype.itemsize
        first, second = self.region.starts[-2:]
        row, column = (first + k, second + i) if self.walk.across else (first + i, second + k)
        panel = span // size
        return column // panel * (self.rows * span) + column % panel * size + row * span


def panel_span(buffer: Buffer) -> int | None:
    """Return the bytes of a panel row of a shared tile that consists of panels; None for another tile."""
    shape = buffer.static_shape
    if shape is None or len(shape) < 2:
        return None
    bits = buffer.dtype.bits
    layout = buffer.layout or shared_tile(shape, bits)
    if layout.swizzle is None:
        return None
    span = 16 << layout.swizzle.bits
    return span if layout == shared_tile(shape, bits, span) else None


def _no_panels(region: Region, across: bool, step: int, ctx: ThreadContext) -> str:
    """Return why wgmma cannot read a shared operand; empty if it can."""
    buffer, span = region.buffer, panel_span(region.buffer)
    if across and buffer.dtype.bits != 16:
        return f"`{buffer.name}` runs across K, and wgmma turns only 16-bit elements"
    if span is None:
        return f"`{buffer.name}` does not lie in panels of 32, 64 or 128 bytes that swizzles repeat in"
    row, column = region.starts[-2:]
    panel = span // buffer.dtype.itemsize
    units = (step, panel) if across else (8, step)
    if not divides(units[0], row, ctx.ranges) or not divides(units[1], column, ctx.ranges):
        return f"the slice of `{buffer.name}` may not start at a multiple of {units[0]} x {units[1]}"
    if across and (wgmma.M % panel or not divides(panel, region.extents[-1])):
        return f"the columns of `{buffer.name}` are not whole panels of {panel}"
    return ""


def _shared_operands(op: Gemm) -> list[tuple[Region, bool]]:
    """Return A and B as far as they are in shared memory, each with whether memory runs across K."""
    operands = [(op.A, op.transpose_A), (op.B, not op.transpose_B)]
    return [(region, across) for region, across in operands if region.buffer.scope == "shared"]


def _is_whole_matrix(region: Region) -> bool:
    """Return whether a region is all of its buffer, a matrix."""
    return region.is_whole and all(map(is_one, region.buffer.shape[:-2]))


def _choices(op: Gemm, ctx: ThreadContext) -> list[WarpgroupPartition]:
    """Return the partitions that fit, best first. Where memory runs along N, a warpgroup's columns are whole panels."""
    sizes, types = problem(op), operand_types(op, ctx)
    assert sizes is not None
    m, n, _ = sizes
    found = warpgroup_partitions(m, n, ctx.count // WARPGROUP, op.policy.value, types[0])
    span = panel_span(op.B.buffer) or 0
    panel = 1 if op.transpose_B else span // op.B.buffer.dtype.itemsize

    def fits(p: WarpgroupPartition) -> bool:
        """Return whether a partition's columns are whole panels."""
        columns = n // p.columns
        width = instruction_columns(columns, types[0])
        return width % panel == 0 if columns > width or p.columns > 1 else True

    return [p for p in found if fits(p)]


def _partition_of(op: Gemm, ctx: ThreadContext) -> WarpgroupPartition:
    """Return the partition that C's layout belongs to."""
    for p in _choices(op, ctx):
        if op.C.buffer.layout == _accumulator(op, p):
            return p
    raise InternalError(f"`{op.C.buffer.name}` has the layout {op.C.buffer.layout}, not an accumulator's", op.span)


def _accumulator(op: Gemm, p: WarpgroupPartition) -> Layout:
    """Return the accumulator layout of a product's partition."""
    return _leading(op.C.buffer, p.accumulator(*matrix_sizes(op.C)))


def _operand_a(op: Gemm, p: WarpgroupPartition) -> Layout:
    """Return the register layout of operand A in a product's partition."""
    return _leading(op.A.buffer, p.operand_a(*matrix_sizes(op.A), op.A.buffer.dtype.bits))


def _leading(buffer: Buffer, layout: Layout) -> Layout:
    """Put dimensions of size 1 in front."""
    return Layout((((),) * (buffer.rank - 2)) + layout.dims, layout.replicas)


def _remark(
    op: Gemm,
    p: WarpgroupPartition,
    shape: tuple[int, int, int],
    types: tuple[str, str, str],
    walks: tuple[Walk | None, Walk],
    ctx: ThreadContext,
) -> None:
    """Add a line to the schedule report. `shape`: the width and K of one wgmma, and the columns of a warpgroup."""
    width, step, columns = shape
    rows = matrix_sizes(op.C)[0] // p.rows
    how = [
        "registers"
        if w is None
        else f"shared panels of {w.walk.swizzle} bytes" + (" across K" if w.walk.across else "")
        for w in walks
    ]
    split = f"{p.rows} x {p.columns} warpgroups of {rows} x {columns}"
    ctx.build.remark(op.span, "T.gemm", f"wgmma m64n{width}k{step} {types[0]}, {split}; A: {how[0]}; B: {how[1]}")


# T.wgmma_results: products that stayed in flight have been waited for, and their results are used from here on.


@tile_op("wgmma_results")
@node_class
class WgmmaResults(RegisteredOp):
    """Mark the wait for the products that wrote the fragment `C`: no arithmetic on it is moved before that wait.

    With `held` it stands before the wait for other products: arithmetic on `C` begins in front of that.
    """

    C: Region
    held: bool = False

    @classmethod
    def build(cls, C: Any) -> WgmmaResults:
        """Say that results of products in flight, in `C`, are used from here on; T.wait_wgmma says so too."""
        return cls(need_region(C, "wgmma_results", "C"))

    def check(self) -> list[Diagnostic]:
        """Return no diagnostics."""
        return []

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return the fragment as read and written, as if it were computed here."""
        return [self.C], [self.C]

    def lower_cpu(self) -> Stmt:
        """Emit nothing."""
        return Block(())

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Demand no layout."""
        return []

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Mark this thread's accumulators."""
        registers, layout = ctx.registers(self.C.buffer), self.C.buffer.layout
        assert layout is not None
        first = Address(registers, (const(0, dt.int32),))
        return wgmma_hold(first) if self.held else wgmma_results(first, layout.extent("r"))

    def evaluate(self, env: Env) -> None:
        """Do nothing."""
