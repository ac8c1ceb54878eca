# SPDX-License-Identifier: Apache-2.0
"""Fuse an epilogue into the stores of an author's kernel, so that its result is not written and read again.

Takes a program as traced. `fuse_into_stores` returns a program whose result holds `epilogue(element, operands...)` of
each element. Each value is rounded to the old type first, so the numbers are those of two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_tile.diagnostics.errors import span_source
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import DType, float32, float64
from torch_tile.ir.expr import Expr, Load, cast, const
from torch_tile.ir.node import Rewriter, children, rebuilt, walk
from torch_tile.ir.stmt import Block, Program, Stmt, Store
from torch_tile.kernels.epilogue.program import Epilogue
from torch_tile.language.trace import tracing
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
    fuse = _Stores(result, new, epilogue, [(kind, x) for (kind, _), x in zip(operands, aux, strict=True)])
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


class _Stores(Rewriter):
    """Replaces each store into `result` by one of the epilogue's value into `new`; copies become nests of stores."""

    def __init__(self, result: Buffer, new: Buffer, epilogue: Epilogue, aux: Sequence[tuple[str, Buffer]]) -> None:
        self.result, self.new, self.epilogue, self.aux = result, new, epilogue, aux

    def visit_Copy(self, node: Copy) -> Stmt:
        """Write a copy into the result as a nest of stores."""
        if node.dst.buffer is not self.result:
            return node
        nest = node.as_loop()
        assert nest is not None, "refused before"
        return self.children(nest)

    def visit_Store(self, node: Store) -> Stmt:
        """Apply the epilogue to the stored value."""
        if node.buffer is not self.result:
            return node
        from torch_tile.kernels.epilogue import emit

        compute = float64 if self.result.dtype == float64 else float32
        with tracing() as at, at.open("the epilogue") as scope:
            span_source.append(lambda: node.span)
            try:
                inputs = {"acc0": cast(node.value, compute)}
                inputs |= {f"x{n}": cast(self._operand(node, *x), compute) for n, x in enumerate(self.aux)}
                value = emit.apply(self.epilogue, inputs, compute, self.new.dtype.bits <= 16)
                store = Store(self.new, node.indices, cast(value, self.new.dtype))
            finally:
                span_source.pop()
        return Block((*scope.stmts, store))

    @staticmethod
    def _operand(store: Store, kind: str, x: Buffer) -> Expr:
        """Return the element of an auxiliary operand that belongs to the stored element."""
        rows, column = store.indices[:-1], store.indices[-1]
        places = {"t": store.indices, "r": (column,), "c": (*rows, const(0, column.dtype)), "s": ()}
        return Load(x, places[kind])
