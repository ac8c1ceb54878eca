# SPDX-License-Identifier: Apache-2.0
"""Evaluate the expressions of a kernel in all lanes of the loop nests that run side by side.

A lane is one iteration of those nests. Values under a false mask are never used: a guard protects a load and a
division.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torch_tile.diagnostics.errors import InternalError, LaunchError, Span, error
from torch_tile.intrinsics import lookup
from torch_tile.intrinsics.foreign import meaning_of
from torch_tile.ir import expr as ex, stmt as st
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32, int64
from torch_tile.ir.expr import Address, Call, Expr, Load
from torch_tile.ir.node import Visitor
from torch_tile.ir.widths import IndexValues
from torch_tile.simulator import values as va
from torch_tile.simulator.memory import Index, Storage, inside
from torch_tile.simulator.tile.nests import Watch
from torch_tile.simulator.values import Value, both, shared, some
from torch_tile.tileop.atomic import folded
from torch_tile.tileop.base import describe

if TYPE_CHECKING:
    from torch_tile.simulator.tile.interpreter import Tiles


class Expressions(Visitor):
    """Evaluates expressions. `lanes` are the extents of the nests that run side by side, innermost first."""

    def __init__(self) -> None:
        self.values: dict[ex.Var, Value] = {}
        self.memory: dict[Buffer, Storage] = {}
        self.constants: dict[Expr, Value] = {}
        self.lanes: tuple[int, ...] = ()
        self.mask: torch.Tensor | None = None
        self.watches: list[Watch] = []
        self.span: Span | None = None
        self.is_from_indices: IndexValues = IndexValues()
        self.is_wide: bool = False  # whether int32 does not wrap, as where it makes an index

    def in_width(self, wide: bool, *nodes: Expr) -> list[Value]:
        """Compute expressions; with `wide` int32 does not wrap."""
        outer, self.is_wide = self.is_wide, wide
        try:
            return [self.expr(node) for node in nodes]
        finally:
            self.is_wide = outer

    def expr(self, node: Expr) -> Value:
        """Compute an expression in the active lanes."""
        handler = self.method_of(node)
        if handler is None:
            raise InternalError(f"the tile interpreter met {type(node).__name__}", node.span or self.span)
        return handler(node)

    def visit_Const(self, node: ex.Const) -> Value:
        """Compute a constant."""
        if not node.dtype.is_float:
            return va.constant(node.value, node.dtype)
        found = self.constants.get(node)
        if found is None:
            found = self.constants[node] = va.constant(node.value, node.dtype)
        return found

    def visit_Var(self, node: ex.Var) -> Value:
        """Compute a variable."""
        if node not in self.values:
            raise LaunchError(f"dimension `{node.name}` does not follow from the shapes of the arguments")
        return self.values[node]

    def visit_Unary(self, node: ex.Unary) -> Value:
        """Compute an operator with one operand."""
        wide = node.dtype == int32 and (self.is_wide or self.is_from_indices(node))
        (a,) = self.in_width(wide, node.a)
        found = va.unary(node.op, a, node.a.dtype)
        return found if wide or node.dtype != int32 else va.wrap(found, int32)

    def visit_Binary(self, node: ex.Binary) -> Value:
        """Compute an operator with two operands."""
        if node.op in ex.LOGICAL:
            return self._logical(node)
        compares = node.op in ex.COMPARISONS
        wide = node.a.dtype == int32 and (self.is_wide or compares or self.is_from_indices(node))
        a, b = self.in_width(wide, node.a, node.b)
        found = va.binary(node.op, a, b, node.a.dtype)
        return found if wide or compares or node.dtype != int32 else va.wrap(found, int32)

    def visit_Cast(self, node: ex.Cast) -> Value:
        """Compute a conversion."""
        (a,) = self.in_width(node.type == int64, node.a)
        return va.cast(a, node.a.dtype, node.type)

    def visit_Call(self, node: ex.Call) -> Value:
        """Compute a call."""
        found = va.call(node.name, self.in_width(False, *node.args), node.args[0].dtype, node.type)
        return va.wrap(found, int32) if node.type == int32 else found

    def visit_Select(self, node: ex.Select) -> Value:
        """Compute a choice."""
        (condition,) = self.in_width(False, node.condition)
        if not isinstance(condition, torch.Tensor):
            return self.expr(node.a if condition else node.b)
        yes, no = both(self.mask, condition), both(self.mask, ~condition)
        if not some(no):
            return self.expr(node.a)
        if not some(yes):
            return self.expr(node.b)
        return va.pick(condition, self._under(yes, node.a), self._under(no, node.b))

    def _logical(self, node: ex.Binary) -> Value:
        """Compute `and` or `or`; the second operand runs only in the lanes that need it."""
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
        """Evaluate an expression under a mask of lanes."""
        outer, self.mask = self.mask, mask
        try:
            return self.expr(node)
        finally:
            self.mask = outer

    def visit_Load(self, node: ex.Load) -> Value:
        """Compute the load of an element."""
        return self.loaded(self.memory[node.buffer], node)

    def loaded(self, storage: Storage, node: ex.Load) -> Value:
        """Return the element that a load reads from `storage`."""
        index, found = self._place(storage, node)
        active = both(self.mask, found)
        for watch in self.watches:
            if node.buffer in watch.targets and some(active):
                watch.note(storage, index, self.lanes, active, write=False)
        if found is True:
            if storage.lacks(index, self.mask):
                self.unwritten(node.buffer, node.span or self.span)
            return storage.get(index)
        if found is False:
            return va.constant(0, node.dtype)
        zero = va.constant(0, node.dtype)
        clamped = tuple(_clamp(i, n) for i, n in zip(index, storage.raw.shape, strict=True))
        if min(storage.shape) and storage.lacks(clamped, active):
            self.unwritten(node.buffer, node.span or self.span)
        return torch.where(found, storage.get(clamped), zero) if min(storage.shape) else zero

    def _place(self, storage: Storage, node: ex.Load | st.Store) -> tuple[Index, Value]:
        """Compute the storage index of an access, and where it is inside. Leaving an on-chip buffer raises."""
        found: Value = True
        index = tuple(self.in_width(True, *node.indices))
        for dim, (i, size) in enumerate(zip(index, storage.shape, strict=True)):
            ok = inside(i, size)
            if ok is not True and node.buffer.scope != "global":
                bad = both(self.mask, ~ok if isinstance(ok, torch.Tensor) else not ok)
                if some(bad):
                    self.out_of_bounds(node.buffer, dim, str(_first_outside(i, bad)), node.span or self.span)
            found = ok if found is True else found if ok is True else both(found, ok)
        return storage.prefix + index, found

    def unwritten(self, buffer: Buffer, span: Span | None) -> NoReturn:
        """Raise the error for a read of an element that no statement has written before."""
        raise error("unwritten_element", span, buffer=buffer.name)

    def out_of_bounds(self, buffer: Buffer, dim: int, index: str, span: Span | None) -> NoReturn:
        """Raise the error for an access outside an on-chip buffer."""
        shape = self.memory[buffer].shape
        size, text = shape[dim], describe(buffer.shape)
        raise error("out_of_bounds", span, dim=dim, buffer=buffer.name, index=index, size=size, shape=text)


def _clamp(index: Value, size: int) -> Value:
    """Clamp an index into `[0, size)`."""
    return index.clamp(0, size - 1) if isinstance(index, torch.Tensor) else min(max(index, 0), size - 1)


def _first_outside(index: Value, bad: Value) -> int:
    """Return the first index that is out of bounds."""
    pair = torch.broadcast_tensors(torch.as_tensor(index), torch.as_tensor(bad))
    return int(pair[0][pair[1]][0])


# Atomic updates that give a value, and atomic loads, in the interpreter of tiles: nothing happens at the same time.


def atomic(call: Call, block: Tiles) -> Value:
    """Update one element and return its old value, 0 outside a tensor."""
    load = _load(call)
    storage = block.memory[load.buffer]
    old = block.loaded(storage, load)
    operand = block.expr(call.args[1])
    wide = block.wide(load.dtype)
    before, by = (torch.as_tensor(x).to(wide) for x in (old, operand))
    new = folded(str(call.options[0]), before, by, load.dtype)
    block.put(load, storage, new if load.dtype.is_float else shared(new))
    return old


def atomic_load(call: Call, block: Tiles) -> Value:
    """Return the element that an atomic load reads."""
    load = _load(call)
    return block.loaded(block.memory[load.buffer], load)


def foreign_value(call: Call, block: Tiles) -> Value:
    """Run the Python meaning of foreign text, with an array for the elements behind each pointer."""
    meaning = meaning_of(call, block.span)
    accesses = {access.operand: access for access in lookup(call.name).effects(call)}
    args: list[Any] = []
    written = []
    for number, operand in enumerate(call.args):
        if not isinstance(operand, Address):
            value = block.expr(operand)
            args.append(value.item() if isinstance(value, torch.Tensor) else value)
            continue
        tensor, start = block.memory[operand.buffer].tensor, 0
        for size, index in zip(tensor.shape, operand.indices, strict=True):
            start = start * size + int(block.expr(index))
        elements = accesses[number].elements
        stop = start + elements if elements >= 0 else tensor.numel()
        if not 0 <= start <= stop <= tensor.numel():
            block.out_of_bounds(operand.buffer, 0, f"{start} to {stop - 1} in all", call.span)
        own = tensor.dtype
        held = own if not own.is_floating_point or own.itemsize >= 4 else torch.float32
        array = tensor.reshape(-1)[start:stop].to(held, copy=True).numpy()
        args.append(array)
        if "w" in accesses[number].kind:
            written.append((tensor, start, stop, array))
    found = meaning(*args)
    for tensor, start, stop, array in written:
        flat = tensor.reshape(-1)
        flat[start:stop] = torch.from_numpy(array).to(tensor.dtype)
        if flat.data_ptr() != tensor.data_ptr():  # a tensor with strides
            tensor.copy_(flat.reshape(tensor.shape))
    return va.constant(0 if found is None else found, call.type)


def _load(call: Call) -> Load:
    """Build the load of the element that an atomic updates."""
    address = call.args[0]
    assert isinstance(address, Address)
    return Load(address.buffer, address.indices, span=call.span)
