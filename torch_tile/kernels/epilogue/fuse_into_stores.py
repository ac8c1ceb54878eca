# SPDX-License-Identifier: Apache-2.0
"""Fuse an epilogue into the stores of an author's kernel, so that its result is not written and read again.

Takes a program as traced. `fuse_into_stores` returns a program whose result holds `epilogue(element, operands...)` of
each element. Each value is rounded to the old type first, so the numbers are those of two kernels.

A shared tile through which results leave takes the epilogue where it is filled: so it still leaves by a bulk copy. An
operand of the same shape and type comes through that tile. Other copies into the result become nests of stores.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch_tile.diagnostics.errors import span_source
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import DType, float32, float64
from torch_tile.ir.expr import Expr, Load, cast, const
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Rewriter, children, contains, find, rebuilt, symbols, walk
from torch_tile.ir.stmt import Alloc, Block, Let, Program, Stmt, Store
from torch_tile.kernels.epilogue.program import Epilogue
from torch_tile.language.trace import tracing
from torch_tile.tileop.base import parallel, spread, squeezed
from torch_tile.tileop.copy.op import Copy


class CannotFuseError(Exception):
    """Why a kernel's stores take no epilogue."""


def fuse_into_stores(
    program: Program, result: Buffer, epilogue: Epilogue, operands: Sequence[tuple[str, DType]], dtype: DType
) -> Program:
    """Return the program that applies `epilogue` to each element of `result` and stores it as `dtype`.

    operands: kind and dtype of each auxiliary operand, which becomes a parameter behind the present ones. Kinds are `t`
    (the result's shape), `r` (its last dimension), `c` (the other dimensions, by one) and `s` (no dimension).
    Raises CannotFuseError where the program does anything with the result but store and copy into it.
    """
    if not result.dtype.is_float or result.lanes or not result.rank:
        raise CannotFuseError(f"its result is of {result.dtype}, and epilogues compute with floats of some dimension")
    if any(view.base is result for view in program.views):
        raise CannotFuseError(f"it has a view of its result `{result.name}`")
    for node in walk(program):
        if _uses_otherwise(node, result):
            raise CannotFuseError(f"it reads its result `{result.name}`, or writes it by more than stores and T.copy")
    new = rebuilt(result, dtype=dtype)
    one = const(1, result.shape[-1].dtype)
    shapes = {"t": result.shape, "r": result.shape[-1:], "c": (*result.shape[:-1], one), "s": ()}
    aux = [Buffer(f"operand_{n}", shapes[kind], of, "global", None, "param") for n, (kind, of) in enumerate(operands)]
    leaving = tiles_that_leave(program, result, dtype)
    fuse = _Stores(result, new, epilogue, [(kind, x) for (kind, _), x in zip(operands, aux, strict=True)], leaving)
    return rebuilt(
        program,
        name=f"{program.name}_with_epilogue",
        params=(*(new if p is result else p for p in program.params), *aux),
        outputs=tuple(new if b is result else b for b in program.outputs),
        kernels=tuple(map(fuse, program.kernels)),
    )


def _uses_otherwise(node: Any, result: Buffer) -> bool:
    """Return whether a node uses the result, but not as the destination of a store or copy."""
    if isinstance(node, Region):
        return False  # counted where the region is used
    used = [x for x in children(node) if x is result or (isinstance(x, Region) and x.buffer is result)]
    if isinstance(node, Store):
        return len(used) > (node.buffer is result)
    if isinstance(node, Copy):
        return len(used) > (node.dst.buffer is result) or (bool(used) and node.as_loop() is None)
    return bool(used)


def tiles_that_leave(program: Program, result: Buffer, dtype: DType) -> dict[Copy, Copy]:
    """Map each copy that fills a shared tile of type `dtype` to the next one, which moves the tile on.

    A tile is filled and copied as a whole, by two copies of one block. Its place in the result is known at both. All
    uses of the tile are such pairs.
    """
    found: dict[Copy, Copy] = {}
    for block in find(program, Block):
        filled: dict[Buffer, tuple[Copy, IdSet[Any]]] = {}  # with the variables that are bound since
        for stmt in block.stmts:
            if isinstance(stmt, Let):
                for _, later in filled.values():
                    later.add(stmt.var)
            if not isinstance(stmt, Copy):
                continue
            if stmt.dst.buffer is result and stmt.src.buffer in filled and stmt.src.is_whole:
                fill, later = filled.pop(stmt.src.buffer)
                if not contains(stmt.dst, Load) and not any(x in later for x in symbols(stmt.dst)):
                    found[fill] = stmt
            tile = stmt.dst.buffer
            if tile.scope == "shared" and tile.dtype == dtype and stmt.dst.is_whole and stmt.as_loop():
                filled[tile] = stmt, IdSet()
    pairs = Counter(fill.dst.buffer for fill in found)
    uses = Counter(x for node in walk(program) for x in children(node) if isinstance(x, Buffer) and x in pairs)
    return {fill: leave for fill, leave in found.items() if uses[fill.dst.buffer] == 2 * pairs[fill.dst.buffer]}


