# SPDX-License-Identifier: Apache-2.0
"""Find parts of results that no statement can write: a grid or a loop ends too early, or its order is wrong.

Each write counts for the box that holds all of its elements, so that only certain gaps are reported. Results of sizes
known at run time are not looked at. `tileop/results.py` finds those that nothing writes at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Expr, is_zero
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import equal
from torch_tile.ir.stmt import Alloc, Kernel, Program, Stmt, Store
from torch_tile.lowering.common.written_boxes import ONE, Box, InOrder, uncovered
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.results import never_written


def partly_written(program: Program, made: Sequence[Buffer] | None = None) -> list[Diagnostic]:
    """Return a diagnostic for each result with a part that no block writes; by default for results of T.empty."""
    static = [b for b in (program.outputs if made is None else made) if b.static_shape and 0 not in b.static_shape]
    garbage = never_written(program, static)
    results = [b for b in static if b not in garbage]
    return [
        diagnose("unwritten_part", buffer.span, part=f"{buffer.name}[{part}]", fix=_exchanged(program, buffer))
        for buffer, part in _gaps(program.kernels, results)
    ]


def _gaps(kernels: Sequence[Kernel], results: Sequence[Buffer]) -> list[tuple[Buffer, str]]:
    """Return the partly unwritten results, each with the indices of its first unwritten part."""
    written: IdMap[Buffer, list[Box]] = IdMap((b, []) for b in results)
    for kernel in kernels:
        if written and not any(is_zero(extent) for extent in kernel.grid):
            _Writes(kernel, written)
    found = []
    for buffer, boxes in written.items():
        gaps = uncovered(tuple((0, n) for n in buffer.static_shape or ()), boxes)
        found.append((buffer, ", ".join(f"{low}:{high}" for low, high in gaps[0])))
    return found


def _exchanged(program: Program, result: Buffer) -> str:
    """Return the fix if two names of blocks that change places would cover a result; empty if none would."""
    for kernel in program.kernels:
        for a, b in itertools.combinations(range(len(kernel.blocks)), 2):
            blocks = list(kernel.blocks)
            blocks[a], blocks[b] = blocks[b], blocks[a]
            others = [replace(k, blocks=tuple(blocks)) if k is kernel else k for k in program.kernels]
            if not equal(kernel.grid[a], kernel.grid[b]) and not _gaps(others, [result]):
                names = ", ".join(var.name for var in blocks)
                return f"let two names change places, `as ({names}):`: they stand in the order of the grid's sizes"
    return ""


class _Writes(InOrder):
    """Collect the boxes that a kernel may write of each result. Results that are wholly written leave the map."""

    def visit_Alloc(self, node: Alloc) -> Stmt:
        """Pass by tiles."""
        return node

    def visit_Address(self, node: Address) -> Any:
        """Count what a pointer leads to as written."""
        self.written.pop(node.buffer.base or node.buffer, None)
        return node

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Count the writes of a tile op."""
        for region in op.accesses()[1]:
            self._write(region.buffer, region.starts, region.extents)
        return self.children(op)

    def visit_Store(self, store: Store) -> Stmt:
        """Count the write of an element."""
        self._write(store.buffer, store.indices, [ONE] * len(store.indices))
        return self.children(store)

    def _write(self, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr]) -> None:
        """Count a write; one by another name of a tensor counts for all of it."""
        if buffer.base is not None:
            self.written.pop(buffer.base, None)
        else:
            self.write(buffer, starts, extents)
