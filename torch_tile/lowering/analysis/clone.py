# SPDX-License-Identifier: Apache-2.0
"""Copy a statement as it runs in one iteration of a loop: with its values, versions of tiles and names."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from torch_tile.diagnostics.errors import Span
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Expr, Load, Var, const
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.layout import Digit
from torch_tile.ir.node import Rewriter, rebuilt
from torch_tile.ir.stmt import Alloc, For, Let, Stmt, Store

E = TypeVar("E", Load, Address, Store)


class Instance(Rewriter):
    """Rewrite statements: replace variables by `values`, and tiles in `versions` by one version of another tile.

    With `fresh`, names and buffers that a statement binds are new ones, so that it may stand beside the original.
    """

    def __init__(self, values: IdMap[Var, Expr], versions: IdMap[Buffer, tuple[Buffer, Expr]], fresh: bool):
        self.values: IdMap[Var, Expr] = IdMap(values.items())
        self.versions = versions
        self.buffers: IdMap[Buffer, Buffer] = IdMap()
        self.fresh = fresh

    def visit_Buffer(self, buffer: Buffer) -> Buffer:
        """Return the copy of a buffer that a fresh statement allocates itself."""
        return self.buffers.get(buffer, buffer)

    def _renamed(self, var: Var) -> Var:
        """Return a new variable for a bound one if the copy is fresh."""
        if not self.fresh:
            return var
        new = Var(var.name, var.type, var.role)
        self.values[var] = new
        return new

    def visit_Let(self, let: Let) -> Let:
        """Rewrite the value before the name is bound."""
        value = self(let.value)
        var = self._renamed(let.var)
        return let if value is let.value and var is let.var else Let(var, value, span=let.span)

    def visit_For(self, loop: For) -> For:
        """Rewrite the bounds before the variables are bound."""
        starts, stops = tuple(map(self, loop.starts)), tuple(map(self, loop.stops))
        if not self.fresh:
            return self.children(loop)
        names = tuple(map(self._renamed, loop.vars))
        return replace(loop, vars=names, starts=starts, stops=stops, body=self(loop.body))

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """Allocate a new buffer if the copy is fresh."""
        if not self.fresh:
            return self.children(node)
        old = node.buffer
        shape, strides = tuple(map(self, old.shape)), None if old.strides is None else tuple(map(self, old.strides))
        new = Buffer(
            old.name, shape, old.dtype, old.scope, strides, old.origin, old.layout, align=old.align,
            padding=old.padding, below=old.below,
        )  # fmt: skip
        self.buffers[old] = new
        return Alloc(new, None if node.init is None else self(node.init), span=node.span)

    def visit_Region(self, region: Region) -> Region:
        """Rewrite a region of a tile into a region of one version."""
        found = self.versions.get(region.buffer)
        if found is None:
            return self.children(region)
        ranges = tuple(map(self, region.ranges))
        return Region(found[0], (Range(found[1], const(1, int32), keep=False), *ranges), span=region.span)

    def visit_Load(self, load: Load) -> Load:
        """Rewrite a load from a tile into a load from one version."""
        return self._element(load)

    def visit_Address(self, address: Address) -> Address:
        """Rewrite an address in a tile into an address in one version."""
        return self._element(address)

    def visit_Store(self, store: Store) -> Store:
        """Rewrite a store to a tile into a store to one version."""
        return self._element(store)

    def _element(self, node: E) -> E:
        """Rewrite an access to a tile into one of its version."""
        new: E = self.children(node)
        found = self.versions.get(node.buffer)
        return new if found is None else replace(new, buffer=found[0], indices=(found[1], *new.indices))

    def visit_Var(self, var: Var) -> Expr:
        """Return the value of a variable in this iteration."""
        return self.values.get(var, var)


def versions_of(tile: Buffer, count: int) -> Buffer:
    """Make a buffer for `count` versions of a tile, with the version as its first dimension."""
    layout = tile.layout
    if layout is not None:
        layout = replace(layout, dims=((Digit(count, layout.extent("m"), "m"),), *layout.dims))
    return Buffer(tile.name, (const(count, int32), *tile.shape), tile.dtype, tile.scope, layout=layout, span=tile.span)


# Statements that a pass makes take the place in the author's file (span) of the statement they replace.


def place_at(op: Stmt, new: Stmt) -> Stmt:
    """Return `new` with the span of `op` on every statement that has none."""
    placed: Stmt = _PlaceAt(op.span)(new)
    return placed


class _PlaceAt(Rewriter):
    """Set the span of statements that have none."""

    def __init__(self, span: Span | None):
        self.span = span

    def visit_Stmt(self, node: Stmt) -> Stmt:
        node = self.children(node)
        return node if node.span is not None else rebuilt(node, span=self.span)
