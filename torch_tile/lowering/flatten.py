# SPDX-License-Identifier: Apache-2.0
"""Every access gets one linear index into its buffer (stage FLAT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from ..ir import dtype as dt
from ..ir.buffer import Buffer
from ..ir.expr import Address, Expr, Load, binary, const
from ..ir.node import Rewriter
from ..ir.simplify import simplify
from ..ir.stmt import Alloc, Program, Store


def flatten(program: Program) -> Program:
    """Replace n-dimensional buffers by one-dimensional ones; strided buffers keep their strides in the index."""
    return _Flatten()(program)  # type: ignore[no-any-return]


class _Flatten(Rewriter):
    def __init__(self) -> None:
        self.flat: dict[int, Buffer] = {}

    def Program(self, program: Program) -> Program:
        new = self.children(program)
        params = tuple(self.one(p) if isinstance(p, Buffer) else p for p in program.params)
        return replace(
            new, params=params, workspaces=tuple(map(self.one, program.workspaces)),
            outputs=tuple(map(self.one, program.outputs)),
        )  # fmt: skip

    def one(self, buffer: Buffer) -> Buffer:
        """The one-dimensional form of a buffer."""
        found = self.flat.get(id(buffer))
        if found is None:
            size = simplify(product(buffer.shape))
            shape = () if buffer.scope == "var" else (size,)
            found = Buffer(buffer.name, shape, buffer.dtype, buffer.scope, None, buffer.origin, span=buffer.span)
            self.flat[id(buffer)] = found
        return found

    def Alloc(self, node: Alloc) -> Alloc:
        return Alloc(self.one(node.buffer), None if node.init is None else self(node.init), span=node.span)

    def Load(self, node: Load) -> Load:
        return Load(self.one(node.buffer), self._index(node.buffer, node.indices), span=node.span)

    def Address(self, node: Address) -> Address:
        return Address(self.one(node.buffer), self._index(node.buffer, node.indices), span=node.span)

    def Store(self, node: Store) -> Store:
        return Store(self.one(node.buffer), self._index(node.buffer, node.indices), self(node.value), span=node.span)

    def _index(self, buffer: Buffer, indices: Sequence[Expr]) -> tuple[Expr, ...]:
        if buffer.scope == "var":
            return ()
        total: Expr = const(0, dt.int32)
        for index, stride in zip(map(self, indices), strides_of(buffer), strict=True):
            total = binary("+", total, binary("*", index, stride))
        return (simplify(total),)


def product(sizes: Sequence[Expr]) -> Expr:
    """All sizes multiplied."""
    one: Expr = const(1, dt.int32)
    return reduce(lambda a, b: binary("*", a, b), sizes, one)


def strides_of(buffer: Buffer) -> tuple[Expr, ...]:
    """Elements between neighbours in each dimension."""
    if buffer.strides is not None:
        return buffer.strides
    steps: list[Expr] = []
    step: Expr = const(1, dt.int32)
    for size in reversed(buffer.shape):
        steps.insert(0, step)
        step = binary("*", step, size)
    return tuple(steps)
