# SPDX-License-Identifier: Apache-2.0
"""Expressions of a kernel, in all lanes of the loop nests that are being run side by side.

A lane is one iteration of those nests. What a mask hides is never looked at: a guard protects a load and a division.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from torch_tile.diagnostics.errors import InternalError, LaunchError, Span, error
from torch_tile.ir import expr as ex, stmt as st
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Expr, Load
from torch_tile.ir.node import Visitor
from torch_tile.simulator import values as va
from torch_tile.simulator.memory import Index, Storage, inside
from torch_tile.simulator.tile.nests import Watch
from torch_tile.simulator.values import Value, both, shared, some
from torch_tile.tileop.atomic import folded
from torch_tile.tileop.base import describe

if TYPE_CHECKING:
    from torch_tile.ir.buffer import Region
    from torch_tile.ir.dtype import DType
    from torch_tile.ir.stmt import Block
    from torch_tile.simulator.tile.interpreter import Tiles


class Expressions(Visitor):
    """The state that expressions depend on. `lanes` are the extents of the nests run side by side, innermost first."""

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self.memory: dict[int, Storage] = {}
        self.constants: dict[int, tuple[Expr, Value]] = {}
        self.lanes: tuple[int, ...] = ()
        self.mask: torch.Tensor | None = None
        self.watches: list[Watch] = []
        self.span: Span | None = None

    def expr(self, node: Expr) -> Value:
        """The value of an expression in the active lanes."""
        handler = self.method_of(node)
        if handler is None:
            raise InternalError(f"the tile interpreter met {type(node).__name__}", node.span or self.span)
        return handler(node)

    def visit_Const(self, node: ex.Const) -> Value:
        """Compute a constant."""
        if not node.dtype.is_float:
            return va.constant(node.value, node.dtype)
        found = self.constants.get(id(node))
        if found is None:
            found = self.constants[id(node)] = node, va.constant(node.value, node.dtype)
        return found[1]

    def visit_Var(self, node: ex.Var) -> Value:
        """Compute a variable."""
        if id(node) not in self.values:
            raise LaunchError(f"dimension `{node.name}` does not follow from the shapes of the arguments")
        return self.values[id(node)]

    def visit_Unary(self, node: ex.Unary) -> Value:
        """Compute an operator with one operand."""
        return va.unary(node.op, self.expr(node.a), node.a.dtype)

    def visit_Binary(self, node: ex.Binary) -> Value:
        """Compute an operator with two operands."""
        if node.op in ex.LOGICAL:
            return self._logical(node)
        return va.binary(node.op, self.expr(node.a), self.expr(node.b), node.a.dtype)

    def visit_Cast(self, node: ex.Cast) -> Value:
        """Compute a conversion."""
        return va.cast(self.expr(node.a), node.a.dtype, node.type)

    def visit_Call(self, node: ex.Call) -> Value:
        """Compute a call."""
        return va.call(node.name, [self.expr(a) for a in node.args], node.args[0].dtype, node.type)

    def visit_Select(self, node: ex.Select) -> Value:
        """Compute a choice."""
        condition = self.expr(node.condition)
        if not isinstance(condition, torch.Tensor):
            return self.expr(node.a if condition else node.b)
        yes, no = both(self.mask, condition), both(self.mask, ~condition)
        if not some(no):
            return self.expr(node.a)
        if not some(yes):
            return self.expr(node.b)
        return va.pick(condition, self._under(yes, node.a), self._under(no, node.b))

    def _logical(self, node: ex.Binary) -> Value:
        a = self.expr(node.a)
        ends = node.op == "or"  # the value of `a` that decides
        if not isinstance(a, torch.Tensor):
            return a if a is ends else self.expr(node.b)
        open_lanes = both(self.mask, ~a if ends else a)
        if not some(open_lanes):
            return a
        b = self._under(open_lanes, node.b)
        return a | b if ends else a & b

    def _under(self, mask: torch.Tensor, node: Expr) -> Value:
        outer, self.mask = self.mask, mask
        try:
            return self.expr(node)
        finally:
            self.mask = outer

    def visit_Load(self, node: ex.Load) -> Value:
        """Compute an element."""
        return self.loaded(self.memory[id(node.buffer)], node)

    def loaded(self, storage: Storage, node: ex.Load) -> Value:
        """The element that a load reads, if this is its buffer."""
        index, found = self._place(storage, node)
        active = both(self.mask, found)
        for watch in self.watches:
            if node.buffer in watch.targets and some(active):
                watch.note(storage, index, self.lanes, active, write=False)
        if found is True:
            return storage.get(index)
        if found is False:
            return va.constant(0, node.dtype)
        zero = va.constant(0, node.dtype)
        clamped = tuple(_clamp(i, n) for i, n in zip(index, storage.raw.shape, strict=True))
        return torch.where(found, storage.get(clamped), zero) if min(storage.shape) else zero

    def _place(self, storage: Storage, node: ex.Load | st.Store) -> tuple[Index, Value]:
        """The index with the storage's prefix, and where it lies inside a global buffer (active lanes on chip must)."""
        found: Value = True
        index = tuple(self.expr(i) for i in node.indices)
        for dim, (i, size) in enumerate(zip(index, storage.shape, strict=True)):
            ok = inside(i, size)
            if ok is not True and node.buffer.scope != "global":
                bad = both(self.mask, ~ok if isinstance(ok, torch.Tensor) else not ok)
                if some(bad):
                    self.out_of_bounds(node.buffer, dim, str(_first(i, bad)), node.span or self.span)
            found = ok if found is True else found if ok is True else both(found, ok)
        return storage.prefix + index, found

    def out_of_bounds(self, buffer: Buffer, dim: int, index: str, span: Span | None) -> NoReturn:
        """An access outside an on-chip buffer."""
        shape = self.memory[id(buffer)].shape
        size, text = shape[dim], describe(buffer.shape)
        raise error("out_of_bounds", span, dim=dim, buffer=buffer.name, index=index, size=size, shape=text)


