# SPDX-License-Identifier: Apache-2.0
"""Products of one warp by hand: TensorCoreIntrinEmitter loads, multiplies and stores values in a thread's local arrays.

Tiles of a warp are cut into pieces of 16 rows, 16 columns and 32 bytes of the shared dimension. Narrow tiles have
pieces of 8 columns. `FRAGMENTS` of intrinsics/matrix.py tells which elements each lane holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.hardware import WARP
from torch_tile.intrinsics import matrix
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Address, Expr, Load, cast, to_expr
from torch_tile.ir.layout import Digit, Layout
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Store
from torch_tile.language.asynchronous import in_kernel, wait_wgmma, wgmma_gemm
from torch_tile.language.layout import make_linear_layout, make_swizzled_layout
from torch_tile.language.threads import thread_index
from torch_tile.language.trace import let
from torch_tile.language.values import Handle, dtype_of
from torch_tile.tileop.base import Scalar, Tile, need_choice, need_region, region_of
from torch_tile.tileop.gemm.op import GemmWarpPolicy

Where = Callable[[Expr, Expr], tuple[Expr, ...]]  # indices of an element, from its row and column in a block's tile


class _Emitter:
    """What both emitters are made of: the types of a product, and the warps of a block with their tiles."""

    a_dtype: dt.DType
    b_dtype: dt.DType
    accum_dtype: dt.DType
    a_transposed: bool
    b_transposed: bool
    chunk: int
    block_row_warps: int
    block_col_warps: int
    warp_row_tiles: int
    warp_col_tiles: int
    reduce_k: int
    num_elems_per_byte: int
    is_m_first: bool
    thread_var: Expr | None

    def __init__(
        self,
        a_dtype: Any = "float16",
        b_dtype: Any = "float16",
        accum_dtype: Any = "float16",
        a_transposed: bool = False,
        b_transposed: bool = False,
        block_row_warps: int = 2,
        block_col_warps: int = 2,
        warp_row_tiles: int = 8,
        warp_col_tiles: int = 8,
        chunk: int = 16,
        reduce_k: int = 1,
        num_elems_per_byte: int = 1,
        is_m_first: bool | None = False,
        thread_var: Expr | None = None,
    ):
        self.a_dtype, self.b_dtype, self.accum_dtype = (dtype_of(d) for d in (a_dtype, b_dtype, accum_dtype))
        self.a_transposed, self.b_transposed, self.chunk = a_transposed, b_transposed, chunk
        self.block_row_warps, self.block_col_warps = block_row_warps, block_col_warps
        self.warp_row_tiles, self.warp_col_tiles = warp_row_tiles, warp_col_tiles
        self.reduce_k, self.num_elems_per_byte = reduce_k, num_elems_per_byte
        self.is_m_first, self.thread_var = bool(is_m_first), thread_var
        self.threads: int = WARP * block_row_warps * block_col_warps * reduce_k
        self._prepare()

    def _prepare(self) -> None:
        """Check the product, and set what follows from the parameters."""


class TensorCoreIntrinEmitter(_Emitter):
    """Emit one warp's part of a matrix product: `ldmatrix_a`, `ldmatrix_b`, `mma`, `stmatrix`.

    The block has `block_row_warps * block_col_warps` warps. Each computes `warp_row_tiles * warp_col_tiles` elements of
    the product; `chunk` is the extent of the shared dimension in shared memory. A is (M, K), or (K, M) if
    `a_transposed`; B is (K, N), or (N, K) if `b_transposed`. `a_dtype` and `b_dtype` are float16, bfloat16, float32 (as
    tf32), int8, uint8, float8 and float64; `accum_dtype` is that of the sums. Warps are counted along rows first, along
    columns first if `is_m_first`. `thread_var` is the running thread's index, if not that of the block.

    Raises TileError where tensor cores have no such product.
    """

    mma_prefix: str
    micro_size_x: int
    micro_size_k: int
    warp_rows: int
    warp_cols: int

    def _prepare(self) -> None:
        """Choose the instruction, and count its repetitions in a warp's tile."""
        warp_row_tiles, warp_col_tiles = self.warp_row_tiles, self.warp_col_tiles
        self.types: tuple[str, str, str] = (
            self._operand_type(self.a_dtype),
            self._operand_type(self.b_dtype),
            str(self.accum_dtype.name),
        )
        name = matrix.PRODUCTS.get(self.types)
        if name is None:
            why = f"is {' * '.join(self.types[:2])} with sums of {self.types[2]}"
            raise error("bad_argument", None, op="TensorCoreIntrinEmitter", name="a_dtype", why=why,
                        fix="tensor cores multiply float16, bfloat16, float32 as tf32, 8-bit integers and floats, "
                        "and float64, with sums of float32, int32 or the type itself")  # fmt: skip
        self.mma_prefix, self.shape = name, matrix.FRAGMENTS[name]
        self.micro_size_x, self.micro_size_k = self.shape.m, self.shape.k
        self.micro_size_y = 16 if self.shape.m == 16 and warp_col_tiles % 16 == 0 else 8
        if self.num_elems_per_byte != 1 or warp_row_tiles % self.micro_size_x or warp_col_tiles % self.micro_size_y:
            why = f"is {warp_row_tiles}, and `warp_col_tiles` {warp_col_tiles}"
            fix = f"give multiples of {self.micro_size_x} and 8; elements of less than a byte are not multiplied"
            raise error("bad_argument", None, op="TensorCoreIntrinEmitter", name="warp_row_tiles", why=why, fix=fix)
        self.warp_rows, self.warp_cols = warp_row_tiles // self.micro_size_x, warp_col_tiles // self.micro_size_y
        self.local_size_a: int = self.micro_size_x * self.micro_size_k // WARP
        self.local_size_b: int = self.micro_size_y * self.micro_size_k // WARP
        self.local_size_out: int = self.micro_size_x * self.micro_size_y // WARP

    def _operand_type(self, dtype: Any) -> str:
        """Return the PTX operand type of a dtype."""
        is_tf32 = dtype == dt.float32 and self.accum_dtype == dt.float32
        return "tf32" if is_tf32 else str(dtype.name)

    @property
    def mma_num_inst_m(self) -> int:
        """Return the number of MMA instructions along the rows of a warp's tile."""
        return self.warp_rows

    @property
    def mma_num_inst_n(self) -> int:
        """Return the number of MMA instructions along the columns of a warp's tile."""
        return self.warp_cols

    def get_thread_binding(self) -> Expr:
        """Return the running thread's index."""
        return thread_index() if self.thread_var is None else to_expr(self.thread_var)

    def extract_thread_binding(self, thread_id: Expr, is_m_first: bool | None = None) -> tuple[Expr, Expr, Expr]:
        """Return the lane, and the warp's place along columns and along rows."""
        m_first = self.is_m_first if is_m_first is None else is_m_first
        rows, columns, warp = self.block_row_warps, self.block_col_warps, thread_id // WARP
        if m_first:
            return thread_id % WARP, warp % columns, warp // columns % rows
        return thread_id % WARP, warp // rows % columns, warp % rows

    # Loads.

    def ldmatrix_a(self, A_local_buf: Tile, A_shared_buf: Tile, ki: Scalar, rk: Scalar = 0) -> None:
        """Load the warp's pieces of A at step `ki` of the shared dimension: `warp_rows * local_size_a` elements.

        `A_shared_buf` is a tile or a slice of one; a warp of a block with `reduce_k` parts takes part `rk`.
        """
        place = self._place("ldmatrix_a", A_shared_buf, self.a_transposed)
        local, start = self._local("ldmatrix_a", A_local_buf, "A_local_buf")
        lane, _, warp_m = self._lane_and_warp()
        k = let("k", simplify(to_expr(rk) * self.chunk + to_expr(ki) * self.micro_size_k))
        for piece in range(self.warp_rows):
            row = let("row", simplify(warp_m * self.warp_row_tiles + piece * self.micro_size_x))
            to = Address(local, (simplify(start + piece * self.local_size_a),))
            # Quarters of a piece are counted along rows first.
            steps = ((8, 0), (0, 8 if self.micro_size_x == 16 else 0))
            self._load(to, place, self.a_transposed, lane, row, k, 4, steps, self.shape.a)

    def ldmatrix_b(self, B_local_buf: Tile, B_shared_buf: Tile, ki: Scalar, rk: Scalar = 0) -> None:
        """Load the warp's pieces of B at step `ki` of the shared dimension: `warp_cols * local_size_b` elements."""
        place = self._place("ldmatrix_b", B_shared_buf, not self.b_transposed)
        local, start = self._local("ldmatrix_b", B_local_buf, "B_local_buf")
        lane, warp_n, _ = self._lane_and_warp()
        k = let("k", simplify(to_expr(rk) * self.chunk + to_expr(ki) * self.micro_size_k))
        halves = self.micro_size_y // 8
        columns_of_piece = (self.shape.b[1], self.shape.b[0])  # (n, k)
        for piece in range(self.warp_cols):
            column = let("column", simplify(warp_n * self.warp_col_tiles + piece * self.micro_size_y))
            to = Address(local, (simplify(start + piece * self.local_size_b),))
            steps = ((0, 8), (8, 0))  # quarters are counted along the shared dimension first
            self._load(to, place, not self.b_transposed, lane, column, k, 2 * halves, steps, columns_of_piece)

    def _load(
        self,
        to: Address,
        place: Where,
        across: bool,
        lane: Expr,
        row: Expr,
        k: Expr,
        count: int,
        steps: tuple[tuple[int, int], tuple[int, int]],
        fragment: tuple[matrix.Digits, matrix.Digits],
    ) -> None:
        """Load one MMA operand from (row, k) on: by ldmatrix of `count` 8x8 matrices, or element by element."""
        at = in_kernel("ldmatrix")
        width = 16 // to.buffer.dtype.itemsize  # elements of a row of a quarter
        if self.shape.m == 16 and (not across or width == 8):
            at.emit(self._quarters(to, place, across, lane, row, k, count, steps))
            return
        size = self.shape.registers("a" if fragment is self.shape.a else "b")
        parts = count // 2 if fragment is not self.shape.a and self.shape.m == 16 else 1
        for part in range(parts):
            for register in range(size):
                r, c = (_index(digits, lane, register) for digits in fragment)
                found = place(simplify(row + r + part * 8), simplify(k + c))
                value = Load(self._source, found)
                where = simplify(to.indices[0] + (part * size + register))
                at.emit(Store(to.buffer, (where,), cast(value, to.buffer.dtype)))

    def _quarters(
        self,
        to: Address,
        place: Where,
        across: bool,
        lane: Expr,
        row: Expr,
        k: Expr,
        count: int,
        steps: tuple[tuple[int, int], tuple[int, int]],
    ) -> Any:
        """Emit an ldmatrix; lane l gives the address of row `l % 8` of matrix `l // 8`."""
        width = 16 // to.buffer.dtype.itemsize
        line, first, second = lane % 8, lane // 8 % 2, lane // 16 % 2
        rows: Expr = first * steps[0][0] + second * steps[1][0]
        columns: Expr = (first * steps[0][1] + second * steps[1][1]) // 8 * width
        if across:  # rows of the tile in memory run along the shared dimension
            columns, rows = columns + line, rows
        else:
            rows = rows + line
        source = Address(self._source, place(simplify(row + rows), simplify(k + columns)))
        return matrix.ldmatrix(to, source, count, across)

    def _place(self, what: str, tile: Tile, swapped: bool) -> Where:
        """Return the indices of a row and a step of the shared dimension in a shared tile or a slice."""
        region = need_region(tile, what, "tile")
        if region.buffer.scope != "shared" or region.buffer.rank < 2:
            why, fix = f"is {region!r}"[:80], "give a T.alloc_shared tile of two dimensions, or a slice of one"
            raise error("bad_argument", None, op=what, name="tile", why=why, fix=fix)
        self._source = region.buffer
        *outer, first, second = region.starts

        def where(row: Expr, k: Expr) -> tuple[Expr, ...]:
            i, j = (k, row) if swapped else (row, k)
            return (*outer, simplify(first + i), simplify(second + j))

        return where

    def _local(self, what: str, array: Any, name: str) -> tuple[Any, Expr]:
        """Return a local array and the start of the author's part of it."""
        region = region_of(array)
        if region is None or region.buffer.scope != "local" or region.buffer.rank != 1:
            why, fix = f"is {array!r}"[:80], "give a T.alloc_local array of one dimension"
            raise error("bad_argument", None, op=what, name=name, why=why, fix=fix)
        return region.buffer, region.starts[0]

    def _lane_and_warp(self) -> tuple[Expr, Expr, Expr]:
        """Name the lane, and the warp's place along columns and rows."""
        lane, warp_n, warp_m = self.extract_thread_binding(self.get_thread_binding())
        return let("lane", lane), let("warp_n", warp_n), let("warp_m", warp_m)

    # Products and stores.

    def mma(self, A_local_buf: Tile, B_local_buf: Tile, C_local_buf: Tile, k_inner: Scalar = 0) -> None:
        """Add the products of all pieces: `C[i, j] += A[i] * B[j]`."""
        for i in range(self.warp_rows):
            for j in range(self.warp_cols):
                self.mma_atom(A_local_buf, B_local_buf, C_local_buf, i, j, k_inner)

    def mma_atom(
        self,
        A_local_buf: Tile,
        B_local_buf: Tile,
        C_local_buf: Tile,
        inst_m_idx: Scalar,
        inst_n_idx: Scalar,
        k_inner: Scalar = 0,
    ) -> None:
        """Add the product of piece `inst_m_idx` of A and piece `inst_n_idx` of B."""
        at = in_kernel("TensorCoreIntrinEmitter.mma")
        named = ((A_local_buf, "A_local_buf"), (B_local_buf, "B_local_buf"), (C_local_buf, "C_local_buf"))
        (a, a_start), (b, b_start), (c, c_start) = (self._local("mma", x, name) for x, name in named)
        thread_index()
        i, j = to_expr(inst_m_idx), to_expr(inst_n_idx)
        halves = max(1, self.micro_size_y // self.shape.n)
        for half in range(halves):
            places = (
                (c, c_start + (i * self.warp_cols + j) * self.local_size_out + half * self.shape.registers("d")),
                (a, a_start + i * self.local_size_a),
                (b, b_start + j * self.local_size_b + half * self.shape.registers("b")),
            )
            d, x, y = (Address(buffer, (simplify(start),)) for buffer, start in places)
            at.emit(matrix.mma(d, x, y, self.mma_prefix, self.types))

    def stmatrix(self, C_local_buf: Tile, C_buf: Tile, pid_m: Scalar = None, pid_n: Scalar = None) -> None:
        """Write the sums to a tile (M, N), or to a tile of pieces (M // 16, N // 16, 16, 16).

        With `pid_m` and `pid_n` they go to block (pid_m, pid_n) of a tensor in global memory.
        """
        at = in_kernel("TensorCoreIntrinEmitter.stmatrix")
        local, start = self._local("stmatrix", C_local_buf, "C_local_buf")
        region = need_region(C_buf, "stmatrix", "C_buf")
        buffer, rank = region.buffer, region.buffer.rank
        lane, warp_n, warp_m = self._lane_and_warp()
        if pid_m is not None and pid_n is not None:
            warp_m = simplify(to_expr(pid_m) * self.block_row_warps + warp_m)
            warp_n = simplify(to_expr(pid_n) * self.block_col_warps + warp_n)
        size = self.shape.registers("d")
        for i in range(self.warp_rows):
            for j in range(self.warp_cols):
                for register in range(self.local_size_out):
                    row, column = (_index(digits, lane, register % size) for digits in self.shape.d)
                    column = simplify(column + register // size * self.shape.n)
                    pieces = simplify(warp_m * self.warp_rows + i), simplify(warp_n * self.warp_cols + j)
                    indices: tuple[Expr, ...]
                    if rank == 4:
                        indices = (*pieces, row, column)
                    else:
                        whole = (pieces[0] * self.micro_size_x + row, pieces[1] * self.micro_size_y + column)
                        outer, inner = region.starts[:-2], region.starts[-2:]
                        indices = (*outer, *(simplify(a + b) for a, b in zip(inner, whole, strict=True)))
                    number = (i * self.warp_cols + j) * self.local_size_out + register
                    value = Load(local, (simplify(start + number),))
                    at.emit(Store(buffer, tuple(simplify(to_expr(n)) for n in indices), cast(value, buffer.dtype)))

    def get_store_index_map(self, inverse: bool = False) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Return the map from a lane and the number of its element to row and column of the accumulator."""
        if inverse:
            raise error("bad_argument", None, op="get_store_index_map", name="inverse", why="is True",
                        fix="leave it out: the map goes from lane and number to row and column")  # fmt: skip
        size = self.shape.registers("d")

        def where(lane: Any, number: Any) -> tuple[Any, Any]:
            row, column = (_index_of(digits, lane, number % size) for digits in self.shape.d)
            return row, column + number // size * self.shape.n

        return where


class WGMMATensorCoreIntrinEmitter(_Emitter):
    """Emit a block's matrix product by Hopper's wgmma: `wgmma` adds a product of tiles to a fragment.

    The parameters are those of TensorCoreIntrinEmitter. The compiler chooses the layouts, as for T.wgmma_gemm.
    """

    @property
    def policy(self) -> GemmWarpPolicy:
        """Return how warps divide the product."""
        return GemmWarpPolicy.FullRow if self.block_col_warps == 1 else GemmWarpPolicy.Square

    def wgmma(
        self, A_region: Tile, B_region: Tile, C_region: Tile, clear_accum: Scalar = False, wg_wait: int = 0
    ) -> None:
        """Add a product of tiles, `C += A B`: A in shared memory or a fragment, C a fragment; C is cleared first if
        `clear_accum`.

        Then at most `wg_wait` products stay in flight; all may if it is below 0.
        """
        wgmma_gemm(A_region, B_region, C_region, self.a_transposed, self.b_transposed, self.policy, clear_accum)
        if wg_wait >= 0:
            wait_wgmma(wg_wait)

    wgmma_rs = wgmma

    def wgmma_wait(self, n: int = 0) -> None:
        """Wait as T.wait_wgmma does."""
        wait_wgmma(n)

    def make_mma_store_layout(self, local_buf: Tile) -> None:
        """Leave the layout of the accumulator to the compiler, for T.annotate_layout."""

    def make_mma_load_layout(self, local_buf: Tile, matrix: str = "A") -> None:
        """Leave the layout of an operand in registers to the compiler, for T.annotate_layout."""


def _index(digits: tuple[Digit, ...], lane: Expr, register: int) -> Expr:
    """Compose an index from digits of a lane and a register."""
    return simplify(to_expr(_index_of(digits, lane, register)))


def _index_of(digits: tuple[Digit, ...], lane: Any, register: Any) -> Any:
    """Evaluate layout digits at a lane and register."""
    total: Any = 0
    for digit in digits:
        axis = lane if digit.axis == "t" else register
        total = total * digit.size + axis // digit.stride % digit.size
    return total


def get_mma_micro_size(dtype: Any) -> tuple[int, int, int]:
    """Return rows, columns and K of one MMA for operands of a type."""
    of = dtype_of(dtype)
    return (8, 8, 4) if of.bits == 64 else (16, 16, 32 // of.itemsize)


def get_ldmatrix_offset(
    matrix: str, row_idx: Any, col_idx: Any, stride: Any = None, dtype: Any = "float16", transposed: bool = False
) -> tuple[Any, Any]:
    """Return the row and column that lane `row_idx` addresses for T.ptx_ldmatrix of four matrices of operand `matrix`.

    They lie in a piece of operand "A" or "B" in shared memory, `col_idx` elements further. A is (M, K), or (K, M) if
    `transposed`; B is (K, N), or (N, K) if `transposed`. Only 16-bit elements are transposed by the load: TileError for
    others if the shared dimension is not the last one. `stride` has no effect.
    """
    need_choice("get_ldmatrix_offset", "matrix", matrix, ("A", "B"))
    width = 16 // dtype_of(dtype).itemsize
    if width != 8 and transposed == (matrix == "A"):
        why, fix = f"is {transposed} for {matrix} of {dtype_of(dtype)}", "load such operands element by element"
        raise error("bad_argument", None, op="T.get_ldmatrix_offset", name="transposed", why=why, fix=fix)
    if transposed:
        return row_idx // 16 * 8 + row_idx % 8, row_idx // 8 % 2 * width + col_idx
    return row_idx % 16, row_idx // 16 * width + col_idx


def mma_store_index_map(thread_id: Any, local_id: Any) -> tuple[Any, Any]:
    """Return the row and column, in a 16 x 16 accumulator, of element `local_id` (0 to 7) of lane `thread_id`."""
    rows, columns = matrix.FRAGMENTS["m16n8k16"].d
    row, column = (_index_of(digits, thread_id, local_id % 4) for digits in (rows, columns))
    return row, column + local_id // 4 * 8


def get_swizzle_layout(row_idx: Any, col_idx: Any, row_size: int, dtype: Any, swizzle_bytes: int | None = None) -> Any:
    """Return the swizzled position of element `row_idx`, `col_idx` of a tile: block of columns, row,
    column.

    Rows have `row_size` elements. Chunks of 16 bytes trade places within `swizzle_bytes`, row by row. That is 128 at
    most, and the row's size by default.
    """
    width = 16 // dtype_of(dtype).itemsize
    chunks = (swizzle_bytes or min(128, row_size * dtype_of(dtype).itemsize)) // 16
    chunk, inside = col_idx // width, col_idx % width
    swizzled = (chunk % chunks) ^ (row_idx % 8 // (8 // chunks))
    return chunk // chunks, row_idx, swizzled * width + inside


def make_mma_swizzle_layout(shared_buf: Handle, is_smooth: bool = False) -> Layout:
    """Return the layout for ldmatrix of `shared_buf`, for T.annotate_layout: swizzled unless `is_smooth`."""
    return make_linear_layout(shared_buf) if is_smooth else make_swizzled_layout(shared_buf)


__all__ = [
    "TensorCoreIntrinEmitter", "WGMMATensorCoreIntrinEmitter", "get_ldmatrix_offset", "get_mma_micro_size",
    "get_swizzle_layout", "make_mma_swizzle_layout", "mma_store_index_map",
]  # fmt: skip