@contextlib.contextmanager
def _with_span_of(author: Stmt) -> Iterator[None]:
    """Give nodes that are made inside the span of an author's statement."""
    span_source.append(lambda: author.span)
    try:
        yield
    finally:
        span_source.pop()


class _Stores(Rewriter):
    """Replaces each store into `result` by one of the epilogue's value into `new`; copies become nests of stores.

    Copies in `leaving` stay copies: the first of a pair takes the epilogue's values.
    """

    def __init__(
        self,
        result: Buffer,
        new: Buffer,
        epilogue: Epilogue,
        aux: Sequence[tuple[str, Buffer]],
        leaving: Mapping[Copy, Copy],
    ) -> None:
        self.result, self.new, self.epilogue, self.aux, self.leaving = result, new, epilogue, aux, leaving
        self.left = IdSet(leaving.values())

    def visit_Copy(self, node: Copy) -> Stmt:
        """Write a copy into the result as a nest of stores."""
        if node in self.leaving:
            return self._filled(node, self.leaving[node].dst)
        if node in self.left:
            return rebuilt(node, dst=rebuilt(node.dst, buffer=self.new))
        if node.dst.buffer is not self.result:
            return node
        nest = node.as_loop()
        assert nest is not None, "refused before"
        return self.children(nest)

    def _filled(self, fill: Copy, place: Region) -> Stmt:
        """Fill a tile with the epilogue's values of what goes to a `place` in the result.

        They are computed into a fragment, which is copied as the author's was. The first operand that can be copied
        comes through the tile: its rows are read in wide pieces.
        """
        tile, values = fill.dst, Buffer("values", fill.dst.buffer.shape, self.new.dtype, "fragment")
        through = next((x for kind, x in self.aux if kind == "t" and x.dtype == tile.buffer.dtype), None)

        def element(point: tuple[Any, ...]) -> Stmt:
            """Compute the value of one element."""
            value = cast(cast(Load(fill.src.buffer, spread(fill.src, point)), tile.buffer.dtype), self.result.dtype)
            at = {} if through is None else {through: Load(tile.buffer, spread(tile, point))}
            return self._stored(values, spread(tile, point), value, spread(place, point), at)

        with _with_span_of(fill):
            brought = () if through is None else (Copy(rebuilt(place, buffer=through), tile),)
            nest, last = parallel(squeezed(tile), element), rebuilt(fill, src=rebuilt(tile, buffer=values))
            return Block((Alloc(values), *brought, nest, last))

    def visit_Store(self, node: Store) -> Stmt:
        """Apply the epilogue to the stored value."""
        if node.buffer is not self.result:
            return node
        with _with_span_of(node):
            return self._stored(self.new, node.indices, node.value, node.indices)

    def _stored(
        self,
        buffer: Buffer,
        indices: tuple[Expr, ...],
        value: Expr,
        place: tuple[Expr, ...],
        loaded: Mapping[Buffer, Expr] = MappingProxyType({}),
    ) -> Block:
        """Store the epilogue of a value with a `place` in the result. Some operands may have been loaded."""
        from torch_tile.kernels.epilogue import emit

        compute = float64 if self.result.dtype == float64 else float32
        with tracing() as at, at.open("the epilogue") as scope:
            operands = [loaded[x] if x in loaded else self._operand(place, kind, x) for kind, x in self.aux]
            inputs = {"acc0": cast(value, compute)} | {f"x{n}": cast(x, compute) for n, x in enumerate(operands)}
            result = emit.apply(self.epilogue, inputs, compute, self.new.dtype.bits <= 16)
        return Block((*scope.stmts, Store(buffer, indices, cast(result, self.new.dtype))))

    @staticmethod
    def _operand(place: tuple[Expr, ...], kind: str, x: Buffer) -> Expr:
        """Return the element of an auxiliary operand that belongs to a place in the result."""
        rows, column = place[:-1], place[-1]
        places = {"t": place, "r": (column,), "c": (*rows, const(0, column.dtype)), "s": ()}
        return Load(x, places[kind])
