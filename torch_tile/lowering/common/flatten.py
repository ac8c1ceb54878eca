# SPDX-License-Identifier: Apache-2.0
"""Give every access one linear index into its buffer (stage FLAT), swizzles of shared memory included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeVar

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, Binary, Expr, Load, binary, const, select
from torch_tile.ir.layout_ops import offset_of
from torch_tile.ir.node import Rewriter, equal, rebuilt, with_fields
from torch_tile.ir.polynomial import Atoms
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Kernel, Program, Store
from torch_tile.tileop.base import conjunction, strides_of

A = TypeVar("A", Load, Address, Store)


def flatten(program: Program) -> Program:
    """Replace n-dimensional buffers by one-dimensional ones; strided buffers keep their strides in the index."""
    return _Flatten()(program)  # type: ignore[no-any-return]


class _Flatten(Rewriter):
    """Replace buffers and the indices of their accesses."""

    def __init__(self) -> None:
        self.flat: dict[Buffer, Buffer] = {}
        self.on_threads = False

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Use layouts on GPUs only; a CPU's tiles are row-major, whatever layout the author asks for."""
        self.on_threads = kernel.thread is not None
        return self.children(kernel)

    def visit_Program(self, program: Program) -> Program:
        """Flatten the kernels, and then the program's parameters, workspaces and outputs."""
        new = self.children(program)
        params = tuple(self.one(p) if isinstance(p, Buffer) else p for p in program.params)
        workspaces, outputs = tuple(map(self.one, program.workspaces)), tuple(map(self.one, program.outputs))
        return with_fields(new, params=params, workspaces=workspaces, outputs=outputs, views=())

    def one(self, buffer: Buffer) -> Buffer:
        """Return the one-dimensional form of a buffer, of a view that of its base, as both are contiguous."""
        if buffer.base is not None:
            return self.one(buffer.base)
        if buffer.scope == "var" or (buffer.rank == 1 and buffer.strides is None and buffer.layout is None):
            return buffer
        found = self.flat.get(buffer)
        if found is None:
            size = simplify(reach(buffer) if buffer.origin == "address" else product(buffer.shape))
            if buffer.layout is not None and self.on_threads:
                size = const(buffer.layout.extent("m"), dt.int32)
            found = replace(buffer, shape=(size,), strides=None, layout=None)
            self.flat[buffer] = found
        return found

    def visit_Alloc(self, node: Alloc) -> Alloc:
        return with_fields(self.children(node), buffer=self.one(node.buffer))

    def visit_Load(self, node: Load) -> Load:
        return self.access(node)

    def visit_Address(self, node: Address) -> Address:
        return self.access(node)

    def visit_Store(self, node: Store) -> Store:
        return self.access(node)

    def visit_TensorMap(self, node: TensorMap) -> TensorMap:
        """Keep the sizes and strides, which the one-dimensional form no longer shows."""
        return with_fields(self.children(node), buffer=self.one(node.buffer))

    def access(self, node: A) -> A:
        """Rewrite an access into one of the one-dimensional form."""
        new, flat = self.children(node), self.one(node.buffer)
        if flat is node.buffer:
            return new
        at = place(node.buffer, new.indices) if self.on_threads else linear(new.indices, strides_of(node.buffer))
        return rebuilt(new, buffer=flat, indices=(at,))


def place(buffer: Buffer, indices: Sequence[Expr]) -> Expr:
    """Return the offset of an element in elements: by the buffer's layout, else by its strides."""
    if buffer.layout is not None:
        return offset_of(buffer.layout, "m", indices)
    return linear(indices, strides_of(buffer))


def linear(indices: Sequence[Expr], strides: Sequence[Expr]) -> Expr:
    """Return the offset of an element in elements, by its strides."""
    total: Expr = const(0, dt.int32)
    for index, stride in rejoined(indices, strides):
        total = binary("+", total, binary("*", index, stride))
    return simplify(total)


def rejoined(indices: Sequence[Expr], strides: Sequence[Expr]) -> list[tuple[Expr, Expr]]:
    """Merge the indices `x // n` and `x % n` of nested dimensions into `x`; return all indices with their strides."""
    found: list[tuple[Expr, Expr]] = []
    for index, stride in zip(indices, strides, strict=True):
        if found and (whole := _rejoined(*found[-1], index, stride)) is not None:
            found[-1] = whole, stride
        else:
            found.append((index, stride))
    return found


def _rejoined(high: Expr, outer: Expr, low: Expr, inner: Expr) -> Expr | None:
    """Return `x` if `high * outer + low * inner` is `x * inner`; else None."""
    if not (isinstance(high, Binary) and isinstance(low, Binary) and (high.op, low.op) == ("//", "%")):
        return None
    if not equal(high.a, low.a) or not equal(high.b, low.b):
        return None
    atoms = Atoms()
    whole = binary("*", inner, high.b)
    return high.a if atoms.of(outer).key == atoms.of(whole).key else None


def reach(buffer: Buffer) -> Expr:
    """Return the number of elements from the first one to the last one in memory."""
    if buffer.strides is None:
        return product(buffer.shape)
    one: Expr = const(1, dt.int32)
    none: Expr = const(0, dt.int32)
    steps = (binary("*", binary("-", n, one), s) for n, s in zip(buffer.shape, buffer.strides, strict=True))
    last = reduce(lambda a, b: binary("+", a, b), steps, none)
    return select(conjunction([binary(">", n, none) for n in buffer.shape]), binary("+", last, one), none)


def product(sizes: Sequence[Expr]) -> Expr:
    """Multiply all sizes."""
    one: Expr = const(1, dt.int32)
    return reduce(lambda a, b: binary("*", a, b), sizes, one)
