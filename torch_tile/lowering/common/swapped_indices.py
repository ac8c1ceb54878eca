# SPDX-License-Identifier: Apache-2.0
"""Find accesses whose indices stand in the wrong order, as `B[column, row]`: outside, reads give 0 and writes are lost.

Only tensors of known sizes count, where two indices that change places reach both ends with their last tile. As
written, some index begins behind the end; or some tile leaves the tensor, and after the change none does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr, Load, is_zero
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.stmt import Kernel, LoopKind, Program, Stmt, Store
from torch_tile.lowering.common.written_boxes import ONE, InOrder
from torch_tile.tileop import RegisteredOp


def swapped_indices(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for the first access to each tensor whose indices fit in another order alone."""
    found: list[Diagnostic] = []
    for kernel in program.kernels:
        if not any(is_zero(extent) for extent in kernel.grid):
            found += _Accesses(kernel).found
    return found


class _Accesses(InOrder):
    """Visit a kernel's accesses to tensors, each with what is known of its indices."""

    def __init__(self, kernel: Kernel) -> None:
        self._told: IdSet[Buffer] = IdSet()
        super().__init__(kernel)

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Look at what a tile op reads and writes."""
        for region in (*op.accesses()[0], *op.accesses()[1]):
            self._access(op, region.buffer, region.starts, region.extents)
        return self.children(op)

    def visit_Load(self, load: Load) -> Any:
        """Look at the read of an element."""
        self._access(load, load.buffer, load.indices, [ONE] * len(load.indices))
        return self.children(load)

    def visit_Store(self, store: Store) -> Stmt:
        """Look at the write of an element."""
        self._access(store, store.buffer, store.indices, [ONE] * len(store.indices))
        return self.children(store)

    def _access(self, node: Any, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr]) -> None:
        """Report an access whose indices fit swapped alone."""
        sizes, wide = buffer.static_shape, [int(n.value) for n in extents if isinstance(n, Const)]
        if buffer.scope != "global" or sizes is None or not 1 < len(sizes) == len(wide):
            return
        if not all(map(self.is_exact, starts)):
            return
        known = self.outer.ranges
        ends = [known.interval(start).high + n for start, n in zip(starts, wide, strict=True)]
        if math.inf in ends:
            return
        # The iterations of T.Parallel are a tile, whose first element begins where their variables do.
        first = {
            var: low for loop in self.outer.loops if loop.kind is LoopKind.PARALLEL
            for var, low in zip(loop.vars, loop.starts, strict=True)
        }  # fmt: skip
        last = [
            known.interval(Substitute(first)(start)).high if first else end - n
            for start, end, n in zip(starts, ends, wide, strict=True)
        ]
        wide = [int(end - at) for end, at in zip(ends, last, strict=True)]
        if buffer in self._told:
            return
        for a, b in itertools.combinations(range(len(sizes)), 2):
            is_behind = last[a] >= sizes[a] or last[b] >= sizes[b]
            if all(last[n] + wide[n] <= sizes[n] for n in (a, b)):  # they stay inside as they are
                continue
            # With these indices swapped: tiles of a copy keep their extents, slices take them along.
            if self._is_guarded_swapped((starts[a], starts[b]), (sizes[a], sizes[b])):
                self._report(node, buffer, starts, (a, b))
                return
            orders = ((last[b], wide[a]), (last[a], wide[b])), ((last[b], wide[b]), (last[a], wide[a]))
            if any(_fit(order, (sizes[a], sizes[b]), is_behind) for order in orders):
                self._report(node, buffer, starts, (a, b))
                return

    def _report(self, node: Any, buffer: Buffer, starts: Sequence[Expr], dims: tuple[int, int]) -> None:
        """Report the indices of a tensor once."""
        self._told.add(buffer)
        reach, name = tuple(int(self.outer.ranges.interval(start).high) for start in starts), buffer.name
        sizes, (a, b) = tuple(buffer.static_shape or ()), dims
        self.found.append(diagnose("swapped_indices", node.span, buffer=name, sizes=sizes, last=reach, a=a, b=b))

    def _is_guarded_swapped(self, indices: tuple[Expr, Expr], sizes: tuple[int, int]) -> bool:
        """Return whether conditions around keep two indices below each other's sizes, to the number."""
        known = self.outer.ranges
        return sizes[0] != sizes[1] and all(
            known.prove(index < size) and not known.prove(index < size - 1)
            for index, size in zip(indices, reversed(sizes), strict=True)
        )


def _fit(ends: Sequence[tuple[float, int]], sizes: Sequence[int], is_behind: bool) -> bool:
    """Return whether last tiles, each its begin and extent, reach the ends of sizes; to the number, unless some begin
    behind an end as they are written."""
    return all(
        (at < size if is_behind else at + n == size) and at + n >= size
        for (at, n), size in zip(ends, sizes, strict=True)
    )
