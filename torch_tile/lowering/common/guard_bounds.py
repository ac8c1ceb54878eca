# SPDX-License-Identifier: Apache-2.0
"""Guard accesses to memory that may be outside its bounds: reads outside give 0, writes outside are dropped.

On GPUs only global memory has guards, on CPUs tiles have them, too: there a write outside would end the process. The
passes add a guard only where nothing proves the bounds. Ranges of loop variables and conditions around the access
may prove them. A wide copy has one guard if it is inside or outside as a whole. Otherwise it falls back to its
elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch_tile.intrinsics.memory import atomic, cp_async, elements, option
from torch_tile.ir import dtype as dt, expr, stmt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Expr, Load, Select, Var, binary, const, minimum, select
from torch_tile.ir.node import find, symbols, with_fields
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Block, Do, For, If, LoopKind, Program, Stmt, Store
from torch_tile.tileop.base import conjunction, is_one

NOTHING = Block(())


def guard_bounds(program: Program) -> Program:
    """Guard every access to a global buffer that may be outside its bounds."""
    return _Guard({b for b in _buffers(program) if b.scope == "global"})(program)  # type: ignore[no-any-return]


def guard_all_bounds(program: Program) -> Program:
    """Guard every access to a tensor or a tile that may be outside its bounds."""
    return _Guard(set(_buffers(program)))(program)  # type: ignore[no-any-return]


class _Guard(Known):
    """Add guards to a program, with the ranges of each place."""

    def __init__(self, guarded: set[Buffer]):
        super().__init__()
        self.guarded = guarded  # by identity

    def __call__(self, node: Any) -> Any:
        """Skip nodes that touch no guarded buffer."""
        return node if self.guarded.isdisjoint(symbols(node)) else super().__call__(node)

    def visit_Load(self, load: Load) -> Expr:
        return self.read(self.children(load), self.unproved_bounds(load.buffer, load.indices))

    def visit_Call(self, call: Call) -> Expr:
        """Guard a call that gives a value, as an atomic does."""
        return self.read(self.children(call), self.missing_in(call))

    def read(self, value: Expr, outside: Sequence[Expr]) -> Expr:
        """Return a value of memory, or 0 where a condition fails."""
        return Select(conjunction(outside), value, const(0, value.dtype), span=value.span) if outside else value

    def visit_Store(self, store: Store) -> Stmt:
        new = self.children(store)
        return self.only_if(self.unproved_bounds(store.buffer, store.indices), new)

    def visit_Do(self, node: Do) -> Stmt:
        """Guard a call by its kind: a wide copy, an asynchronous copy, or another call."""
        call = node.call
        inner = self.children(call)  # an address may need loads, which have guards of their own
        node = with_fields(node, call=inner)
        if isinstance(inner, Call) and inner.name in ("vector_copy", "atomic_add_vector"):
            return self.wide(node, inner)
        if isinstance(inner, Call) and inner.name == "cp_async":
            return self.cp_async(node, inner)
        return self.only_if(self.missing_in(call), node)

    def only_if(self, conditions: Sequence[Expr], one: Stmt) -> Stmt:
        """Run a statement only where all conditions hold."""
        return If(conjunction(conditions), Block((one,)), NOTHING, span=one.span) if conditions else one

    def wide(self, node: stmt.Do, call: expr.Call) -> Stmt:
        """Guard a wide copy or addition by one condition, or else each of its elements by its own."""
        place = _global(call)
        if place is None:
            return node
        count = elements(call, 0, option(call))
        whole, partial = self.vector(place, count)
        if not whole:
            return node
        is_read = place is call.args[1]
        if not partial and not is_read:
            return self.only_if(whole, node)
        rest = self.scattered(call, count) if partial else _cleared(call, count)
        return If(conjunction(whole), Block((node,)), Block((rest,)), span=node.span)

    def cp_async(self, node: stmt.Do, call: expr.Call) -> Stmt:
        """Guard an asynchronous copy by its number of valid bytes: bytes outside are not valid."""
        dst, src, valid = call.args
        place = _global(call)
        if place is None or not isinstance(dst, Address) or not isinstance(src, Address):
            return node
        size, item = option(call), place.buffer.dtype.itemsize
        whole, partial = self.vector(place, size // item)
        if not whole:
            return node
        if partial:
            start, extent = place.indices[-1], place.buffer.shape[-1]
            whole = self.unproved_bounds(place.buffer, place.indices)
            valid = minimum(valid, binary("*", binary("-", extent, start), const(item, dt.int32)))
        if whole:
            valid = select(conjunction(whole), valid, const(0, dt.int32))
            src = _with_single_elements(src)
        return replace(cp_async(dst, src, valid, size, *map(str, call.options[1:])), span=node.span)

    def vector(self, place: Address, count: int) -> tuple[list[Expr], bool]:
        """Return the unproved conditions for `count` elements to be inside, and whether only some may be."""
        buffer, last = place.buffer, place.indices[-1]
        if self.divides(count, last) and self.divides(count, buffer.shape[-1]):
            return self.unproved_bounds(buffer, place.indices), False
        end = simplify(binary("+", last, const(count - 1, dt.int32)))
        conditions = self.unproved_bounds(buffer, place.indices)
        past = binary("<", end, buffer.shape[-1])
        if self.ranges.prove(past):
            return conditions, not self.divides(count, last)
        return [*self.unproved_bounds(buffer, place.indices, upper=False), past], True

    def scattered(self, call: expr.Call, count: int) -> Stmt:
        """Copy or add element by element, each with its own guard."""
        step = Var("element", dt.int32, "loop")
        dst, src = (_address_after(a, step) for a in call.args)
        value = Load(src.buffer, src.indices, *map(str, call.options[1:]))
        is_copy = call.name == "vector_copy"
        body = Store(dst.buffer, dst.indices, value) if is_copy else Do(atomic(dst, value, "add"))
        return self(_each(step, count, body, call))  # type: ignore[no-any-return]

    def missing_in(self, call: Expr) -> list[Expr]:
        """Return the unproved conditions that keep a call's operands inside guarded buffers."""
        return [c for a in find(call, Address) for c in self.unproved_bounds(a.buffer, a.indices)]

    def unproved_bounds(self, buffer: Buffer, indices: Sequence[Expr], upper: bool = True) -> list[Expr]:
        """Return the unproved conditions of an access inside a guarded buffer, of the last index only with `upper`."""
        if buffer not in self.guarded:
            return []
        wanted = []
        for n, (index, size) in enumerate(zip(indices, buffer.shape, strict=True)):
            wanted.append(binary(">=", index, const(0, dt.int32)))
            if upper or n + 1 < len(indices):
                wanted.append(binary("<", index, size))
        return [c for c in wanted if not self.ranges.prove(c)]


