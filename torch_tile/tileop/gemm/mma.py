# SPDX-License-Identifier: Apache-2.0
"""T.gemm by mma.sync: operands come from shared memory by ldmatrix, or stay in the registers where they already are.

B of float8 beside A of 16 bits is widened in registers.

Decides the split of C over the warps (`partition.py`). Assumes at lowering that C and fragment operands have the
layouts demanded here. What a thread then does is in `gemm/steps.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_tile.diagnostics.errors import InternalError
from torch_tile.hardware import WARP
from torch_tile.intrinsics.matrix import FRAGMENTS, Digits, shape_for
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Const
from torch_tile.ir.layout import Layout, shared_tile
from torch_tile.ir.stmt import Stmt
from torch_tile.tileop.gemm import steps as gemm_steps
from torch_tile.tileop.gemm.partition import Partition, partitions, transposed
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.tileop.gemm.op import Gemm


def refuses(op: Gemm, ctx: ThreadContext) -> str | None:
    """Return why the tensor cores cannot compute this product; None if they can."""
    types = instruction_types(op, ctx)
    name = shape_for(*types, ctx.target)
    if name is None:
        return f"no mma.sync on {ctx.target} multiplies {types[0]} by {types[1]} into {types[2]}"
    if ctx.count % WARP:
        return f"{ctx.count} threads are not whole warps"
    sizes = problem(op)
    if sizes is None:
        return "its extents are known only at run time"
    shape = FRAGMENTS[name]
    for what, size, unit in zip("MNK", sizes, (shape.m, shape.n, shape.k), strict=True):
        if size % unit:
            return f"{what} = {size} is not a multiple of {unit}"
    if op.C.buffer.scope != "fragment":
        return f"`{op.C.buffer.name}` is in {op.C.buffer.scope} memory, not a fragment"
    wholes = (
        (op.C, -2, shape.n),
        (op.A, -1 if op.transpose_A else -2, shape.k),
        (op.B, -2 if op.transpose_B else -1, shape.k),
    )
    for region, whole, unit in wholes:
        if region.buffer.scope == "fragment" and not _in_tiles(region, whole, unit):
            return f"the slice of the fragment `{region.buffer.name}` does not consist of whole instruction tiles"
        if region.buffer.scope not in ("fragment", "shared"):
            return f"`{region.buffer.name}` is in {region.buffer.scope} memory"
    return None if _choices(op, ctx) else f"{ctx.count // WARP} warps cannot share a slice of `{op.C.buffer.name}`"


def infer_layout(op: Gemm, known: Layouts, ctx: ThreadContext) -> list[Demand]:
    """Demand accumulators for C, fragment operands as the instruction reads them, and swizzled shared ones."""
    chosen = next((p for p in _choices(op, ctx) if _agrees(op, p, known)), _choices(op, ctx)[0])
    demands = []
    for operand in (op.C, op.A, op.B):
        buffer = operand.buffer
        if buffer.scope == "fragment":
            what = {op.C: "accumulator", op.A: "A operand", op.B: "B operand"}[operand]
            demands.append(Demand(buffer, _layout_of(op, operand, chosen), True, f"mma.sync {what}", op.span))
        elif (sizes := buffer.static_shape) is not None:
            layout = shared_tile(sizes, buffer.dtype.bits)
            demands.append(Demand(buffer, layout, False, "swizzled so that ldmatrix meets no bank twice", op.span))
    return demands


def lower(op: Gemm, ctx: ThreadContext) -> Stmt:
    """Emit one thread's part of a product by mma.sync."""
    return gemm_steps.product(op, partition_of(op, ctx), ctx, widens(op))


def partition_of(op: Gemm, ctx: ThreadContext) -> Partition:
    """Return the partition that C's layout belongs to."""
    for p in _choices(op, ctx):
        if op.C.buffer.layout == _layout_of(op, op.C, p):
            return p
    raise InternalError(f"`{op.C.buffer.name}` has the layout {op.C.buffer.layout}, not an accumulator's", op.span)


def has_product(op: Gemm, ctx: ThreadContext) -> bool:
    """Return whether the tensor cores multiply these types, whatever the sizes."""
    return shape_for(*instruction_types(op, ctx), ctx.target) is not None


def operand_types(op: Gemm, ctx: ThreadContext) -> tuple[str, str, str]:
    """Return the types of A, B, C as `intrinsics.matrix` names them: float32 is as tf32 where the author allows it."""
    a, b, c = (region.buffer.dtype.name for region in (op.A, op.B, op.C))
    if ctx.build.options.tf32 and a == b == c == "float32":
        return "tf32", "tf32", c
    return a, b, c


def widens(op: Gemm) -> bool:
    """Return whether B is of float8 in shared memory, to be widened to A's 16 bits."""
    a, b = op.A.buffer.dtype, op.B.buffer
    return a in (dt.float16, dt.bfloat16) and b.dtype == dt.float8_e4m3fn and b.scope == "shared"