def _clamp(index: Value, size: int) -> Value:
    return index.clamp(0, size - 1) if isinstance(index, torch.Tensor) else min(max(index, 0), size - 1)


def _first(index: Value, bad: Value) -> int:
    """The offending index, of the first lane that has one."""
    pair = torch.broadcast_tensors(torch.as_tensor(index), torch.as_tensor(bad))
    return int(pair[0][pair[1]][0])


# What a tile op's `evaluate` may ask of the interpreter that runs it.


class Env(Protocol):
    """The state of one block, seen tile by tile."""

    def read(self, region: Region) -> torch.Tensor:
        """A copy of the region, one dimension per buffer dimension; global elements outside the buffer read 0."""

    def write(self, region: Region, tile: torch.Tensor) -> None:
        """Overwrite the region with a tile of its shape; global elements outside the buffer are dropped."""

    def extents(self, region: Region) -> list[int]:
        """The region's extents, one per buffer dimension."""

    def value(self, expr: Expr) -> Any:
        """A scalar expression as a Python number."""

    def size(self, expr: Expr) -> int:
        """An integer expression as a Python int."""

    def full(self, shape: Sequence[int], value: Any, dtype: DType) -> torch.Tensor:
        """A constant tile."""

    def wide(self, dtype: DType) -> torch.dtype:
        """The type in which a reference computes for results of `dtype`: float64 or int64."""

    def block(self, block: Block) -> None:
        """Run statements."""


# Atomic updates that give a value, and atomic loads, in the interpreter of tiles: nothing happens at the same time.


def atomic(call: Call, block: Tiles) -> Value:
    """Update one element; gives what stood there, 0 outside a tensor."""
    load = _load(call)
    storage, old = block.memory[id(load.buffer)], block.loaded(block.memory[id(load.buffer)], load)
    operand = block.expr(call.args[1])
    wide = block.wide(load.dtype)
    before, value = (torch.as_tensor(x).to(wide) for x in (old, operand))
    new = folded(str(call.options[0]), before, value, load.dtype)
    block.put(load, storage, new if load.dtype.is_float else shared(new))
    return old


def atomic_load(call: Call, block: Tiles) -> Value:
    """What stands there."""
    load = _load(call)
    return block.loaded(block.memory[id(load.buffer)], load)


def _load(call: Call) -> Load:
    address = call.args[0]
    assert isinstance(address, Address)
    return Load(address.buffer, address.indices, span=call.span)
