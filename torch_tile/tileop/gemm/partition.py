# SPDX-License-Identifier: Apache-2.0
"""Partitions of a product among the warps of a block, and the layouts of its operands that follow.

One warp computes a box of C out of instruction tiles; `intrinsics/matrix.py` has a tile's layout in a warp. Warps that
a split cannot use repeat the work of the others (replicas).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch_tile.hardware import WARP, WARPGROUP
from torch_tile.intrinsics import wgmma
from torch_tile.intrinsics.matrix import Digits, Shape
from torch_tile.ir.layout import Digit, Layout


@dataclass(frozen=True)
class Partition:
    """A split of C over `rows x columns` warps of `warps`; each tile is one instruction of `shape`."""

    shape: Shape
    rows: int
    columns: int
    warps: int
    alternating: bool = False

    @property
    def copies(self) -> int:
        """Number of warps that do the same work."""
        return self.warps // (self.rows * self.columns)

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Return the instruction tiles of one warp along the rows and the columns of an m x n product."""
        return m // (self.rows * self.shape.m), n // (self.columns * self.shape.n)

    def _thread_digits(self) -> tuple[Digit, Digit, Digit]:
        """Return the thread digits of the warp's place along the rows, along the columns, and of its copy."""
        strides = WARP * self.columns, WARP, WARP * self.columns * self.rows
        sizes = self.rows, self.columns, self.copies
        row, column, copy = (Digit(size, stride, "t") for size, stride in zip(sizes, strides, strict=True))
        return row, column, copy

    def accumulator(self, m: int, n: int) -> Layout:
        """Return the layout of C (m x n): registers count tile row, tile column, element."""
        row, column, copy = self._thread_digits()
        m_tiles, n_tiles = self.tiles(m, n)
        each = self.shape.registers("d")
        rows = row, Digit(m_tiles, n_tiles * each, "r"), *self.shape.d[0]
        columns: Digits = (column, Digit(n_tiles, each, "r"), *self.shape.d[1])
        if self.alternating:
            columns = column, Digit(n_tiles // 2, 2 * each, "r"), *self.shape.d[1], Digit(2, each, "r")
        return _layout(rows, columns, (copy,))

    def operand_a(self, m: int, k: int) -> Layout:
        """Return the layout of A (m x k): registers count tile row, step of k, element; equal in all warp columns."""
        row, column, copy = self._thread_digits()
        m_tiles, k_tiles = self.tiles(m, 0)[0], k // self.shape.k
        each = self.shape.registers("a")
        rows = row, Digit(m_tiles, k_tiles * each, "r"), *self.shape.a[0]
        columns = Digit(k_tiles, each, "r"), *self.shape.a[1]
        return _layout(rows, columns, (copy, column))

    def operand_b(self, k: int, n: int) -> Layout:
        """Return the layout of B (k x n): registers count tile column, step of k, element; equal in all warp rows."""
        row, column, copy = self._thread_digits()
        n_tiles, k_tiles = self.tiles(0, n)[1], k // self.shape.k
        each = self.shape.registers("b")
        rows = Digit(k_tiles, each, "r"), *self.shape.b[0]
        columns = column, Digit(n_tiles, k_tiles * each, "r"), *self.shape.b[1]
        return _layout(rows, columns, (copy, row))


def _layout(rows: Digits, columns: Digits, replicas: Digits) -> Layout:
    """Build a layout without the digits of size 1."""
    rows, columns, replicas = (tuple(d for d in digits if d.size > 1) for digits in (rows, columns, replicas))
    return Layout((rows, columns), replicas)


def transposed(layout: Layout) -> Layout:
    """Return the layout of the transposed matrix."""
    return Layout(layout.dims[::-1], layout.replicas, layout.swizzle)


def partitions(shape: Shape, m: int, n: int, warps: int, policy: str) -> Iterator[Partition]:
    """Return the ways to split an m x n product over warps, best first.

    More warps are better. Then "FullRow" and "FullCol" want as many of them along the rows or columns as fit. "Square"
    wants boxes that read the least: the smallest sum of a box's sides.
    """
    found = [
        Partition(shape, rows, columns, warps)
        for rows in range(1, warps + 1)
        for columns in range(1, warps // rows + 1)
        if warps % (rows * columns) == 0 and m % (rows * shape.m) == 0 and n % (columns * shape.n) == 0
    ]
    sides = {
        "FullRow": lambda p: -p.rows,
        "FullCol": lambda p: -p.columns,
        "Square": lambda p: m // p.rows + n // p.columns,
    }
    yield from sorted(found, key=lambda p: (p.copies, sides[policy](p), -p.rows))


# Partitions of a product by wgmma among the warpgroups of a role, and the layouts of fragments that follow. A warpgroup
# computes a box of C out of tiles of 64 rows; `intrinsics/wgmma.py` has a tile's layout in it. Warpgroups that a split
# cannot use repeat the work of the others (replicas).


@dataclass(frozen=True)
class WarpgroupPartition:
    """A split of C over `rows x columns` of `groups` warpgroups."""

    rows: int
    columns: int
    groups: int

    @property
    def copies(self) -> int:
        """Number of warpgroups that do the same work."""
        return self.groups // (self.rows * self.columns)

    def tiles(self, m: int) -> int:
        """Count the tiles of 64 rows of one warpgroup."""
        return m // (self.rows * wgmma.M)

    def _group_digits(self) -> tuple[Digit, Digit, Digit]:
        """Return the thread digits of the warpgroup's place along the rows, along the columns, and of its copy."""
        each = WARPGROUP
        row = Digit(self.rows, each * self.columns, "t")
        return row, Digit(self.columns, each, "t"), Digit(self.copies, each * self.columns * self.rows, "t")

    def accumulator(self, m: int, n: int) -> Layout:
        """Return the layout of C (m x n): registers count tile row, block of 8 columns, element of the block."""
        row, column, copy = self._group_digits()
        blocks = n // (self.columns * 8)
        rows = row, Digit(self.tiles(m), 4 * blocks, "r"), *wgmma.ROWS_D
        columns = column, Digit(blocks, 4, "r"), *wgmma.COLUMNS_D
        return _layout(rows, columns, (copy,))

    def operand_a(self, m: int, k: int, bits: int) -> Layout:
        """Return the layout of A (m x k): registers count tile row, step of k, element; alike for all columns."""
        row, column, copy = self._group_digits()
        each_rows, each_columns = {8: wgmma.A_8, 16: wgmma.A_16, 32: wgmma.A_32}[bits]
        registers = 256 // bits * wgmma.M // WARPGROUP
        steps = k * bits // 256
        rows = row, Digit(self.tiles(m), steps * registers, "r"), *each_rows
        columns = Digit(steps, registers, "r"), *each_columns
        return _layout(rows, columns, (copy, column))


def instruction_columns(n: int, type_of_a: str) -> int:
    """Return the columns of the widest instruction that divides `n`; 0 if none does."""
    widths = range(min(n, wgmma.LARGEST_N), 7, -8)
    return next((w for w in widths if n % w == 0 and wgmma.allowed_n(w, type_of_a)), 0) if n % 8 == 0 else 0


def warpgroup_partitions(m: int, n: int, groups: int, policy: str, type_of_a: str) -> Iterator[WarpgroupPartition]:
    """Return the ways to split an m x n product over warpgroups, best first.

    The more warpgroups take part, the better. Then "FullRow" and "FullCol" want as many of them along the rows or
    columns as fit; "Square" the boxes that read the least, for the same the widest instructions.
    """
    found = [
        WarpgroupPartition(rows, columns, groups)
        for rows in range(1, groups + 1)
        for columns in range(1, groups // rows + 1)
        if groups % (rows * columns) == 0
        and m % (rows * wgmma.M) == 0
        and n % columns == 0
        and instruction_columns(n // columns, type_of_a)
    ]
    sides = {
        "FullRow": lambda p: -p.rows,
        "FullCol": lambda p: -p.columns,
        # Each warpgroup's A is read from shared memory once for all its columns, B for every 64 rows.
        "Square": lambda p: (m // (p.rows * wgmma.M)) * (wgmma.M + n // p.columns),
    }
    yield from sorted(found, key=lambda p: (p.copies, sides[policy](p), -p.rows))
