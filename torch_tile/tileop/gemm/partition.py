# SPDX-License-Identifier: Apache-2.0
"""How the warps of a block split a product, and where that puts each operand's elements.

One warp computes a box of C out of instruction tiles; `intrinsics/matrix.py` says where a tile's elements lie in a
warp. Warps that a split cannot use repeat the work of the others (replicas).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch_tile.hardware import WARP
from torch_tile.intrinsics.matrix import Digits, Shape
from torch_tile.ir.layout import Digit, Layout


@dataclass(frozen=True)
class Partition:
    """`rows x columns` warps of `warps` share C; each tile is one instruction of `shape`."""

    shape: Shape
    rows: int
    columns: int
    warps: int

    @property
    def copies(self) -> int:
        """How many warps do the same."""
        return self.warps // (self.rows * self.columns)

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Instruction tiles of one warp along the rows and the columns of an m x n product."""
        return m // (self.rows * self.shape.m), n // (self.columns * self.shape.n)

    def _thread_digits(self) -> tuple[Digit, Digit, Digit]:
        """The warp's place along the rows, along the columns, and which of the copies it is."""
        strides = WARP * self.columns, WARP, WARP * self.columns * self.rows
        sizes = self.rows, self.columns, self.copies
        row, column, copy = (Digit(size, stride, "t") for size, stride in zip(sizes, strides, strict=True))
        return row, column, copy

    def accumulator(self, m: int, n: int) -> Layout:
        """Where C (m x n) lies: registers count tile row, tile column, element."""
        row, column, copy = self._thread_digits()
        m_tiles, n_tiles = self.tiles(m, n)
        each = self.shape.registers("d")
        rows = row, Digit(m_tiles, n_tiles * each, "r"), *self.shape.d[0]
        columns = column, Digit(n_tiles, each, "r"), *self.shape.d[1]
        return _layout(rows, columns, (copy,))

    def operand_a(self, m: int, k: int) -> Layout:
        """Where A (m x k) lies: registers count tile row, step of k, element; equal in all columns of warps."""
        row, column, copy = self._thread_digits()
        m_tiles, k_tiles = self.tiles(m, 0)[0], k // self.shape.k
        each = self.shape.registers("a")
        rows = row, Digit(m_tiles, k_tiles * each, "r"), *self.shape.a[0]
        columns = Digit(k_tiles, each, "r"), *self.shape.a[1]
        return _layout(rows, columns, (copy, column))

    def operand_b(self, k: int, n: int) -> Layout:
        """Where B (k x n) lies: registers count tile column, step of k, element; equal in all rows of warps."""
        row, column, copy = self._thread_digits()
        n_tiles, k_tiles = self.tiles(0, n)[1], k // self.shape.k
        each = self.shape.registers("b")
        rows = Digit(k_tiles, each, "r"), *self.shape.b[0]
        columns = column, Digit(n_tiles, k_tiles * each, "r"), *self.shape.b[1]
        return _layout(rows, columns, (copy, row))


def _layout(rows: Digits, columns: Digits, replicas: Digits) -> Layout:
    """A layout without the digits of size 1."""
    rows, columns, replicas = (tuple(d for d in digits if d.size > 1) for digits in (rows, columns, replicas))
    return Layout((rows, columns), replicas)


def transposed(layout: Layout) -> Layout:
    """The layout of the transposed matrix."""
    return Layout(layout.dims[::-1], layout.replicas, layout.swizzle)


def partitions(shape: Shape, m: int, n: int, warps: int, policy: str) -> Iterator[Partition]:
    """The ways to split an m x n product, best first.

    The more warps take part, the better. Then "FullRow" and "FullCol" want as many of them along the rows or columns
    as fit, "Square" the boxes that read the least: the smallest sum of a box's sides.
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
