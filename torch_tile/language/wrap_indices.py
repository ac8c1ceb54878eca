# SPDX-License-Identifier: Apache-2.0
"""Count negative indices from the end of their dimension, as Python and TileLang do.

An index that is certainly negative becomes `size + index`. So does each lane of an index by a vector, also where only
the values at run time tell. Another index is left as it is: outside of a tensor, reads give 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Binary, Const, Expr, Load, Select, Unary, binary, const, is_constant
from torch_tile.ir.node import contents, find, with_fields
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Program, Stmt, Store

ZERO = const(0, dt.int32)


def lane_index(index: Expr, size: Expr) -> Expr:
    """Return the index of a vector's lane, which counts from the end where it is negative."""
    if isinstance(index, Const):
        return index
    return Select(binary("<", index, ZERO), simplify(binary("+", size, index)), index)


def wrap_indices(program: Program) -> Program:
    """Return the program with each negative index replaced by the one that it stands for."""
    accesses = find(program, Load, Store, Address, Region)
    if not any(map(_is_signed, (n for a in accesses for n in (a.starts if isinstance(a, Region) else a.indices)))):
        return program
    return _Wrap()(program)  # type: ignore[no-any-return]


def _is_signed(index: Expr) -> bool:
    """Return whether an index has a part that may make it negative."""
    return not isinstance(index, Const) and any(
        isinstance(one, Select | Unary)
        or (isinstance(one, Binary) and one.op == "-")
        or (isinstance(one, Const) and not isinstance(one.value, bool) and one.value < 0)
        for one in find(index, Select, Unary, Binary, Const)
    )


class _Wrap(Known):
    """Replace negative indices, with the ranges of each place."""

    def __call__(self, node: Any) -> Any:
        """Skip values that read no memory and hold no place."""
        if isinstance(node, Expr) and not contents(node) & (Load.bit | Address.bit):
            return node
        return super().__call__(node)

    def visit_Load(self, load: Load) -> Expr:
        new = self.children(load)
        return self.moved(new, load.indices)  # type: ignore[no-any-return]

    def visit_Address(self, address: Address) -> Expr:
        new = self.children(address)
        return self.moved(new, address.indices)  # type: ignore[no-any-return]

    def visit_Store(self, store: Store) -> Stmt:
        new = self.children(store)
        return self.moved(new, store.indices)  # type: ignore[no-any-return]

    def visit_Region(self, region: Region) -> Region:
        """Wrap the indices of a region that are single ones; slices stay where they are."""
        new, ranges = self.children(region), []
        for dim, (r, before) in enumerate(zip(new.ranges, region.starts, strict=True)):
            start = self.wrapped(r.start, before, region.buffer, dim) if is_constant(r.extent, 1) else r.start
            ranges.append(with_fields(r, start=start))
        return with_fields(new, ranges=tuple(ranges))

    def moved(self, one: Any, before: Sequence[Expr]) -> Any:
        """Return an access with its indices wrapped; `before` are the indices that ranges speak of."""
        indices = tuple(map(self.wrapped, one.indices, before, [one.buffer] * len(before), range(len(before))))
        return with_fields(one, indices=indices)

    def wrapped(self, index: Expr, before: Expr, buffer: Buffer, dim: int) -> Expr:
        """Return the index that a negative one stands for."""
        if not _is_signed(before):
            return index
        if isinstance(index, Select) and isinstance(before, Select):  # of a lane
            if self.ranges.prove(before.condition):
                return index.a
            return index.b if self.ranges.refute(before.condition) else index
        if self.ranges.prove(binary("<", before, ZERO)):
            return simplify(binary("+", buffer.shape[dim], index))
        return index
