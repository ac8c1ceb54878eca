# SPDX-License-Identifier: Apache-2.0
"""Find wrong sums: many terms in 16 bits or fewer, and sums that a loop stores but never clears.

Sums in registers and on-chip tiles count: products, reductions and `+=`. The number of terms is that of the loops
around, up to the one that begins the sum anew. Only numbers count: sizes of a call are looked at when it comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Binary, Cast, Const, Expr, Load
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, equal, find, symbols
from torch_tile.ir.scope_facts import values_for_names
from torch_tile.ir.stmt import For, Kernel, Program, Stmt, Store
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.reduce.op import Reduce

LEAST_TERMS = 1024  # of a sum that is told of


def narrow_sums(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each tile of narrow floats in which a kernel sums up many terms."""
    return [found for kernel in program.kernels for found in _Sums(kernel).found.values()]


def kept_sums(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each sum of products that a loop stores elsewhere each time, and never begins anew."""
    found: IdMap[Buffer, Diagnostic] = IdMap()
    for outer in (loop for kernel in program.kernels for loop in find(kernel.body, For) if len(loop.vars) == 1):
        in_full = values_for_names(outer.body)
        begun = IdSet(_begun(outer.body))
        sums = {op.C.buffer: op for loop in find(outer.body, For) for op in find(loop.body, Gemm) if not op.clear_accum}
        for copy in (one for one in outer.body.stmts if isinstance(one, Copy)):
            tile, places = copy.src.buffer, map(in_full, copy.dst.starts)
            is_apart = copy.dst.buffer.scope == "global" and any(outer.vars[0] in symbols(place) for place in places)
            if is_apart and tile in sums and tile not in begun:
                index, notes = outer.vars[0].name, [(copy.span, "it is stored here")]
                found[tile] = diagnose("kept_sum", sums[tile].span, notes, buffer=tile.name, index=index)
    return [*found.values()]


class _Sums(Rewriter):
    """Visit the sums of a kernel, with the loops around each."""

    def __init__(self, kernel: Kernel) -> None:
        self.found: IdMap[Buffer, Diagnostic] = IdMap()
        self.loops: list[tuple[For, IdSet[Buffer]]] = []  # each with the buffers that its body begins anew
        self(kernel.body)

    def __call__(self, node: Any) -> Any:
        """Skip values."""
        return node if isinstance(node, Expr) else super().__call__(node)

    def visit_For(self, loop: For) -> Stmt:
        """Visit the body of a loop."""
        self.loops.append((loop, IdSet(_begun(loop.body))))
        self(loop.body)
        self.loops.pop()
        return loop

    def visit_Store(self, store: Store) -> Stmt:
        """Look at `tile[i] += x`."""
        own = (n for n in find(store.value, Load) if n.buffer is store.buffer and equal(n.indices, store.indices))
        value = store.value.a if isinstance(store.value, Cast) else store.value
        if isinstance(value, Binary) and value.op == "+" and any(True for _ in own):
            self._sum(store, store.buffer, store.indices, 1)
        return store

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Check a product or a reduction that adds to an existing sum."""
        if isinstance(op, Gemm) and not op.clear_accum:
            depth = op.A.extents[-2 if op.transpose_A else -1]
            self._sum(op, op.C.buffer, op.C.starts, int(depth.value) if isinstance(depth, Const) else 1)
        elif isinstance(op, Reduce) and op.kind == "sum" and not op.clear:
            self._sum(op, op.dst.buffer, op.dst.starts, 1)
        return op

    def _sum(self, node: Stmt, buffer: Buffer, place: Sequence[Expr], terms: int) -> None:
        """Count the terms of a sum, and report too many."""
        if not buffer.dtype.is_float or buffer.dtype.bits > 16 or buffer.scope == "global":
            return
        named = frozenset().union(*map(symbols, place))
        for loop, begun in reversed(self.loops):
            if buffer in begun:
                break
            counts = [
                _count(a, b, loop.step)
                for var, a, b in zip(loop.vars, loop.starts, loop.stops, strict=True)
                if var not in named
            ]
            terms *= math.prod(counts)
        if terms >= LEAST_TERMS and buffer not in self.found:
            kind = str(buffer.dtype)
            self.found[buffer] = diagnose("narrow_sum", node.span, buffer=buffer.name, terms=terms, dtype=kind)


def _count(start: Expr, stop: Expr, step: int) -> int:
    """Return the iterations of a loop; 1 if they are unknown."""
    known = isinstance(start, Const) and isinstance(stop, Const)
    return max(len(range(int(start.value), int(stop.value), step)), 1) if known else 1  # type: ignore[attr-defined]


def _begun(body: Node) -> Iterator[Buffer]:
    """Yield the buffers that a statement of `body` writes without reading them."""
    for node in find(body, RegisteredOp, Store):
        if isinstance(node, Store):
            if not any(load.buffer is node.buffer for load in find(node.value, Load)):
                yield node.buffer
        else:
            reads, writes = node.accesses()
            yield from (w.buffer for w in writes if not any(r.buffer is w.buffer for r in reads))
