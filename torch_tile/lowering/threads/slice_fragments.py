# SPDX-License-Identifier: Apache-2.0
"""Make slices of fragments static, so that the threads that hold them read them from their registers.

A short loop that takes one slice of a fragment after the other, `acc[s * 16 + i, j]`, is written out: registers have no
run-time index, and layout inference only follows offsets that it knows. A nest whose only statement is guarded by
`i < n` shrinks to `n` iterations where it indexes such a slice. What has no such loop stays the same object.
"""

from __future__ import annotations

from dataclasses import replace

from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Binary, Const, Expr, Load, Var, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, find, symbols
from torch_tile.ir.simplify import simplify, simplify_stmt
from torch_tile.ir.stmt import Block, Break, Continue, For, If, LoopKind, Program, Stmt, Store
from torch_tile.lowering.analysis.clone import Instance

MOST_SLICES = 8  # iterations of a loop that is written out


def slice_fragments(program: Program) -> Program:
    """Write loops over slices of fragments out, and shrink guarded nests over slices; values do not change."""
    return _Slices()(program)  # type: ignore[no-any-return]


class _Slices(Rewriter):
    """Rewrite loops from the inside out."""

    def visit_For(self, loop: For) -> Stmt:
        """Shrink a guarded nest, or write out a loop over slices."""
        new: For = self.children(loop)
        if new.kind is LoopKind.PARALLEL:
            return _shrunk(new)
        count = _iterations(new)
        if (
            not 1 < count <= MOST_SLICES
            or not _moves_slices(new)
            or any(find(new.body, Break))
            or any(find(new.body, Continue))
        ):
            return new
        return Block(tuple(one for n in range(count) for one in self._iteration(new, n)), span=loop.span)

    def _iteration(self, loop: For, n: int) -> tuple[Stmt, ...]:
        """Return the body of one iteration, with names and buffers of its own."""
        (var,), (start,) = loop.vars, loop.starts
        assert isinstance(start, Const)
        value: Expr = const(start.value + n * loop.step, var.dtype)
        body: Block = Instance(IdMap([(var, value)]), IdMap(), fresh=True)(loop.body)
        return tuple(self(simplify_stmt(one)) for one in body.stmts)


def _iterations(loop: For) -> int:
    """Return the number of iterations of a loop of one variable; 0 where it is not known."""
    if loop.kind not in (LoopKind.SERIAL, LoopKind.UNROLLED) or len(loop.vars) != 1:
        return 0
    (start,), (stop,) = loop.starts, loop.stops
    if not isinstance(start, Const) or not isinstance(stop, Const):
        return 0
    return len(range(int(start.value), int(stop.value), loop.step))


def _moves_slices(loop: For) -> bool:
    """Return whether a slice of a fragment begins elsewhere in each iteration of a loop."""
    (var,) = loop.vars
    for region in find(loop.body, Region):
        if region.buffer.scope == "fragment" and any(r.keep and var in symbols(r.start) for r in region.ranges):
            return True
    nests = (n for n in find(loop.body, For) if n.kind is LoopKind.PARALLEL)
    return any(
        var in symbols(index) and not symbols(index).isdisjoint(nest.vars)
        for nest in nests for access in _accesses(nest.body) for index in access.indices
    )  # fmt: skip


def _accesses(node: Node) -> list[Load | Store]:
    """Return the accesses to elements of fragments."""
    accesses: tuple[Load | Store, ...] = (*find(node, Load), *find(node, Store))
    return [n for n in accesses if n.buffer.scope == "fragment"]


def _shrunk(nest: For) -> For:
    """Leave out the iterations of a nest that its guard `i < n` forbids, where it indexes a slice of a fragment."""
    if len(nest.body.stmts) != 1 or not isinstance(guard := nest.body.stmts[0], If) or guard.otherwise.stmts:
        return nest
    bound = guard.condition
    if not isinstance(bound, Binary) or bound.op != "<" or bound.a not in IdSet[Expr](nest.vars):
        return nest
    at, most = next(n for n, var in enumerate(nest.vars) if var is bound.a), simplify(bound.b)
    start, stop = nest.starts[at], nest.stops[at]
    whole = all(isinstance(n, Const) for n in (start, stop, most)) and start.value == 0  # type: ignore[attr-defined]
    plain = IdSet[Var](nest.vars)
    sliced = any(index not in plain and bound.a in symbols(index) for a in _accesses(guard) for index in a.indices)
    if not whole or not sliced or most.value <= 0 or stop.value % most.value:  # type: ignore[attr-defined]
        return nest
    return replace(nest, stops=(*nest.stops[:at], most, *nest.stops[at + 1 :]), body=guard.then)


__all__ = ["slice_fragments"]