def instruction_types(op: Gemm, ctx: ThreadContext) -> tuple[str, str, str]:
    """Return the types of A, B and C as the instruction takes them."""
    a, b, c = operand_types(op, ctx)
    return (a, a, c) if widens(op) else (a, b, c)


def problem(op: Gemm) -> tuple[int, int, int] | None:
    """Return M, N, K, or None if one of them is known only at run time."""
    m, n = op.C.extents[-2:]
    k = op.A.extents[-2 if op.transpose_A else -1]
    sizes = [e.value for e in (m, n, k) if isinstance(e, Const)]
    return (int(sizes[0]), int(sizes[1]), int(sizes[2])) if len(sizes) == 3 else None


def step_of(op: Gemm, ctx: ThreadContext) -> int:
    """Return how many elements of K one instruction covers."""
    name = shape_for(*instruction_types(op, ctx), ctx.target)
    assert name is not None
    return FRAGMENTS[name].k


def registers(op: Gemm, ctx: ThreadContext) -> tuple[int, int, int]:
    """Count a thread's 4-byte registers for its part of C, and of A and B in a step along K."""
    sizes, p = problem(op), _choices(op, ctx)[0]
    assert sizes is not None
    m_tiles, n_tiles = p.tiles(*sizes[:2])
    counts = (op.C, "d", m_tiles * n_tiles), (op.A, "a", m_tiles), (op.B, "b", n_tiles)
    c, a, b = (-(-tiles * p.shape.registers(x) * r.buffer.dtype.bits // 32) for r, x, tiles in counts)
    return c, a, b


def matrix_sizes(region: Region) -> tuple[int, int]:
    """Return the rows and columns of the buffer behind a region."""
    shape = region.buffer.static_shape
    assert shape is not None
    return shape[-2], shape[-1]


def start_of(region: Region, dim: int) -> int | None:
    """Return the first index along a dimension if it is a literal."""
    start = region.starts[dim]
    return int(start.value) if isinstance(start, Const) else None


def _in_tiles(region: Region, whole: int, unit: int) -> bool:
    """Return whether a fragment is whole along dimension `whole` (-2 rows, -1 columns) and tiled along the other."""
    shape = region.buffer.static_shape
    if shape is None or any(size != 1 for size in shape[:-2]):
        return False
    sliced = -3 - whole
    start, extent = start_of(region, sliced), region.extents[whole]
    fits = isinstance(extent, Const) and extent.value == shape[whole]
    return fits and shape[sliced] % unit == 0 and start is not None and start % unit == 0


def _choices(op: Gemm, ctx: ThreadContext) -> list[Partition]:
    """Return the partitions that fit, best first: one column of warps where a slice takes C's columns."""
    sizes, name = problem(op), shape_for(*instruction_types(op, ctx), ctx.target)
    assert sizes is not None and name is not None
    m, n, _ = sizes
    shape = FRAGMENTS[name]
    if widens(op) and op.transpose_B:
        shape = shape.in_byte_order()
    splits = partitions(shape, m, n, ctx.count // WARP, op.policy.value)
    found = [p for p in splits if p.columns == 1 or n == matrix_sizes(op.C)[1]]
    return [replace(p, alternating=True) for p in found if _may_alternate(op, p, n)] + found


def _may_alternate(op: Gemm, p: Partition, n: int) -> bool:
    """Return whether columns may go to two tiles by turns: ldmatrix turns pairs of bytes, neighbours along n."""
    start, pair = start_of(op.C, -1), 2 * p.shape.n
    across = widens(op) and not op.transpose_B
    return across and n % (p.columns * pair) == 0 and start is not None and start % pair == 0


def _layout_of(op: Gemm, operand: Region, p: Partition) -> Layout:
    """Return the layout of the whole fragment behind an operand."""
    rows, columns = matrix_sizes(operand)
    if operand is op.C:
        found = p.accumulator(rows, columns)
    elif operand is op.A:
        found = transposed(p.operand_a(columns, rows)) if op.transpose_A else p.operand_a(rows, columns)
    else:
        found = transposed(p.operand_b(columns, rows)) if op.transpose_B else p.operand_b(rows, columns)
    lead: tuple[Digits, ...] = ((),) * (operand.buffer.rank - 2)
    return Layout((*lead, *found.dims), found.replicas)


def _agrees(op: Gemm, p: Partition, known: Layouts) -> bool:
    """Return whether a partition keeps every layout that is already known."""
    fragments = (r for r in (op.C, op.A, op.B) if r.buffer.scope == "fragment")
    return all((layout := known.get(r.buffer)) is None or layout == _layout_of(op, r, p) for r in fragments)