def _buffers(program: Program) -> Iterator[Buffer]:
    """Find the buffers of a program."""
    return (b for b in symbols(program) if isinstance(b, Buffer))


def _global(call: Call) -> Address | None:
    """Return the operand in global memory; None if there is none."""
    return next((a for a in call.args if isinstance(a, Address) and a.buffer.scope == "global"), None)


def _address_after(address: Expr, step: Var) -> Address:
    """Return the address `step` elements further."""
    assert isinstance(address, Address)
    return replace(address, indices=(*address.indices[:-1], simplify(binary("+", address.indices[-1], step))))


def _with_single_elements(address: Address) -> Address:
    """Return an address with index 0 along outer dimensions of one element, aligned even for empty copies."""
    pairs = zip(address.indices[:-1], address.buffer.shape, strict=False)
    outer = (const(0, dt.int32) if is_one(size) else index for index, size in pairs)
    return replace(address, indices=(*outer, address.indices[-1]))


def _cleared(call: Call, count: int) -> Stmt:
    """Fill the local array that a wide read would fill with zeros."""
    step = Var("element", dt.int32, "loop")
    dst = _address_after(call.args[0], step)
    return _each(step, count, Store(dst.buffer, dst.indices, const(0, dst.buffer.dtype)), call)


def _each(step: Var, count: int, body: Store | Do, call: Call) -> For:
    """Build an unrolled loop over elements."""
    span = call.span
    bounds = (const(0, dt.int32),), (const(count, dt.int32),)
    return For(LoopKind.UNROLLED, (step,), *bounds, Block((replace(body, span=span),)), span=span)
