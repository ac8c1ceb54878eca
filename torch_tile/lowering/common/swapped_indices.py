# SPDX-License-Identifier: Apache-2.0
"""Find reads whose indices stand in the wrong order, as `B[column, row]`. Reads outside give 0, so nothing else tells.

Only reads of tensors of known sizes count, where both hold: some indices lie wholly behind the end, and two indices
that change places reach both ends exactly, within the last tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr, Load, is_zero
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.stmt import Kernel, Program, Stmt
from torch_tile.lowering.common.written_boxes import ONE, InOrder
from torch_tile.tileop import RegisteredOp


def swapped_indices(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for the first read of each tensor whose indices fit in another order alone."""
    found: list[Diagnostic] = []
    for kernel in program.kernels:
        if not any(is_zero(extent) for extent in kernel.grid):
            found += _Reads(kernel).found
    return found


class _Reads(InOrder):
    """Visit a kernel's reads of tensors, each with what is known of its indices."""

    def __init__(self, kernel: Kernel) -> None:
        self._told: IdSet[Buffer] = IdSet()
        super().__init__(kernel)

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Look at what a tile op reads."""
        for region in op.accesses()[0]:
            self._read(op, region.buffer, region.starts, region.extents)
        return self.children(op)

    def visit_Load(self, load: Load) -> Any:
        """Look at the read of an element."""
        self._read(load, load.buffer, load.indices, [ONE] * len(load.indices))
        return self.children(load)

    def _read(self, node: Any, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr]) -> None:
        """Report a read whose indices fit swapped alone."""
        sizes = buffer.static_shape
        if (
            buffer.scope != "global"
            or sizes is None
            or len(sizes) < 2
            or not all(isinstance(n, Const) for n in extents)
        ):
            return
        last = [self.outer.ranges.interval(start).high for start in starts]
        wide = [int(n.value) for n in extents if isinstance(n, Const)]
        if all(at < size for at, size in zip(last, sizes, strict=True)) or buffer in self._told:
            return
        for a, b in itertools.combinations(range(len(sizes)), 2):
            ends = (last[b], wide[a], sizes[a]), (last[a], wide[b], sizes[b])  # with these indices swapped
            if all(at < size <= at + width for at, width, size in ends):
                self._told.add(buffer)
                what = {"buffer": buffer.name, "sizes": tuple(sizes), "last": tuple(map(int, last)), "a": a, "b": b}
                self.found.append(diagnose("swapped_indices", node.span, **what))
                return
