# SPDX-License-Identifier: Apache-2.0
"""T.gemm_sp: products of which A is 2:4 sparse, kept as its nonzeros and the metadata that says where they stand.

The metadata is that of mma.sp in the PTX ISA, row by row: four bits for two nonzeros of four neighbours along K, the
place of the first in the lower two bits. Of 32-bit types, four bits say which of two neighbours is kept: 0b0100 the
first, 0b1110 the second. Lower bits of an element of E come first. TileLang's own compressor since 0.1.14 writes this
order; that of CUTLASS's compressors, which interleaves rows, is another. The product expands A into a tile in shared
memory and multiplies that, on every target.
"""

from __future__ import annotations

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Const, Expr, Load, Var, binary, cast, const, select
from torch_tile.ir.stmt import Alloc, Block, Let, Stmt, Store
from torch_tile.language.asynchronous import gemm, in_kernel
from torch_tile.language.trace import Tracer
from torch_tile.language.values import Handle
from torch_tile.tileop.base import Scalar, Tile, describe, indices_at, need_region, number_of, parallel
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.gemm.op import GemmWarpPolicy

NIBBLE = 4  # bits of metadata for one group


def group_of(dtype: dt.DType) -> tuple[int, int]:
    """Return how many elements are kept of how many neighbours: 1 of 2 for types of 32 bits, else 2 of 4."""
    return (1, 2) if dtype.bits == 32 else (2, 4)


def gemm_sp(
    A_sparse: Tile,
    E: Tile,
    B: Tile,
    C: Tile,
    transpose_A: bool = False,
    transpose_E: bool = False,
    transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.Square,
    clear_accum: Scalar = False,
    wg_wait: int = 0,
) -> None:
    """Compute `C += A B` for a 2:4 sparse A, of tiles in shared memory or fragments, summed in C's dtype.

    `A_sparse` (M, K / 2) holds the nonzeros of A's rows. `E`, of an integer dtype, holds where they stand: (M, K / 16)
    in 16 bits for elements of up to 16 bits. For those of 32 bits, of which one of each two is kept, (M, K / 8); wider
    or narrower integers hold more or less. `transpose_A` and `transpose_E` swap the dimensions of each. The rest is as
    for T.gemm. `torch_tile.utils.sparse.compress` makes both of a matrix. `wg_wait` is a hint without effect: the
    product is complete afterwards.

    Raises TileError for shapes that do not fit.
    """
    at = in_kernel("T.gemm_sp")
    kept, places = need_region(A_sparse, "gemm_sp", "A_sparse"), need_region(E, "gemm_sp", "E")
    sizes, counts = _matrix(kept, "A_sparse", transpose_A), _matrix(places, "E", transpose_E)
    element, word = kept.buffer.dtype, places.buffer.dtype
    _, group = group_of(element)
    rows, columns = sizes[0], 2 * sizes[1]
    fix = ""
    if not word.is_integer or word.bits not in (8, 16, 32):
        fix = "give an integer dtype of 8, 16 or 32 bits"
    elif element.bits not in (8, 16, 32):
        fix = "give A_sparse a dtype of 8, 16 or 32 bits"
    elif columns % group or counts != (rows, columns * NIBBLE // (group * word.bits)):
        wanted = rows, columns * NIBBLE // (group * word.bits)
        fix = f"give {NIBBLE} bits for each {group} columns of A: {wanted[::-1] if transpose_E else wanted}"
    if fix:
        why = f"is {describe(places.tile_shape)} of {word} for {describe(kept.tile_shape)} of {element}"
        raise error("bad_argument", None, op="T.gemm_sp", name="E", why=why, fix=fix)
    shape = (columns, rows) if transpose_A else (rows, columns)
    whole = Buffer(f"{kept.buffer.name}_whole", tuple(const(n, dt.int32) for n in shape), element, "shared")
    at.emit(Alloc(whole))
    at.own(whole)
    kept, places = _indexed_by_any_thread(at, kept), _indexed_by_any_thread(at, places)
    groups = word.bits // NIBBLE  # in an element of E

    def expand(point: tuple[Var, ...]) -> Stmt:
        row, number = point
        place = (number // groups, row) if transpose_E else (row, number // groups)
        bits = cast(Load(places.buffer, indices_at(places, place)), dt.int64 if word.bits == 32 else dt.int32)
        of_group = binary("&", binary(">>", bits, cast(number % groups * NIBBLE, bits.dtype)), const(15, bits.dtype))
        nibble = Var("places", dt.int32, "let")
        stmts: list[Stmt] = [Let(nibble, cast(of_group, dt.int32))]
        for n in range(group):
            value: Expr = const(0, element)
            for which in range(group // 2):
                there = binary("&", binary(">>", nibble, 2 * which), 3)
                source = number * (group // 2) + which
                found = Load(kept.buffer, indices_at(kept, (source, row) if transpose_A else (row, source)))
                value = select(binary("==", there, n * 4 // group), found, value)
            target = number * group + n
            stmts.append(Store(whole, (target, row) if transpose_A else (row, target), value))
        return Block(tuple(stmts))

    at.emit(parallel((const(rows, dt.int32), const(columns // group, dt.int32)), expand))
    gemm(Handle(whole), B, C, transpose_A, transpose_B, policy, clear_accum)


wgmma_gemm_sp = gemm_sp


def _matrix(region: Region, name: str, is_transposed: bool) -> tuple[int, int]:
    """Return the rows and columns of an operand. Raises TileError unless it is a matrix of constant size."""
    shape = region.tile_shape
    if len(shape) != 2 or not all(isinstance(n, Const) for n in shape):
        why, fix = f"has the shape {describe(shape)}", "give a tile of two dimensions"
        raise error("bad_argument", None, op="T.gemm_sp", name=name, why=why, fix=fix)
    rows, columns = map(number_of, shape[::-1] if is_transposed else shape)
    return rows, columns


def _indexed_by_any_thread(at: Tracer, region: Region) -> Region:
    """Return a region that any thread can index: a fragment goes by way of shared memory."""
    if region.buffer.scope != "fragment":
        return region
    stage = Buffer(f"{region.buffer.name}_seen", region.tile_shape, region.buffer.dtype, "shared")
    at.emit(Alloc(stage))
    at.own(stage)
    found = need_region(stage, "gemm_sp", "A_sparse")
    at.emit(Copy(region, found))
    return found


__all__ = ["gemm_sp", "wgmma_gemm_sp"]
