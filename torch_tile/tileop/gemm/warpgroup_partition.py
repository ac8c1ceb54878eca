# SPDX-License-Identifier: Apache-2.0
"""How the warpgroups of a role split a product by wgmma, and where that puts what is in registers.

A warpgroup computes a box of C out of tiles of 64 rows; `intrinsics/wgmma.py` says where a tile's elements lie in it.
Warpgroups that a split cannot use repeat the work of the others (replicas).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch_tile.hardware import WARPGROUP
from torch_tile.intrinsics import wgmma
from torch_tile.ir.layout import Digit, Layout

Digits = tuple[Digit, ...]


@dataclass(frozen=True)
class WarpgroupPartition:
    """`rows x columns` of `groups` warpgroups share C."""

    rows: int
    columns: int
    groups: int

    @property
    def copies(self) -> int:
        """How many warpgroups do the same."""
        return self.groups // (self.rows * self.columns)

    def tiles(self, m: int) -> int:
        """Tiles of 64 rows of one warpgroup."""
        return m // (self.rows * wgmma.M)

    def _group_digits(self) -> tuple[Digit, Digit, Digit]:
        """The warpgroup's place along the rows, along the columns, and which of the copies it is."""
        each = WARPGROUP
        row = Digit(self.rows, each * self.columns, "t")
        return row, Digit(self.columns, each, "t"), Digit(self.copies, each * self.columns * self.rows, "t")

    def accumulator(self, m: int, n: int) -> Layout:
        """Where C (m x n) lies: registers count tile row, block of 8 columns, element of the block."""
        row, column, copy = self._group_digits()
        blocks = n // (self.columns * 8)
        rows = row, Digit(self.tiles(m), 4 * blocks, "r"), *wgmma.ROWS_D
        columns = column, Digit(blocks, 4, "r"), *wgmma.COLUMNS_D
        return _layout(rows, columns, (copy,))

    def operand_a(self, m: int, k: int, bits: int) -> Layout:
        """Where A (m x k) lies: registers count tile row, step of k, element; equal in all columns of warpgroups."""
        row, column, copy = self._group_digits()
        each_rows, each_columns = {8: wgmma.A_8, 16: wgmma.A_16, 32: wgmma.A_32}[bits]
        registers = 256 // bits * wgmma.M // WARPGROUP
        steps = k * bits // 256
        rows = row, Digit(self.tiles(m), steps * registers, "r"), *each_rows
        columns = Digit(steps, registers, "r"), *each_columns
        return _layout(rows, columns, (copy, column))


def _layout(rows: Digits, columns: Digits, replicas: Digits) -> Layout:
    """A layout without the digits of size 1."""
    rows, columns, replicas = (tuple(d for d in digits if d.size > 1) for digits in (rows, columns, replicas))
    return Layout((rows, columns), replicas)


def instruction_columns(n: int, type_of_a: str) -> int:
    """The widest instruction of which whole ones make `n` columns; 0 if none does."""
    widths = range(min(n, wgmma.LARGEST_N), 7, -8)
    return next((w for w in widths if n % w == 0 and wgmma.allowed_n(w, type_of_a)), 0) if n % 8 == 0 else 0


def warpgroup_partitions(m: int, n: int, groups: int, policy: str, type_of_a: str) -> Iterator[WarpgroupPartition]:
    """The ways to split an m x n product, best first.

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
