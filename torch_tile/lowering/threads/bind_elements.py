# SPDX-License-Identifier: Apache-2.0
"""Bind a statement outside of T.Parallel that touches single elements of fragments.

The threads that hold the elements run it. All indices must be constants, and one thread must hold all that is read.
Else the fragments pass through shared memory, as do fragments whose elements are updated atomically.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Const, Expr, Load, binary, const
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.layout import Layout
from torch_tile.ir.layout_ops import offset_of
from torch_tile.ir.node import Node, Rewriter, find
from torch_tile.ir.stmt import Block, Do, If, Let, Stmt, Store
from torch_tile.lowering.threads.bind_loop import load_of, through_shared
from torch_tile.tileop.base import conjunction
from torch_tile.tileop.threads import ThreadContext

Element = Load | Store | Address


def needs_holder(node: Store | Do | Let) -> bool:
    """Return whether one of the fragments' elements in a statement is not in every thread, or is updated atomically."""
    return any(isinstance(e, Address) or not is_everywhere(e.buffer.layout) for e in _fragment_accesses(node))


def is_everywhere(layout: Layout | None) -> bool:
    """Return whether every thread holds all elements of a fragment."""
    return layout is not None and not any(d.axis == "t" and d.size > 1 for dim in layout.dims for d in dim)


def bind_elements(node: Store | Do | Let, ctx: ThreadContext, bind: Callable[[Stmt], Stmt]) -> Stmt:
    """Return the code of a thread for a statement that `needs_holder`. `bind` binds it on tiles in shared memory."""
    elements = _fragment_accesses(node)
    if not isinstance(node, Let) and not any(isinstance(e, Address) for e in elements):
        held = _by_holder(node, elements, ctx)
        if held is not None:
            return held
    updated = IdSet(e.buffer for e in elements if isinstance(e, Address))
    parted = (e.buffer for e in elements if e.buffer in updated or not is_everywhere(e.buffer.layout))
    fragments = list(dict.fromkeys(parted))
    written = [e.buffer for e in elements if not isinstance(e, Load)]
    return through_shared(node, fragments, fragments, written, ctx, bind)


def _fragment_accesses(node: Node) -> list[Element]:
    """Return the accesses to fragments in a statement."""
    return [e for e in find(node, Load, Store, Address) if e.buffer.scope == "fragment"]


def _by_holder(node: Store | Do, elements: list[Element], ctx: ThreadContext) -> Stmt | None:
    """Let the threads that hold all elements run a statement; None if these are not known, or no such threads."""
    conditions: list[Expr] = []
    stored = isinstance(node, Store) and node.buffer.scope == "fragment"
    if stored and any(isinstance(e, Load) for e in elements):
        return None  # threads with copies of the target need not hold what is read
    threads = set()
    for element in elements:
        layout, indices = element.buffer.layout, [i.value for i in element.indices if isinstance(i, Const)]
        if layout is None or len(indices) < len(element.indices):
            return None
        place = layout.apply([int(i) for i in indices])["t"]
        threads.add(place)
        conditions.append(binary("==", _without_copies(layout, ctx.thread), place))
    if len(threads) > 1:
        return None
    if not stored:  # of the threads with copies the first
        conditions = [binary("==", ctx.thread, threads.pop())]
    new: Stmt = _Registers(ctx)(node)
    return If(conjunction(conditions), Block((new,)), Block(()), span=node.span)


def _without_copies(layout: Layout, thread: Expr) -> Expr:
    """Return the number of the first thread that holds what `thread` holds."""
    found: Expr = const(0, thread.dtype)
    for digit in (d for dim in layout.canonical.dims for d in dim if d.axis == "t"):
        found = found + thread // digit.stride % digit.size * digit.stride
    return found


class _Registers(Rewriter):
    """Replace elements of fragments by this thread's registers."""

    def __init__(self, ctx: ThreadContext):
        self.ctx = ctx

    def visit_Load(self, load: Load) -> Load:
        if load.buffer.scope != "fragment":
            return self.children(load)
        return load_of(load, self.ctx, self._register(load.buffer, load.indices))

    def visit_Store(self, store: Store) -> Store:
        new: Store = self.children(store)
        if store.buffer.scope != "fragment":
            return new
        place = self._register(store.buffer, store.indices)
        return Store(self.ctx.registers(store.buffer), (place,), new.value, span=store.span)

    def _register(self, fragment: Buffer, indices: tuple[Expr, ...]) -> Expr:
        """Return the register index of a fragment's element."""
        assert fragment.layout is not None
        return offset_of(fragment.layout, "r", indices)
